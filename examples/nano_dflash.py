"""DFlash decoding in one file that reads from top to bottom; the engine does the same with kernels and graphs.

python examples/nano_dflash.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 "Why is the sky blue?"

A target writes one token in each pass. A drafter proposes a whole block in one cheap pass, and the target checks the
block in one pass. The tokens that the target would have written itself stay, and the target adds one more. So the
answer is the target's own, and most passes give several tokens. (DFlash: arXiv 2602.06036)

The parts, in order:

1. layers       Llama and Qwen3 layers, which the drafter has too: norm, rope, attention, MLP
2. paged cache  keys and values in pages of 16 tokens; each request has a list of pages
3. target       ragged rows of several requests in one pass; the outputs of some layers are features
4. drafter      reads the features of the text, and fills a block of masks
5. decoding     draft a block for each request, verify all blocks in one pass, keep what is right
6. loading      config.json and safetensors of Hugging Face

Not included: sampling, scaled ropes, quantized weights, recurrent layers, draft trees. Decoding is greedy, and the
drafter is not batched. The file imports nothing from dflash_toolkit.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

PAGE = 16  # tokens per page of the cache

# ---- 1. layers -------------------------------------------------------------------------------------------------------


def norm(x, weight, eps):
    """RMSNorm: divides x by its root mean square, in fp32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x, positions, theta):
    """Turns the pairs (i, i + H / 2) of x [T, heads, H] by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device).float() / half)
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(q, k, v, mask):
    """Softmax attention of q [Q, N, H] over k and v [K, G, H]; `mask` [Q, K] marks the visible keys."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)  # [Q, N * H]


class Weights:
    """The tensors of a checkpoint whose names begin with a prefix, and the sizes of its configuration."""

    def __init__(self, tensors, config, at=""):
        self.tensors, self.config, self.at = tensors, config, at

    def below(self, name):
        return Weights(self.tensors, self.config, f"{self.at}{name}.")

    def linear(self, name, x):
        """Multiplies x by the matrix `name`, and adds its bias if there is one."""
        return F.linear(x, self.tensors[f"{self.at}{name}.weight"], self.tensors.get(f"{self.at}{name}.bias"))

    def norm(self, name, x):
        """RMSNorm with the weight `name`; returns x if there is none (Llama has no norm of queries and keys)."""
        weight = self.tensors.get(f"{self.at}{name}.weight")
        return x if weight is None else norm(x, weight, self.config.eps)

    def heads(self, name, x):
        return self.linear(name, x).unflatten(-1, (-1, self.config.head_dim))  # [T, heads, H]

    def queries(self, x, positions):
        return rope(self.norm("q_norm", self.heads("q_proj", x)), positions, self.config.theta)

    def keys_values(self, x, positions):
        k = rope(self.norm("k_norm", self.heads("k_proj", x)), positions, self.config.theta)
        return k, self.heads("v_proj", x)

    def mlp(self, x):
        return self.linear("down_proj", F.silu(self.linear("gate_proj", x)) * self.linear("up_proj", x))


@dataclass
class Config:
    """The fields of config.json that the computation needs."""

    raw: dict

    @property
    def eps(self):
        return self.raw["rms_norm_eps"]

    @property
    def theta(self):
        given = self.raw.get("rope_parameters") or {}
        assert given.get("rope_type", "default") == "default", "scaled ropes are left out here"
        return given.get("rope_theta") or self.raw.get("rope_theta") or 10000.0

    @property
    def head_dim(self):
        return self.raw.get("head_dim") or self.raw["hidden_size"] // self.raw["num_attention_heads"]

    @property
    def layers(self):
        return self.raw["num_hidden_layers"]

    @property
    def kv_heads(self):
        return self.raw.get("num_key_value_heads") or self.raw["num_attention_heads"]


# ---- 2. paged cache --------------------------------------------------------------------------------------------------


