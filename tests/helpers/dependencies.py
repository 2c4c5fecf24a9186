"""Packages that the toolkit imports only where they are used."""

OPTIONAL = {"vllm", "sglang", "deepspeed", "wandb", "datasets", "triton", "flash_attn", "flash_attn_interface"}
OPTIONAL |= {"fastapi", "uvicorn", "gguf", "xgrammar"}
