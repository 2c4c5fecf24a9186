"""DeepSpeed ZeRO: `parallel.Replicated` with the optimiser's state (1), gradients (2) and weights (3) in shards.

The DeepSpeed configuration is derived from ours. The resume point is the whole one of `resume_point.py`: shards are
gathered tensor by tensor, so a run can continue with another number of processes, another stage, or without sharding.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.network import Drafter

from ..config import TrainConfig
from ..objective.loss import runner
from ..optim.optimizers import FlatMuon, make_optimizer
from ..run.resume_point import ResumePoint
from .parallel import Processes, Replicated, other_optimizer

if TYPE_CHECKING:
    from .fsdp import Fsdp

ADAMW = ("exp_avg", "exp_avg_sq")  # moments


def deepspeed_config(config: TrainConfig, packed: bool, device: torch.device) -> dict[str, Any]:
    """Returns DeepSpeed's JSON. Weights are fp32 and computed with under autocast, as without DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": 1 if packed else config.optim.batch_size,
        "gradient_accumulation_steps": config.optim.accumulate * (config.optim.splits or 1),
        "gradient_clipping": config.optim.clip,
        "zero_optimization": {"stage": config.run.zero},
        "zero_allow_untested_optimizer": True,  # torch's own AdamW
        "torch_autocast": {"enabled": device.type == "cuda", "dtype": "bfloat16"},
        "steps_per_print": 1 << 60,
    }


def import_deepspeed() -> Any:
    """Imports deepspeed. Raises UserError if it is not installed."""
    try:
        import deepspeed
        import deepspeed.utils
    except ImportError as error:
        raise UserError("run.zero needs deepspeed: pip install 'dflash-toolkit[train]'") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # on CPUs DeepSpeed would first compile its own reductions for more than a minute; gloo has some already
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class _Forward(nn.Module):
    """The step's forward as the module that DeepSpeed owns."""

    def __init__(self, drafter: Drafter, config: TrainConfig) -> None:
        super().__init__()
        self.drafter = drafter
        if config.run.zero == 3:  # its hooks fetch weights and would split the graph at every product
            config = replace(config, run=replace(config.run, compile="off"))
        self._run = runner(config, drafter.device)

    def forward(self, *args: Any) -> Tensor:
        return self._run(self.drafter, *args)


