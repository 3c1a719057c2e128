"""Wiring: the only place where threads, processes and files meet the controller."""
