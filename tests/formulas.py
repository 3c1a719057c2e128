"""Checks that figures are what their formulas give, by arithmetic that is not the planner's."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping

from tidemill.hardware.figures import Figure

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "ceil": math.ceil,
    "max": max,
    "min": min,
    "positive": lambda value: value if value > 1e-9 else 0.0,
}


def check_figures(figures: Iterable[Figure]) -> int:
    """Check that every formula of its inputs gives the value, and every figure has a source.

    Returns:
        The number of figures.
    """
    checked = 0
    for figure in figures:
        assert evaluated(figure.formula, figure.inputs) == figure.value, figure
        assert figure.source
        checked += 1
    return checked


def evaluated(formula: str, inputs: Mapping[str, float]) -> float:
    """The value of a formula, node by node."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                return inputs[name]
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return FUNCTIONS[name](*map(value, args))
        raise AssertionError(f"not arithmetic: {ast.unparse(node)} in {formula}")

    return value(ast.parse(formula, mode="eval").body)
