"""Tidemill: reinforcement-learning post-training on compute that comes and goes."""

__version__ = "0.1.0"
