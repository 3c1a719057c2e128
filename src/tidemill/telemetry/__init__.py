"""Logs, metrics, samples, views, sinks, summary and report of a run. Imports no torch."""
