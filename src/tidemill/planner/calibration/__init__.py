"""A profile of engine, trainer and controller, fitted to the logs of a real run."""
