"""Simulated factories of what takes time and machines, for running the real controller under a virtual clock."""
