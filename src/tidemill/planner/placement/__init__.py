"""`tidemill plan placement`: machines for training and for generation, and the GPUs of each part."""
