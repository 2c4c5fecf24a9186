"""Pairs of a target and a drafter, which decode with the engine or with the readable definition in `decode.py`."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ...config import UnsupportedModel, UserError
from ...draft_tree import WIDTH
from ...fingerprint import drafter_digest, sample_digest, template_digest
from ...generation import Generation
from ...models.dflash.network import Drafter
from ...models.target import Target
from ...models.target_files import load_config, load_tokenizer
from ...runtime import EngineOptions
from ...runtime.engine import resolve_draft_dtype
from ...runtime.load import Parts, load_parts
from ...sampling import DraftSampleMethod, SamplingParams
from .decoders import EngineDecoder, OnStep, ReferenceDecoder, ThreadedDecoder, decode_all, free_memory

CERTAIN = 1e6  # a bias larger than any logit


class Pair(ABC):
    """A target and its drafter, ready to decode one prompt at a time."""

    name: str
    tokenizer: Any  # the target's
    device: torch.device
    dtype: torch.dtype
    context_limit: int  # the target's maximum number of tokens, prompt and answer together
    vocabulary: int  # prompt ids must be below this
    block_size: int  # S; every step drafts S - 1 tokens
    draft_sample_method: DraftSampleMethod
    facts: dict[str, Any]  # identify target and drafter, as JSON values
    concurrency: int = 1  # concurrent requests of a report
    modules: tuple[Target, Drafter] | None = None  # Hugging Face modules, if loaded
    where: str | None = None  # the server that decodes; None: this process

    def make_room(self, tokens: int) -> None:  # noqa: B027, caches that grow by themselves need nothing
        """Sets the maximum number of tokens of a prompt and its answer together."""

    def draft_at_most(self, tokens: int) -> None:
        """Sets the number of tokens drafted per step, at most what the drafter was loaded for."""
        raise UserError(f"draft_length: the {self.name} does not let this command set the draft length")

    def counted(self) -> Any:
        """Returns the start value for `steps_since`."""
        return None

    def steps_since(self, before: Any, answers: Sequence[Generation]) -> int:
        """Returns the number of steps of `answers`; nothing else may be decoded since `before`."""
        return sum(len(answer.steps) for answer in answers)

    def decoder_for(self, draft: bool, concurrency: int) -> EngineDecoder | ThreadedDecoder:
        """Returns a decoder of `concurrency` requests at a time; the caller closes it. Raises UserError."""
        raise UserError(f"concurrency: the {self.name} decodes one request at a time; it needs --runtime engine")

    def served(self, concurrency: int, draft_tree: int, draft_tree_width: int | None) -> EngineDecoder:
        """Returns a decoder that chooses lengths and rows as `dflash-serve` does; the caller closes it.

        Raises UserError.
        """
        raise UserError(f"draft_tree_nodes: the {self.name} cannot measure this; use --runtime engine")

    def repeats_plain(self, params: SamplingParams) -> bool:
        """Whether answers must equal the plain ones, not only have the same distribution."""
        return self.draft_sample_method == "greedy" or params.temperature == 0.0

    @abstractmethod
    def decoder(self, draft: bool) -> EngineDecoder | ReferenceDecoder:
        """Returns a decoder with the drafter or without it. Raises UserError."""

    def decode(
        self, prompt_ids: list[int], params: SamplingParams, *, draft: bool, on_step: OnStep | None = None
    ) -> Generation:
        """Decodes one prompt; calls `on_step` with the growing answer. Raises UserError."""
        return decode_all(self.decoder(draft), [prompt_ids], params, on_step)[0]

    def regret(self, ids: list[int], token: int) -> float:
        """Returns log p(best) - log p(`token`) after `ids` in nats, of the target's unfiltered fp32 logits."""
        # a bias forces the token; log-probabilities come from the unbiased logits
        params = SamplingParams(logit_bias=((token, CERTAIN),), logprobs=1, max_tokens=1)
        found = self.decode(ids, params, draft=False).logprobs[0]
        return found.best[0][1] - found.chosen


def _tree_facts(nodes: int, width: int | None) -> dict[str, int | None]:
    return {"draft_tree": nodes, "draft_tree_width": width} if nodes else {}


class ReferencePair(Pair):
    """`decode.py` on plain Hugging Face modules.

    Args:
        draft_tree: number of nodes verified per step; 0: chains.
        draft_tree_width: maximum children of a node; None: its default, WIDTH.

    Raises:
        UserError: the target does not support trees.
    """

    name = "reference"

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        draft_sample_method: DraftSampleMethod = "greedy",
        draft_tree: int = 0,
        draft_tree_width: int | None = None,
    ) -> None:
        if draft_tree:
            draft_tree_width = target.tree_width(draft_tree_width)
        drafter = drafter.to(target.device, target.dtype)
        drafting = ReferenceDecoder(target, drafter, draft_sample_method, draft_tree, draft_tree_width)
        self._decoders = {True: drafting, False: ReferenceDecoder(target)}
        self.draft_sample_method = draft_sample_method
        self.tokenizer, self.device, self.dtype = target.tokenizer, target.device, target.dtype
        self.context_limit, self.block_size = target.context_limit, drafter.config.block_size
        self.vocabulary = target.embedding.num_embeddings
        tensors = target.model.named_parameters()
        facts = _facts(target.name, target.config, target.tokenizer, tensors, drafter)
        how = {"draft_dtype": "full", "draft_sample_method": draft_sample_method}
        self.facts = facts | how | _tree_facts(draft_tree, draft_tree_width)
        self._drafter = drafter
        self.modules = target, drafter

    def draft_at_most(self, tokens: int) -> None:
        self._drafter.config = self._drafter.config.with_block_size(tokens + 1)
        self.block_size = self.facts["block_size"] = tokens + 1

    def decoder(self, draft: bool) -> ReferenceDecoder:
        return self._decoders[draft]


