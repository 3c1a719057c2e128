"""`tidemill plan memory`: bytes per role and per GPU, and the number of GPUs that they need."""
