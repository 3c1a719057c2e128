"""Generating: workers, sampling and engines."""