@dataclass(frozen=True, slots=True)
class _Part:
    """One of torch's optimisers in the form of `resume_point.py`."""

    parameters: list[nn.Parameter]
    form: list[dict[str, Any]]  # its param_groups, with numbers for parameters
    moments: tuple[str, ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "_Part":
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = ("momentum_buffer",) if isinstance(optimizer, torch.optim.Muon) else ADAMW
        return cls(parameters, optimizer.state_dict()["param_groups"], moments)


class Zero:
    """The drafter in shards. The interface is `parallel.Replicated`'s."""

    def __init__(
        self, drafter: Drafter, config: TrainConfig, processes: Processes, state: ResumePoint | None,
        work: Path, packed: bool,
    ) -> None:  # fmt: skip
        deepspeed = import_deepspeed()
        self.drafter = drafter
        self._utils = deepspeed.utils
        self._processes = processes
        self._steps = 0  # optimiser steps done
        if state:
            drafter.load_state_dict(state.drafter)
        kind = "muon" if config.optim.optimizer == "muon" else "adamw"
        parts = make_optimizer(drafter.named_parameters(), replace(config.optim, optimizer=kind)).parts
        self.peak = parts[0].param_groups[0]["lr"]
        self._names = {p: name for name, p in drafter.named_parameters()}
        self._parts = [_Part.of(part) for part in parts]
        matrices = {p: p.shape for p in self._parts[0].parameters}
        optimizer: torch.optim.Optimizer = parts[0]
        if kind == "muon":
            optimizer = FlatMuon(parts[0], parts[1], processes.rank, processes.world)  # type: ignore[arg-type]
        settings = deepspeed_config(config, packed, drafter.device)
        processes.rank_zero(write_json, work / "deepspeed.json", settings)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=_Forward(drafter, config), optimizer=optimizer, config=settings
        )
        if isinstance(optimizer, FlatMuon):
            optimizer.by_matrix = config.run.zero == 3
            of, flat = ("fp16_groups", "fp32_partitioned_groups_flat") if optimizer.by_matrix else (
                "bit16_groups", "single_partition_of_fp32_groups")  # fmt: skip
            for parameters, partition in zip(getattr(self._optimizer, of), getattr(self._optimizer, flat), strict=True):
                optimizer.shapes[partition] = [matrices[p] for p in parameters if p in matrices]
        if state:
            self._restore(state.optimizer, state.step, config)

    def run(self, drafter: Drafter, *args: Any) -> Tensor:
        return self._engine(*args)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def backward(self, weighted_sum: Tensor, last: bool) -> None:
        """See `parallel.Replicated`."""
        self._engine.backward(weighted_sum, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts micro steps; does nothing else before the last one of a step

    def step(self, weight_sum: Tensor) -> Tensor:
        """See `parallel.Replicated`."""
        # DeepSpeed averages over processes and divides gradients by its loss scale before clipping
        self._optimizer.loss_scale = float(weight_sum) / self._processes.world
        self._engine.step()
        self._optimizer.loss_scale = 1.0  # the next backward would be multiplied by it
        self._steps += 1
        return torch.as_tensor(self._engine.get_global_grad_norm())

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any], None]:
        """See `parallel.Replicated`. The optimiser's state has the form of torch's AdamW over whole weights."""
        self._link()
        weights: dict[str, Tensor] = {}
        optimizer: dict[str, Any] = {}
        for key, part in zip("01", self._parts, strict=False):
            state: dict[int, dict[str, Tensor]] = {}
            for i, parameter in enumerate(part.parameters):
                whole = self._utils.safe_get_full_fp32_param(parameter)
                found = {name: self._utils.safe_get_full_optimizer_state(parameter, name) for name in part.moments}
                if self._processes.main:
                    weights[self._names[parameter]] = whole.cpu()
                    state[i] = {name: value.cpu() for name, value in found.items()}
                    if part.moments == ADAMW:
                        state[i]["step"] = torch.tensor(float(self._steps))
            optimizer[key] = {"state": state, "param_groups": part.form}
        return weights | self._fixed(), optimizer, None

    def whole(self) -> Drafter:
        """See `parallel.Replicated`: gathered in host memory on the first process."""
        weights = {
            name: self._utils.safe_get_full_fp32_param(parameter).cpu() for parameter, name in self._names.items()
        }
        if not self._processes.main:
            return self.drafter
        return Drafter.of_tensors(self.drafter.config, weights | self._fixed())

    def _fixed(self) -> dict[str, Tensor]:
        return {name: each.cpu() for name, each in self.drafter.named_buffers()}

    def close(self) -> None:
        """Frees what DeepSpeed would hold until the process ends."""
        self._engine.destroy()

    def _restore(self, saved: dict[str, Any], steps: int, config: TrainConfig) -> None:
        if len(saved) != len(self._parts):
            raise other_optimizer()
        for part, kept in zip(self._parts, saved.values(), strict=True):
            found = {i: {*moments} - {"step"} for i, moments in kept.get("state", {}).items()}
            if found != {i: {*part.moments} for i in range(len(part.parameters))}:
                raise other_optimizer()
        self._step_without_gradient(config)
        self._link()
        for part, kept in zip(self._parts, saved.values(), strict=True):
            for i, parameter in enumerate(part.parameters):
                for name in part.moments:
                    value = kept["state"][i][name].to(self._engine.device)
                    self._utils.safe_set_full_optimizer_state(parameter, value, name)
        self._steps = steps
        for shard in self._optimizer.optimizer.state.values():
            if "step" in shard:
                shard["step"].fill_(self._steps)

    def _link(self) -> None:
        """Links parameters to their moments: in stages 1 and 2, DeepSpeed 0.19 links only the first group."""
        if hasattr(self._optimizer, "_hp_optimizer_states_linked"):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _step_without_gradient(self, config: TrainConfig) -> None:
        """Steps without gradient or learning rate, so that the optimiser creates its state."""
        drafter, device = self.drafter.config, self._engine.device
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        features = torch.zeros(1, 1, drafter.feature_size, device=device)
        block = torch.zeros(1, drafter.block_size, drafter.hidden_size, device=device)
        context = torch.zeros(1, 1, dtype=torch.long, device=device)
        positions = torch.arange(drafter.block_size, device=device)[None]
        mask = torch.ones(1, 1, drafter.block_size, drafter.block_size + 1, dtype=torch.bool, device=device)
        masks = dict.fromkeys(drafter.layer_types, mask)
        ids = torch.zeros(1, drafter.block_size, dtype=torch.long, device=device)
        between = (ids, ids[:, :1].bool()) if self.drafter.between else ()
        tokens = torch.zeros(1, drafter.block_size, drafter.draft_candidates, dtype=torch.long, device=device)
        nothing = tokens.float(), tokens, context.expand(1, drafter.block_size)
        for left in reversed(range(config.optim.accumulate * (config.optim.splits or 1))):
            hidden = self._engine(features, context, block, positions, masks, *between)
            if self.drafter.selector is not None:
                scores, _ = self.drafter.selector(hidden, *nothing)
                hidden = hidden.sum() + scores.sum()
            self.backward((hidden * 0).sum(), last=not left)
        self.step(torch.ones(()))
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


Learner: TypeAlias = "Replicated | Fsdp | Zero"


def make_learner(
    drafter: Drafter, config: TrainConfig, processes: Processes, state: ResumePoint | None, work: Path, packed: bool
) -> Learner:
    """Returns the learner that the options choose; every process must call it. ZeRO writes its configuration to `work`.

    Raises:
        UserError: the resume point has another drafter or optimiser, deepspeed is missing, or the disk is full.
    """
    drafter.recompute = bool(config.optim.recompute)
    for fixed in drafter.buffers() if processes.world > 1 else ():
        if fixed.is_floating_point():  # eigenvectors may differ between GPUs
            dist.broadcast(fixed, 0)
    if state and not _same_shapes(drafter, state):
        raise UserError(f"{work / 'state.pt'}: does not fit this drafter's weights; remove it to start again")
    if config.run.fsdp:
        from .fsdp import Fsdp  # imports sharded tensors, half a second

        return Fsdp(drafter, config, processes, state)
    if config.run.zero:
        return Zero(drafter, config, processes, state, work, packed)
    return Replicated(drafter, config, processes, state)


def _same_shapes(drafter: Drafter, state: ResumePoint) -> bool:
    expected = {name: weight.shape for name, weight in drafter.state_dict().items()}
    kept = [state.drafter or {}, *([state.average] if state.average else [])]
    return all({name: weight.shape for name, weight in weights.items()} == expected for weights in kept)
