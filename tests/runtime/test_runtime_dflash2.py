"""DFlash 2 in the engine: initial weights, the bits of a block in any batch, fp8."""

from typing import Any

import pytest
import torch
from conftest import make_dflash2, make_drafter
from engines import check_drafts, make_engine, pair, prompts_of
from torch import Tensor

from dflash_toolkit import SamplingParams
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.models.dflash2.convolution import DynamicConvolution
from dflash_toolkit.models.dflash2.selector import CandidateSelector
from dflash_toolkit.runtime import weights
from dflash_toolkit.runtime.stack import Rows

NO_CONVOLUTION = {"conv_kernel_size": 0, "conv_group_size": 0}
NO_SELECTOR = {"selector_rank": 0, "selector_top_k": 0}
PARTS = {"both": {}, "selector": NO_CONVOLUTION, "convolution": NO_SELECTOR}


def test_initial_dflash2_weights_draft_as_plain_dflash() -> None:
    target, _ = pair()
    drafter, plain = make_dflash2(target), make_drafter(target)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    for part in drafter.modules():
        if isinstance(part, DynamicConvolution | CandidateSelector):
            part.init_weights()
    check_drafts(make_engine(target, drafter), (target, plain), prompts_of(12), SamplingParams(max_tokens=14))


@pytest.mark.parametrize("changes", PARTS.values(), ids=PARTS)
def test_other_requests_of_a_batch_change_no_bit_of_a_block(changes: dict[str, Any]) -> None:
    target, _ = pair()
    runner = make_engine(target, make_dflash2(target, **changes)).runner
    stack, drafter, block = runner.proposer.stack, runner.drafter, 8
    stack.cache.normal_()
    pages = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    rows = Rows(torch.tensor([3, 5], dtype=torch.int32), pages, runner.page_size)
    x = torch.randn(2 * block, 32)
    other = torch.cat([torch.randn(block, 32), x[block:]])
    last = torch.tensor([7, 9])

    def second(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        hidden = stack.forward(x, rows)
        return hidden[block:], runner.proposer._head.draft(hidden, last, block).tokens[1]

    with torch.inference_mode():
        for one, two in zip(second(x, last), second(other, torch.tensor([8, 9])), strict=True):
            assert torch.equal(one, two)
    assert drafter is not None and (drafter.selector is None) == (changes is NO_SELECTOR)


@pytest.mark.parametrize("size", [0.3, 90.0])
def test_fp8_layers_are_close_and_change_no_answer(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm weights have any size; rows are cast without scaling."""
    monkeypatch.setattr(weights, "WIDE_IN_FP8", 0)
    target, _ = pair()
    drafter = make_dflash2(target)
    for layer in drafter.layers:
        layer.input_layernorm.weight.data *= size
        layer.post_attention_layernorm.weight.data *= size
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] in ("kernel_projection", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                parameter.data /= size
    full, narrow = (make_engine(target, drafter, draft_dtype=kind) for kind in ("full", "fp8"))
    rows = Rows(torch.tensor([0], dtype=torch.int32), torch.arange(1, 5, dtype=torch.int32)[None], 4)
    x = torch.randn(8, 32)
    with torch.inference_mode():
        exact, found = (engine.runner.proposer.stack.forward(x, rows) for engine in (full, narrow))
    assert 0.001 < float((found - exact).norm() / exact.norm()) < 0.2
    first, second = narrow.runner.drafter.layers
    kept = [conv.projection for conv in (first.ffn_conv, second.mixer_conv, second.ffn_conv)]
    assert all(isinstance(matrix, RowScaledFp8) for matrix in kept) and isinstance(first.mixer_conv.projection, Tensor)
    prompts, params = prompts_of(5, 18), SamplingParams(max_tokens=20)
    expected = make_engine(target, None).generate(prompts, params)
    assert [got.tokens for got in narrow.generate(prompts, params)] == [got.tokens for got in expected]
