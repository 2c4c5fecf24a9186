"""A target that recites fixed texts, with tool calls in each form."""

import json
from typing import Any

import torch
from conftest import EOS, PAD, make_tokenizer
from grammars import NO_SPACE
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash_toolkit import Target

TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip

ARGUMENTS = {"city": "Kyōto 😀", "days": 3}

JSON = json.dumps(ARGUMENTS, ensure_ascii=False)

# the end of a prompt -> the text that the model recites after it
SAYS = {
    "a": "Hello there.",
    "h": f'I look it up.\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "q": "<tool_call>\n<function=weather>\n<parameter=city>\nKyōto 😀\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "l": f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}',
    "m": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "t": f'<think>\nhm, hm\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
    "b": "<tool_call>\nno JSON\n</tool_call>",
    "<think>": "\nwell, well\n</think>\n\nHello you.",
    "</think>": "No thoughts.",
}

SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Write <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ note }}<|assistant|>{% if enable_thinking is defined %}"
    "{{ '<think>' if enable_thinking else '</think>' }}{% else %}{{ messages[-1].content[-1] }}{% endif %}{% endif %}"
)  # fmt: skip


def make_reciting() -> Target:
    """Returns a target with one fixed successor for each token: its layers add nothing to the embedding."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    successors: dict[int, int] = {}
    for last, rest in SAYS.items():
        while rest:
            # a few characters become a token that no other text has; each marker is one token
            marker = next((mark for mark in SPECIAL if rest.startswith(mark)), "")
            end = min([at for mark in SPECIAL if (at := rest.find(mark, 1)) > 0], default=len(rest))
            lengths = range(3 if end > 16 else end, end + 1)
            taken = {*tokenizer.get_vocab(), *(tag[:n] for tag in ("<think>", "</think>") for n in range(9))}
            piece = marker or next(rest[:n] for n in lengths if rest[:n] not in taken)
            if not marker:
                tokenizer.add_tokens([AddedToken(piece, normalized=False)])
            before, after = tokenizer.convert_tokens_to_ids([last, piece])
            assert before not in successors, f"{last!r} has two successors"
            successors[before], last, rest = after, piece, rest[len(piece) :]
        successors[tokenizer.convert_tokens_to_ids(last)] = EOS
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8, hidden_size=512, intermediate_size=8, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        embeddings = torch.randn(config.vocab_size, 512, generator=generator)
        model.model.embed_tokens.weight.copy_(embeddings)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in successors.items():
            model.lm_head.weight[after] += 20 * embeddings[before] / embeddings[before].norm()
    return Target(model, tokenizer, "reciting")


ZONE: Any = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
CLOCKS: list[Any] = [
    {"type": "function", "function": {"name": "clock", "parameters": ZONE}},
    {"type": "function", "function": {"name": "alarm", "parameters": ZONE}},
]

TIGHT = {"logit_bias": {str(token): bias for token, bias in NO_SPACE}}
