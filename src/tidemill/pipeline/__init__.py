"""Pipelines: planning the stages of a recipe, running them in order, and reporting on them."""
