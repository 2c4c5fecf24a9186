"""The plain torch definitions against float64 autograd, Hugging Face's filters and plain loops."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_toolkit.kernels.loss import frozen_head_loss
from dflash_toolkit.kernels.loss_terms import LogitScale
from dflash_toolkit.kernels.reference import (
    accept_or_resample,
    accepted_prefix,
    add_rms_norm,
    block_conv,
    choose,
    conv_add_rms_norm,
    draw,
    filtered_probabilities,
    linear_top,
    penalized,
    scored_tokens,
    walk,
)
from dflash_toolkit.models.dflash2.convolution import DynamicConvolution
from dflash_toolkit.models.dflash2.selector import CandidateSelector

# ---- the frozen head -------------------------------------------------------------------------------


def head_inputs(rows: int, width: int, vocab: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [R, D], weight [V, D], labels [R] and an upstream gradient [R] with exact zeros in it."""
    hidden, weight = scale * torch.randn(rows, width), torch.randn(vocab, width) / width**0.5
    upstream = torch.rand(rows) * (torch.arange(rows) % 3 != 1)
    return hidden, weight, torch.randint(vocab, (rows,)), upstream


def exact(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient by autograd over all the logits, in float64."""
    leaf = hidden.double().requires_grad_()
    loss = F.cross_entropy(leaf @ weight.double().T, labels, reduction="none")
    loss.backward(upstream.double())
    return loss.detach(), leaf.grad


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
    leaf = hidden.clone().requires_grad_()
    loss = frozen_head_loss(leaf, weight, labels, chunk).loss
    loss.backward(upstream)
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(
    "shape",  # rows, width, vocabulary, chunk
    [(1, 1, 1, 1), (1, 7, 5, 512), (13, 7, 31, 4), (13, 7, 31, 13), (64, 33, 257, 17), (0, 8, 5, 4), (3, 8, 9**5, 2)],
    ids=str,
)
def test_loss_and_gradient_are_those_of_full_cross_entropy(shape: tuple[int, int, int, int]) -> None:
    *sizes, chunk = shape
    inputs = head_inputs(*sizes)
    before = [t.clone() for t in inputs]
    for got, expected in zip(ours(*inputs, chunk), exact(*inputs), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=5e-5, atol=1e-6)
    assert all(map(torch.equal, inputs, before)), "inputs are left as they were"


@pytest.mark.parametrize(("multiplier", "cap"), [(0.2, None), (1.0, 3.0), (0.7, 2.0)])
def test_logits_have_the_head_s_bias_and_are_multiplied_and_capped(multiplier: float, cap: float | None) -> None:
    hidden, weight, labels, upstream = head_inputs(90, 16, 50, scale=3.0)  # more rows than are capped at a time
    leaf, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    bias = torch.randn(50)
    rows = frozen_head_loss(leaf, weight, labels, 80, scale=LogitScale(multiplier, cap), bias=bias)
    rows.loss.backward(upstream)
    logits = (exact @ weight.double().T + bias.double()) * multiplier
    logits = logits if cap is None else torch.tanh(logits / cap) * cap  # as z-lab's client has it
    loss = F.cross_entropy(logits, labels, reduction="none")
    loss.backward(upstream.double())
    torch.testing.assert_close(rows.loss.double(), loss, rtol=5e-5, atol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=5e-5, atol=1e-6)


def test_saturated_logits_give_finite_losses_and_gradients() -> None:
    # logits of several hundred: exp without the maximum taken off would overflow
    hidden, weight, labels, upstream = head_inputs(12, 16, 50, scale=300.0)
    logits = hidden @ weight.T
    labels[:6] = logits[:6].argmax(-1)
    labels[6:] = logits[6:].argmin(-1)
    loss, gradient = ours(hidden, weight, labels, upstream, chunk=5)
    assert loss[6:].min() > 100.0
    expected_loss, expected_gradient = exact(hidden, weight, labels, upstream)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("rows", "width", "vocab"), [(24, 32, 100), (17, 64, 1031)])
def test_bf16_errs_at_most_twice_as_much_as_plain_bf16_autograd(rows: int, width: int, vocab: int) -> None:
    hidden, weight, labels, upstream = head_inputs(rows, width, vocab, scale=3.0)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    truth = exact(hidden, weight, labels, upstream)

    plain = hidden.clone().requires_grad_()
    plain_loss = F.cross_entropy(F.linear(plain, weight).float(), labels, reduction="none")
    plain_loss.backward(upstream)

    for got, reference, true in zip(
        ours(hidden, weight, labels, upstream, chunk=7), (plain_loss.detach(), plain.grad), truth, strict=True
    ):
        error = (got.double() - true).norm() / true.norm()
        assert error <= 2 * (reference.double() - true).norm() / true.norm()
        assert error < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_keeps_the_dtype_of_the_hidden_states(dtype: torch.dtype) -> None:
    hidden, weight, labels, upstream = head_inputs(6, 8, 20)
    loss, gradient = ours(hidden.to(dtype), weight.bfloat16(), labels, upstream)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)


def test_only_rows_with_an_upstream_gradient_get_a_gradient() -> None:
    hidden, weight, labels, upstream = head_inputs(20, 8, 40)
    assert not frozen_head_loss(hidden, weight, labels).loss.requires_grad
    _, gradient = ours(hidden, weight.requires_grad_(), labels, upstream, chunk=3)
    assert (upstream == 0).any() and gradient[upstream == 0].count_nonzero() == 0
    assert gradient[upstream != 0].abs().sum(-1).min() > 0 and weight.grad is None


def test_correct_is_true_if_the_argmax_is_the_label() -> None:
    hidden, weight, labels, _ = head_inputs(30, 8, 12)
    labels[::2] = (hidden @ weight.T)[::2].argmax(-1)
    result = frozen_head_loss(hidden.requires_grad_(), weight, labels, chunk=7)
    assert torch.equal(result.correct, (hidden @ weight.T).argmax(-1) == labels)
    assert result.correct[::2].all() and not result.correct.requires_grad


def test_at_most_one_chunk_of_logits_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = Tensor.logsumexp
    monkeypatch.setattr(Tensor, "logsumexp", lambda self, *a, **k: (seen.append(len(self)), real(self, *a, **k))[1])
    hidden, weight, labels, upstream = head_inputs(10, 4, 6)
    ours(hidden, weight, labels, upstream, chunk=4)
    assert seen == [4, 4, 2]


# ---- filters -------------------------------------------------------------------------------


def hf_probabilities(logits: Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Hugging Face's own filters in the order in which `generate` applies them."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        steps.append(TopPLogitsWarper(top_p))
    if min_p:
        steps.append(MinPLogitsWarper(min_p))
    return steps(torch.zeros(len(logits), 1, dtype=torch.long), logits.float()).softmax(-1)


FILTERS = [  # temperature, top-p, top-k, min-p
    dict(zip(("temperature", "top_p", "top_k", "min_p"), each, strict=True))
    for each in itertools.product((0.3, 1.0, 1.7), (1.0, 0.9, 0.35), (0, 1, 5, 400), (0.0, 0.08))
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filtered_probabilities_are_those_of_hugging_face(filters: dict[str, Any]) -> None:
    # few levels, as bf16 heads produce: which of the tokens tied at the edge of top-p stay is a free choice
    tied, logits = torch.randint(-4, 5, (20, 97)).float() / 2, 3 * torch.randn(20, 301)
    got, expected = filtered_probabilities(logits, **filters), hf_probabilities(logits, **filters)
    assert torch.equal(got > 0, expected > 0), "the same tokens stay"
    pairs = [(got, expected)]
    got, expected = filtered_probabilities(tied, **filters), hf_probabilities(tied, **filters)
    pairs += [(got.sort(-1).values, expected.sort(-1).values)] + [(got, expected)] * (filters["top_p"] == 1.0)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_without_filters_the_probabilities_are_the_softmax() -> None:
    logits = torch.randn(3, 20)
    torch.testing.assert_close(filtered_probabilities(logits, temperature=0.7), (logits / 0.7).softmax(-1))


def test_scored_tokens_have_rank_and_best_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [5.0, 0.0, 1.0, 5.0]])
    logprobs = logits.log_softmax(-1)
    chosen, rank, *best = scored_tokens(logits, torch.tensor([3, 2]), 2).T
    torch.testing.assert_close(chosen.float(), logprobs[[0, 1], [3, 2]])
    assert rank.tolist() == [3, 3] and best[0].tolist()[0] == 1 and {*torch.stack(best[:2])[:, 1].tolist()} == {0, 3}
    torch.testing.assert_close(torch.stack(best[2:], 1).float(), logprobs.topk(2).values)


def test_top_p_keeps_tied_tokens_by_lowest_id() -> None:
    logits = torch.zeros(1, 4096)
    kept = filtered_probabilities(logits, temperature=1.0, top_p=0.25)[0].nonzero()[:, 0]
    assert torch.equal(kept, torch.arange(1024))


def test_filtering_is_batch_invariant_for_any_shape() -> None:
    logits = torch.randint(-6, 7, (16, 500)).float() / 4  # ties everywhere
    filters = {"temperature": 0.8, "top_p": 0.8, "top_k": 300, "min_p": 0.01}
    together = filtered_probabilities(logits, **filters)
    assert torch.equal(together, torch.stack([filtered_probabilities(row, **filters) for row in logits]))
    assert torch.equal(filtered_probabilities(logits.view(2, 8, 500), **filters), together.view(2, 8, 500))


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 15),
    min_p=st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_filtered_mass_is_one_and_keeps_the_best_token(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    row = torch.tensor([logits])
    got = filtered_probabilities(row, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)[0]
    assert math.isclose(float(got.sum()), 1.0, rel_tol=1e-5)
    assert got[row[0].argmax()] > 0
    assert got.argmax() == row[0].softmax(-1).argmax() or got.max() == got[row[0].argmax()]


# ---- penalties -------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.4, 1.0, 1.3, 7.0])
def test_repetition_penalty_matches_hugging_face(penalty: float) -> None:
    logits, context = 3 * torch.randn(8, 61), torch.randint(0, 61, (8, 40))
    seen = torch.zeros(8, 61, dtype=torch.bool).scatter(1, context, True)
    for sign in (logits > 0, logits < 0):
        assert (seen & sign).sum() > 50 and (~seen & sign).sum() > 50, "each of the four cases"
    got = penalized(logits, seen, torch.zeros(8, 61, dtype=torch.int32), torch.zeros(8, 61), penalty, 0.0, 0.0)
    torch.testing.assert_close(got, RepetitionPenaltyLogitsProcessor(penalty)(context, logits))


def test_penalties_and_bias_apply_in_the_documented_order() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0, 0.0]] * 2)
    seen = torch.tensor([[True, True, False, False, True, True]] * 2)
    counts = torch.tensor([[0, 1, 0, 0, 3, 2], [1, 0, 0, 0, 0, 0]])
    bias = torch.tensor([[0.0, 0.0, 5.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, -torch.inf, 0.0, 0.0]])
    repetition, presence, frequency = (torch.tensor(v)[:, None] for v in ([2.0, 1.0], [0.25, -1.0], [0.5, 1.5]))
    got = penalized(logits, seen, counts, bias, repetition, presence, frequency)
    first = [2 / 2, -2 * 2 - 0.25 - 0.5, 2 + 5, -2, 1 / 2 - 0.25 - 3 * 0.5 + 0.5, -0.25 - 2 * 0.5]
    assert got.tolist() == [first, [2 + 1 - 1.5, -2, 2, -torch.inf, 1, 0]], "parameters of a row's own"


def test_without_penalties_and_bias_the_logits_are_left_as_they_are() -> None:
    logits, seen = torch.randn(4, 33).bfloat16(), torch.rand(4, 33) < 0.5
    got = penalized(logits, seen, seen.int(), torch.zeros(4, 33), 1.0, 0.0, 0.0)
    assert got.dtype == torch.float32 and torch.equal(got, logits.float())


# ---- draws and acceptance -------------------------------------------------------------------------------


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0, 3.0]), min_size=1, max_size=9).filter(any),
    uniform=st.one_of(st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, 1.0 - 2.0**-53])),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_choose_is_the_inverse_cdf_and_skips_zero_probability(weights: list[float], uniform: float) -> None:
    probabilities = torch.tensor([weights]) / sum(weights)
    token = int(choose(probabilities, torch.tensor([uniform], dtype=torch.float64)))
    assert probabilities[0, token] > 0
    cdf = probabilities[0].double().cumsum(0)
    threshold = uniform * float(cdf[-1])
    assert token == next(i for i, mass in enumerate(cdf.tolist()) if mass > threshold)


@given(st.integers(1, 4), st.integers(0, 9), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_accepted_prefix_counts_matches_up_to_the_first_mismatch(rows: int, size: int, dice: random.Random) -> None:
    draft, choice = ([dice.choices((0, 0, 1), k=n) for _ in range(rows)] for n in (size, size + 1))
    expected = [
        next((i for i, (d, c) in enumerate(zip(*row, strict=False)) if d != c), size)
        for row in zip(draft, choice, strict=True)
    ]
    drafted, chosen = torch.tensor(draft, dtype=torch.long), torch.tensor(choice)
    assert accepted_prefix(drafted, chosen).tolist() == expected
    assert accepted_prefix(drafted, chosen[:, :-1]).tolist() == expected, "the bonus column takes no part"


def test_rejected_draft_is_excluded_from_the_resampled_token() -> None:
    """Speculative sampling with a point mass: P(accept d) = p(d), and a rejection is p with d removed."""
    p = torch.tensor([0.1, 0.4, 0.3, 0.2])
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    choice = choose(p.expand(1000, -1), draws)[:, None]
    accepted = accepted_prefix(torch.full((1000, 1), 1), choice) == 1
    assert accepted.sum() == 400
    rejected = choice[~accepted, 0].bincount(minlength=4) / (~accepted).sum()
    torch.testing.assert_close(rejected, torch.tensor([0.1, 0.0, 0.3, 0.2]) / 0.6)


CELLS = 840  # a multiple of 1..8, so that every share of 8 parts ends at the edge of a cell


def shares(parts: st.SearchStrategy[int]) -> st.SearchStrategy[list[int]]:
    """Distributions over 5 tokens in eighths, most of them with tokens of probability zero."""
    return st.lists(parts, min_size=8, max_size=8).map(lambda found: [found.count(token) for token in range(5)])


def outcomes(p: list[int], q: list[int], order: list[int], taken: int | None) -> list[int]:
    """Returns the tokens for a draft `taken`, or for none, over a grid of the two random numbers.

    The first `CELLS` vary the number that accepts; the others vary the number that samples, and nothing is accepted.
    """
    middle = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    none = torch.full_like(middle, 1.0 - 2.0**-53)
    rows = 2 * CELLS
    candidates = torch.tensor([order] * rows)
    mass = torch.tensor([q]).expand(rows, -1).gather(1, candidates) / 8
    return accept_or_resample(
        torch.tensor([p]).expand(rows, -1) / 8,
        torch.full((rows,), -1 if taken is None else taken),
        candidates,
        torch.zeros_like(mass) if taken is None else mass,
        torch.cat([middle, middle]),
        torch.cat([middle, none]),
    ).tolist()


@given(p=shares(st.integers(0, 4)), q=shares(st.integers(1, 3)), order=st.permutations([1, 2, 3]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_accepted_and_resampled_tokens_follow_the_target(p: list[int], q: list[int], order: list[int]) -> None:
    """In exact fractions over all outcomes: the sum over drafts is p, and the accepted share is the overlap of p and q.

    A rule that ignores q, or samples from p without the draft, accepts another share or has another distribution.
    """
    total, accepted = [Fraction(0)] * 5, Fraction(0)
    for d in order:
        if not q[d]:
            continue
        found = outcomes(p, q, order, d)
        share = Fraction(q[d], 8) * Fraction(found[:CELLS].count(d), CELLS)
        accepted += share
        total[d] += share
        rejected = found[CELLS:]
        if p[d] < q[d]:
            assert d not in rejected
            for token in rejected:
                total[token] += (Fraction(q[d], 8) - share) * Fraction(1, CELLS)
        else:
            assert set(found) == {d}, "what is at least as probable as it was drafted is never rejected"
    assert total == [Fraction(part, 8) for part in p]
    assert accepted == sum(Fraction(min(pair), 8) for pair in zip(p, q, strict=True))
    bonus = outcomes(p, q, order, None)
    assert [Fraction(bonus.count(token), 2 * CELLS) for token in range(5)] == total, "without a draft it is p itself"


def test_draft_is_accepted_if_only_rounding_rejects_it() -> None:
    p, q = torch.tensor([[0.0, 1.0 - 2.0**-24, 0.0]]), torch.ones(1, 1)
    least = torch.full((1,), 1.0 - 2.0**-53, dtype=torch.float64)
    assert accept_or_resample(p, torch.tensor([1]), torch.tensor([[1]]), q, least, least).tolist() == [1]


def test_draft_follows_the_tempered_softmax_or_argmax_at_zero() -> None:
    scores = torch.tensor([[2.0, 1.0, 2.0, -1.0]])
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for temperature in (0.5, 1.0, 3.0):
        places, q = draw(scores.expand(1000, -1), torch.full((1000,), temperature), draws)
        torch.testing.assert_close(q[0], (scores[0] / temperature).softmax(-1))
        torch.testing.assert_close(places.bincount(minlength=4) / 1000, q[0], rtol=0, atol=1e-3)
    places, q = draw(scores.expand(1000, -1), torch.zeros(1000), draws)
    assert not places.any() and torch.equal(q, torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(1000, -1))


# ---- DFlash 2 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_block_conv_matches_the_network_and_sums_partials(taps: int) -> None:
    network, x, other = DynamicConvolution(12, taps, 4), torch.randn(3, 5, 12), torch.randn(3, 5, 12)
    with torch.no_grad():
        network.base_kernel.normal_()
        expected = network(x, lambda inside: inside + other, None).flatten(0, 1)
        u, dynamic, base = x.flatten(0, 1), network.kernel_projection(x).flatten(0, 1), network.base_kernel
        before, after = dynamic.chunk(2, dim=1)
        y = block_conv(u, before, base[0], 5) + other.flatten(0, 1)
        torch.testing.assert_close(block_conv(y, after, base[1], 5), expected)
        halves = torch.stack([y - 1, torch.ones_like(y)]), torch.stack([after / 2] * 2)
        torch.testing.assert_close(block_conv(*halves, base[1], 5), expected)
        norm, tap = torch.randn(12), torch.empty(15, 12)
        found = conv_add_rms_norm(u, *halves, base[1], 5, norm, 1e-6, tap)
        torch.testing.assert_close((*found, tap), (*add_rms_norm(u, expected[None], norm, 1e-6), u + expected))
    assert block_conv(y.bfloat16(), after.bfloat16(), base[1].bfloat16(), 5).dtype == torch.bfloat16


def test_linear_top_sorts_by_logit_then_lowest_column() -> None:
    x, weight = torch.randn(3, 7), torch.randn(40, 7)
    weight[30] = weight[8] = weight[2]
    values, ids = linear_top(x, weight, 40)
    logits = (x @ weight.T).tolist()
    assert ids.tolist() == [sorted(range(40), key=lambda column: (-row[column], column)) for row in logits]
    assert torch.equal(values, torch.tensor([sorted(row, reverse=True) for row in logits]))
    assert torch.equal(linear_top(x, weight, 4)[1], ids[:, :4])
    assert linear_top(x.bfloat16(), weight.bfloat16(), 4)[0].dtype == torch.float32


def test_every_block_is_walked_as_the_network_walks_it() -> None:
    network, hidden, unary = CandidateSelector(12, 50, 6), torch.randn(4, 8, 12), torch.randn(4, 8, 9)
    candidates, anchors = torch.rand(4, 8, 50).argsort(-1)[..., :9], torch.tensor([3, 49, 0, 3])
    with torch.no_grad():
        network.predecessor_codebook.normal_()
        network.successor_codebook.normal_()
        each = zip(hidden, unary, candidates, anchors.tolist(), strict=True)
        expected = torch.stack([network.walk(h[1:], u[1:], c[1:], a) for h, u, c, a in each])
        books = network.predecessor_codebook, network.successor_codebook
        slots = [part[:, 1:] for part in (network.hidden_projection(hidden), unary, candidates)]
        assert torch.equal(walk(*slots, *books, anchors), expected)
        assert not torch.equal(expected, candidates[:, 1:].gather(2, unary[:, 1:].argmax(-1, keepdim=True))[..., 0])
        ties = torch.zeros(4, 7, 9)
        assert torch.equal(walk(slots[0], ties, slots[2], books[0], 0 * books[1], anchors), candidates[:, 1:, 0])
