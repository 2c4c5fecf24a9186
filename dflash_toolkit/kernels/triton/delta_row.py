"""The delta rule of one row and some columns of a head's state, in Triton, for steps of blocks and of trees.

All kernels that use it are compiled with `enable_fp_fusion=False`: the order of operations and the fused ones are those
written here, so a row has the same bits in each.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def key_parts(BLOCK_K: tl.constexpr):
    """Returns the places of four parts of a head's keys.

    A thread has products of each part, and `_products` states how it adds them. In one sum over all keys the compiler
    chooses which products it fuses with an addition, and may choose differently in another kernel.
    """
    o_k = tl.arange(0, BLOCK_K // 4)
    return (o_k, o_k + BLOCK_K // 4, o_k + BLOCK_K // 2, o_k + 3 * BLOCK_K // 4)


@triton.jit
def load_parts(p_x, o_parts, there, H_K: tl.constexpr):
    """Loads the parts of queries or keys in fp32."""
    return [tl.load(p_x + o_k, mask=(o_k < H_K) & there, other=0.0).to(tl.float32) for o_k in o_parts]


@triton.jit
def load_state(p_state, o_parts, there, H_K: tl.constexpr, H_V: tl.constexpr, POLICY: tl.constexpr):
    """Loads the parts of the columns of a state that p_state [1, columns] points to."""
    return [
        tl.load(p_state + o_k[:, None] * H_V, mask=(o_k < H_K)[:, None] & there, other=0.0, eviction_policy=POLICY)
        for o_k in o_parts
    ]


@triton.jit
def store_state(p_state, b_state, o_parts, there, H_K: tl.constexpr, H_V: tl.constexpr):
    for i in tl.static_range(4):
        mask = (o_parts[i] < H_K)[:, None] & there
        tl.store(p_state + o_parts[i][:, None] * H_V, b_state[i], mask=mask, cache_modifier=".cs")  # read in a step


@triton.jit
def _products(x, y):
    return tl.fma(x[3], y[3], tl.fma(x[2], y[2], tl.fma(x[1], y[1], x[0] * y[0])))


@triton.jit
def _unit(b_x, scale):
    """Returns a vector of length `scale`."""
    b_scale = tl.rsqrt(tl.sum(_products(b_x, b_x), axis=0) + 1e-6) * scale
    return [b_part * b_scale for b_part in b_x]


@triton.jit
def _columns(b_x, b_state):
    return [tl.broadcast_to(b_part[:, None], b_state[0].shape) for b_part in b_x]


@triton.jit
def updated(b_state, b_k, b_v, decay, beta):
    """Returns the state after a row."""
    b_keys = _columns(_unit(b_k, 1.0), b_state)
    b_old = [b_part * decay for b_part in b_state]
    b_delta = (b_v - tl.sum(_products(b_old, b_keys), axis=0)) * beta
    b_delta = tl.broadcast_to(b_delta[None, :], b_state[0].shape)
    return [
        tl.fma(b_keys[0], b_delta, b_old[0]),
        tl.fma(b_keys[1], b_delta, b_old[1]),
        tl.fma(b_keys[2], b_delta, b_old[2]),
        tl.fma(b_keys[3], b_delta, b_old[3]),
    ]


@triton.jit
def output_of(b_state, b_q, scale):
    """Returns a row's output from the state after it."""
    return tl.sum(_products(b_state, _columns(_unit(b_q, scale), b_state)), axis=0)


@triton.jit
def delta_row(p_k, p_v, p_gate, row, there, o_parts, o_v, C, N, H_K: tl.constexpr, H_V: tl.constexpr):
    """Loads key, columns o_v of the value, decay and beta of a row."""
    b_k = load_parts(p_k + row * C, o_parts, there, H_K)
    b_v = tl.load(p_v + row * C + o_v, mask=(o_v < H_V) & there, other=0.0).to(tl.float32)
    decay = tl.load(p_gate + row * 2 * N, mask=there, other=0.0)
    beta = tl.load(p_gate + row * 2 * N + N, mask=there, other=0.0)
    return b_k, b_v, decay, beta