class PagedCache:
    """Keys and values of one model for all requests: [layer, key or value, page, place, kv head, head dim].

    A request of any length takes whole pages from a common pool, so no memory is reserved for its longest answer.
    """

    def __init__(self, config, pages, like):
        shape = (config.layers, 2, pages, PAGE, config.kv_heads, config.head_dim)
        self.kv = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.free = list(range(pages))

    def reserve(self, pages, length):
        """Gives a request's list of pages room for `length` tokens."""
        while len(pages) * PAGE < length:
            pages.append(self.free.pop())

    def release(self, pages):
        self.free += pages
        pages.clear()

    def write(self, layer, pages, positions, k, v):
        """Stores keys and values at positions of a request; overwrites those of rejected tokens."""
        page, place = torch.tensor(pages, device=k.device)[positions // PAGE], positions % PAGE
        self.kv[layer, 0, page, place] = k
        self.kv[layer, 1, page, place] = v

    def read(self, layer, pages, length):
        """Returns the first `length` keys and values of a request."""
        k, v = self.kv[layer][:, pages].flatten(1, 2)[:, :length]
        return k, v


# ---- 3. target -------------------------------------------------------------------------------------------------------


class Target:
    def __init__(self, tensors, config, pages):
        self.config, self.weights = config, Weights(tensors, config, "model.")
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)  # tied if it is missing
        self.cache = PagedCache(config, pages, self.embedding)

    def forward(self, requests, rows, taps):
        """Runs the new tokens of several requests, of different lengths, as one row of tokens.

        Projections do not depend on which request a token belongs to. Attention does, so it runs request by request.

        Args:
            rows: the new tokens of each request, which follow the `length` tokens that are in the cache.
            taps: layers with the outputs (features) that the drafter reads.

        Returns:
            For each request, the target's next token after each new token, and features [tokens, taps * D].
        """
        device, counts = self.embedding.device, [len(row) for row in rows]
        ids = torch.tensor([token for row in rows for token in row], device=device)
        places = [torch.arange(r.length, r.length + n, device=device) for r, n in zip(requests, counts, strict=True)]
        positions = torch.cat(places)
        for request, count in zip(requests, counts, strict=True):
            self.cache.reserve(request.pages, request.length + count)
        x, features = self.embedding[ids], {}
        for i in range(self.config.layers):
            layer = self.weights.below(f"layers.{i}")
            attention, mlp = layer.below("self_attn"), layer.below("mlp")
            normed = layer.norm("input_layernorm", x)
            q = attention.queries(normed, positions)
            k, v = attention.keys_values(normed, positions)
            mixed = []
            for request, place, *own in zip(requests, places, *(t.split(counts) for t in (q, k, v)), strict=True):
                own_q, own_k, own_v = own
                self.cache.write(i, request.pages, place, own_k, own_v)
                seen = request.length + len(place)
                causal = torch.arange(seen, device=device) <= place[:, None]
                mixed.append(attend(own_q, *self.cache.read(i, request.pages, seen), causal))
            x = x + attention.linear("o_proj", torch.cat(mixed))
            x = x + mlp.mlp(layer.norm("post_attention_layernorm", x))
            if i in taps:
                features[i] = x
        chosen = F.linear(self.weights.norm("norm", x), self.head).argmax(-1)
        tapped = torch.cat([features[i] for i in taps], dim=-1)
        return [part.tolist() for part in chosen.split(counts)], tapped.split(counts)


# ---- 4. drafter ------------------------------------------------------------------------------------------------------


class Drafter:
    """A few layers that read the target's features instead of the text; it has no embedding and no head of its own."""

    def __init__(self, tensors, config, target, pages):
        own = config.raw["dflash_config"]
        assert set(config.raw["layer_types"]) == {"full_attention"} and not config.raw.get("is_causal")
        self.config, self.target, self.weights = config, target, Weights(tensors, config)
        self.taps, self.mask, self.block_size = own["target_layer_ids"], own["mask_token_id"], own["block_size"]
        self.cache = PagedCache(config, pages, target.embedding)

    def extend(self, request, features):
        """Computes keys and values of new tokens from their features, and adds them to every layer's cache.

        The features are the context of all layers: they do not pass through the layers, so each token costs little.
        """
        positions = torch.arange(request.length, request.length + len(features), device=features.device)
        self.cache.reserve(request.draft_pages, request.length + len(features))
        context = self.weights.norm("hidden_norm", self.weights.linear("fc", features))
        for i in range(self.config.layers):
            k, v = self.weights.below(f"layers.{i}.self_attn").keys_values(context, positions)
            self.cache.write(i, request.draft_pages, positions, k, v)

    def propose(self, request, last):
        """Drafts block_size - 1 tokens after `last` in one pass.

        The block is the last token and masks. Attention is not causal: every slot sees the text and the whole block,
        and all slots are predicted at the same time.
        """
        ids = torch.tensor([last] + [self.mask] * (self.block_size - 1), device=self.target.embedding.device)
        positions = torch.arange(request.length, request.length + self.block_size, device=ids.device)
        x = self.target.embedding[ids]
        for i in range(self.config.layers):
            layer = self.weights.below(f"layers.{i}")
            attention, mlp = layer.below("self_attn"), layer.below("mlp")
            normed = layer.norm("input_layernorm", x)
            own, context = (
                attention.keys_values(normed, positions),
                self.cache.read(i, request.draft_pages, request.length),
            )
            k, v = (torch.cat(pair) for pair in zip(context, own, strict=True))  # the block's own are not stored
            x = x + attention.linear("o_proj", attend(attention.queries(normed, positions), k, v, None))
            x = x + mlp.mlp(layer.norm("post_attention_layernorm", x))
        return F.linear(self.weights.norm("norm", x[1:]), self.target.head).argmax(-1).tolist()


