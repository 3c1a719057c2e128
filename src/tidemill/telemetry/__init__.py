"""A run's story: events, metrics, samples, the view, optional sinks, the summary and the report. Imports no torch."""
