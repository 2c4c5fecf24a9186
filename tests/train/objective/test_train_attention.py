"""FlexAttention's kernels in training: tiles that fit the shared memory of the card, chosen outside compiled graphs."""

import pytest
import torch
from conftest import make_dflash2, make_target
from other_gpus import use_gpu
from training_runs import random_rows

from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.models.dflash import flex
from dflash_toolkit.models.dflash.flex import FLEX_OPTIONS, NARROW, TRITON, flex_options
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import TILE, sample_blocks
from dflash_toolkit.train.objective.loss import _forward, masks_of

GPU = torch.device("cuda")


def sizes_of(name: str) -> dict[str, int]:
    """Returns the options that are numbers."""
    return {key: value for key, value in (FLEX_OPTIONS[name] or {}).items() if isinstance(value, int)}


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
@pytest.mark.parametrize("card", ["sm_86", "sm_89", "sm_120", "sm_121"])
def test_attention_tiles_fit_99_kib(card: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton counts them: the resident tiles, and those of every stage, of a width that is a power of two."""
    use_gpu(monkeypatch, KNOWN[card].capability)
    options = sizes_of(flex_options(head_dim, GPU))
    stages = [options.get(f"{name}_num_stages") or options["num_stages"] for name in ("fwd", "bwd")]
    width = 2 * (128 if head_dim <= 128 else 256)
    forward = (options["BLOCK_M"] + 2 * stages[0] * options["BLOCK_N"]) * width
    by_keys = (2 * options["BLOCK_N1"] + 2 * stages[1] * options["BLOCK_M1"]) * width
    by_queries = (2 * options["BLOCK_M2"] + 2 * stages[1] * options["BLOCK_N2"]) * width
    assert max(forward, by_keys, by_queries) <= KNOWN[card].shared_memory
    assert all(TILE % options[name] == 0 for name in ("BLOCK_M", "BLOCK_N", *NARROW))


@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_large_cards_keep_their_attention_tiles(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpu(monkeypatch, KNOWN[card].capability)
    assert [sizes_of(flex_options(head_dim, GPU)) for head_dim in (64, 128, 256)] == [NARROW, {}, {}]
    assert FLEX_OPTIONS[flex_options(64, torch.device("cpu"))] is None


def test_few_slots_take_the_same_kernel_as_many() -> None:
    """PyTorch's decoding kernel, for fewer than 128 queries, has no choice for block masks like ours."""
    names = [name for name in FLEX_OPTIONS if name != "CPU"]
    assert all((FLEX_OPTIONS[name] or {}).items() >= TRITON.items() for name in names)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("options", FLEX_OPTIONS)
def test_the_choice_of_tiles_does_not_break_a_compiled_step(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def choose(head_dim: int, device: torch.device) -> str:
        chosen.append(head_dim)
        return options

    monkeypatch.setattr(flex, "flex_options", torch.compiler.assume_constant_result(choose))
    target = make_target()
    drafter = make_dflash2(target)
    features = FeatureSource(target, drafter.config.target_layer_ids, 64, pad_to=TILE)(random_rows(2))
    blocks = sample_blocks(features, 16, 8, 299, torch.Generator().manual_seed(0))
    given = (features.hidden, features.positions, target.embed(blocks.inputs.flatten(1)), blocks.positions.flatten(1),
             masks_of(drafter.config, features, blocks, flex=True))  # fmt: skip
    with torch.no_grad():
        compiled = torch.compile(_forward, backend="eager", fullgraph=True)(drafter, *given)
        assert torch.equal(compiled, _forward(drafter, *given))
    assert set(chosen) == {drafter.config.head_dim}
