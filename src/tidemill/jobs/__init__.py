"""What a command or a stage of a pipeline does: train, serve, evaluate, generate, export. Each runs on a `runtime`."""
