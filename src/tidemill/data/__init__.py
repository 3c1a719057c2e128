"""Rows, prompts in a reproducible order, and their splits."""
