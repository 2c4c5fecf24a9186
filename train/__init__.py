"""dflash-train: from a target model to a drafter checkpoint."""

from dflash_toolkit.threads import wait_passively

if __name__ == "train":  # the folder at the top of a checkout; as a second module, its classes would differ
    raise ImportError("import dflash_toolkit.train instead of train")

wait_passively()  # before anything here imports torch
