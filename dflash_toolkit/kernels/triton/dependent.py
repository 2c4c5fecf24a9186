"""What kernels of a step do where a launch may overlap the one before it; `launch.pdl` says how they have to.

PDL is `launch.LATE`, `launch.EARLY` or 0, where the device or the interpreter has no such launches.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Every program calls it before it touches what another launch reads or writes, and none leaves without it: the end
    of this launch has to mean that of all before it."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next launch may start, unless it may already; called once this one's own loads are under way."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pieces_ahead(i_n, N, K, first, last, AHEAD, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr):
    """Where in a weight the pieces begin that `ask_ahead` asks for, and their sizes, int64 and int32 [2 * BLOCK_N], in
    bytes; a number takes WIDTH."""
    o_i = tl.arange(0, 2 * BLOCK_N)  # two pieces of a row, so that every thread has one
    o_w = tl.minimum(i_n * BLOCK_N + o_i // 2, N - 1)
    if HALVES:
        o_w = (o_w % 2) * (N // 2) + o_w // 2
    o_from = first * WIDTH + o_i % 2 * (AHEAD // 2)
    b_size = tl.maximum(tl.minimum(last * WIDTH - o_from, AHEAD // 2), 0)
    return o_w.to(tl.int64) * K * WIDTH + o_from, b_size


@triton.jit
def ask_ahead(
    w_p, i_n, N, K, first, last, AHEAD, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Have L2 load the first AHEAD bytes of columns first..last of rows i_n * BLOCK_N... of a weight [N, K].

    To be called before the wait, as no launch writes weights. AHEAD is a multiple of 32, and rows begin at multiples of
    16 bytes. HALVES: the rows are gates and ups in turn, and the weight holds all gates, then all ups.
    """
    if PDL:
        width: tl.constexpr = w_p.dtype.element_ty.primitive_bitwidth // 8
        if AHEAD > 0:  # as the lanes of a warp ask one after another, even for nothing
            o_from, b_size = pieces_ahead(i_n, N, K, first, last, AHEAD, width, BLOCK_N, HALVES)
            tl.inline_asm_elementwise(
                """{
                .reg .pred some;
                setp.ne.u32 some, $2, 0;
                @some cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }""",
                "=r,l,r",
                [w_p.to(tl.int64) + o_from, b_size],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
