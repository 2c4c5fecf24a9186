"""How many responses are written at a time, and in which order."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Program, lines

from dflash_toolkit import SamplingParams, Target, UserError
from dflash_toolkit.evaluation.measure.decoders import EngineDecoder
from dflash_toolkit.files import read_json
from dflash_toolkit.runtime import EngineOptions
from dflash_toolkit.runtime.load import Parts
from dflash_toolkit.train.responses import backends, batch_size
from dflash_toolkit.train.responses.batch_size import sizes_that_fit

GIB = 1 << 30


def parts_of_8b(drafter: bool = False) -> Any:
    """The sizes that matter of Qwen3-8B and its drafter, on a GPU."""
    spec = SimpleNamespace(kv_values_per_token=36 * 2 * 8 * 128, vocab_size=151936, delta_nets=[])
    embedding = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 2)
    small = SimpleNamespace(kv_values_per_token=5 * 2 * 8 * 128)
    draft = SimpleNamespace(spec=small, config=SimpleNamespace(block_size=16)) if drafter else None
    return SimpleNamespace(target=SimpleNamespace(spec=spec, embedding=embedding), drafter=draft)


@pytest.mark.parametrize(
    ("total", "free", "drafter", "size"),
    [(79, 63, False, 256), (79, 61, True, 192), (139, 120, True, 256), (40, 24, False, 96), (24, 7, False, 16)],
)
def test_the_batch_size_follows_the_memory(
    total: int, free: int, drafter: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, total * GIB))
    first, *smaller = sizes_that_fit(parts_of_8b(drafter), 2048)
    assert first == size and smaller == [each for each in batch_size.SIZES if each < size]


def test_a_size_that_the_engine_refuses_is_lowered(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tried = Parts.engine, list[int]()

    def engine(parts: Parts, options: EngineOptions) -> Any:
        tried.append(options.max_num_seqs or 0)
        if tried[-1] > 48:
            raise UserError("GPU memory is 3 GiB short")
        return made(parts, options)

    monkeypatch.setattr(Parts, "engine", engine)
    monkeypatch.setattr(backends, "sizes_that_fit", lambda *_: [96, 64, 48, 32])
    backends.open_decoder(str(target_dir), device="cpu", batch=None, context=64).close()
    assert tried == [96, 64, 48]
    with pytest.raises(UserError, match="3 GiB short"):
        backends.open_decoder(str(target_dir), device="cpu", batch=96, context=64)


def test_greedy_responses_come_before_sampled_ones(dflash_data: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures, submit = [], EngineDecoder.submit

    def noted(decoder: EngineDecoder, key: int, prompt: list[int], params: SamplingParams, *rest: Any) -> None:
        temperatures.append(params.temperature)
        submit(decoder, key, prompt, params, *rest)

    monkeypatch.setattr(EngineDecoder, "submit", noted)
    dflash_data("samples=3", "--greedy-first", "temperature=1.5")
    assert temperatures == [0.0] * 9 + [1.5] * 18
    keys = [(row["index"], row["sample"]) for row in dflash_data.rows()]
    assert keys == [(index, sample) for index in range(9) for sample in range(3)]


def test_the_record_has_the_tokens_per_second(dflash_data: Program, tmp_path: Path) -> None:
    said = dflash_data()
    record = read_json(tmp_path / "a.run.json")
    tokens = sum(row["spans"][0][1] - row["spans"][0][0] for row in dflash_data.rows())
    assert record["speed"]["tokens"] == tokens and record["speed"]["tokens_per_second"] > 0
    assert any(line.startswith(f"{tokens} tokens in ") and line.endswith(" tokens/s") for line in said)


@pytest.mark.parametrize("draft", [True, False])
def test_the_drafter_of_init_from_writes_the_same_responses(
    draft: bool, dflash_train: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, given = backends.load_parts, []

    def load_parts(target: str | Target, drafter: Any, *rest: Any, **more: Any) -> Parts:
        given.append(drafter)
        return loaded(target, drafter, *rest, **more)

    monkeypatch.setattr(backends, "load_parts", load_parts)
    dflash_train("optim.steps=1", output="fresh")
    start = ("--init-from", dflash_train.place("fresh"), f"responses.draft={str(draft).lower()}")
    dflash_train("optim.steps=1", *start, output="started")
    assert [each is not None for each in given] == [False, draft]
    started, fresh = (
        {(row["index"], row["sample"]): row["tokens"] for row in lines(dflash_train.place(name) / "work/answers.jsonl")}
        for name in ("started", "fresh")
    )
    assert started == fresh
    assert read_json(dflash_train.place("fresh") / "run.json")["response_speed"]["tokens_per_second"] > 0
