"""Draft -> verify -> accept on plain Hugging Face modules: the readable definition of correct serving output.

Batch 1, written for reading. Greedy output is token-identical to the target's own `generate`; a sampled output is
token-identical to plain sampling with the same seed, because the draw at a position depends on the seed and that
position alone, never on how many tokens a step committed. If the drafts are sampled too ("probabilistic"), the output
has the distribution of plain sampling, but not the same tokens.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor

from .config import UserError
from .draft_tree import WIDTH, DraftTree, best_first
from .generation import Generation, PromptLogprobs, Step, TokenLogprobs, check_prompt, commit
from .grammar import Grammars, Matcher, masks_of, words_of
from .kernels.reference import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    accept_or_resample,
    accepted_prefix,
    choose,
    filtered_probabilities,
    mask_logits_,
    penalized,
    position_uniform,
    scored_tokens,
)
from .models.cache import TargetCache
from .models.dflash.network import ContextKV, Drafter, SampledDraft
from .models.target import Target, TargetOutput
from .sampling import DraftSampleMethod, GrammarError, SamplingParams, int64_seed


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[int],
    params: SamplingParams | None = None,
    draft_sample_method: DraftSampleMethod = "greedy",
    draft_tree: int = 0,
    draft_tree_width: int | None = None,
) -> Generation:
    """Decodes one prompt to its end; see `stream`."""
    how = draft_sample_method, draft_tree, draft_tree_width
    return deque(stream(target, drafter, prompt_ids, params, *how), maxlen=1)[0]


@torch.inference_mode()
def stream(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[int],
    params: SamplingParams | None = None,
    draft_sample_method: DraftSampleMethod = "greedy",
    draft_tree: int = 0,
    draft_tree_width: int | None = None,
) -> Iterator[Generation]:
    """Decodes one prompt, yielding the same growing `Generation` after the prefill and after every step.

    Args:
        drafter: None decodes plainly, one token per step, by the same code.
        prompt_ids: at least one token, fewer than the target's context limit.
        draft_sample_method: greedy drafts the most probable tokens; probabilistic samples them at the temperature of
            `params`; temperature 0 is greedy.
        draft_tree: > 0 drafts a tree of this many nodes per step, see `propose_tree`; 0 a chain. A step's `drafted` is
            the depth of its tree.
        draft_tree_width: maximum children of a node; 1 is a chain. None: see `Target.tree_width`.

    Raises:
        UserError: an empty prompt, one that leaves no room for an answer, a token id of the prompt or of a bias outside
            the target's vocabulary, a tree for a target without support for trees (`Target.tree_width`) or with sampled
            drafts, or a grammar that cannot be used or followed (GrammarError).
    """
    params = params or SamplingParams()
    rows = target.embedding.num_embeddings
    check_prompt(prompt_ids, target.context_limit, rows, answered=params.max_tokens > 0)
    params.check_bias(rows)
    params = target.restrictions.apply(params, len(prompt_ids))
    limit = min(params.max_tokens, target.context_limit - len(prompt_ids))
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.stop_token_ids))
    matcher = None
    if params.grammar:
        matcher = Grammars(target.tokenizer, rows, target.stop_token_ids).matcher(params.grammar, stop_ids)
    width = 1
    if drafter and draft_tree:
        if draft_sample_method == "probabilistic":
            raise UserError("draft trees cannot sample drafts; use draft_sample_method greedy")
        width = target.tree_width(draft_tree_width)
    taps = drafter.config.target_layer_ids if drafter else ()
    if params.return_taps and not taps:
        raise UserError("return_taps needs a drafter, which names the layers")
    generation = Generation()

    started = time.perf_counter()
    cache = target.new_cache()
    prompt = torch.tensor([prompt_ids], device=target.device)
    out = target.forward(prompt, taps=taps, cache=cache, logits="last" if params.prompt_logprobs is None else "all")
    assert out.logits is not None
    after = out.logits[0, -1:]
    first = choices(after, prompt_ids, [], [], params, stop_ids, matcher).tolist()
    context = _context_kv(drafter, out.features, 0, len(prompt_ids))
    cache.flush()
    first = commit(generation, first, stop_ids, limit)
    _follow(matcher, first)
    if params.logprobs is not None:
        generation.logprobs += token_logprobs(after, first, params.logprobs)
    if params.prompt_logprobs is not None:
        scored = scored_tokens(out.logits[0, :-1], prompt[0, 1:], params.prompt_logprobs)
        generation.prompt_logprobs = PromptLogprobs(scored.shape[1] // 2 - 1, scored.cpu().numpy().tobytes())
    if params.return_taps and out.features is not None:
        generation.taps = out.features[0]
    generation.prefill_s = time.perf_counter() - started
    yield generation

    while generation.finish_reason is None:
        started = time.perf_counter()
        # tokens 0..p are committed, p has not been through the target; caches hold 0..p-1
        p = len(prompt_ids) + len(generation.tokens) - 1
        last = generation.tokens[-1]
        remaining = limit - len(generation.tokens)

        draft, sampled_draft, tree = list[int](), None, None
        if drafter and remaining > 1:
            if draft_tree:  # the bonus token is always committed, so no deeper node can be used
                most = {"depth": remaining - 1, "width": width}
                tree = propose_tree(target, drafter, context, last, p, draft_tree, **most)
                draft = tree.tokens.tolist()
            elif draft_sample_method == "probabilistic" and params.temperature > 0.0:
                sampled_draft = propose_sampled(target, drafter, context, last, p, params)
                draft = sampled_draft.tokens.tolist()[: remaining - 1]
            else:
                draft = propose(target, drafter, context, last, p)[: remaining - 1]

        block = torch.tensor([[last, *draft]], device=target.device)
        branching = tree if width > 1 else None  # else its rows are consecutive, as those of any draft
        visible = branching.visible if branching else None
        by_path = visible is not None and cache.recurrent
        if visible is not None and by_path:
            out = run_by_path(target, block, visible, taps, cache)
        else:
            if draft:
                cache.begin_block()
            out = target.forward(block, taps=taps, cache=cache, logits="all", visible=visible)
        assert out.logits is not None
        tokens, logits = generation.tokens, out.logits[0]
        if branching:
            path, chosen = walk(branching, logits, prompt_ids + tokens, tokens, params, stop_ids, matcher)
            if not by_path:
                cache.move_path(block.shape[1], path)
            drafted = int(branching.depths.max())
        else:
            # the longest drafted prefix that equals the target's own choices, then its choice at the first mismatch
            choice = choices(logits, prompt_ids + tokens, tokens, draft, params, stop_ids, matcher, sampled_draft)
            path = list(range(int(accepted_prefix(block[:, 1:], choice[None])[0]) + 1))
            chosen, drafted = choice[: len(path)].tolist(), len(draft)
        accepted = len(path) - 1
        committed = commit(generation, chosen, stop_ids, limit)
        _follow(matcher, committed)
        if params.logprobs is not None:
            generation.logprobs += token_logprobs(logits[path], committed, params.logprobs)
        offered = tree.offered(path)[: len(committed)] if tree else ()
        generation.steps.append(Step(drafted, min(accepted, len(committed)), tuple(committed), offered))

        # rejected tokens leave the target's cache; the verified ones enter the drafter's context
        if by_path or cache.end_block(len(draft) + 1, accepted + 1):
            target.forward(block[:, path], cache=cache)
            cache.flush()
        features = None if out.features is None else out.features[:, path]
        more = _context_kv(drafter, features, p, accepted + 1)
        context = context.append(more) if context and more else more
        if params.return_taps and features is not None:
            read = len(prompt_ids) + len(generation.tokens) - 1
            generation.taps = torch.cat([generation.taps, features[0]])[:read]
        generation.decode_s += time.perf_counter() - started
        yield generation


def run_by_path(target: Target, ids: Tensor, visible: Tensor, taps: Sequence[int], cache: TargetCache) -> TargetOutput:
    """Runs the rows of a tree, the path to each leaf alone, as recurrent layers need; none stays in the cache.

    Args:
        ids: [1, N + 1], the anchor and the nodes.
        visible: see `DraftTree.visible`.
    """
    rows, logits, features = list[int](), list[Tensor](), list[Tensor]()
    for leaf in (visible.sum(0) == 1).nonzero()[:, 0].tolist():
        path = visible[leaf].nonzero()[:, 0].tolist()
        cache.begin_block()
        out = target.forward(ids[:, path], taps=taps, cache=cache, logits="all")
        cache.end_block(len(path), 0)
        assert out.logits is not None
        rows += path
        logits.append(out.logits)
        if out.features is not None:
            features.append(out.features)
    first = [rows.index(row) for row in range(len(visible))]
    kept = torch.cat(features, dim=1)[:, first] if features else None
    return TargetOutput(kept, torch.cat(logits, dim=1)[:, first], None)


def propose(target: Target, drafter: Drafter, context: ContextKV | None, last: int, position: int) -> list[int]:
    """Drafts S - 1 tokens after token `last` at `position` in one pass: `Drafter.choose` of slots 1..S-1."""
    states = _draft_states(target, drafter, context, last, position)
    return drafter.choose(*states, last, target.head_weight).tolist()


def propose_tree(
    target: Target,
    drafter: Drafter,
    context: ContextKV | None,
    last: int,
    position: int,
    nodes: int,
    depth: int | None = None,
    width: int = WIDTH,
) -> DraftTree:
    """Returns `best_first` of the drafter's probabilities for slots 1..S-1, or for the first `depth` if given.

    A tree of width one and S - 1 nodes is the chain that `propose` drafts.
    """
    states = _draft_states(target, drafter, context, last, position)
    candidates, log_probs = drafter.conditional(*states, last, target.head_weight)
    return best_first(candidates[:depth], log_probs[:depth], nodes, width)


def walk(
    tree: DraftTree,
    logits: Tensor,
    context: list[int],
    answer: list[int],
    params: SamplingParams,
    stop_ids: Set[int] = frozenset(),
    matcher: Matcher | None = None,
) -> tuple[list[int], list[int]]:
    """Follows the target's tokens from the anchor as far as the tree has them.

    At each row the target chooses as it would without drafts; the walk continues at the child with this token, and
    ends if there is none. The drafts decide only how far it goes: they are point masses.

    Args:
        logits: [N + 1, V], for the anchor and the nodes.
        context, answer, params, stop_ids, matcher: as for `choices`.

    Returns:
        Rows of the anchor and the accepted nodes, and the target's token at each: one more than were accepted.
    """
    rows, chosen = [0], list[int]()
    while True:
        token = int(choices(logits[rows], context, answer, chosen, params, stop_ids, matcher)[-1])
        chosen.append(token)
        child = tree.child(rows[-1], token)
        if child is None:
            return rows, chosen
        rows.append(child)


def propose_sampled(
    target: Target, drafter: Drafter, context: ContextKV | None, last: int, position: int, params: SamplingParams
) -> SampledDraft:
    """Does the same as `propose`, but samples; a slot's random number depends on the seed and its position."""
    hidden, logits = _draft_states(target, drafter, context, last, position)
    positions = torch.arange(position + 1, position + 1 + len(hidden), device=hidden.device)
    uniform = position_uniform(torch.full_like(positions, int64_seed(params.seed)), positions, DRAFT_STREAM)
    return drafter.sample(hidden, logits, last, params.temperature, uniform, target.head_weight)


