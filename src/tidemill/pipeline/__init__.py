"""Stages of a recipe: what is finished, what is due, and running it in order."""
