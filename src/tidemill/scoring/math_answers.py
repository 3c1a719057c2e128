"""The reward `math_verify`, as a function for other processes: parsing what a model wrote can take for ever.

math-verify and sympy evaluate generated Python, into which a completion can insert names: `\\text{...}`
becomes a symbol, and a sum is computed by code that contains the symbol's name. An audit hook refuses code that names
anything but mathematical functions, reads an attribute, or changes an object.
"""

from __future__ import annotations

import dis
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import math_verify as package
import mpmath
import sympy

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeout is off
EVALUATED = "<"
"""Start of the file name of code that was not read from a file."""
MAKE_CODE = frozenset(
    ["collections", "dataclasses", "enum", "functools", "mpmath.libmp.libhyper", "sympy.polys.monomials", "typing"]
)
"""Modules that run code which they have made themselves."""
REFUSED_EVENTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "signal.", "pty.", "mmap.")
HARMLESS_EVENTS = frozenset({"os.listdir", "os.putenv", "os.scandir", "os.unsetenv"})  # of imports
IMPORTS = importlib.import_module("sympy.utilities.lambdify")._import.__code__
"""Runs import statements that sympy wrote."""
KNOWN_NAMES = frozenset({*dir(sympy), *dir(mpmath), "math", "mpmath", "numpy", "scipy", "sympy", "_lambdifygenerated"})
REFUSED_OPERATIONS = frozenset(
    name
    for name in dis.opmap
    if "_ATTR" in name or "_METHOD" in name or name.startswith(("DELETE_", "STORE_GLOBAL", "STORE_S"))
)
"""Operations on attributes, and those that change an object; in every version of Python."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_checking = False


def math_verify(completion: str, answer: str) -> float:
    """1 if math-verify finds the completion's mathematical expression equal to the answer's; else 0.

    Raises:
        ValueError: the answer has no expression.
        PermissionError: the completion inserted names into code.
    """
    global _checking  # noqa: PLW0603 -- an audit hook cannot be removed
    _checking = True
    try:
        expected = _parsed(f"${answer}$" if "\\" in answer and "$" not in answer else answer)
        if not expected:
            raise ValueError(f"math-verify finds no expression in the answer {answer[:40]!r}")
        return float(package.verify(expected, _parsed(completion), timeout_seconds=None))
    finally:
        _checking = False


def _parsed(text: str) -> Any:
    return package.parse(text, parsing_timeout=None)  # the caller's deadline holds


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _checking:
        return
    if event == "exec":
        code, caller = arguments[0], sys._getframe(1)
        own = caller.f_globals.get("__name__") in MAKE_CODE or caller.f_code is IMPORTS
        if code.co_filename.startswith(EVALUATED) and not own:
            known = KNOWN_NAMES | {*caller.f_locals.get("namespace", ())} - {"builtins"}  # of sympy.lambdify
            for each in _codes(code):
                for name in each.co_names:
                    if name not in known or name.startswith("__"):
                        raise PermissionError(f"a completion may not use the name {name}")
                # A symbol called `sys` makes that name known, and an attribute of it would be another's.
                if refused := {step.opname for step in dis.get_instructions(each)} & REFUSED_OPERATIONS:
                    raise PermissionError(f"a completion may not run {min(refused)}")
    elif (event.startswith(REFUSED_EVENTS) and event not in HARMLESS_EVENTS) or (
        event == "open" and (arguments[2] or 0) & WRITING
    ):
        raise PermissionError(f"a completion may not call {event}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


math_verify(r"$\sum_{n=0}^{\infty} \frac{1}{n!}$", "$e$")  # imports what every process would, in the server
sys.addaudithook(_refuse)
