"""Runs a drafter over the target's own answers, as configured or with another setting, and counts right predictions.

Teacher-forced: every position of an answer is an anchor, all blocks of a text at once. The definition of a block is
`decode.propose`'s; here each of its rules is a parameter, so that the doctor can ask which one was broken.
"""

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..acceptance import ratio
from ..config import UserError
from ..decode import generate
from ..generation import Generation
from ..kernels.loss_terms import LogitScale
from ..models.dflash.network import Drafter
from ..models.rope import RopeScaling
from ..models.target import Target
from ..progress import Progress
from ..sampling import DraftSampleMethod, SamplingParams
from .edits import Edit

NEAR = 16  # recall counts hits among this many best tokens
ANCHORS_AT_ONCE = 32
ANSWER_WORK = 8  # cost of an answer in the bar, in scorings of all answers; roughly
EMBEDDING = -1  # the layer id before the first: the embedding's output


@dataclass(frozen=True, slots=True)
class Setting:
    """How a drafter is run. The shifts are zero in the contract; only a faulty trainer needs others."""

    layer_ids: tuple[int, ...]  # EMBEDDING..n - 1; the last layer's output is the normed one
    rope_theta: float
    rope_scaling: RopeScaling | None
    mask_token_id: int
    is_causal: bool | None
    output_multiplier: float
    final_logit_softcapping: float | None
    selector: bool = True  # if it has one; else every slot takes its own best token
    across_blocks: bool = False  # convolutions read the rows of the block before
    context_end: int = 0  # a block sees context before anchor + context_end
    block_shift: int = 0  # slot k is at position anchor + k + block_shift
    label_shift: int = 0  # slot k predicts the token at anchor + k + label_shift
    edits: tuple[Edit, ...] = ()  # corrections of weights, applied in order

    @classmethod
    def of(cls, drafter: Drafter) -> "Setting":
        c = drafter.config
        scale = (c.output_multiplier, c.final_logit_softcapping)
        return cls(c.target_layer_ids, c.rope_theta, c.rope_scaling, c.mask_token_id, c.is_causal, *scale)


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with the target's own greedy answer, the decoding steps, and the features for the drafter."""

    tokens: Tensor  # [T], prompt and answer
    prompt_tokens: int
    generation: Generation
    hidden: dict[int, Tensor]  # layer id -> [T, D]

    @property
    def anchors(self) -> int:
        """Number of blocks that can be judged: an anchor needs a token after it."""
        return max(0, len(self.tokens) - 1 - self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Scores:
    """The predictions of R blocks, slots 1..S - 1."""

    hits: Tensor  # [R, S - 1] bool, the drafted token is the answer's
    near: Tensor  # [R, S - 1] bool, the answer's token is among the checked best tokens: NEAR, or one
    judged: Tensor  # [R, S - 1] bool, the answer has a token there
    text: Tensor  # [R] long, the index of the answer
    anchor: Tensor  # [R] long, its position in the answer
    skipped: int = 0  # leading slots that do not count

    @property
    def accepted(self) -> Tensor:
        """Drafts [R] that would be accepted: the leading hits."""
        return self.hits[:, self.skipped :].long().cumprod(1).sum(1)

    @property
    def tau(self) -> float:
        """1 + accepted drafts, over all anchors of the answers."""
        return 1 + float(self.accepted.float().mean())

    def share(self, what: Tensor, among: Tensor | None = None) -> list[float]:
        """Returns the share [S - 1] of `what` in the judged slots, by slot; NaN without any."""
        counted = self.judged if among is None else self.judged & among
        return [ratio(int(n), int(m)) for n, m in zip((what & counted).sum(0), counted.sum(0), strict=True)]

    @property
    def given_previous(self) -> list[float]:
        """Returns the share [S - 1] of right slots among blocks with all slots before right."""
        return self.share(self.hits, self._previous)

    @property
    def asked_given_previous(self) -> list[int]:
        """Returns the number of blocks of each such share."""
        counts: list[int] = (self.judged & self._previous).sum(0).tolist()
        return counts

    @property
    def _previous(self) -> Tensor:
        """Returns whether all slots before [R, S - 1] were right."""
        before = torch.ones_like(self.hits)
        before[:, 1:] = self.hits[:, :-1].long().cumprod(1).bool()
        return before

    @property
    def steps(self) -> int:
        """Returns the number of verify steps if the answers were decoded by these predictions."""
        accepted, steps = self.accepted.tolist(), 0
        for text in self.text.unique():
            rows = (self.text == text).nonzero().flatten().tolist()
            at = rows[0]
            while at <= rows[-1]:
                steps += 1
                at += accepted[at] + 1
        return steps


class Gain(NamedTuple):
    """The difference between two ways of running."""

    tokens: float  # accepted drafts a block, the difference
    z: float  # the same in standard errors


def gain(better: Scores, base: Scores) -> Gain:
    """Returns the gain paired over blocks; blocks of S - 1 positions in a row share tokens: one observation."""
    difference = (better.accepted - base.accepted).double()
    place = torch.stack([base.text, base.anchor // base.hits.shape[1]], dim=1)
    segment = place.unique(dim=0, return_inverse=True)[1]
    return clustered(difference, segment)


def unpaired_gain(better: Scores, base: Scores) -> Gain:
    """Returns the gain for answers that differ; a whole answer is one observation."""
    means, errors = [], []
    for scores in (better, base):
        accepted = scores.accepted.double()
        means.append(float(accepted.mean()))
        found = clustered(accepted - accepted.mean() + 1, scores.text)  # the mean is 1, so z is 1 / error
        errors.append(1 / found.z if found.z else math.inf)
    error = math.hypot(*errors)
    difference = means[0] - means[1]
    return Gain(difference, difference / error if error else math.copysign(math.inf, difference))


def clustered(values: Tensor, cluster: Tensor) -> Gain:
    """Returns the mean of `values` [R] and its ratio to its standard error, with dependence inside a cluster."""
    mean = values.mean()
    sums = torch.zeros(int(cluster.max()) + 1, dtype=torch.float64).index_add_(0, cluster, values - mean)
    n = len(sums)
    if n < 2:
        return Gain(float(mean), 0.0)
    error = float((sums.square().sum() * n / (n - 1)).sqrt()) / len(values)
    if error == 0.0:
        return Gain(float(mean), 0.0 if mean == 0 else math.copysign(math.inf, float(mean)))
    return Gain(float(mean), float(mean) / error)


class Probe:
    """A target, a drafter that fits it, and the answers that have been decoded with both.

    Args:
        layer_ids: taps to try in addition to the drafter's own, each with the adjacent layers.
    """

    def __init__(self, target: Target, drafter: Drafter, max_tokens: int, layer_ids: Sequence[int] = ()) -> None:
        self.target, self.drafter = target, drafter.to(target.device, target.dtype)
        self._params = SamplingParams(max_tokens=max_tokens)
        self._stored: dict[str, Tensor] = dict(self.drafter.state_dict())  # by name, always the same objects
        self._assigned = self._stored  # weights that `_edited` has
        ids, last = {*drafter.config.target_layer_ids, *layer_ids}, len(target.layers) - 1
        self._layers = sorted({i + shift for i in ids for shift in (-1, 0, 1) if i + shift <= last})

    def decode(self, prompt: list[int], temperature: float, draft_sample_method: DraftSampleMethod) -> Generation:
        """Decodes a prompt with the drafter. Raises UserError."""
        params = replace(self._params, temperature=temperature)
        return generate(self.target, self.drafter, prompt, params, draft_sample_method)

    @torch.inference_mode()
    def answer(self, prompt: list[int], temperature: float = 0.0) -> Answer:
        """Decodes a prompt with the drafter, then reads the whole text once more. Raises UserError."""
        generation = self.decode(prompt, temperature, "greedy")
        tokens = torch.tensor([prompt + generation.tokens], device=self.target.device)
        taps = [layer for layer in self._layers if layer != EMBEDDING]
        features = self.target.forward(tokens, taps=taps).features
        assert features is not None
        hidden = dict(zip(taps, features[0].chunk(len(taps), dim=-1), strict=True))
        last = len(self.target.layers) - 1
        if last in hidden:
            hidden[last] = self.target.structure.norm(hidden[last])  # as HF's hidden_states have it
        if EMBEDDING in self._layers:
            hidden[EMBEDDING] = self.target.embedding(tokens[0])
        return Answer(tokens[0], len(prompt), generation, hidden)

    def answers(
        self, prompts: Sequence[list[int]], bar: Progress, names: Sequence[str] = (), temperature: float = 0.0
    ) -> list[Answer]:
        """Returns the answers that are long enough for a block. Raises UserError naming a prompt that fails."""
        found = []
        for i, ids in enumerate(prompts):
            try:
                found.append(self.answer(ids, temperature))
            except UserError as error:
                raise UserError(f"prompt {names[i]!r}: {error}" if names else str(error)) from error
            bar.advance(ANSWER_WORK, note="answering")
        return [answer for answer in found if answer.anchors]

    @torch.inference_mode()
    def score(self, answers: list[Answer], setting: Setting, *, stride: int = 1, near: int = 1) -> Scores:
        """Judges the blocks of every `stride`-th anchor of the answers, drafted by the rules of `setting`.

        Args:
            near: number of best tokens of a slot to check.
        """
        drafter = self._run_as(setting)
        parts: list[tuple[Tensor, ...]] = []
        for number, answer in enumerate(answers):
            for anchor, drafted, best in self.drafts(drafter, answer, setting, stride, near):
                slots = torch.arange(1, drafter.config.block_size, device=best.device)
                at = anchor[:, None] + slots + setting.label_shift
                judged = at < len(answer.tokens)
                label = answer.tokens[at.clamp(max=len(answer.tokens) - 1)]
                hit, among = (drafted == label) & judged, (best == label[:, :, None]).any(-1) & judged
                text = torch.full_like(anchor, number)
                parts.append(tuple(t.cpu() for t in (hit, among, judged, text, anchor)))
        hits, found, judged, text, anchors = (torch.cat(column) for column in zip(*parts, strict=True))
        # with labels one earlier, slot 1 would only have to repeat the anchor
        return Scores(hits, found, judged, text, anchors, skipped=max(0, -setting.label_shift))

    def _run_as(self, setting: Setting) -> Drafter:
        """Returns the drafter with another configuration and corrected weights; shares the others."""
        config = replace(
            self.drafter.config,
            rope_theta=setting.rope_theta,
            rope_scaling=setting.rope_scaling,
            is_causal=setting.is_causal,
            mask_token_id=setting.mask_token_id,
            output_multiplier=setting.output_multiplier,
            final_logit_softcapping=setting.final_logit_softcapping,
        )
        if not setting.edits:
            drafter = copy.copy(self.drafter)
            drafter.config = config
            return drafter
        tensors = self._stored
        for edit in setting.edits:
            tensors = edit.apply(tensors)
        drafter = self._edited
        drafter.config = config
        for name, tensor in tensors.items():
            if tensor is not self._assigned[name]:  # `load_state_dict` would visit every module
                place, _, leaf = name.rpartition(".")
                owner = drafter.get_submodule(place)
                setattr(owner, leaf, nn.Parameter(tensor, False) if leaf in owner._parameters else tensor)
        self._assigned = tensors
        return drafter

    @functools.cached_property
    def _edited(self) -> Drafter:
        """A network for corrected weights; making one takes longer than judging some blocks with it."""
        return Drafter.of_tensors(self.drafter.config, self._stored).eval()

    @torch.inference_mode()
    def drafts(
        self, drafter: Drafter, answer: Answer, setting: Setting, stride: int, near: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields anchors [A], drafts [A, S - 1] and the `near` best tokens of the slots [A, S - 1, near], best first.

        It yields some at a time, for every `stride`-th anchor of the answer.
        """
        device, total, size = answer.tokens.device, len(answer.tokens), drafter.config.block_size
        features = torch.cat([answer.hidden[layer] for layer in setting.layer_ids], dim=-1)[None]
        place = torch.arange(total, device=device)[None]
        context = drafter.context_kv(features.to(drafter.dtype), place)
        apart = 1 if setting.across_blocks else stride  # the block before is the nearest there is
        anchors = torch.arange(answer.prompt_tokens, total - 1, apart, device=device)
        for anchor in anchors.split(ANCHORS_AT_ONCE):
            ids = torch.full((len(anchor), size), setting.mask_token_id, device=device)
            ids[:, 0] = answer.tokens[anchor]
            rows = (1, -1) if setting.across_blocks else (-1, size)  # one for all blocks, or one for each
            number = torch.arange(len(anchor), device=device)[:, None].expand(-1, size).reshape(rows)
            slots = torch.arange(size, device=device)
            positions = (anchor[:, None] + slots + setting.block_shift).reshape(rows)
            before = place[:, None] < (anchor[number] + setting.context_end)[:, :, None]  # [B, Q, T]
            visible = torch.cat([before, number[:, :, None] == number[:, None]], dim=2)[:, None]
            rope = drafter.rope(positions)
            x = last = drafter.scaled(self.target.embed(ids).to(drafter.dtype)).view(*number.shape, -1)
            begun = drafter.begin(ids.view(number.shape), size) if drafter.between else None
            for i, layer in enumerate(drafter.layers):
                own = drafter.own_mask(i, positions, place.expand(len(number), -1))
                pair = tuple(each[i].expand(len(number), -1, -1, -1) for each in (context.keys, context.values))
                x = last = layer(x, rope, pair, visible if own is None else visible & own)
                if drafter.between:
                    x, _ = drafter.between(i, x, begun)
            hidden = drafter.states(x, last, ()).view(len(anchor), size, -1)[:, 1:]
            logits = self.target.head(drafter.for_head(hidden).to(self.target.dtype))
            drafted, best = self._chosen(drafter, setting, hidden, logits, ids[:, 0], near)
            judged = (anchor - answer.prompt_tokens) % stride == 0
            yield anchor[judged], drafted[judged], best[judged]

    def _chosen(
        self, drafter: Drafter, setting: Setting, hidden: Tensor, logits: Tensor, anchors: Tensor, near: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the drafts [A, S - 1], as `Drafter.choose`, and the `near` best tokens [A, S - 1, near]."""
        selector = drafter.config.architecture.chooser(drafter, self.target.head_weight) if setting.selector else None
        count = drafter.config.draft_candidates if selector else 1
        if max(near, count) == 1:
            best = logits.argmax(-1, keepdim=True)
            return best[:, :, 0], best
        values, tokens = logits.topk(min(max(near, count), logits.shape[-1]), dim=-1)
        if selector is None:
            return tokens[:, :, 0], tokens
        unary = values[:, :, :count].float().contiguous()
        LogitScale(setting.output_multiplier, setting.final_logit_softcapping).apply_(unary)
        return selector.walk_blocks(hidden, unary, tokens[:, :, :count], anchors), tokens[:, :, :near]
