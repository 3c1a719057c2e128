"""Finds the environment that a configuration names, and checks it before a run starts."""

from __future__ import annotations

import inspect

from tidemill.agents.adapters.environments import ADAPTERS
from tidemill.agents.builtin import BUILT_IN
from tidemill.agents.environment import Environment, ToolEnvironment
from tidemill.agents.tools import tools_of
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.extensions.registry import Extension, given_function, resolve
from tidemill.extensions.results import place_of

WHERE = "env.name"
METHODS = {"reset": ("task", "seed"), "step": ("action",), "score": ("answer",), "demonstrate": (), "close": ()}
"""The arguments that methods are called with, by name."""


def find_environment(config: EnvConfig, sandbox: SandboxConfig = SandboxConfig()) -> Extension:  # noqa: B008 -- frozen
    """The environment `env.name`: `function` is its class.

    Raises:
        UserError: there is none, it is not an environment, does not take `env.params`, or has a wrong tool or method.
    """
    if (built_in := (BUILT_IN | ADAPTERS).get(config.name)) is not None:
        found = given_function(built_in, "environment", where=WHERE)
    else:
        found = resolve(config.name, "environment", where=WHERE)
    environment = found.function
    if not isinstance(environment, type) or not issubclass(environment, Environment):
        hint = "derive it from tidemill.Environment or tidemill.ToolEnvironment"
        raise UserError(f"{config.name} is not an environment", where=WHERE, hint=hint)
    try:
        inspect.signature(environment).bind(**config.params)
    except TypeError as error:
        hint = f"it takes {', '.join(inspect.signature(environment).parameters) or 'no parameters'}"
        raise UserError(f"{found.name}: {error}", where="env.params", hint=hint) from None
    _check_methods(environment)
    if issubclass(environment, ToolEnvironment):
        if not tools_of(environment, config.params, sandbox):
            raise UserError(f"{found.name} has no tools", where=WHERE, hint="mark its methods with @tidemill.tool")
    elif environment.step is Environment.step:
        raise UserError(f"{found.name} has no method step", where=WHERE, hint="define step(self, action)")
    return found


def _check_methods(environment: type[Environment]) -> None:
    """Raises UserError: a method does not take its arguments, which would look like a mistake of every episode."""
    for name, arguments in METHODS.items():
        if (method := getattr(environment, name, None)) is None:
            continue
        bound = isinstance(inspect.getattr_static(environment, name), (staticmethod, classmethod))
        try:
            inspect.signature(method).bind(*([] if bound else [None]), **dict.fromkeys(arguments))
        except TypeError as error:
            hint = f"write def {name}({', '.join(['self', *arguments])})"
            raise UserError(f"{environment.__name__}.{name}: {error}", where=place_of(method), hint=hint) from None
