"""Training: the policy's step, its optimizer and its checkpoints."""
