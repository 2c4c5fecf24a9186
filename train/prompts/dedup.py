"""Near duplicates among prompts: exact ones after normalisation, and similar ones by MinHash (Broder 1997)."""

import hashlib
import re
import unicodedata
import zlib
from array import array
from collections.abc import Collection, Iterable

import torch

BANDS, DEPTH = 16, 4  # of 64 hashes; two texts of similarity s share a band with probability 1 - (1 - s^4)^16
CROWD = 32  # texts per band
SHINGLE = 3  # words
# a word, one ideograph or syllable of a script without spaces, or one symbol
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")


def normalized(text: str) -> str:
    """Returns the text without differences of case, spacing and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(text: str) -> frozenset[int]:
    """Returns hashes of the runs of three words; of the whole text if it has fewer."""
    words = WORD.findall(normalized(text))
    runs: Iterable[list[str]] = (words[i : i + SHINGLE] for i in range(max(1, len(words) - SHINGLE + 1)))
    return frozenset(zlib.crc32(" ".join(run).encode(errors="surrogatepass")) for run in runs)


def similarity(a: frozenset[int], b: Collection[int]) -> float:
    """Returns the Jaccard similarity of two sets. `b` may be any collection without repetitions."""
    shared = len(a.intersection(b))
    return shared / (len(a) + len(b) - shared)


class Duplicates:
    """Remembers texts and finds near duplicates; the result depends only on the texts and their order.

    MinHash finds candidates, and their exact similarity decides, so no text below the threshold is dropped. A
    remembered text needs about 2 kB.

    Texts with a long common instruction share many bands without being duplicates. A band stops growing at `CROWD`
    texts, so a text is compared with at most `BANDS * CROWD` others; later texts are found by bands that are not full.

    Args:
        threshold: texts at least this similar are duplicates; 1 drops only texts that are equal after normalisation.
    """

    def __init__(self, threshold: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self._factors = torch.randint(1 << 62, (BANDS * DEPTH,), generator=generator) * 2 + 1
        self._offsets = torch.randint(1 << 62, (BANDS * DEPTH,), generator=generator)
        self._threshold = threshold
        self._digests: set[bytes] = set()  # of the texts
        self._kept: list[array[int]] = []  # shingles
        self._bands: dict[int, list[int]] = {}  # hash of a part of a signature -> texts that have it

    def seen(self, text: str, under: str = "") -> bool:
        """Whether a similar text was seen before `under` the same instructions; remembers the text if not.

        Instructions are not compared: many questions share long ones.
        """
        return self._look(text, under, remember=True)

    def holds(self, text: str, under: str = "") -> bool:
        """Like `seen`, but remembers nothing."""
        return self._look(text, under, remember=False)

    def _look(self, text: str, under: str, remember: bool) -> bool:
        both = f"{normalized(under)}\n{normalized(text)}"
        digest = hashlib.blake2b(both.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in self._digests:
            return True
        if remember:
            self._digests.add(digest)
        if self._threshold >= 1:
            return False
        mine = shingles(text)
        keys = self._keys(mine, zlib.crc32(normalized(under).encode(errors="surrogatepass")))
        candidates = {i for key in keys for i in self._bands.get(key, ())}
        if any(similarity(mine, self._kept[i]) >= self._threshold for i in candidates):
            return True
        if remember:
            for key in keys:
                band = self._bands.setdefault(key, [])
                if len(band) < CROWD:
                    band.append(len(self._kept))
            self._kept.append(array("I", sorted(mine)))
        return False

    def _keys(self, mine: frozenset[int], salt: int) -> list[int]:
        hashes = torch.tensor(sorted(mine))[:, None] * self._factors + self._offsets  # multiply-shift, wrapping around
        signature = ((hashes >> 32) & 0xFFFFFFFF).amin(0).view(BANDS, DEPTH)
        return [zlib.crc32(repr(row).encode(), salt ^ band) for band, row in enumerate(signature.tolist())]
