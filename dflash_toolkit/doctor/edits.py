"""Known ways to store weights wrongly, each with the edit that corrects it.

The edits are tried against the hashes that the export recorded, which gives certainty, and, without a record, by
acceptance like any other setting.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.dflash.architecture import Swap
from ..models.dflash.config import DrafterConfig

Tensors = Mapping[str, Tensor]
EVERY_ORDER = 4  # up to this many things are tried in every order (23 orders); more only in likely orders


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A correction of stored weights."""

    check: str
    words: str  # describes the correction
    remedy: str
    apply: Callable[[Tensors], dict[str, Tensor]]  # tensors that stay are the same objects


def likely_orders(count: int) -> list[tuple[int, ...]]:
    """Returns other orders of `count` things: all of a few; of more, reversed, two exchanged and rotated."""
    first = tuple(range(count))
    if count <= EVERY_ORDER:
        return [order for order in itertools.permutations(first) if order != first]
    found = [first[::-1]]
    for i, j in itertools.combinations(first, 2):
        swapped = list(first)
        swapped[i], swapped[j] = j, i
        found.append(tuple(swapped))
    found += [first[shift:] + first[:shift] for shift in range(1, count)]
    return list(dict.fromkeys(found))


def edits(config: DrafterConfig) -> Iterator[Edit]:
    """Yields every edit that is possible for a drafter of this shape."""
    yield from layer_orders(config)
    yield from rope_rows(config)
    yield exchanged("gate and up", "mlp.gate_proj.weight", "mlp.up_proj.weight", config.num_layers)
    yield exchanged("q and k norms", "self_attn.q_norm.weight", "self_attn.k_norm.weight", config.num_layers)
    yield plus_one()
    for part in config.architecture.parts:
        if part.is_in(config.sizes):
            yield from map(swapped, part.swaps)


def layer_orders(config: DrafterConfig) -> Iterator[Edit]:
    """Yields the layers in other orders."""
    for order in likely_orders(config.num_layers):
        yield layer_order(order)


def layer_order(order: Sequence[int]) -> Edit:
    """Returns the edit that reads layer i from stored layer `order[i]`."""

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        found = dict(tensors)
        for name in tensors:
            parts = name.split(".")
            if parts[0] == "layers" and parts[1].isdecimal() and int(parts[1]) < len(order):
                source = ".".join(["layers", str(order[int(parts[1])]), *parts[2:]])
                if source in tensors:
                    found[name] = tensors[source]
        return found

    moved = [i for i, source in enumerate(order) if i != source]
    if len(moved) == 2:
        words = f"layers.{moved[0]} and layers.{moved[1]} exchanged"
        remedy = f"layers.{moved[0]} and layers.{moved[1]} are swapped: exchange the names of their tensors"
    else:
        words = f"layers in the order {list(order)}"
        remedy = f"the layers are stored in another order: name layers.{list(order)} layers.{list(range(len(order)))}"
    return Edit("layer order", words, f"{remedy} in the weights, or export again", apply)


def rope_rows(config: DrafterConfig) -> Iterator[Edit]:
    """Yields edits of the rows of q_proj and k_proj (and q_norm and k_norm): interleaved pairs against halves."""
    half = torch.arange(config.head_dim // 2)
    split = torch.cat([2 * half, 2 * half + 1])  # row i of a head is stored row split[i]
    joined = torch.stack([half, half + config.head_dim // 2], dim=1).flatten()
    for order, stored, wanted in ((split, "interleaved", "in halves"), (joined, "split", "interleaved")):
        for norms in (True, False):
            which = "q_proj, k_proj, q_norm and k_norm" if norms else "q_proj and k_proj"
            back = "de-interleave" if stored == "interleaved" else "interleave"
            remedy = (
                f"the rows of {which} are stored for a RoPE that turns "
                f"{'adjacent pairs, as GGUF files of Llama are' if order is split else 'halves'}: "
                f"{back} the {config.head_dim} rows of every head in the weights, or export again"
            )
            words = f"rows of {which} {wanted}"
            yield Edit("rope rows", words, remedy, _reordered(order, config.head_dim, norms))


def _reordered(order: Tensor, head_dim: int, norms: bool) -> Callable[[Tensors], dict[str, Tensor]]:
    parts = ("q_proj", "k_proj", "q_norm", "k_norm") if norms else ("q_proj", "k_proj")

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            if set(name.split(".")) & set(parts) and tensor.shape[0] % head_dim == 0:
                heads = tensor.unflatten(0, (-1, head_dim))
                found[name] = heads.index_select(1, order.to(tensor.device)).flatten(0, 1)
        return found

    return apply


def exchanged(check: str, one: str, other: str, layers: int) -> Edit:
    """Returns the edit that exchanges two tensors of every layer."""

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        found = dict(tensors)
        for i in range(layers):
            a, b = f"layers.{i}.{one}", f"layers.{i}.{other}"
            if a in tensors and b in tensors and tensors[a].shape == tensors[b].shape:
                found[a], found[b] = tensors[b], tensors[a]
        return found

    first, second = (name.removesuffix(".weight").split(".")[-1] for name in (one, other))
    remedy = f"{first} and {second} are swapped: exchange the names of these tensors in every layer, or export again"
    return Edit(check, f"{first} and {second} exchanged", remedy, apply)


def swapped(swap: Swap) -> Edit:
    """Returns the edit that exchanges two tensors of the drafter's architecture."""
    one, other = swap.tensors

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors) | {one: tensors[other], other: tensors[one]}

    remedy = f"the {swap.check} are swapped: exchange the names {one} and {other}, or export again"
    return Edit(swap.check, f"{swap.what} exchanged", remedy, apply)


def plus_one() -> Edit:
    """Returns the edit for norms stored as Gemma stores them: w - 1, for a network that multiplies by 1 + w."""

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        return {n: (t.float() + 1).to(t.dtype) if is_norm(n) else t for n, t in tensors.items()}

    remedy = "the norm weights are stored minus one: add 1 to every norm's weight, or export again"
    return Edit("norm weights", "1 added to every norm's weight", remedy, apply)


def is_norm(name: str) -> bool:
    """Whether a tensor is the weight of an RMSNorm."""
    return name.endswith("norm.weight")


def renamed(names: Mapping[str, str]) -> Edit:
    """Returns the edit for tensors stored under others' names: `names` is name -> stored name."""

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors) | {name: tensors[source] for name, source in names.items()}

    name, source = next(iter(names.items()))
    more = f" ({len(names)} such tensors in all)" if len(names) > 2 else ""
    remedy = (
        f"the tensor exported as {name} is stored as {source}{more}: exchange the names in the weights, or export again"
    )
    return Edit("weights", f"{len(names)} tensors under their own names", remedy, apply)
