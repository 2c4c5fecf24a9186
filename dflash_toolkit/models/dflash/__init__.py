"""The DFlash drafter: its network and its checkpoint."""
