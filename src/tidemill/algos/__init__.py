"""Advantages, losses, corrections and KL estimates: pure functions on tensors, and literal registries of them."""
