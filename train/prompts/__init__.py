"""Which prompts are answered: chosen, without duplicates."""
