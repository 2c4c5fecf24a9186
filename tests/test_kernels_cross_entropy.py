"""Cross-entropy of stored logits against float64, on the interpreter where there is no GPU."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dflash_toolkit.kernels.cross_entropy import cross_entropy_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(rows: int, vocabulary: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [R, V] as a view with NaN on both sides, and labels."""
    wide = torch.full((rows, vocabulary + 14), math.nan, dtype=dtype, device=DEVICE)
    wide[:, 7:-7] = (scale * torch.randn(rows, vocabulary)).to(DEVICE, dtype)
    return wide[:, 7:-7], torch.randint(0, vocabulary, (rows,), device=DEVICE)


@pytest.mark.parametrize(
    ("vocabulary", "scale", "dtype"),
    [
        (151_936, 3.0, torch.bfloat16 if DEVICE == "cuda" else torch.float16),
        (4097, 3.0, torch.float32),  # one lane of a second block
        (5003, 300.0, torch.float32),  # saturated: all mass on one column
        (33, 1.0, torch.float32),
        (1, 1.0, torch.float32),
    ],
)
@pytest.mark.parametrize("gradient", [True, False])
def test_loss_hit_and_gradient(vocabulary: int, scale: float, dtype: torch.dtype, gradient: bool) -> None:
    rows = 3
    logits, labels = draw(rows, vocabulary, scale, dtype)
    labels[0] = logits[0].argmax()
    exact = logits.double().requires_grad_(True)
    losses = F.cross_entropy(exact, labels, reduction="none")
    losses.sum().backward()
    assert exact.grad is not None
    before = logits.clone()
    loss = torch.full((rows,), math.nan, device=DEVICE)
    correct = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    cross_entropy_(logits, labels, loss, correct, gradient)
    tolerance = 8 * torch.finfo(torch.float32).eps * (1 + exact.detach().abs().max())
    assert (loss - losses).abs().max() <= tolerance
    assert torch.equal(correct, exact.argmax(-1) == labels)
    if gradient:
        assert (logits.double() - exact.grad).abs().max() <= tolerance + torch.finfo(dtype).eps
    else:
        assert torch.equal(logits, before)


def test_of_equal_logits_the_first_counts_as_the_argmax() -> None:
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[:, [4100, 8200]] = 1.0
    loss, correct = torch.zeros(2, device=DEVICE), torch.zeros(2, dtype=torch.bool, device=DEVICE)
    cross_entropy_(logits, torch.tensor([4100, 8200], device=DEVICE), loss, correct, gradient=False)
    assert correct.tolist() == [True, False]
