"""Rendering of a recipe as documents for a Kubernetes cluster."""
