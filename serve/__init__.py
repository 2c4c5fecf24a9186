"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""

from dflash_toolkit.threads import wait_passively

if __name__ == "serve":  # the folder at the top of a checkout; as a second module, its classes would differ
    raise ImportError("import dflash_toolkit.serve instead of serve")

wait_passively()  # before anything here imports torch