class EnginePair(Pair):
    """Two engines over the same target weights: one drafts a full block every step, one has no drafter.

    Each is created on first use, with cache for one prompt and its answer.

    Args:
        drafting: fields of `DraftOptions`; by default chains are drafted.

    Raises:
        ValueError: a value that the engine does not know.
    """

    name = "engine"

    def __init__(self, parts: Parts, tokenizer: Any, facts: dict[str, Any], **drafting: Any) -> None:
        assert parts.drafter is not None
        target, self._parts = parts.target, parts
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        asked = EngineOptions(max_num_seqs=1, prefix_cache=False, **{"draft_tree": 0} | drafting)
        nodes, dtype = asked.draft_tree or 0, resolve_draft_dtype(asked.draft_dtype, self.device, self.dtype)
        width = asked.draft_tree_width or WIDTH if nodes else asked.draft_tree_width
        self._options = replace(asked, draft_dtype=dtype, draft_tree_width=width)
        self.draft_sample_method = cast(DraftSampleMethod, asked.draft_sample_method)  # one of its choices
        how = {"draft_dtype": dtype, "draft_sample_method": self.draft_sample_method}
        how |= {"kv_cache_dtype": "fp8"} if asked.fp8_cache else {}
        self.tokenizer, self.facts = tokenizer, facts | how | _tree_facts(nodes, width)
        self.context_limit, self.block_size = target.spec.context_limit, parts.drafter.config.block_size
        self.vocabulary = target.spec.vocab_size
        self._context = self.context_limit
        self._decoders: dict[bool, EngineDecoder] = {}  # by whether it drafts

    @classmethod
    def load(
        cls,
        target: str | Target,
        drafter: Drafter,
        device: str = "auto",
        dtype: str = "auto",
        *,
        share: bool = False,
        tokenizer: Any = None,
        **drafting: Any,
    ) -> "EnginePair":
        """Loads as `load_parts` does and raises what it raises; moves `drafter` to the device."""
        if isinstance(target, str):
            name, config, tokenizer = target, load_config(target), tokenizer or load_tokenizer(target)
        else:
            name, config, tokenizer = target.name, target.config, target.tokenizer
        with suggest_reference():
            parts = load_parts(target, drafter, device, dtype, share=share, tokenizer=tokenizer)
        tensors = parts.target.parameter_views(stacked=True)  # by module names, as in the reference
        facts = _facts(name, config, tokenizer, tensors.items(), drafter)
        pair = cls(parts, tokenizer, facts, **drafting)
        pair.modules = None if isinstance(target, str) else (target, drafter)
        return pair

    def make_room(self, tokens: int) -> None:
        self._context = min(tokens, self.context_limit)
        self._decoders.clear()

    def draft_at_most(self, tokens: int) -> None:
        self.block_size = self.facts["block_size"] = tokens + 1
        self._decoders.pop(True, None)

    def decoder(self, draft: bool) -> EngineDecoder:
        if draft not in self._decoders:
            self._decoders[draft] = self._create(draft, 1, report_offered=True)
        return self._decoders[draft]

    def decoder_for(self, draft: bool, concurrency: int) -> EngineDecoder:
        self._decoders.clear()  # frees their memory
        free_memory()
        return self._create(draft, concurrency)

    def served(self, concurrency: int, draft_tree: int, draft_tree_width: int | None) -> EngineDecoder:
        self._decoders.clear()
        free_memory()
        trees = {"draft_tree": draft_tree, "draft_tree_width": draft_tree_width}
        decoder = self._create(True, concurrency, **trees, num_speculative_tokens=None)
        decoder.prepare()
        return decoder

    def _create(self, draft: bool, concurrency: int, **more: Any) -> EngineDecoder:
        tokens = self.block_size - 1 if draft else 0  # a report measures whole blocks
        how = {"max_num_seqs": concurrency, "max_model_len": self._context, "num_speculative_tokens": tokens}
        options = replace(self._options, **how | more)
        try:
            parts = self._parts if draft else replace(self._parts, drafter=None)
            return EngineDecoder(parts.engine(options))
        except UserError as error:
            # the reference does not draft in fp8, and without the fp8 copy of the head there is more memory
            way = "--runtime reference" if options.draft_dtype == "full" else "--draft-dtype full"
            way += ", or remove --draft-tree-nodes" if more.get("draft_tree") else ""
            raise UserError(
                f"memory does not fit a prompt and answer of {self._context} tokens ({error}); "
                f"lower max_tokens or use {way}"
            ) from error


@contextlib.contextmanager
def suggest_reference(error_type: type[UserError] = UserError) -> Iterator[None]:
    """Adds `--runtime reference` to errors of this class."""
    try:
        yield
    except error_type as error:
        kind = UnsupportedModel if isinstance(error, UnsupportedModel) else UserError
        raise kind(f"{error}; --runtime reference decodes without the engine") from error


def _facts(
    name: str, config: Any, tokenizer: Any, tensors: Iterable[tuple[str, Tensor]], drafter: Drafter
) -> dict[str, Any]:
    return {
        "target": name,
        "target_num_layers": config.num_hidden_layers,
        "target_sample_sha256": sample_digest(tensors),
        "chat_template_sha256": template_digest(tokenizer),
        "drafter_kind": drafter.config.architecture.kind,
        "drafter_sha256": drafter_digest(drafter),
        "block_size": drafter.config.block_size,
        "target_layer_ids": list(drafter.config.target_layer_ids),
        "mask_token_id": drafter.config.mask_token_id,
    }
