"""Estimates how fast a machine writes responses and computes features of a target; `rates.py` has what was measured."""

import importlib.util
import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.preflight import GIB
from dflash_toolkit.roofline import SHEETS, roofline_of, sheet_of
from dflash_toolkit.runtime.options import EngineOptions

from ..config import TrainConfig
from ..responses.batch_size import LOGIT_BYTES, ON_CPU, STEP_BYTES, fitting
from ..responses.batch_size import PROMPT_TOKENS as TYPICAL_PROMPT
from .rates import (
    CPU_READ_TB_S_PER_CORE,
    CPU_TFLOPS_PER_CORE,
    DECODING,
    FEATURE_SHARE,
    FEATURE_SHARE_EXPERTS,
    FEATURES,
    H100,
    HOST_TOKENS_PER_S,
    READ_SHARE,
    READ_SHARE_VLLM,
    RECURRENT_ONE_BY_ONE,
    REFERENCE_MS_PER_LAYER,
    SMALL,
    Machine,
    Shape,
)
from .target_weights import Weights, computes

CPU = "this CPU"


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate and its source."""

    tokens_per_second: float
    how: str

    @property
    def words(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s"


def machine_of(config: TrainConfig, target: PreTrainedConfig) -> Machine:
    """Returns this machine, or the GPU of --estimate-gpu.

    Without a GPU and with a large target it is an H100, and `show` prints that.

    Raises:
        UserError: the name or the device is unknown.
    """
    if config.estimate_gpu is not None:
        if sheet := sheet_of(config.estimate_gpu):
            return Machine.of(sheet)
        raise UserError(f"estimate_gpu {config.estimate_gpu!r} is not known; known: {', '.join(SHEETS)}")
    if config.device != "cpu" and torch.cuda.is_available():
        return Machine.of(roofline_of(resolve_device(config.device)))
    if config.device == "cpu" or target.hidden_size < SMALL:
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return Machine(CPU, memory, CPU_TFLOPS_PER_CORE * cores, CPU_READ_TB_S_PER_CORE * cores, "memory")
    return H100


def response_rate(
    config: TrainConfig, target: PreTrainedConfig, weights: Weights, machine: Machine, context: float, server: bool
) -> Rate:
    """Returns the tokens a second of plain decoding, measured for this shape or computed from its bytes."""
    engine = not server and computes(target) and config.responses.runtime != "reference"
    alone = _together(config, target, weights, machine) if engine and machine.name != CPU else ON_CPU
    requests = 256 if server else config.responses.batch_size or alone
    measured = DECODING.get((_measured_as(target, weights), machine.name), {}) if engine else {}
    if requests in measured:
        return Rate(measured[requests], f"measured at {requests} requests")
    share = READ_SHARE_VLLM if server else READ_SHARE
    rate = requests * share * machine.read_tb_s * 1e12 / weights.read(requests, context)
    if not engine and not server and machine.name != CPU:
        rate = min(rate, requests / (REFERENCE_MS_PER_LAYER * weights.layers / 1000))
        return Rate(rate, "computed for transformers, since our engine does not support the target")
    if engine and rate > HOST_TOKENS_PER_S:
        return Rate(HOST_TOKENS_PER_S, f"computed for our engine at {requests} requests, limited by the host")
    return Rate(rate, f"computed for {'vLLM' if server else 'our engine'} at {requests} requests from bytes read")


def _together(config: TrainConfig, target: PreTrainedConfig, weights: Weights, machine: Machine) -> int:
    """Returns how many responses our engine writes at a time on a GPU, see `sizes_that_fit`."""
    total = int(machine.memory_gib * GIB)
    room = EngineOptions().memory_share(total) * total - STEP_BYTES - weights.nbytes
    each = (TYPICAL_PROMPT + config.responses.max_tokens // 2) * weights.kv_bytes + weights.state_bytes
    return fitting(room, each + LOGIT_BYTES * target.vocab_size)[0]


def feature_rate(
    target: PreTrainedConfig, weights: Weights, shape: DrafterConfig, machine: Machine, linear_attention: bool | None,
    *, whole: bool = False,
) -> Rate:  # fmt: skip
    """Returns the rate of the target's hidden states, measured for this shape or computed from its FLOPs.

    Args:
        whole: all layers run, for the last hidden state.
    """
    recurrent = "linear_attention" in (getattr(target, "layer_types", None) or ())
    if linear_attention is None:
        linear_attention = importlib.util.find_spec("fla") is not None
    slow = recurrent and machine.name != CPU and not linear_attention
    measured = FEATURES.get((_measured_as(target, weights), machine.name))
    if measured:
        rate, how = measured, "measured"
    else:
        share = FEATURE_SHARE_EXPERTS if weights.experts else FEATURE_SHARE
        depth = 1.0 if whole else (max(shape.target_layer_ids) + 1) / weights.layers
        rate, how = share * machine.tflops * 1e12 / (2 * weights.active * depth), "computed from FLOPs"
    if slow:
        return Rate(RECURRENT_ONE_BY_ONE * rate, f"{how}; three times as fast with the extra linear-attention")
    return Rate(rate, how)


def _measured_as(target: PreTrainedConfig, weights: Weights) -> Shape:
    return target.model_type, int(target.hidden_size), weights.layers, weights.fp8
