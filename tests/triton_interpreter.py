"""Run Triton kernels on CPU tensors within a test, although Triton was imported for its compiler."""

from __future__ import annotations

import sys

import pytest


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, kernels are interpreted, and with them the functions of Triton that they call."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    loaded = [each for name, each in sys.modules.items() if name.startswith(("triton.language", "tidemill.kernels"))]
    for module in loaded:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(value.fn))
