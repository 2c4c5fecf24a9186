"""Defines the choice of tokens: filters, penalties, random numbers, sampling and acceptance."""

import torch
from torch import Tensor

TARGET_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM = range(3)  # independent random numbers at one position


def position_uniform(seed: Tensor, position: Tensor, stream: int = TARGET_STREAM) -> Tensor:
    """Returns a uniform number in [0, 1) that depends only on (seed, position, stream), by the SplitMix64 finaliser.

    Args:
        seed, position: int64, of the same shape.
        stream: its use: the target's own token, a draft, or the acceptance of a draft.

    Returns:
        float64 of that shape.
    """

    def signed(constant: int) -> int:  # int64 multiplication wraps, as the algorithm requires
        constant &= (1 << 64) - 1
        return constant - (1 << 64) if constant >> 63 else constant

    def shifted(z: Tensor, bits: int) -> Tensor:  # >> on int64 copies the sign
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = seed * signed(0x9E3779B97F4A7C15) + position * signed(0xD1342543DE82EF95)
    z = z + signed(0x632BE59BD9B4E019 + stream * 0xD6E8FEB86659FD93)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ shifted(z, bits)) * signed(factor)
    return shifted(z ^ shifted(z, 31), 11).double() / (1 << 53)


def filtered_probabilities(
    logits: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Tensor:
    """Returns the distribution that tokens are sampled from, in fp32.

    Filters run in the order of Hugging Face `generate`: temperature, top-k, top-p, min-p. All tokens tied at the k-th
    logit stay; among tokens tied at the edge of top-p, those with the lower ids stay.

    Args:
        logits: [..., V].
        temperature: > 0.
        top_p: keeps the smallest set of tokens with a mass of at least top_p; 1 keeps all.
        top_k: 0 keeps all.
        min_p: removes tokens below min_p times the largest probability; 0 keeps all.

    Returns:
        Probabilities [..., V] that sum to 1.
    """
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        # stable, so that the choice among tied tokens does not depend on the number of rows
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        mass_before = mass.cumsum(-1) - mass
        ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)
        scores = torch.empty_like(scores).scatter(-1, order, ordered)
    probabilities = scores.softmax(-1)
    if min_p > 0.0:
        floor = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def _filtered_by_row(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Returns `filtered_probabilities` [M, V] with each row's own parameters; meaningless at temperature 0."""
    scores = logits.float() / torch.where(temperature == 0.0, 1.0, temperature)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered < ordered.gather(1, top_k[:, None] - 1), -torch.inf)
    mass = ordered.softmax(-1)
    outside = (mass.cumsum(-1) - mass >= top_p[:, None]) & (top_p < 1.0)[:, None]
    scores = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(outside, -torch.inf))
    probabilities = scores.softmax(-1)
    floor = min_p[:, None] * probabilities.amax(-1, keepdim=True)
    kept = probabilities.masked_fill(probabilities < floor, 0.0)
    return torch.where((min_p > 0.0)[:, None], kept / kept.sum(-1, keepdim=True), probabilities)


def penalized(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    bias: Tensor,
    repetition: Tensor | float,
    presence: Tensor | float,
    frequency: Tensor | float,
) -> Tensor:
    """Applies penalties and bias to logits [..., V], in fp32. Neutral values leave the logits unchanged.

    Args:
        seen: bool [..., V], tokens of the prompt or the answer; repetition divides their positive logits and
            multiplies their negative ones (Keskar et al. 2019, section 4.1).
        counts: integers [..., V], of tokens in the answer; presence is subtracted once, frequency once per count.
        bias: [..., V], added.
    """
    logits = logits.float()
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - presence * (counts > 0) - frequency * counts + bias


def mask_logits_(logits: Tensor, masks: Tensor, at: Tensor) -> None:
    """Sets logits [M, V] of tokens that a row's mask does not allow to -inf.

    Args:
        masks: int32 [N, words] of at least V bits: token v is bit v % 32, from the lowest, of word v // 32.
        at: int32 [M], the mask of each row; rows with -1 do not change.
    """
    bits = masks[at.long().clamp(min=0), :, None] >> torch.arange(32, device=masks.device, dtype=masks.dtype)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~allowed & (at >= 0)[:, None], -torch.inf)


def choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token with a cumulative mass above `uniform`.

    Args:
        probabilities: [M, V].
        uniform: [M] in [0, 1).

    Returns:
        Token ids [M], each with probability > 0.
    """
    cdf = probabilities.double().cumsum(-1)
    threshold = uniform.double() * cdf[:, -1]
    return torch.searchsorted(cdf, threshold[:, None], right=True)[:, 0].clamp_(max=probabilities.shape[-1] - 1)


def draw(scores: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples a draft of every row from q, the softmax of its candidates' scores over the temperature.

    Args:
        scores: fp32 [M, C].
        temperature: fp32 [M]; at 0, q is a point mass on the largest score, the first of tied ones.
        uniform: fp64 [M], as in `choose`.

    Returns:
        Places int64 [M] among the candidates, and q, fp32 [M, C].
    """
    greedy = (temperature == 0.0)[:, None]
    best = scores.argmax(-1, keepdim=True)
    q = (scores / torch.where(greedy, 1.0, temperature[:, None])).softmax(-1)
    q = torch.where(greedy, torch.zeros_like(q).scatter(1, best, 1.0), q)
    return choose(q, uniform), q


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Returns every row's token with its own parameters: sampled from `filtered_probabilities`, or the argmax.

    Args:
        logits: [M, V].
        temperature, top_p, min_p: fp32 [M]; temperature 0 chooses the largest logit, the first of tied ones.
        top_k: int64 [M] in 1..V.
        uniform: fp64 [M] in [0, 1), as in `choose`.

    Returns:
        int64 [M]; any token for a row with NaN.
    """
    drawn = choose(_filtered_by_row(logits, temperature, top_p, top_k, min_p), uniform)
    return torch.where(temperature == 0.0, logits.argmax(-1), drawn)


def accept_or_resample(
    p: Tensor, draft: Tensor, candidates: Tensor, q: Tensor, uniform: Tensor, acceptance: Tensor
) -> Tensor:
    """Returns the target's tokens for sampled drafts: speculative sampling (Leviathan et al. 2023, Algorithm 1).

    A draft d is accepted with probability min(1, p(d) / q(d)). Otherwise the token is sampled from max(p - q, 0), which
    excludes rejected drafts. If d is distributed as q, the token is distributed as p.

    Args:
        p: fp32 [M, V], the target's filtered distribution.
        draft: int64 [M]; -1: nothing was drafted, and the token is sampled from p.
        candidates: int64 [M, C], the tokens of q, each once.
        q: fp32 [M, C].
        uniform: fp64 [M] in [0, 1), random number for sampling.
        acceptance: fp64 [M] in [0, 1), independent random number for acceptance.

    Returns:
        int64 [M]; the draft if it is accepted, otherwise another token.
    """
    q = torch.where((draft >= 0)[:, None], q, 0.0)
    rest = p.scatter_add(1, candidates, -q).clamp_(min=0.0)
    nothing = ~(rest > 0.0).any(-1)  # p equals q up to rounding, so no other token can be sampled
    of_p = p.gather(1, draft.clamp(min=0)[:, None])[:, 0].double()
    of_q = torch.where(candidates == draft[:, None], q, 0.0).sum(-1).double()
    taken = (draft >= 0) & ((acceptance * of_q < of_p) | nothing)
    return torch.where(taken, draft, choose(rest, uniform))


def rejection_sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    draft: Tensor,
    candidates: Tensor,
    q: Tensor,
    acceptance: Tensor,
) -> Tensor:
    """Does the same as `sample`, but accepts each row's draft or replaces it, see `accept_or_resample`.

    Args:
        draft: int64 [M], the sampled draft of each row; -1: none.
        candidates: int64 [M, C].
        q: fp32 [M, C].
        acceptance: fp64 [M] in [0, 1).
    """
    p = _filtered_by_row(logits, temperature, top_p, top_k, min_p)
    drawn = accept_or_resample(p, draft, candidates, q, uniform, acceptance)
    return torch.where(temperature == 0.0, logits.argmax(-1), drawn)


def accepted_prefix(draft: Tensor, choice: Tensor) -> Tensor:
    """Returns the number of drafted tokens that equal the target's choices before the first mismatch.

    The same rule serves greedy and sampled verification: `choice[i]` is the target's token at that position, the argmax
    or a sample from its distribution p. A draft d is then accepted with probability p(d), and after a rejection the
    choice is distributed as p without d. This is speculative sampling with a point mass as proposal (Leviathan et al.
    2023, Algorithm 1 with q = 1 at d). For sampled drafts, `accept_or_resample` makes the choices.

    Args:
        draft: [M, S - 1] proposed tokens.
        choice: [M, S] or [M, S - 1]; the target's tokens, `choice[:, i]` at the position of `draft[:, i]`.

    Returns:
        Counts [M] in 0..S-1.
    """
    return (draft == choice[:, : draft.shape[1]]).long().cumprod(dim=1).sum(dim=1)


def accept(
    draft: Tensor,
    choice: Tensor,
    active: Tensor,
    lengths: Tensor,
    last_token: Tensor,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Commits the longest drafted prefix that equals the target's choices, and its choice at the first mismatch.

    Args:
        draft: int64 [B, S - 1], S >= 1.
        choice: int64 [B, S].
        active: bool [B]; other rows commit nothing.
        lengths: int32 [B], advanced in place by the number of committed tokens.
        last_token: int64 [B], replaced in place by the last committed token.
        forced: int32 [B], numbers of drafted tokens to accept, whatever the target chose (synthetic acceptance).

    Returns:
        counts int32 [B], the committed tokens of each row (0 where inactive), and tokens int64 [B, S], of which
        the first `counts` are committed.
    """
    accepted = accepted_prefix(draft, choice) if forced is None else forced.long()
    counts = torch.where(active, accepted + 1, 0).to(lengths.dtype)
    bonus = choice.gather(1, accepted[:, None])  # [B, 1]
    tokens = torch.cat([draft, bonus], dim=1).scatter(1, accepted[:, None], bonus)
    lengths += counts
    last_token.copy_(torch.where(active, bonus[:, 0], last_token))
    return counts, tokens


def scored_tokens(logits: Tensor, tokens: Tensor, best: int) -> Tensor:
    """Returns log-probabilities of given tokens, and the target's most probable tokens at their positions.

    Args:
        logits: [M, V].
        tokens: int64 [M].
        best: tokens reported with each; at most V.

    Returns:
        fp64 [M, 2 + 2 * best]: the token's log-probability and its rank, which also counts tied tokens; the ids of the
        most probable tokens, then their log-probabilities.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs >= chosen).sum(1, keepdim=True)
    values, ids = logprobs.topk(min(best, logits.shape[1]))
    return torch.cat([part.double() for part in (chosen, rank, ids, values)], dim=1)
