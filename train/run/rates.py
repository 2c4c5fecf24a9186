"""Rates for the estimate of a run's cost: measured ones, and assumptions where nothing was measured.

Every measured number has its GPU, commit and file next to it. `git show COMMIT:scripts/results/FILE.json` also
shows the command. All runs used PyTorch 2.11, Triton 3.6 and transformers 5.17.
"""

from dataclasses import dataclass
from typing import Self

from dflash_toolkit.roofline import SHEETS, Roofline


@dataclass(frozen=True, slots=True)
class Machine:
    """A device: memory in GiB, dense 16-bit TFLOP/s, and memory bandwidth in TB/s that a copy reaches."""

    name: str
    memory_gib: float
    tflops: float
    read_tb_s: float
    memory_name: str = "GPU memory"

    @classmethod
    def of(cls, roofline: Roofline) -> Self:
        """Returns a GPU with these rates."""
        return cls(roofline.name, roofline.memory_gib, roofline.bf16_tflops, roofline.read_tb_s)


H100, H200 = (Machine.of(SHEETS[name]) for name in ("H100", "H200"))

# Two CPU cores with SmolLM2-135M in 16 bits: 150 tokens/s with 16 rows, and prompts with 995 tokens/s.
CPU_TFLOPS_PER_CORE, CPU_READ_TB_S_PER_CORE = 0.13, 0.0013

Shape = tuple[str, int, int, bool]  # model_type, hidden size, layers, whether the weights are in FP8
QWEN3_8B, QWEN3_8B_FP8 = ("qwen3", 4096, 36, False), ("qwen3", 4096, 36, True)
QWEN3_30B_A3B = ("qwen3_moe", 2048, 48, False)
QWEN3_27B_FP8 = ("qwen3_5_text", 5120, 64, True)  # Qwen3.5, 3.6 and 3.8 have one shape
QWEN3_35B_A3B_FP8 = ("qwen3_5_moe_text", 2048, 40, True)
QWEN3_5_9B = ("qwen3_5_text", 4096, 32, False)

# Plain decoding, tokens/s by requests, prompts of 512 tokens, random weights (scripts/bench/step.py --block 1)
DECODING: dict[tuple[Shape, str], dict[int, float]] = {
    (QWEN3_8B, "H100"): {1: 176, 8: 1340, 32: 4840},  # 4470a42 step_plain_fp8_h100
    (QWEN3_8B_FP8, "H100"): {1: 262, 8: 1869, 32: 6347},  # 4470a42 step_plain_fp8_h100
    (QWEN3_30B_A3B, "H100"): {1: 289, 8: 780, 32: 1633},  # 4470a42 step_qwen3_30b_a3b_h100
    (QWEN3_27B_FP8, "H100"): {1: 89, 8: 627, 32: 1698},  # 4470a42 shapes_fp8_h100
    (QWEN3_35B_A3B_FP8, "H100"): {1: 381, 8: 1451, 32: 2457},  # 4470a42 shapes_fp8_h100
    (QWEN3_8B, "H200"): {1: 237, 8: 1763, 32: 6260, 64: 10178},  # 4470a42 step_qwen3_8b_h200
    (QWEN3_27B_FP8, "H200"): {1: 113, 8: 793, 32: 2293},  # 4470a42 shapes_fp8_h200
    (QWEN3_35B_A3B_FP8, "H200"): {1: 423, 8: 1712, 32: 3124},  # 4470a42 shapes_fp8_h200
}

# Hidden states for training, tokens/s (scripts/bench/target_features.py, features.py and train_step.py)
FEATURES: dict[tuple[Shape, str], float] = {
    (QWEN3_8B, "H100"): 31_100,  # 4470a42 train_window_qwen3_8b_h100: 4 rows of 2048 in 263 ms
    (QWEN3_8B, "H200"): 33_456,  # 4470a42 features_h200
    (QWEN3_5_9B, "H100"): 26_273,  # 4470a42 target_features_h100, with the extra `linear-attention`
    (QWEN3_30B_A3B, "H100"): 27_937,  # 4470a42 target_features_h100
}
RECURRENT_ONE_BY_ONE = 0.35  # share of that rate without the extra `linear-attention` (9,261 tokens/s, same file)

# Shares of a device's peak that measured runs reached, for other shapes
READ_SHARE = 0.65  # of the bandwidth, for a plain step of our engine with 32 requests: 0.54 to 0.76 in DECODING
HOST_TOKENS_PER_S = 30_000  # plain, many requests: 25,400 to 32,100 for a target of 0.5B, tests-gpu.json `end_to_end`
READ_SHARE_VLLM = 0.45  # assumed for vLLM, with steps in 4470a42 shapes_fp8_h100 up to 1.4 times as long
REFERENCE_MS_PER_LAYER = 1.4  # least, of a step of transformers, 4470a42 hf_path_qwen3_8b_h200: 50.8 ms for 36 layers
FEATURE_SHARE, FEATURE_SHARE_EXPERTS = 0.40, 0.17  # of the FLOP/s, from FEATURES
TRAIN_SHARE, TRAIN_SHARE_SMALL = 0.50, 0.30  # of the FLOP/s: 0.54 for Qwen3-8B, 0.49 for 1.5B, 0.3 for 0.5B
SMALL = 1536  # hidden size below which the second one applies
# parameters of the drafter, on one H200 (training-rate); Muon multiplies matrices, AdamW reads and writes memory
MUON_MS_PER_BILLION, ADAMW_MS_PER_BILLION = 174.0, 14.0

# Assumptions about the data
PROMPT_TOKENS = 150
RESPONSE_TOKENS = 600  # without thinking
THINKING_TOKENS = 1800  # with thinking, before responses.max_tokens cuts it
FIXED_S = 300.0  # loading, compiling, the last evaluation
