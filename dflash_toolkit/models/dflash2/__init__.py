"""The additions of DFlash 2 to a DFlash drafter, usable separately: convolutions in blocks, and a token selector."""
