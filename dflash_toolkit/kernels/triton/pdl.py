"""Programmatic dependent launch: a launch may overlap the one before it. `launch.pdl` states the rules.

PDL is false if the device or the interpreter has no such launches.
"""

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Waits for the launch before this one.

    Every program calls it before it touches memory that another launch reads or writes, and before it exits: the end of
    this launch must imply the end of all launches before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next launch start. Called after this launch has issued its own loads."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
