"""Mistakes of programs that convert weights from another layout, each with the edit that corrects it.

Rows and columns of matrices are views of several axes; a converter that reads these in another order mixes them up.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..models.dflash.config import DrafterConfig
from .edits import Edit, Tensors, exchanged

Change = Callable[[Tensor], Tensor]


def conversions(config: DrafterConfig) -> Iterator[Edit]:
    """Yields every edit that is possible for a drafter of this shape."""
    yield exchanged("k and v", "self_attn.k_proj.weight", "self_attn.v_proj.weight", config.num_layers)
    yield from query_heads(config)
    yield from feature_blocks(config)
    if config.architecture.around_spec(config):
        yield from kernels(config)


def _changed(check: str, words: str, remedy: str, changes: dict[str, Change]) -> Edit:
    """Returns the edit that changes each tensor with a name that ends with a key."""

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        found = dict(tensors)
        for name, tensor in tensors.items():
            for ending, change in changes.items():
                if name.endswith(ending):
                    found[name] = change(tensor).contiguous()
        return found

    return Edit(check, words, f"{remedy} in the weights, or convert again", apply)


def query_heads(config: DrafterConfig) -> Iterator[Edit]:
    """Yields the query heads in other orders, with and without the columns of o_proj that belong to them."""
    count, groups = config.num_heads, config.num_kv_heads
    heads = torch.arange(count)
    orders = {
        "by group of keys": heads.view(-1, groups).T.flatten(),
        "interleaved over the groups of keys": heads.view(groups, -1).T.flatten(),
        "reversed": heads.flip(0),
    }
    tried: list[list[int]] = [heads.tolist()]
    for words, order in orders.items():
        if order.tolist() in tried:
            continue
        tried.append(order.tolist())

        def rows(weight: Tensor, order: Tensor = order) -> Tensor:
            return weight.unflatten(0, (count, -1))[order.to(weight.device)].flatten(0, 1)

        def columns(weight: Tensor, order: Tensor = order) -> Tensor:
            return weight.unflatten(1, (count, -1))[:, order.to(weight.device)].flatten(1)

        query: dict[str, Change] = {"self_attn.q_proj.weight": rows, "self_attn.q_proj.bias": rows}
        output: dict[str, Change] = {"self_attn.o_proj.weight": columns}
        for which, changes in (("q_proj", query), ("q_proj and o_proj", query | output), ("o_proj", output)):
            remedy = f"the query heads of {which} are stored in another order: put them in the order {order.tolist()}"
            yield _changed("q heads", f"heads of {which} {words}", remedy, changes)


def feature_blocks(config: DrafterConfig) -> Iterator[Edit]:
    """Yields the columns of fc, [D, taps * D], read as other axes."""
    taps, size = len(config.target_layer_ids), config.hidden_size

    def transposed(weight: Tensor) -> Tensor:
        return weight.view(size, taps, size).permute(2, 1, 0).reshape(weight.shape)

    def separated(weight: Tensor) -> Tensor:
        return weight.view(size, size, taps).transpose(1, 2).reshape(weight.shape)

    remedy = "the block of every tap in fc.weight is transposed: transpose each block of [D, D]"
    yield _changed("fc blocks", "every block of fc transposed", remedy, {"fc.weight": transposed})
    if taps > 1:
        remedy = "the columns of fc.weight alternate between the taps: store the columns of one tap after another"
        yield _changed("fc blocks", "columns of fc by tap", remedy, {"fc.weight": separated})


def kernels(config: DrafterConfig) -> Iterator[Edit]:
    """Yields the convolutions' taps and sides in other orders, their rows as other axes, and the two exchanged.

    A base kernel is [2 sides, taps, D]; the rows of a kernel projection are [2 sides, taps, groups].
    """
    taps = config.conv_kernel_size
    axes = (2, taps, -1)
    base, projection = "_conv.base_kernel", "_conv.kernel_projection.weight"
    for check, what, axis in (
        ("convolution taps", "the taps of the convolutions are stored in reverse", 1),
        ("convolution sides", "the convolutions before and after the sublayers are stored in reverse", 0),
    ):
        if axis == 1 and taps == 1:
            continue

        def kernel(weight: Tensor, axis: int = axis) -> Tensor:
            return weight.flip(axis)

        def rows(weight: Tensor, axis: int = axis) -> Tensor:
            return weight.unflatten(0, axes).flip(axis).flatten(0, 2)

        both: dict[str, Change] = {base: kernel, projection: rows}
        for changed in (both, (base,), (projection,)):
            which = " and ".join(name.split(".")[1] for name in changed)
            remedy = f"{what} in {which}: reverse that axis, of sizes [2, {taps}, ...],"
            yield _changed(check, f"{which} reversed", remedy, {name: both[name] for name in changed})
    yield from kernel_rows(config, base, projection)
    parts = [f".{name.partition('.')[2]}" for name in (base, projection)]
    names = [(f"attention_conv{part}", f"mlp_conv{part}") for part in parts]
    exchanges = [exchanged("convolution places", *pair, config.num_layers) for pair in names]

    def apply(tensors: Tensors) -> dict[str, Tensor]:
        found = dict(tensors)
        for edit in exchanges:
            found = edit.apply(found)
        return found

    remedy = "attention_conv and mlp_conv are swapped: exchange the names of their tensors in every layer"
    words = "attention_conv and mlp_conv exchanged"
    yield Edit("convolution places", words, f"{remedy}, or convert again", apply)


def kernel_rows(config: DrafterConfig, base: str, projection: str) -> Iterator[Edit]:
    """Yields the axes of kernel rows in other orders."""
    names = ("sides", "taps", "groups")
    sizes = (2, config.conv_kernel_size, config.hidden_size // config.conv_group_size)
    for order in ((0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        stored = [sizes[axis] for axis in order]
        back = sorted(range(3), key=order.__getitem__)

        def rows(weight: Tensor, stored: list[int] = stored, back: list[int] = back) -> Tensor:
            return weight.unflatten(0, stored).permute(*back, 3).flatten(0, 2)

        def kernel(weight: Tensor) -> Tensor:
            return weight.reshape(weight.shape[1], weight.shape[0], -1).transpose(0, 1)

        labels = ", ".join(names[axis] for axis in order)
        remedy = f"the rows of kernel_projection are stored as [{labels}]: store them as [{', '.join(names)}]"
        yield _changed("kernel rows", f"rows of kernel_projection from [{labels}]", remedy, {projection: rows})
        if order == (1, 0, 2):
            remedy = "base_kernel and kernel_projection are stored as [taps, sides, ...]: store them as [sides, taps]"
            both: dict[str, Change] = {base: kernel, projection: rows}
            yield _changed("kernel rows", "kernels from [taps, sides]", remedy, both)
