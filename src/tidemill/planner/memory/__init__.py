"""`tidemill plan memory`: bytes per role and per GPU, how many GPUs they need, and why fewer do not do."""
