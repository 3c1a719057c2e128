"""`tidemill plan placement`: on which machines to train and to generate, and over how many GPUs each."""
