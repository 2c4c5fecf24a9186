"""The targets that people run most, with their real sizes: for the table of docs/train.md and the tests of configs/."""

from transformers import GptOssConfig, PreTrainedConfig

from dflash_toolkit.runtime.shapes import named_shape

# transformers' GptOssConfig with the sizes of the 20b; its experts are stored in MXFP4
_GPT_OSS_20B = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}

# configs/NAME.yaml: the architecture of its target in config.json
RECIPES = {
    "qwen3-8b": "Qwen3ForCausalLM",
    "llama-3.1-8b": "LlamaForCausalLM",
    "qwen3.5-9b": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-27b-fp8": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-35b-a3b-fp8": "Qwen3_5MoeForConditionalGeneration",
    "qwen3-coder-30b-a3b": "Qwen3MoeForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
}
_SHAPES = {
    "llama-3.1-8b": "llama3.1-8b",
    "qwen3.6-27b-fp8": "qwen3.8-27b-fp8",  # one shape
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",  # one shape but for the longest context
}


def config_of(name: str) -> PreTrainedConfig:
    """Returns the configuration of a recipe's target, without weights."""
    if name == "gpt-oss-20b":
        return GptOssConfig(**_GPT_OSS_20B)
    return named_shape(_SHAPES.get(name, name))
