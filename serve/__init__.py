"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""

from dflash_toolkit.threads import wait_passively

wait_passively()  # before anything here imports torch
