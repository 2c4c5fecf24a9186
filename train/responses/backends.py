"""Decoders of responses: the runtime's engine, or the reference if the engine cannot compute the target."""

import sys
from typing import TYPE_CHECKING, Any

from dflash_toolkit.config import UnsupportedModel, UserError
from dflash_toolkit.evaluation.measure.batched import BatchedDecoder, unbatchable_reason
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder, ReferenceDecoder, free_memory
from dflash_toolkit.models.device import resolve_dtype, use_device
from dflash_toolkit.models.target import Target
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.runtime import EngineOptions
from dflash_toolkit.runtime.load import load_parts, read_drafter

from ..distributed.ranks import speaks
from .batch_size import ON_CPU, sizes_that_fit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dflash_toolkit.models.dflash.network import Drafter

MOST_WITH_TREES = 32  # requests at a time; larger batches are compute-bound, so a step verifies blocks alone


def open_decoder(
    target: str,
    *,
    runtime: str = "auto",
    drafter: "str | Drafter | None" = None,
    device: str = "auto",
    dtype: str = "auto",
    batch: int | None,
    context: int,
    tokens: int | None = None,
    mesh: "DeviceMesh | None" = None,
    tokenizer: Any = None,
) -> Decoder:
    """Loads a target for decoding.

    Args:
        runtime: one of `config.RUNTIMES`; auto is the engine or, after printing the reason, the reference.
        drafter: speeds up the engine; responses stay the same. The reference does not use it.
        batch: concurrent responses; None: as many as the memory holds, see `sizes_that_fit`.
        context: prompt and response together, in tokens.
        tokens: limit of a response (default: the context).
        tokenizer: the target's, with the template of prompts, whose end of a response ends answers (default: loaded).
        mesh: processes that decode together with a sharded target, with the reference.

    Raises:
        UserError: missing or broken weights, no such device, too little memory, or (`runtime="engine"`) a target that
            the engine does not compute.
    """
    refused = None
    if runtime != "reference" and mesh is None:
        try:
            return _engine(target, drafter, device, dtype, batch, context, tokens or context, tokenizer)
        except UnsupportedModel as error:
            if runtime == "engine":
                raise
            refused = str(error)  # the error would keep loaded weights alive
    loaded, batch = Target.load(target, device, dtype, mesh), batch or ON_CPU
    loaded.tokenizer = tokenizer or loaded.tokenizer
    why = unbatchable_reason(loaded)
    if refused is not None:
        how = f"{batch} prompts at a time" if why is None else f"one prompt at a time ({why})"
        how += " and without the drafter" if drafter else ""
        print(f"the reference decodes, {how}; the engine cannot: {refused}", file=sys.stderr)
    return BatchedDecoder(loaded, batch) if why is None else ReferenceDecoder(loaded)


def _engine(
    target: str,
    drafter: "str | Drafter | None",
    device: str,
    dtype: str,
    batch: int | None,
    context: int,
    tokens: int,
    tokenizer: Any,
) -> EngineDecoder:
    if isinstance(drafter, str):  # before the target, which takes longest
        where = use_device(device)
        drafter = read_drafter(drafter, load_config(target), where, resolve_dtype(dtype, where))
    parts = load_parts(target, drafter, device, dtype, tokenizer=tokenizer)
    limit = min(context, parts.target.spec.context_limit)
    for size in [batch] if batch else sizes_that_fit(parts, tokens):
        trees = None if size <= MOST_WITH_TREES else 0
        try:
            engine = parts.engine(EngineOptions(max_num_seqs=size, max_model_len=limit, draft_tree=trees))
            if parts.target.embedding.is_cuda and speaks():
                print(f"responses: {size} at a time", file=sys.stderr)
            return EngineDecoder(engine)
        except UserError as error:  # the size is an estimate; the engine measures
            refused = error.with_traceback(None)  # it would keep the engine's memory
            refused.__cause__ = refused.__context__ = None
        free_memory()
    raise refused
