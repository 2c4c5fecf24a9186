"""A target too large for one GPU: each of several processes holds a slice of every layer, by transformers' own plans.

The embedding and the head stay whole on every process: a drafter uses them, and they are small compared with the
layers. transformers shards over all processes; this module shards over a mesh of some of them.
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
    """Loads `from_pretrained(name, **options)` of a causal language model, sharded over `mesh`; collective.

    Args:
        name: None makes random weights of the configuration.
        mesh: one-dimensional, over the devices that the weights go to.

    Raises:
        UnsupportedModel: transformers has no plan for the architecture.
        UserError: heads that cannot be split evenly over the processes, or accelerate is missing.
        OSError, RuntimeError, ValueError: as `from_pretrained`.
    """
    if not is_accelerate_available():
        raise UserError("a target over several processes needs accelerate: pip install 'dflash-toolkit[train]'")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    plan = _plan(whole, mesh.size(), name or str(config.model_type))
    if name is None:
        options["state_dict"] = {}  # every weight is missing in it, and is made on its device
    with _over(mesh):
        settings = DistributedConfig(tp_size=mesh.size(), tp_plan=plan)
        model_class, own = type(whole), whole.config  # for a multimodal configuration perhaps the text part alone
        return model_class.from_pretrained(name, config=own, distributed_config=settings, **options)


def _plan(model: Any, size: int, name: str) -> dict[str, str]:
    """Returns the style of every module or parameter that is sharded, by transformers' names."""
    borrowed = {model.get_input_embeddings(), model.get_output_embeddings()}
    kept = {path for path, module in model.named_modules() if module in borrowed}
    plan = {path: style for path, style in model.tp_plan.items() if path not in kept}
    # the plan of Llama 4 in transformers 5.15 shards the matrices of the experts, and does not add up their outputs
    experts = {path.rpartition(".")[0] for path in plan if path.endswith(".experts.gate_up_proj")}
    if not plan or experts - {*plan}:
        raise UnsupportedModel(
            f"target {name}: transformers has no plan to shard architecture {model.config.model_type!r} over several "
            f"processes; a GPU must hold it whole, or vLLM compute its responses and features (run.feature_endpoint)"
        )
    config = model.config.get_text_config(decoder=True)
    layers = [config]
    if getattr(config, "is_heterogeneous", False):
        layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    for heads in ("num_attention_heads", "num_key_value_heads"):
        if uneven := next((n for each in layers if (n := getattr(each, heads, size)) % size), None):
            raise UserError(f"target {name}: its {heads}={uneven} cannot be shared out over {size} processes")
    if "replicate" in ALL_PARALLEL_STYLES:  # later versions add these rules to theirs, earlier ones use only these
        plan |= dict.fromkeys(kept, "replicate")
    return plan


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Answers for all dimensions of parallelism that transformers may request."""

    mesh: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self.mesh


@contextlib.contextmanager
def _over(mesh: DeviceMesh) -> Iterator[None]:
    """Shards models loaded in this context over `mesh`, instead of a mesh of all processes."""
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
