"""The small engine that lives in the trainer's process."""

from tidemill.rollout.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
