"""The target's responses to prompts: decoding backends, files and token ids."""
