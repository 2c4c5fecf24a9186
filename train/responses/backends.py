"""Who answers: the runtime's engine, or the readable reference where the engine cannot compute the target."""

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
    """Load a target to answer with.

    Args:
        runtime: one of `config.RUNTIMES`; auto is the engine, or, with a line that says why not, the reference.
        drafter: speeds the engine up; the responses stay the same. The reference has no use for one.
        batch: responses written at a time.
        context: prompt and response together, in tokens.
        mesh: of processes that decode the same together, with a target sharded over them; the reference does.

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
            refused = str(error)  # the error itself would hold on to what was loaded
    loaded = Target.load(target, device, dtype, mesh)
    why = unbatchable_reason(loaded)
    if refused is not None:
        how = f"{batch} prompts at a time" if why is None else f"one prompt at a time ({why})"
        how += " and without the drafter" if drafter else ""
        print(f"the reference answers, {how}, for the engine cannot: {refused}", file=sys.stderr)
    return BatchedDecoder(loaded, batch) if why is None else ReferenceDecoder(loaded)


def _engine(target: str, drafter: str | None, device: str, dtype: str, batch: int, context: int) -> EngineDecoder:
    draft = None
    if drafter is not None:  # before the target, which takes longest, and whatever answers in the end
        where = use_device(device)
        draft = read_drafter(drafter, load_config(target), where, resolve_dtype(dtype, where))
    parts = load_parts(target, draft, device, dtype)
    limit = min(context, parts.target.spec.context_limit)
    return EngineDecoder(parts.engine(EngineOptions(max_num_seqs=batch, max_model_len=limit)))
