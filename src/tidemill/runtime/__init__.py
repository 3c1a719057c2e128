"""Wiring: the only place where threads, processes and models meet the controller. What they run is in `jobs`."""
