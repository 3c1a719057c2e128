"""Triton kernels, one module each with its launcher. Import such a module only where `availability.missing` is None."""
