"""dflash-serve: a target and its drafter behind an OpenAI-compatible endpoint."""
