"""Runs coroutines of tests in virtual time."""

from __future__ import annotations

from tidemill.sim.virtual_time import Deadlock, VirtualLoop, run_virtual

__all__ = ["Deadlock", "VirtualLoop", "run_virtual"]
