"""Runs code that nobody has checked, such as a model's, where it can neither read nor change the machine."""

from tidemill.sandbox.open_sandbox import open_sandbox
from tidemill.sandbox.records import Finished, Limits, Sandbox, SandboxError, SandboxLostError, Snapshot

__all__ = ["Finished", "Limits", "Sandbox", "SandboxError", "SandboxLostError", "Snapshot", "open_sandbox"]
