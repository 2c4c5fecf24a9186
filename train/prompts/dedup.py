"""Duplicates among prompts: equal ones after normalisation, and near ones, found by MinHash (Broder 1997).

Near duplicates are judged by what differs. Text that several prompts share (instructions, documents, templates) counts
as no similarity, and of other text at most `ENOUGH` pairs of words do, so that a long text does not hide a difference.
"""

import hashlib
import re
import unicodedata
import zlib

import numpy as np
import numpy.typing as npt

BANDS, DEPTH = 16, 4  # 64 hashes; two texts of similarity s share a band with probability 1 - (1 - s^4)^16
CROWD = 32  # texts per band
RUN = 8  # words; text is shared if more than `SHARERS` prompts have such a run of it
SHARERS = 3
SLOTS = 28  # bits of the table that counts runs
LEAST, ENOUGH = 16, 32  # pairs of words in common: fewer make no near duplicates, more do not count
# a word, one ideograph or syllable of a script without spaces, or one symbol
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[^\w\s]")
MARKS = re.compile(r"(?:(?<=\s)|(?<=[^\W\d_]{2}))[.,;:?!\"'\u2026\u3002\uff0c]+(?=\s|$)")  # not the one of 5!

Integers = npt.NDArray[np.uint64]
_generator = np.random.default_rng(1)
_FACTORS = _generator.integers(1 << 63, size=BANDS * DEPTH, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _generator.integers(1 << 63, size=BANDS * DEPTH, dtype=np.uint64)
_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


def normalized(text: str) -> str:
    """Returns the text without differences of case, spacing and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _hashed(*columns: Integers) -> Integers:
    """Returns one hash for each row of the columns."""
    found = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        found = (found + column) * _ODD
        found ^= found >> _HALF
    return found


def _words(text: str) -> Integers:
    return np.array([zlib.crc32(word.encode(errors="surrogatepass")) for word in WORD.findall(text)], np.uint64)


class SharedText:
    """Counts in how many texts each run of `RUN` words is."""

    def __init__(self) -> None:
        self._counts = np.zeros(1 << SLOTS, np.uint8)  # by hash, at most 255; memory grows with use

    def add(self, text: str) -> None:
        slots = np.unique(self._slots(_words(normalized(text))))
        self._counts[slots] += self._counts[slots] < 255

    def covers(self, words: Integers) -> npt.NDArray[np.bool_]:
        """Returns for each word whether it is in a run that more than `SHARERS` texts have."""
        edges = np.zeros(len(words) + 1, np.int64)
        starts = np.flatnonzero(self._counts[self._slots(words)] > SHARERS)
        edges[starts] += 1
        edges[starts + RUN] -= 1
        return np.cumsum(edges)[:-1] > 0

    def _slots(self, words: Integers) -> Integers:
        count = max(len(words) - RUN + 1, 0)
        return _hashed(*(words[i : i + count] for i in range(RUN))) >> np.uint64(64 - SLOTS)


class Duplicates:
    """Remembers texts and finds duplicates; the result depends only on the texts and their order.

    MinHash finds candidates, and an exact comparison decides. A remembered text needs about 2 kB. A band stops growing
    at `CROWD` texts, so a text is compared with at most `BANDS * CROWD` others.

    Args:
        threshold: of the pairs of words of two texts, as defined above, the share in common at which they are near
            duplicates; 1 drops only texts that are equal after normalisation.
        shared: must have counted all texts before near duplicates are searched; None: no text is shared.
    """

    def __init__(self, threshold: float, shared: SharedText | None = None) -> None:
        self._threshold, self._shared = threshold, shared
        self._digests: set[bytes] = set()  # one for each text
        self._kept: list[npt.NDArray[np.uint32]] = []  # sorted pairs of words
        self._bands: dict[int, list[int]] = {}  # hash of a part of a signature -> texts that have it

    def seen(self, text: str, under: str = "") -> bool:
        """Whether a duplicate was seen before `under` the same instructions; remembers the text if not.

        Instructions are not compared: many questions share long ones.
        """
        return self.repeats(text, under) or self.near(text, under)

    def holds(self, text: str, under: str = "") -> bool:
        """Like `seen`, but remembers nothing."""
        return self._digest(text, under) in self._digests or self.near(text, under, remember=False)

    def repeats(self, text: str, under: str = "") -> bool:
        """Whether an equal text was seen; remembers it. Below a threshold of 1 punctuation after words is ignored."""
        digest = self._digest(text, under)
        if digest in self._digests:
            return True
        self._digests.add(digest)
        return False

    def near(self, text: str, under: str = "", remember: bool = True) -> bool:
        """Whether a near duplicate was seen; remembers the text if not."""
        if self._threshold >= 1:
            return False
        text_pairs, own = self._pairs(_words(normalized(text)))
        if own.sum() < LEAST:
            return False
        keys = self._keys(text_pairs[own], zlib.crc32(normalized(under).encode(errors="surrogatepass")))
        if any(
            self._are_near(text_pairs, own, self._kept[i])
            for i in {i for key in keys for i in self._bands.get(key, ())}
        ):
            return True
        if remember:
            for key in keys:
                band = self._bands.setdefault(key, [])
                if len(band) < CROWD:
                    band.append(len(self._kept))
            self._kept.append(text_pairs)
        return False

    def _digest(self, text: str, under: str) -> bytes:
        parts = [normalized(each) for each in (under, text)]
        if self._threshold < 1:
            parts = [" ".join(MARKS.sub(" ", part).split()) for part in parts]
        return hashlib.blake2b("\n".join(parts).encode(errors="surrogatepass"), digest_size=16).digest()

    def _pairs(self, words: Integers) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Returns sorted hashes of the pairs of adjacent words, and which are not shared; repetitions differ."""
        pairs = _hashed(words[:-1], words[1:])
        covered = self._shared.covers(words) if self._shared else np.zeros(len(words), np.bool_)
        own: npt.NDArray[np.bool_] = ~(covered[:-1] & covered[1:])
        order = np.argsort(pairs, kind="stable")
        pairs, own = pairs[order], own[order]
        place = np.arange(len(pairs))
        first = np.maximum.accumulate(np.where(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)], place, 0))
        found = (_hashed(pairs, (place - first).astype(np.uint64)) >> _HALF).astype(np.uint32)
        order = np.argsort(found)
        return found[order], own[order]

    def _are_near(
        self, text_pairs: npt.NDArray[np.uint32], own: npt.NDArray[np.bool_], other_pairs: npt.NDArray[np.uint32]
    ) -> bool:
        common = other_pairs[np.minimum(np.searchsorted(other_pairs, text_pairs), len(other_pairs) - 1)] == text_pairs
        differ = len(text_pairs) + len(other_pairs) - 2 * int(common.sum())
        same = int((common & own).sum())
        same = min(same, ENOUGH) if same >= LEAST else 0
        return same > 0 and same >= self._threshold * (same + differ)

    def _keys(self, text_pairs: npt.NDArray[np.uint32], salt: int) -> list[int]:
        hashes = text_pairs[:, None].astype(np.uint64) * _FACTORS + _OFFSETS  # multiply-shift, wrapping around
        signature = (hashes >> _HALF).min(0).reshape(BANDS, DEPTH)
        bands = np.arange(BANDS, dtype=np.uint64) + (np.uint64(salt) << _HALF)
        return _hashed(bands, *signature.T).tolist()