def _draft_states(
    target: Target, drafter: Drafter, context: ContextKV | None, last: int, position: int
) -> tuple[Tensor, Tensor]:
    """Returns the result of `Drafter.forward` for slots 1..S-1, and their logits by the target's head [S - 1, V]."""
    assert context is not None and context.length == position, "the drafter sees positions strictly before the anchor"
    size = drafter.config.block_size
    ids = torch.full((1, size), drafter.config.mask_token_id, device=target.device)
    ids[0, 0] = last
    positions = torch.arange(position, position + size, device=target.device)[None]
    states = drafter(target.embed(ids).to(drafter.dtype), positions, context, tokens=ids)[0, 1:]
    return states, target.head(drafter.for_head(states).to(target.dtype))


def _context_kv(drafter: Drafter | None, features: Tensor | None, start: int, count: int) -> ContextKV | None:
    if drafter is None or features is None:
        return None
    positions = torch.arange(start, start + count, device=features.device)[None]
    return drafter.context_kv(features[:, :count].to(drafter.dtype), positions)


def _follow(matcher: Matcher | None, tokens: list[int]) -> None:
    if matcher and matcher.accept(tokens) < len(tokens):
        raise GrammarError()


def choices(
    logits: Tensor,
    context: list[int],
    answer: list[int],
    draft: list[int],
    params: SamplingParams,
    stop_ids: Set[int] = frozenset(),
    matcher: Matcher | None = None,
    sampled_draft: SampledDraft | None = None,
) -> Tensor:
    """Returns the target's tokens [M] from logits [M, V]; row i follows the context and `draft[:i]`.

    Args:
        context: prompt and answer, so its length is the position of the first choice.
        answer: the generated part of the context.
        stop_ids: tokens that end the answer; they are not chosen before `min_tokens`.
        matcher: at the end of the answer.
        sampled_draft: begins with `draft`, if that was sampled.
    """
    if params.edits_logits:
        logits = logits.float().clone()
        for i in range(len(logits)):
            logits[i] = _edited(logits[i], context + draft[:i], answer + draft[:i], params)
            late = set() if len(answer) + i else set(params.begin_suppress_tokens)
            late |= stop_ids if len(answer) + i < params.min_tokens else set()
            logits[i, [token for token in late if 0 <= token < logits.shape[1]]] = -torch.inf
    if matcher:
        logits = logits.clone()
        mask_logits_(
            logits, *(part.to(logits.device) for part in masks_of([matcher], [draft], words_of(logits.shape[1])))
        )
    positions = torch.arange(len(context), len(context) + len(logits), device=logits.device)
    return sampled(logits, params, torch.full_like(positions, int64_seed(params.seed)), positions, sampled_draft)


