"""Draft trees on the device: what the drafters of a batch propose, and the rows of a pass that verifies some of it."""

from dataclasses import dataclass

from torch import Tensor

MOST_NODES = 64  # nodes of a request


@dataclass(frozen=True, slots=True)
class Trees:
    """Up to N nodes after the anchor of each of B requests, likeliest path first; depths are 1 to K.

    A place is a node's number within its request: the anchor has 0 and node i has i + 1. A parent comes before its
    children, so the places of a path ascend, and none is below its depth.
    """

    tokens: Tensor  # int64 [B, N]
    parents: Tensor  # int32 [B, N], places
    depths: Tensor  # int32 [B, N]; 0: there is neither this node nor a later one
    log_probs: Tensor  # fp32 [B, N], of the path from the anchor
    paths: Tensor  # int32 [B, N + 1, K + 1], of each place those of the path to it, its own the last; after that any
    ancestors: Tensor  # int64 [B, N], bit i: node i is on the path, the node itself too


@dataclass(frozen=True, slots=True)
class TreeRows:
    """M rows of a pass: of each request its anchor and the nodes that are verified, then padding.

    Request b has rows starts[b] to starts[b + 1] - 1, in the order of their places. Keys and values of place i are
    stored at position lengths[b] + i; accepted rows are moved to their own positions later.
    """

    starts: Tensor  # int32 [B + 1]
    requests: Tensor  # int32 [M]; -1: padding
    parents: Tensor  # int32 [M], rows; of an anchor and of padding the row itself
    depths: Tensor  # int32 [M]; 0 of an anchor and of padding
    tokens: Tensor  # int64 [M]; 0 of padding
    positions: Tensor  # int32 [M], lengths[b] + depth; 0 of padding
    slots: Tensor  # int32 [M], of the cache; of padding 0, in the null block
    log_probs: Tensor  # fp32 [M]; 0 of an anchor and of padding
    ancestors: Tensor  # int64 [M], as of `Trees`; 0 of an anchor and of padding
