"""Decoders of responses: the runtime's engine, or the reference if the engine cannot compute the target."""

import sys
from typing import TYPE_CHECKING

from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.evaluation.measure.batched import BatchedDecoder, unbatchable_reason
from dflash_toolkit.evaluation.measure.decoders import Decoder, EngineDecoder, ReferenceDecoder
from dflash_toolkit.models.target import Target, load_config, resolve_dtype, use_device
from dflash_toolkit.runtime import EngineOptions
from dflash_toolkit.runtime.load import load_parts, read_drafter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def open_decoder(
    target: str,
    *,
    runtime: str = "auto",
    drafter: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch: int,
    context: int,
    mesh: "DeviceMesh | None" = None,
) -> Decoder:
    """Loads a target for decoding.

    Args:
        runtime: one of `config.RUNTIMES`; auto is the engine or, after printing the reason, the reference.
        drafter: speeds up the engine; responses stay the same. The reference does not use it.
        batch: concurrent responses.
        context: prompt and response together, in tokens.
        mesh: processes that decode together with a sharded target, with the reference.

    Raises:
        UserError: missing or broken weights, no such device, too little memory, or (`runtime="engine"`) a target that
            the engine does not compute.
    """
    refused = None
    if runtime != "reference" and mesh is None:
        try:
            return _engine(target, drafter, device, dtype, batch, context)
        except UnsupportedModel as error:
            if runtime == "engine":
                raise
            refused = str(error)  # the error would keep loaded weights alive
    loaded = Target.load(target, device, dtype, mesh)
    why = unbatchable_reason(loaded)
    if refused is not None:
        how = f"{batch} prompts at a time" if why is None else f"one prompt at a time ({why})"
        how += " and without the drafter" if drafter else ""
        print(f"the reference decodes, {how}; the engine cannot: {refused}", file=sys.stderr)
    return BatchedDecoder(loaded, batch) if why is None else ReferenceDecoder(loaded)


def _engine(target: str, drafter: str | None, device: str, dtype: str, batch: int, context: int) -> EngineDecoder:
    draft = None
    if drafter is not None:  # before the target, which takes longest
        where = use_device(device)
        draft = read_drafter(drafter, load_config(target), where, resolve_dtype(dtype, where))
    parts = load_parts(target, draft, device, dtype)
    limit = min(context, parts.target.spec.context_limit)
    return EngineDecoder(parts.engine(EngineOptions(max_num_seqs=batch, max_model_len=limit)))
