"""Decodes prompts with a drafter and without one, and counts what was accepted."""
