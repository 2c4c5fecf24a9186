"""Operations of a persistent Gluon kernel on the whole grid: barriers, dependent launches, time stamps."""

# mypy: disable-error-code="no-untyped-def"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def join(sync_p, FENCE: gl.constexpr):
    """Waits until every program of the grid arrives here. Earlier writes of each are then visible to all.

    FENCE: also to asynchronous loads. All warps of the calling partition take part; it must have the program's first
    threads, and it uses hardware barrier 15.
    """
    if FENCE:
        async_sees_memory()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first, early;
        .reg .u32 seen;
        mov.u32 seen, %tid.x;
        setp.eq.u32 first, seen, 0;
        setp.ge.u32 early, seen, 32;
        bar.sync 15, $3;
        @early bra DONE;
        @first red.release.gpu.global.add.u32 [$1], 1;
        AGAIN: ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 early, seen, $2;
        @early bra AGAIN;
        DONE: barrier.sync 15, $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [sync_p, gl.num_programs(0), 32 * gl.num_warps()],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    if FENCE:
        async_sees_memory()


@gluon.jit
def _do(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def async_sees_memory():
    _do("fence.proxy.async.global; mov.u32 $0, 0;")


@gluon.jit
def grid_wait():
    _do("griddepcontrol.wait; mov.u32 $0, 0;")


@gluon.jit
def grid_launch():
    _do("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def stamp(trace_p, phase: gl.constexpr, PHASES: gl.constexpr):
    """Stores the time in ns at which this program got here to trace [programs, PHASES]; nothing if PHASES is 0."""
    if PHASES > 0:
        now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
        gl.store(trace_p + gl.program_id(0) * PHASES + phase, now)
