"""dflash-train: from a target model to a drafter checkpoint."""

from dflash_toolkit.threads import wait_passively

wait_passively()  # before anything here imports torch
