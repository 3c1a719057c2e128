"""Fault simulation: the real controller among faults drawn from a seed, every step of it watched.

As FoundationDB and TigerBeetle test themselves: everything that could differ between two runs (time, chance, the order
of messages, what a disk keeps) comes out of one seed, so that a failure is repeated exactly by its number.
"""
