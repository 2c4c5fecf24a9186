"""dflash-serve: an OpenAI-compatible server for a target and its drafter."""
