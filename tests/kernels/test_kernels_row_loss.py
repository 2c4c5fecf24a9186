"""The losses of stored logits against float64 autograd: the definition, and the kernel (interpreted without a GPU)."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_toolkit.kernels import reference as definition
from dflash_toolkit.kernels.loss_terms import CROSS_ENTROPY, LossMix, RowTerms
from dflash_toolkit.kernels.triton import row_loss as triton_kernel

# numpy, which interprets the kernel, remarks on lanes past the vocabulary, which the kernel masks
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXES = {
    "ce": CROSS_ENTROPY,
    "kl": LossMix(ce=0.0, kl=1.0),
    "tv": LossMix(ce=0.0, tv=1.0),
    "lk": LossMix(ce=0.0, lk=1.0),
    "lk_hybrid": LossMix(ce=0.0, lk_hybrid=1.0),
    "all": LossMix(0.3, 0.7, 1.1, 0.2, 0.5, temperature=0.7),
}


def draw(rows: int, vocabulary: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drafter's logits [R, V] and target's [2, V], both as views with NaN on all sides, labels and target rows."""
    target = scale * torch.randn(2, vocabulary)
    at = torch.arange(rows) % 2
    views = []
    for values in (target[at] + torch.randn(rows, vocabulary), target):  # near each other, so that they overlap
        wide = torch.full((len(values) + 2, vocabulary + 14), math.nan, dtype=dtype, device=DEVICE)
        wide[1:-1, 7:-7] = values.to(DEVICE, dtype)
        views.append(wide[1:-1, 7:-7])
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    labels[0] = views[0][0].argmax()
    return views[0], views[1], labels, at.to(DEVICE)


def unwritten(rows: int, mix: LossMix, dtype: torch.dtype = torch.float32) -> RowTerms:
    values = [torch.full((rows,), math.nan, dtype=dtype, device=DEVICE) for _ in range(3 if mix.distribution else 1)]
    return RowTerms(values[0], torch.full((rows,), -1, dtype=torch.int32, device=DEVICE), *values[1:])


def exact(x: Tensor, z: Tensor, labels: Tensor, mix: LossMix) -> dict[str, Tensor]:
    """Everything in float64; the gradient is autograd's, of the losses as the papers write them."""
    x = x.detach().to(torch.float64, copy=True).requires_grad_()
    log_q, log_p = (x / mix.temperature).log_softmax(-1), (z.double() / mix.temperature).log_softmax(-1)
    ce = F.cross_entropy(x, labels, reduction="none")
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    acceptance = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    share = torch.exp(-3 * acceptance.detach())
    tv = 1 - acceptance
    hybrid = share * kl + (1 - share) * tv
    loss = mix.ce * ce + mix.kl * kl + mix.tv * tv - mix.lk * acceptance.log() + mix.lk_hybrid * hybrid
    loss.sum().backward()
    at_label = x.gather(1, labels[:, None])
    first = torch.arange(x.shape[1], device=x.device) < labels[:, None]
    found = {"ce": ce, "kl": kl, "acceptance": acceptance, "loss": loss, "log_q": log_q, "log_p": log_p}
    found["rank"] = ((x > at_label) | ((x == at_label) & first)).sum(-1)
    return {name: value.detach() for name, value in found.items()} | {"gradient": x.grad}


def bounds(x: Tensor, z: Tensor, labels: Tensor, mix: LossMix, true: dict[str, Tensor], eps: float) -> tuple:
    """How far rounding to `eps` may carry terms (absolute) and each element of the gradient, before it is stored.

    A logarithm of a probability is the difference of two numbers as large as the largest logit, so it errs by some
    `eps` of that, and a probability by as much of itself. Where p and q are nearer than that, TV's step may go either
    way.
    """
    unit = 16 * eps * (1 + max(x.double().abs().max().item(), z.double().abs().max().item()) / mix.temperature)
    q, p = true["log_q"].exp(), true["log_p"].exp()
    kl, tv = (slope[:, None] for slope in mix.slopes(true["acceptance"]))
    ties = q * ((true["log_q"] - true["log_p"]).abs() <= unit)
    hot = F.one_hot(labels, x.shape[1])
    gradient = unit * (mix.ce * (x.double().softmax(-1) + hot) + (kl * (p + q) + tv * 2 * q) / mix.temperature)
    gradient += tv * (ties + q * ties.sum(-1, keepdim=True)) / mix.temperature
    return unit, gradient


CASES = [
    pytest.param(5003, 300.0, torch.float32, id="saturated fp32"),  # the mass is on a few columns: the formulas
    pytest.param(4097, 3.0, torch.float32, id="one lane of another block"),
    pytest.param(2049, 3.0, torch.bfloat16, id="bf16"),
    pytest.param(151_936, 2.0, torch.bfloat16, id="a real vocabulary"),
    pytest.param(33, 1.0, torch.float32, id="less than a block"),
    pytest.param(1, 1.0, torch.float32, id="one token"),
    pytest.param(257, 30.0, torch.float64, id="float64"),  # only for the definition
]


