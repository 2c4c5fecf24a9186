"""What DFlash 2 adds to a DFlash drafter, either part by itself: convolutions in its blocks, a selector of tokens."""
