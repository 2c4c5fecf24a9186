"""The passes that a runner captures, launches and reads: prefills, steps over blocks, and steps over draft trees."""
