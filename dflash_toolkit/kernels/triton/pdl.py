"""What kernels do where a launch may overlap the one before it; `launch.pdl` says how they have to.

PDL is false where the device or the interpreter has no such launches.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Every program calls it before it touches what another launch reads or writes, and none leaves without it: the end
    of this launch has to mean that of all before it."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next launch may start; called once this one's own loads are under way."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
