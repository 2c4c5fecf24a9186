"""Responses of the target to prompts: who generates them, and the files and token ids they become."""
