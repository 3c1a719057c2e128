"""What a model is used for outside of a training run: generated data, evaluation, export."""
