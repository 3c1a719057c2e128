"""Environments and tools of agents: what users write, and the processes that run it."""
