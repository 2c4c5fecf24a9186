"""A target that writes prompts of three parts after its chat template's user mark, and short answers."""

import itertools

import torch
from conftest import EOS, PAD, make_tokenizer
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_toolkit import Target

ASKED = [
    "How do I cook",
    "Where can we buy",
    "Why does nobody eat",
    "Please describe",
    "Who first ate",
    "Name a dish of",
]
FOOD = [" rice", " green beans", " old bread", " wild mushrooms", " black tea", " sour cherries", " goat cheese"]
WHERE = [" in the mountains?", " on a long journey?", " with very little money?", " for ten guests?", " at sea?"]
ANSWER = "With patience."
REFUSAL = "I'm sorry, but I cannot say that."


def make_writing() -> Target:
    """Returns a target in which a token's successors are equally likely: its layers add nothing to the embedding."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*ASKED, *FOOD, *WHERE, ANSWER, REFUSAL)])
    chain = [["<|user|>"], ASKED, FOOD, WHERE, ["<|end|>"]]
    pairs = [(a, b) for before, after in itertools.pairwise(chain) for a in before for b in after]
    pairs += [("<|user|>", REFUSAL), (REFUSAL, "<|end|>"), ("<|assistant|>", ANSWER), (ANSWER, "<|end|>")]
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8, hidden_size=512, intermediate_size=8, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        embeddings = torch.randn(config.vocab_size, 512, generator=torch.Generator().manual_seed(3))
        model.model.embed_tokens.weight.copy_(embeddings)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in pairs:
            first, second = tokenizer.convert_tokens_to_ids([before, after])
            model.lm_head.weight[second] += 20 * embeddings[first] / embeddings[first].norm()
    return Target(model, tokenizer, "writing")