# ---- 5. decoding -----------------------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: list
    answer: list = field(default_factory=list)
    steps: list = field(default_factory=list)  # tokens from each verification
    length: int = 0  # tokens in both caches; the last token of the answer is not in them yet
    pages: list = field(default_factory=list)
    draft_pages: list = field(default_factory=list)


@torch.inference_mode()
def generate(target, drafter, prompts, max_tokens, stop=()):
    """Decodes greedy answers to several prompts of any lengths together."""
    requests = [Request(list(prompt)) for prompt in prompts]

    # prefill: one pass over all prompts gives each request its first token and the drafter its context
    chosen, features = target.forward(requests, [r.prompt for r in requests], drafter.taps)
    for request, tokens, feature in zip(requests, chosen, features, strict=True):
        accept(drafter, request, tokens[-1:], feature, len(request.prompt))
    running = finish(requests, target, drafter, max_tokens, stop)

    while running:
        drafts = [drafter.propose(r, r.answer[-1])[: max_tokens - len(r.answer) - 1] for r in running]
        # one pass over [last token, draft] of every request gives the target's own token after each of them
        blocks = [[r.answer[-1], *draft] for r, draft in zip(running, drafts, strict=True)]
        chosen, features = target.forward(running, blocks, drafter.taps)
        for request, draft, tokens, feature in zip(running, drafts, chosen, features, strict=True):
            # the draft is right while it equals the target's choice; the target's next token comes for free
            right = 0
            while right < len(draft) and draft[right] == tokens[right]:
                right += 1
            before = len(request.answer)
            accept(drafter, request, tokens[: right + 1], feature, right + 1)
            request.answer = until_stop(request.answer, stop)
            request.steps.append(len(request.answer) - before)
        running = finish(running, target, drafter, max_tokens, stop)
    return requests


def accept(drafter, request, tokens, features, verified):
    """Keeps the first `verified` tokens that ran. Rejected ones need no clean-up: the next pass overwrites them."""
    drafter.extend(request, features[:verified])
    request.length += verified
    request.answer = request.answer + tokens


def until_stop(tokens, stop):
    """Returns the tokens up to the first one that ends an answer."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


def finish(requests, target, drafter, max_tokens, stop):
    """Frees the pages of finished requests; returns the others."""
    running = []
    for request in requests:
        if request.answer[-1] in stop or len(request.answer) >= max_tokens:
            target.cache.release(request.pages)
            drafter.cache.release(request.draft_pages)
        else:
            running.append(request)
    return running


# ---- 6. loading ------------------------------------------------------------------------------------------------------


def read(name, device, dtype):
    """Reads configuration and tensors of a Hugging Face id or directory."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {key: value.to(device, dtype) for key, value in load_file(file).items()}
    return Config(json.loads((folder / "config.json").read_text())), tensors


def load(target_name, drafter_name, device="cpu", dtype=torch.float32, cache_tokens=16384):
    """Loads a target and its drafter, each with a cache for `cache_tokens` tokens."""
    config, tensors = read(target_name, device, dtype)
    assert config.raw["model_type"] in ("llama", "qwen2", "qwen3"), config.raw["model_type"]
    target = Target(tensors, config, cache_tokens // PAGE)
    config, tensors = read(drafter_name, device, dtype)
    return target, Drafter(tensors, config, target, cache_tokens // PAGE)


def main():
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description="Answer prompts greedily with a target and its DFlash drafter.")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("prompts", nargs="+")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, drafter = load(args.target, args.drafter, device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    chats = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    for request in generate(target, drafter, ids, args.max_tokens, {tokenizer.eos_token_id}):
        steps = request.steps
        print(tokenizer.decode(request.answer, skip_special_tokens=True))
        print(f"[{len(request.answer)} tokens, {sum(steps) / len(steps) if steps else 1:.2f} in each verification]\n")


if __name__ == "__main__":
    main()