def sampled(
    logits: Tensor, params: SamplingParams, seeds: Tensor, positions: Tensor, draft: SampledDraft | None = None
) -> Tensor:
    """Samples tokens [M] from logits [M, V], each by its seed at its position; at temperature 0 takes the best.

    Args:
        draft: sampled for at least the first M - 1 rows; each of these keeps its draft or takes another token instead.
    """
    if params.temperature == 0.0:
        return logits.argmax(-1)
    p = filtered_probabilities(
        logits, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p
    )
    uniform = position_uniform(seeds, positions)
    if draft is None:
        return choose(p, uniform)
    end = len(logits) - 1  # the last row has no draft: the bonus token is sampled from p
    taken = accept_or_resample(
        p[:end],
        draft.tokens[:end],
        draft.candidates[:end],
        draft.q[:end],
        uniform[:end],
        position_uniform(seeds[:end], positions[:end], ACCEPTANCE_STREAM),
    )
    return torch.cat([taken, choose(p[end:], uniform[end:])])


def _edited(logits: Tensor, context: list[int], answer: list[int], params: SamplingParams) -> Tensor:
    def counts(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device).bincount(minlength=len(logits))

    bias = torch.zeros_like(logits)
    for token, value in params.logit_bias:
        bias[token] += value
    return penalized(
        logits,
        counts(context) > 0,
        counts(answer),
        bias,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def token_logprobs(logits: Tensor, tokens: list[int], best: int) -> list[TokenLogprobs]:
    """Returns what `SamplingParams.logprobs` reports for `tokens`, chosen from the first rows of logits [M, V]."""
    found = []
    for row, token in zip(logits.float().log_softmax(-1), tokens, strict=False):
        values, ids = row.topk(best)
        found.append(TokenLogprobs(float(row[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True))))
    return found
