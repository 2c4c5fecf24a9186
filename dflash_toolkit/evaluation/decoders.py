"""What decodes for a report: the engine that `dflash-serve` runs, or the readable definition in `decode.py`."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import UserError
from ..decode import stream
from ..fingerprint import drafter_digest, sample_digest, template_digest
from ..generation import Generation
from ..models.dflash.network import Drafter
from ..models.target import Target, load_config, load_tokenizer
from ..runtime import Engine, EngineOptions
from ..runtime.engine import resolve_draft_dtype
from ..runtime.load import Parts, load_parts
from ..sampling import SamplingParams

CERTAIN = 1e6  # a bias that no logit outweighs


class Decoder(Protocol):
    """A target and its drafter, ready to decode one prompt at a time."""

    name: str
    tokenizer: Any  # the target's
    device: torch.device
    dtype: torch.dtype
    context_limit: int  # of the target: prompt and answer together, in tokens
    vocabulary: int  # prompt ids must be below this
    block_size: int  # S; every step drafts S - 1 tokens
    facts: dict[str, Any]  # what tells this target and drafter from others, as JSON values

    def make_room(self, tokens: int) -> None:
        """From now on a prompt and its answer have at most so many tokens together."""

    def decode(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        draft: bool,
        on_step: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Decode one prompt to its end; `on_step` gets the growing answer. Raises UserError."""

    def gap(self, ids: list[int], plain: int, drafted: int) -> float:
        """p(plain) - p(drafted) behind `ids`: the target's softmax in fp32, unfiltered."""


class ReferenceDecoder:
    """`decode.py` on plain Hugging Face modules."""

    name = "reference"

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter.to(target.device, target.dtype)
        self.tokenizer, self.device, self.dtype = target.tokenizer, target.device, target.dtype
        self.context_limit, self.block_size = target.context_limit, drafter.config.block_size
        self.vocabulary = target.embedding.num_embeddings
        tensors = target.model.named_parameters()
        facts = _facts(target.name, target.config, target.tokenizer, tensors, drafter)
        self.facts = {**facts, "draft_dtype": "full"}  # the only one it has

    def make_room(self, tokens: int) -> None:
        """Its caches grow by themselves."""

    def decode(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        draft: bool,
        on_step: Callable[[Generation], None] | None = None,
    ) -> Generation:
        for generation in stream(self._target, self._drafter if draft else None, prompt_ids, params):
            if on_step:
                on_step(generation)
        return generation

    def gap(self, ids: list[int], plain: int, drafted: int) -> float:
        logits = self._target.forward(torch.tensor([ids], device=self.device), logits="last").logits
        assert logits is not None
        p = logits[0, -1].float().softmax(-1)
        return float(p[plain] - p[drafted])


class EngineDecoder:
    """Two engines over the same target weights: one drafts a full block every step, one has no drafter.

    Each is made when it is first needed, with room for one prompt and its answer.

    Raises:
        ValueError: a `draft_dtype` that the engine does not know.
    """

    name = "engine"

    def __init__(self, parts: Parts, tokenizer: Any, facts: dict[str, Any], draft_dtype: str = "auto") -> None:
        assert parts.drafter is not None
        target, self._parts = parts.target, parts
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        options = EngineOptions(max_num_seqs=1, prefix_cache=False, draft_dtype=draft_dtype)
        self._options = replace(options, draft_dtype=resolve_draft_dtype(draft_dtype, self.device, self.dtype))
        self.tokenizer, self.facts = tokenizer, {**facts, "draft_dtype": self._options.draft_dtype}
        self.context_limit, self.block_size = target.spec.context_limit, parts.drafter.config.block_size
        self.vocabulary = target.spec.vocab_size
        self._context = self.context_limit
        self._engines: dict[bool, Engine] = {}  # by whether it drafts

    @classmethod
    def load(
        cls,
        target: str | Target,
        drafter: Drafter,
        device: str = "auto",
        dtype: str = "auto",
        draft_dtype: str = "auto",
    ) -> "EngineDecoder":
        """As `load_parts` does; `drafter` moves to the device. Raises UserError."""
        if isinstance(target, str):
            name, config, tokenizer = target, load_config(target), load_tokenizer(target)
        else:
            name, config, tokenizer = target.name, target.config, target.tokenizer
        with _way_out():
            parts = load_parts(target, drafter, device, dtype)
        facts = _facts(name, config, tokenizer, parts.target.parameter_views().items(), drafter)
        return cls(parts, tokenizer, facts, draft_dtype)

    def make_room(self, tokens: int) -> None:
        self._context = min(tokens, self.context_limit)
        self._engines.clear()

    def decode(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        draft: bool,
        on_step: Callable[[Generation], None] | None = None,
    ) -> Generation:
        engine = self._engine(draft)
        progress = (lambda request, step: on_step(request.generation)) if on_step else None
        request = engine.submit(prompt_ids, params, progress)
        while engine.step():
            pass  # until nothing is in flight: a step behind the answer's end would delay the next prompt
        return request.generation

    def gap(self, ids: list[int], plain: int, drafted: int) -> float:
        # log-probabilities are those of the unbiased logits, whatever a bias makes the engine choose
        wanted = [
            SamplingParams(logit_bias=((token, CERTAIN),), logprobs=0, max_new_tokens=1) for token in (plain, drafted)
        ]
        of_plain, of_drafted = self._engine(draft=False).generate([ids, ids], wanted)
        return math.exp(of_plain.logprobs[0].chosen) - math.exp(of_drafted.logprobs[0].chosen)

    def _engine(self, draft: bool) -> Engine:
        if draft not in self._engines:
            options = replace(
                self._options,
                max_model_len=self._context,
                num_speculative_tokens=self.block_size - 1
                if draft
                else 0,  # a report is about whole blocks: nothing is chosen
            )
            try:
                parts = self._parts if draft else replace(self._parts, drafter=None)
                engine = parts.engine(options)
            except UserError as error:
                # the reference does not draft in fp8; and without its copy of the head there is more room
                way = "--runtime reference" if options.draft_dtype == "full" else "--draft-dtype full"
                raise UserError(
                    f"the engine has no room for a prompt and answer of {self._context} tokens ({error}); "
                    f"lower max_tokens or use {way}"
                ) from error
            self._engines[draft] = engine
        return self._engines[draft]


@contextlib.contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; --runtime reference decodes without the engine") from error


# ---- what was decoded with -----------------------------------------------------------------------------------


def _facts(
    name: str, config: Any, tokenizer: Any, tensors: Iterable[tuple[str, Tensor]], drafter: Drafter
) -> dict[str, Any]:
    return {
        "target": name,
        "target_num_layers": config.num_hidden_layers,
        "target_sample_sha256": sample_digest(tensors),
        "chat_template_sha256": template_digest(tokenizer),
        "drafter_sha256": drafter_digest(drafter),
        "block_size": drafter.config.block_size,
        "target_layer_ids": list(drafter.config.target_layer_ids),
        "mask_token_id": drafter.config.mask_token_id,
    }
