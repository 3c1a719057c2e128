"""Simulated twins of what takes time and machines, for running the real controller under a virtual clock."""