@pytest.mark.parametrize(("vocabulary", "scale", "dtype"), CASES)
@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["torch", "triton"])
@pytest.mark.sampled
def test_terms_and_gradient_are_those_of_float64_autograd(
    implementation, vocabulary: int, scale: float, dtype: torch.dtype
) -> None:
    if dtype == torch.float64 and implementation is triton_kernel:
        pytest.skip("the kernel computes in fp32")
    wide = torch.promote_types(dtype, torch.float32)
    names = ["all"] if vocabulary > 100_000 else list(MIXES)  # slow in the interpreter
    for name in names:
        mix, rows = MIXES[name], 2 if vocabulary > 100_000 else 3
        logits, target, labels, at = draw(rows, vocabulary, scale, dtype)
        before, before_target = logits.clone(), target.clone()
        true = exact(logits, target[at], labels, mix)
        terms = unwritten(rows, mix, wide)
        implementation.row_loss_(logits, labels, terms, mix, True, target, at)
        unit, allowed = bounds(before, target, labels, mix, true, torch.finfo(wide).eps)
        assert (terms.cross_entropy - true["ce"]).abs().max() <= unit, name
        assert torch.equal(terms.rank.long(), true["rank"]), name
        if mix.distribution:
            assert terms.kl is not None and terms.acceptance is not None
            assert (terms.kl - true["kl"]).abs().max() <= unit, name
            assert ((terms.acceptance - true["acceptance"]) / true["acceptance"]).abs().max() <= unit, name
        assert (mix.value(terms) - true["loss"]).abs().max() <= 4 * unit, name
        stored = torch.finfo(dtype).eps * true["gradient"].abs() + torch.finfo(dtype).tiny
        assert ((logits.double() - true["gradient"]).abs() <= allowed + stored).all(), name
        assert torch.equal(target, before_target), name


@pytest.mark.parametrize("name", ["ce", "all"])
@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["torch", "triton"])
def test_without_a_gradient_the_logits_stay_as_they_are(implementation, name: str) -> None:
    mix = MIXES[name]
    logits, target, labels, at = draw(2, 5000, 3.0, torch.float32)
    before = logits.clone()
    terms, with_gradient = unwritten(2, mix), unwritten(2, mix)
    implementation.row_loss_(logits, labels, terms, mix, False, target, at)
    assert torch.equal(logits, before)
    implementation.row_loss_(logits, labels, with_gradient, mix, True, target, at)
    assert torch.equal(mix.value(terms), mix.value(with_gradient)) and not torch.equal(logits, before)


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["torch", "triton"])
def test_rank_counts_tokens_before_the_label_with_ties_by_id(implementation) -> None:
    logits = torch.zeros(5, 9000, device=DEVICE)
    logits[:, [17, 4100, 8200]] = torch.tensor([2.0, 1.0, 1.0], device=DEVICE)
    logits[3, 5] = logits[4, 4100] = math.nan
    terms = unwritten(5, CROSS_ENTROPY)
    labels = torch.tensor([4100, 8200, 3, 17, 4100], device=DEVICE)
    implementation.row_loss_(logits, labels, terms, CROSS_ENTROPY, gradient=False)
    # a NaN ranks first, as for argmax, and a label that is NaN ranks last, so it is never correct
    assert terms.rank.tolist() == [1, 2, 3 + 3, 1, 9000]


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["torch", "triton"])
def test_disjoint_distributions_have_finite_losses(implementation) -> None:
    mix = MIXES["all"]
    logits, target = torch.zeros(1, 50, device=DEVICE), torch.zeros(1, 50, device=DEVICE)
    logits[0, 3], target[0, 4] = 900.0, 900.0
    terms = unwritten(1, mix)
    at = torch.zeros(1, dtype=torch.long, device=DEVICE)
    implementation.row_loss_(logits, at, terms, mix, True, target, at)
    loss = mix.value(terms)
    assert terms.acceptance is not None and terms.acceptance.item() == 0.0
    assert loss.isfinite().all() and loss > 900 and logits.isfinite().all() and logits.abs().max() > 0.1


@pytest.mark.parametrize("implementation", [definition, triton_kernel], ids=["torch", "triton"])
def test_a_drafter_equal_to_the_target_has_zero_gradient(implementation) -> None:
    mix = LossMix(0.0, 1.0, 1.0, 1.0, 1.0, temperature=1.3)
    target = 5 * torch.randn(2, 700, device=DEVICE)
    logits, terms, at = target.clone(), unwritten(2, mix), torch.tensor([0, 1], device=DEVICE)
    implementation.row_loss_(logits, at, terms, mix, True, target, at)
    assert mix.value(terms).abs().max() < 1e-5 and logits.abs().max() < 1e-6


def test_row_result_does_not_depend_on_batch_size() -> None:
    mix = MIXES["all"]
    logits, target, labels, at = draw(4, 3001, 3.0, torch.float32)
    together, alone = logits.clone(), logits.clone()
    terms, one = unwritten(4, mix), unwritten(1, mix)
    triton_kernel.row_loss_(together, labels, terms, mix, True, target, at)
    triton_kernel.row_loss_(alone[2:3], labels[2:3], one, mix, True, target[at[2:3]], at[:1])
    assert torch.equal(alone[2], together[2]) and one.cross_entropy == terms.cross_entropy[2]
    assert terms.kl is not None and terms.acceptance is not None
    assert one.kl == terms.kl[2] and one.acceptance == terms.acceptance[2]
