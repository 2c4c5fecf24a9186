"""Draft trees on the device: the nodes that drafters propose, and the rows of a pass that verifies some of them."""

from dataclasses import dataclass

from torch import Tensor

MOST_NODES = 64  # maximum nodes of a request


@dataclass(frozen=True, slots=True)
class Trees:
    """Up to N nodes after the anchor of each of B requests, most probable path first; depths are 1 to K.

    A place is a node's number within its request: the anchor has 0 and node i has i + 1. A parent comes before its
    children, so the places of a path ascend, and none is below its depth.
    """

    tokens: Tensor  # int64 [B, N]
    parents: Tensor  # int32 [B, N], places
    depths: Tensor  # int32 [B, N]; 0: there is neither this node nor a later one
    log_probs: Tensor  # fp32 [B, N], log-probability of the path from the anchor
    paths: Tensor  # int32 [B, N + 1, K + 1], places of the path to each place, which is the last; the rest is undefined
    ancestors: Tensor  # int64 [B, N], bit i: node i is on the path, or is the node itself


@dataclass(frozen=True, slots=True)
class TreeRows:
    """M rows of a pass: each request's anchor and verified nodes, then padding.

    Request b has rows starts[b] to starts[b + 1] - 1, in the order of their places. Keys and values of place i are
    stored at position lengths[b] + i; accepted rows are moved to their own positions later.
    """

    starts: Tensor  # int32 [B + 1]
    requests: Tensor  # int32 [M]; -1: padding
    parents: Tensor  # int32 [M], rows; an anchor and padding have their own row
    depths: Tensor  # int32 [M]; 0 for an anchor and padding
    tokens: Tensor  # int64 [M]; 0 for padding
    positions: Tensor  # int32 [M], lengths[b] + depth; 0 for padding
    slots: Tensor  # int32 [M], cache slots; 0 for padding, in the null block
    log_probs: Tensor  # fp32 [M]; 0 for an anchor and padding
    ancestors: Tensor  # int64 [M], as in `Trees`; 0 for an anchor and padding
