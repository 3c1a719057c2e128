"""OSMO as a target of `tidemill deploy`: a task for each stage of a recipe."""
