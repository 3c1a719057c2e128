"""`tidemill calibrate`: a profile of engine, trainer and controller, fitted to the logs of a run."""
