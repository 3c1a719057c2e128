"""The built-in engine, which runs in the process of the trainer or a worker."""

from tidemill.rollout.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
