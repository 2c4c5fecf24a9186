"""Choice of prompts, without duplicates."""
