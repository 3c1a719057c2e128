"""What machines and models can do, as formulas: memory, FLOPs, bytes and seconds. Pure; no torch, no clock."""
