"""FSDP2 (torch's `fully_shard`): `parallel.Replicated` with sharded weights, gradients and optimiser state.

Every layer is a unit. In every micro step its matrices are gathered in bf16 while the previous layer computes, and its
gradients are scattered in fp32 while the next layer's backward pass runs. The few norms stay whole on every process, in
fp32. The resume point is the whole one of `resume_point.py`, so a run can continue unsharded or with other process
counts.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from dflash_toolkit.models.dflash.network import Drafter, DraftLayer

from ..config import TrainConfig
from ..objective.loss import compiles
from ..optim.optimizers import is_matrix, make_optimizer, rows_of, update_average
from ..run.resume_point import ResumePoint
from .parallel import Processes, other_optimizer

Rope = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Inputs:
    """Inputs of a step's forward pass without gradient. FSDP's hooks traverse tuples, but not this class."""

    features: Tensor  # [B, T, K*D]
    block: Tensor  # [B, Q, D]
    context_rope: Rope
    block_rope: Rope
    masks: dict[str, Tensor | BlockMask]  # by layer type
    block_size: int
    tokens: Tensor | None = None  # see `Between.begin`
    replaced: Tensor | None = None


def _context(fc: nn.Module, norm: nn.Module, features: Tensor) -> Tensor:
    return norm(fc(features))


def _layer(
    layer: DraftLayer, x: Tensor, context: Tensor, context_rope: Rope, block_rope: Rope, mask: Tensor | BlockMask,
    block_size: int,
) -> Tensor:  # fmt: skip
    return layer(x, block_rope, layer.self_attn.keys_values(context, context_rope), mask, block_size)


def _between(drafter: Drafter, layer: int, x: Tensor, begun: Any) -> tuple[Tensor, Tensor | None]:
    assert drafter.between is not None
    return drafter.between(layer, x, begun)


def _last(drafter: Drafter, x: Tensor, last: Tensor, costs: list[Tensor]) -> Tensor:
    return drafter.states(x, last, costs)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class _Unit(nn.Module):
    """A layer with its keys and values of the context: the whole use of its weights."""

    def __init__(self, layer: nn.Module, kind: str, run: Callable[..., Tensor], recompute: bool) -> None:
        super().__init__()
        self.layer, self._kind, self._run, self._recompute = layer, kind, run, recompute

    def forward(self, x: Tensor, context: Tensor, given: _Inputs) -> Tensor:
        arguments = (self.layer, x, context, given.context_rope, given.block_rope, given.masks[self._kind],
                     given.block_size)  # fmt: skip
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(self._run, *arguments, use_reentrant=False, preserve_rng_state=False)
        return self._run(*arguments)


class _Forward(nn.Module):
    """`Drafter.context_kv` and `Drafter.forward`, layer by layer."""

    def __init__(self, drafter: Drafter, compiled: bool) -> None:
        super().__init__()
        self.fc, self.hidden_norm, self.norm = drafter.fc, drafter.hidden_norm, drafter.norm
        self.between, self._drafter = drafter.between, (drafter,)  # a tuple: not a module of this one
        parts: tuple[Callable[..., Any], ...] = (_context, _layer, _between, _last)
        self._context, layer, self._between, self._last = map(_compiled, parts) if compiled else parts
        kinds = zip(drafter.layers, drafter.config.layer_types, strict=True)
        self.units = nn.ModuleList(_Unit(each, kind, layer, drafter.recompute) for each, kind in kinds)
        self.selector = drafter.selector  # called by the loss

    def forward(self, given: _Inputs) -> Tensor:
        (drafter,) = self._drafter
        context, x = self._context(self.fc, self.hidden_norm, given.features), given.block
        begun = drafter.begin(given.tokens, given.block_size, given.replaced) if given.tokens is not None else None
        last, costs = x, list[Tensor]()
        for i, unit in enumerate(self.units):
            x = last = unit(x, context, given)
            if begun is not None:
                x, cost = self._between(drafter, i, x, begun)
                costs += [] if cost is None else [cost]
        return self._last(drafter, x, last, costs)


class Fsdp:
    """The drafter in shards. The interface is `parallel.Replicated`'s."""

    def __init__(self, drafter: Drafter, config: TrainConfig, processes: Processes, state: ResumePoint | None) -> None:
        warnings.filterwarnings("ignore", r"`torch.distributed.*` is deprecated", FutureWarning)  # by torch itself
        self.drafter = drafter
        self._processes, self._clip = processes, config.optim.clip
        self._steps = state.step if state else 0
        if state:
            drafter.load_state_dict(state.drafter)
        for parameter in drafter.parameters():
            dist.broadcast(parameter.data, 0)
        self._names = [name for name, _ in drafter.named_parameters()]
        shapes = [p.shape for name, p in drafter.named_parameters() if is_matrix(name, p)]
        device = drafter.device
        self._mesh = init_device_mesh(device.type, (processes.world,))
        self._forward = _Forward(drafter, compiles(config, device))
        last = [part for part in (self._forward.selector, self._forward) if part is not None]  # needed again at once
        for unit in (*self._forward.units, *last):
            fully_shard(
                unit, mesh=self._mesh, ignored_params={p for p in drafter.parameters() if p.dim() != 2},
                reshard_after_forward=config.run.fsdp_reshard_after_forward and unit not in last,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16 if device.type == "cuda" else None,  # the dtype that autocast would use
                    reduce_dtype=torch.float32, cast_forward_inputs=False,
                ),
            )  # fmt: skip
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)  # gradients are sums; `step` divides them
            unit.set_force_sum_reduction_for_comms(True)
        self._parameters = list(drafter.parameters())
        # plain tensors over the same memory: optimisers and averages are element-wise, and Muon handles shards itself
        self._shards = nn.ParameterList(nn.Parameter(_local(p.data)) for p in self._parameters)
        named = zip(self._names, self._shards, strict=True)
        self._optimizer = make_optimizer(named, config.optim, processes.rank, processes.world, shapes)
        self.peak = self._optimizer.param_groups[0]["lr"]
        self._decay, self._average = config.optim.ema, copy.deepcopy(self._shards) if config.optim.ema else None
        if state:
            try:
                self._optimizer.load_state_dict(self._moments(state.optimizer, self._part))
            except (LookupError, ValueError) as error:
                raise other_optimizer() from error
            if self._average and state.average:
                for mean, name, p in zip(self._average, self._names, self._parameters, strict=True):
                    mean.data.copy_(self._part(state.average[name], p.shape))

    def run(self, drafter: Drafter, features: Tensor, context: Tensor, embedded: Tensor, positions: Tensor,
            masks: dict[str, Tensor | BlockMask], *between: Tensor) -> Tensor:  # fmt: skip
        ropes = drafter.rope(context), drafter.rope(positions)  # the rope needs fp32, as the weights have here
        block = drafter.scaled(embedded), *ropes, masks, drafter.config.block_size
        return self._forward(_Inputs(features, *block, *between))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def backward(self, weighted_sum: Tensor, last: bool) -> None:
        """See `parallel.Replicated`. Gradients of every micro step are scattered, since whole ones are never kept."""
        weighted_sum.backward()

    def step(self, weight_sum: Tensor) -> Tensor:
        """See `parallel.Replicated`."""
        whole: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            assert parameter.grad is not None
            shard.grad, parameter.grad = _local(parameter.grad), None
            (parts if isinstance(parameter, DTensor) else whole).append(shard.grad)
        squares = nn.utils.get_total_norm(parts).square()
        sums = self._processes.sum(torch.cat([squares[None], *(gradient.flatten() for gradient in whole)]))
        for gradient, summed in zip(whole, sums[1:].split([g.numel() for g in whole]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        norm = (sums[0] + nn.utils.get_total_norm(whole).square()).sqrt() / weight_sum
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) / weight_sum
        torch._foreach_mul_(parts + whole, factor.float())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        if self._average:
            update_average(self._average, self._shards, self._decay, self._steps)
        return norm

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor] | None]:
        """See `parallel.Replicated`. Tensors are gathered one by one and kept by the first process."""
        moments = self._moments(self._optimizer.state_dict(), self._whole)
        return self._all(self._shards), moments, self._all(self._average) if self._average else None

    def whole(self) -> Drafter:
        """See `parallel.Replicated`: gathered in host memory on the first process."""
        weights = self._all(self._average or self._shards)
        return Drafter.of_tensors(self.drafter.config, weights) if self._processes.main else self.drafter

    def _all(self, shards: nn.ParameterList) -> dict[str, Tensor]:
        every = zip(self._names, shards, self._parameters, strict=True)
        fixed = {name: each.cpu() for name, each in self.drafter.named_buffers()}
        return {name: self._whole(shard.data, p.shape) for name, shard, p in every} | fixed

    def _moments(self, saved: dict[str, Any], change: Callable[[Tensor, torch.Size], Tensor]) -> dict[str, Any]:
        """Returns an optimiser's state with `change` applied to its tensors, given the shape of their weights."""
        shapes = {shard: p.shape for shard, p in zip(self._shards, self._parameters, strict=True)}
        changed = {}
        for key, part in zip("01", self._optimizer.parts, strict=False):
            of = [shapes[shard] for group in part.param_groups for shard in group["params"]]
            state = {
                i: {name: change(value, of[i]) if value.dim() else value for name, value in kept.items()}
                for i, kept in saved[key]["state"].items()
            }
            changed[key] = saved[key] | {"state": state}
        return changed

    def _whole(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Gathers a value that is sharded as a weight of this shape; the first process gets the result."""
        if len(shape) == 2:
            stride = (shape[1], 1)
            value = DTensor.from_local(
                value, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            ).full_tensor()
        return value.cpu() if self._processes.main else value[:0]

    def _part(self, value: Tensor, shape: torch.Size) -> Tensor:
        """Returns this process's shard of a whole value."""
        return rows_of(value, self._processes.world)[self._processes.rank] if len(shape) == 2 else value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
