"""Fault simulation: runs the real controller with faults drawn from a seed and checks invariants at every event.

As in FoundationDB and TigerBeetle, one seed determines everything that could differ between two runs (time, randomness,
message order, durable bytes), so a failure is replayed exactly by its seed.
"""
