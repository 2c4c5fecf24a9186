"""Small engines on a GPU."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from conftest import make_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from dflash_toolkit import Drafter, DrafterConfig, Target
from dflash_toolkit.models.dflash.shape import default_target_layer_ids
from dflash_toolkit.runtime import Engine, EngineOptions, load_engine
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.runner import StepRunner

VOCAB, LIMIT = 4096, 1024


@cache
def pair(
    kind: str = "qwen3", dflash2: bool = False, limit: int = LIMIT, dspine: bool = False
) -> tuple[Target, Drafter]:
    """Returns a random bf16 target of a few million weights, with varied answers, and a random drafter."""
    parts = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16} if dflash2 else {}
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
        "num_attention_heads": 14 if kind == "qwen2" else 8, "num_key_value_heads": 2, "max_position_embeddings": limit,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "initializer_range": 0.06,
    }  # fmt: skip
    if kind == "qwen2":  # seven query heads a KV head: two tiles of rows
        shape["hidden_size"] = 14 * 64
    routed = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
    hybrid = {  # every other layer; heads of 256 as published, and of 128, which other kernels compute
        "layer_types": ["full_attention", "linear_attention"] * 3,
        "head_dim": 128 if kind == "qwen3_next" else 256, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    }  # fmt: skip
    windows = {**shape, "sliding_window": 60, "layer_types": ["sliding_attention", "full_attention"] * 3}
    config = {
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(head_dim=64, **shape),
        "qwen3_moe": lambda: Qwen3MoeConfig(head_dim=64, mlp_only_layers=[2], **routed, **shape),
        "qwen3_next": lambda: Qwen3NextConfig(shared_expert_intermediate_size=256, **hybrid, **routed, **shape),
        "phi3": lambda: Phi3Config(partial_rotary_factor=0.75, **shape),
        "granite": lambda: GraniteConfig(
            embedding_multiplier=0.5,
            residual_multiplier=0.4,
            attention_multiplier=1 / 64,
            logits_scaling=2.0,
            **shape,
        ),
        "smollm3": lambda: SmolLM3Config(**shape),
        "olmo2": lambda: Olmo2Config(**shape),
        "glm4": lambda: Glm4Config(head_dim=64, **shape),
        "qwen2_moe": lambda: Qwen2MoeConfig(shared_expert_intermediate_size=768, **routed, **shape),
        "glm4_moe": lambda: Glm4MoeConfig(
            head_dim=64,
            n_routed_experts=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            num_experts_per_tok=4,
            moe_intermediate_size=256,
            **shape,
        ),
        "gemma2": lambda: Gemma2Config(head_dim=256, query_pre_attn_scalar=200, attn_logit_softcapping=9.0, **windows),
        "gemma3": lambda: Gemma3TextConfig(head_dim=128, query_pre_attn_scalar=90, **windows),
        "gpt_oss": lambda: GptOssConfig(
            head_dim=64,
            num_local_experts=16,
            num_experts_per_tok=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            **windows,
        ),
        "gemma4": lambda: Gemma4TextConfig(
            head_dim=128,
            global_head_dim=512,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            **windows,
        ),
        "gemma4_moe": lambda: Gemma4TextConfig(
            head_dim=128,
            global_head_dim=256,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=16,
            top_k_experts=4,
            moe_intermediate_size=256,
            **windows,
        ),
        "gemma4_e2b": lambda: Gemma4TextConfig(
            head_dim=128,
            global_head_dim=256,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=64,
            vocab_size_per_layer_input=VOCAB,
            **windows,
        ),
        "llama4": lambda: Llama4TextConfig(
            **shape
            | {"num_attention_heads": 10, "head_dim": 128, "intermediate_size": 256, "intermediate_size_mlp": 1408},
            num_local_experts=16,
            interleave_moe_layer_step=2,
            no_rope_layer_interval=3,
            attention_chunk_size=96,
            floor_scale=32,
            attn_scale=0.3,
        ),
        "qwen3_5": lambda: Qwen3_5TextConfig(**hybrid, **shape),
        "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(shared_expert_intermediate_size=256, **hybrid, **routed, **shape),
    }[kind]()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = Target(model, make_tokenizer(), f"small-{kind}")
    drafter = Drafter(
        DrafterConfig(
            hidden_size=config.hidden_size, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64,
            intermediate_size=1024, vocab_size=VOCAB, num_target_layers=6,
            target_layer_ids=default_target_layer_ids(6, 3), mask_token_id=VOCAB - 1, block_size=16, rope_theta=1e4,
            **parts,
        )
    )  # fmt: skip
    if dspine:
        drafter = Drafter(drafter.config.resized(transfer_rank=256, message_size=128, refine_top_k=16))
    drafter.init_weights(generator := torch.Generator().manual_seed(5), std=0.05)
    drafter.config.architecture.fit_head(drafter, target.head_weight.detach().cpu())
    for name, parameter in drafter.named_parameters():
        if any(part in name for part in ("_conv.", "selector", "injection")):  # they have no effect in a new drafter
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return target, drafter.to("cuda", torch.bfloat16).eval()


def make_engine(target: Target, drafter: Drafter | None, **options: Any) -> Engine:
    defaults = {"max_num_seqs": 8, "kv_cache_tokens": 16 * LIMIT, "prefix_cache": False}
    defaults["num_speculative_tokens"] = 15 if drafter else 0
    return load_engine(target, drafter, options=EngineOptions(**defaults | options))[0]


def prompts_of(count: int, seed: int = 1) -> list[list[int]]:
    dice = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 200, (count,), generator=dice).tolist()
    return [torch.randint(0, VOCAB - 1, (n,), generator=dice).tolist() for n in lengths]


def knowing(engine: Engine, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    """Draft the known answers on the device, wrong at every seventh position: the graph holds the real steps."""
    texts = {tuple(p): torch.tensor(p + a + [0] * 64, device="cuda") for p, a in zip(prompts, answers, strict=True)}
    runner: StepRunner = engine.runner
    table = torch.zeros(runner.max_num_seqs, max(map(len, texts.values())), dtype=torch.int64, device="cuda")
    add, move = runner.add, runner.move

    def added(row: int, request: Request, place: int = 0) -> Any:
        text = texts[tuple(request.prompt_ids)]
        table[row, : len(text)] = text
        return add(row, request, place)

    def moved(source: int, target: int) -> None:
        table[target].copy_(table[source])
        move(source, target)

    def propose(last: Tensor, rows: Any, block: int) -> Draft:
        positions = rows.lengths[:, None].long() + torch.arange(1, block, device="cuda")
        drafts = table[: len(last)].gather(1, positions.clamp(max=table.shape[1] - 1))
        return Draft(torch.where(positions % 7 == 0, (drafts + 1) % VOCAB, drafts))

    def children(last: Tensor, rows: Any, block: int, calibration: Tensor, width: int) -> tuple[Tensor, ...]:
        """Returns three candidates, usually with one right one at a place that depends on the position."""
        positions = rows.lengths[:, None].long() + torch.arange(1, block, device="cuda")
        right = table[: len(last)].gather(1, positions.clamp(max=table.shape[1] - 1))[..., None]
        wrong = (right + torch.arange(1, 4, device="cuda")) % VOCAB
        held = torch.where(positions[..., None] % 7 == 0, (right + 4) % VOCAB, right)
        candidates = wrong.scatter(2, positions[..., None] % 3, held)
        if width == 1:  # else no chain would get far
            candidates = held
        ranks = torch.arange(3, dtype=torch.int32, device="cuda").expand(len(last), block - 1, 1, 3)
        values = (0.5 / (1 + ranks.float())).log()
        return values[..., :width].contiguous(), ranks[..., :width].contiguous(), candidates

    runner.add, runner.move, runner.proposer.propose = added, moved, propose  # type: ignore[method-assign]
    runner.proposer.children = children  # type: ignore[method-assign]
    runner.graphs.captured.clear()  # the ones captured for their times hold the random drafter
