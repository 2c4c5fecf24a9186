"""Prompts and conversations from files and datasets."""
