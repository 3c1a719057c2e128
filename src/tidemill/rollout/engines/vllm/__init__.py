"""vLLM as an engine of workers, in the worker's own process."""
