"""The models: a target read from Hugging Face files, and the drafters that belong to one."""
