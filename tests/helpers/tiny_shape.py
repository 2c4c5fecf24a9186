"""A shape that benchmarks accept as `--shape tiny`."""

import pytest

from scripts.shapes import SHAPES, named_shape


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 8}
    config = named_shape("smollm2")
    config.update(sizes)
    monkeypatch.setitem(SHAPES, "tiny", config)
