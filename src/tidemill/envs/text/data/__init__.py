"""Rows from files: prompts with answers, demonstrations, preference pairs."""

from __future__ import annotations

from tidemill.envs.text.data.examples import Examples, load_demonstrations, load_pairs

__all__ = ["Examples", "load_demonstrations", "load_pairs"]
