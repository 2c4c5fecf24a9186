"""A target too large for one GPU: a slice of every layer on each of several processes, by transformers' own plans.

The embedding and the head stay whole on every process: a drafter borrows them, and they are small beside the layers.
transformers shards over all the processes there are; here a mesh of some of them will do.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.mixin import DistributedMixin
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.utils import is_accelerate_available

from ..config import UnsupportedModel, UserError

MESH_MAKER = "prepare_distribute_model"


def load(name: str | None, config: PreTrainedConfig, mesh: DeviceMesh, **options: Any) -> Any:
    """`from_pretrained(name, **options)` of a causal language model, sharded over `mesh`, whose processes all call it.

    Args:
        name: None makes random weights of the configuration.
        mesh: one-dimensional, over the devices that the weights go to.

    Raises:
        UnsupportedModel: transformers has no plan for the architecture.
        UserError: heads that so many processes cannot share out evenly, or no accelerate.
        OSError, RuntimeError, ValueError: as of `from_pretrained`.
    """
    if not is_accelerate_available():
        raise UserError("a target over several processes needs accelerate: pip install 'dflash-toolkit[train]'")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    plan = _plan(whole, mesh.size(), name or str(config.model_type))
    if name is None:
        options["state_dict"] = {}  # in which every weight is missing, and is made where it belongs
    with _over(mesh):
        settings = DistributedConfig(tp_size=mesh.size(), tp_plan=plan)
        model_class, own = type(whole), whole.config  # of a multimodal configuration perhaps the text part alone
        return model_class.from_pretrained(name, config=own, distributed_config=settings, **options)


def _plan(model: Any, size: int, name: str) -> dict[str, str]:
    """What is done to every module or parameter that is sharded, in transformers' words."""
    borrowed = {model.get_input_embeddings(), model.get_output_embeddings()}
    kept = {path for path, module in model.named_modules() if module in borrowed}
    plan = {path: style for path, style in model.tp_plan.items() if path not in kept}
    if not plan:
        raise UnsupportedModel(
            f"target {name}: transformers has no plan to shard architecture {model.config.model_type!r} over several "
            f"processes; a GPU must hold it whole, or vLLM compute its responses and features (run.feature_endpoint)"
        )
    config = model.config.get_text_config(decoder=True)
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if getattr(config, heads, size) % size:
            raise UserError(
                f"target {name}: its {heads}={getattr(config, heads)} cannot be shared out over {size} processes"
            )
    if "replicate" in ALL_PARALLEL_STYLES:  # later versions add these rules to theirs, earlier ones take these alone
        plan |= dict.fromkeys(kept, "replicate")
    return plan


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Stands for all dimensions of parallelism that transformers may ask for."""

    mesh: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self.mesh


@contextlib.contextmanager
def _over(mesh: DeviceMesh) -> Iterator[None]:
    """Models loaded in here are sharded over `mesh`, where transformers would make a mesh of all processes."""
    plain = vars(DistributedMixin)[MESH_MAKER]
    earlier = "device_mesh" in inspect.signature(plain.__func__).parameters  # before 5.2x
    kind = mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def prepared(cls: type, distributed_config: DistributedConfig, **_: Any) -> tuple[Any, ...]:
        return distributed_config, device, mesh if earlier else _Mesh(mesh)

    setattr(DistributedMixin, MESH_MAKER, classmethod(prepared))
    try:
        yield
    finally:
        setattr(DistributedMixin, MESH_MAKER, plain)
