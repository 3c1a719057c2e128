"""The boundary of the Python API: arguments are checked by name, and every error is one `TidemillError`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from tidemill.config.foreign_names import explained, ours_of
from tidemill.config.keys import all_keys, did_you_mean, find
from tidemill.core.errors import GuardStop, TidemillError, UserError, as_user_error, describe_error, root_error

P = ParamSpec("P")
T = TypeVar("T")

ARGUMENTS = {
    "args": "overrides",
    "config": "recipe",
    "config_path": "recipe",
    "dataset": "data",
    "train_dataset": "data",
    "train_data": "data",
    "rows": "data",
    "eval_dataset": "eval_data",
    "test_dataset": "eval_data",
    "valid_dataset": "eval_data",
    "reward_func": "rewards",
    "reward_funcs": "rewards",
    "reward_function": "rewards",
    "reward_functions": "rewards",
    "reward_fn": "rewards",
    "reward_model": "rewards",
    "reward_processing_classes": "tokenizer",
    "processing_class": "tokenizer",
    "actor": "model",
    "model_name": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "checkpoint": "model",
    "output_dir": "run_dir",
    "save_dir": "run_dir",
    "out_dir": "run_dir",
    "env": "environment",
    "environment_factory": "environment",
    "loss_fn": "loss",
    "inputs": "prompts",
    "messages": "prompts",
    "path": "folder",
    "to": "folder",
    "save_directory": "folder",
}
"""Arguments of other libraries' functions, by the argument of ours. (Their settings are `config` keys.)"""
EXAMPLES = {
    "recipe": '"char-addition"',
    "data": "rows",
    "eval_data": "rows",
    "rewards": "[right]",
    "overrides": '{"trainer.steps": 100}',
    "run_dir": '"runs/mine"',
    "folder": '"exported"',
}
PYTHON_SPELLING = (
    (re.compile(r"--run\.dir"), "run_dir"),
    (re.compile(r'(?:\b(?:task|data)\.)?columns = \{ (\w+) = ("[^"]*") \}'), r'columns={"\1": \2}'),
)
"""What a recipe or the command line spells otherwise in hints than the arguments of a function."""


def entry_point(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function, a coroutine function or a method part of the API.

    An unknown, missing or surplus argument is a `UserError` with a suggestion. Errors of the input are raised without
    the exceptions that led to them and without the frames of this package; a failure that is not the caller's keeps
    both, as the cause of a `TidemillError`.
    """
    signature, name = inspect.signature(function), public_name(function)
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            __tracebackhide__ = True
            try:
                check_arguments(signature, name, args, kwargs)
                return await cast("Coroutine[Any, Any, T]", function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 (raised below)
                raised = boundary_error(error)
            raise raised

        return cast("Callable[P, T]", awaited)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            check_arguments(signature, name, args, kwargs)
            return function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (raised below)
            raised = boundary_error(error)
        raise raised

    return called


def same_arguments(original: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function that passes its arguments to `original` the parameters of it."""

    def typed(function: Callable[..., T]) -> Callable[P, T]:
        own = inspect.signature(function)
        parameters = inspect.signature(original).parameters.values()
        function.__signature__ = own.replace(parameters=list(parameters))  # type: ignore[attr-defined]
        return function

    return typed


def public_name(function: Callable[..., Any]) -> str:
    """The name by which users call it: `tidemill.train`, `tidemill.rewards.exact`, `tidemill.Run.samples`."""
    module = "rewards." if function.__module__ == "tidemill.api.rewards" else ""
    return f"tidemill.{module}{function.__qualname__.removesuffix('.__init__')}"


def boundary_error(error: BaseException) -> BaseException:
    """What a caller sees of an error: a `TidemillError`, or the exception itself if it is none of ours to report.

    Raise it outside of the `except` block, so that it has no context.
    """
    root = root_error(error)
    if not isinstance(root, Exception):  # an interrupt, SystemExit, the cancellation of a task
        # torch imports it at exit; Python would then forget that an interrupt ended the script, and end with code 1
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")
        return _alone(root) if isinstance(root, KeyboardInterrupt) else error
    if (known := as_user_error(root)) is not None:
        for pattern, spelled in PYTHON_SPELLING:
            known.hint = pattern.sub(spelled, known.hint)
        return _alone(known)
    if isinstance(root, GuardStop) or (isinstance(root, TidemillError) and root.__cause__ is None):
        return _alone(root)
    if isinstance(root, TidemillError):
        return root
    failure = TidemillError(describe_error(error))
    failure.__cause__ = root
    return failure


def _alone(error: BaseException) -> BaseException:
    """Without the exceptions and the frames that led to it."""
    error.__cause__ = error.__context__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def check_arguments(signature: inspect.Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises UserError: an argument is unknown or missing, or there are too many without a name."""
    parameters = signature.parameters
    by_name = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    accepted = [each.name for each in by_name if each.name != "self"]
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    unknown = [] if open_ended else [each for each in kwargs if each not in accepted]
    if unknown:
        what = f"has no argument {', '.join(unknown)}"
        hint = _suggested({each: kwargs[each] for each in unknown}, accepted)
        listed = f"its arguments are {', '.join(accepted)}" if accepted else "it takes no arguments"
        raise UserError(what, where=name, hint=hint or listed)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        positional = [each.name for each in parameters.values() if each.kind is not each.KEYWORD_ONLY]
        what = str(error)
        if what.startswith("too many positional"):
            taken = ", ".join(each for each in positional if each != "self")
            what = f"too many arguments without a name{f': takes {taken}' if taken else ''}"
        main = [each for each in ("data", "rewards", "prompts", "model") if each in accepted] or accepted
        hint = f"give arguments by name: {', '.join(map(_argument, main[:2]))}"
        raise UserError(what, where=name, hint=hint) from None


def _suggested(unknown: Mapping[str, Any], accepted: Sequence[str]) -> str:
    """What to write instead of unknown arguments; empty if nothing is similar."""
    settings: dict[str, Any] = {}
    arguments: list[str] = []
    hints: list[str] = []
    for given, value in unknown.items():
        meant = ARGUMENTS.get(given, "")
        if given == "args" and "overrides" in accepted:
            hints.append("settings are given by key (`tidemill config search WORD` finds them)")
            settings["trainer.steps"] = 100
        elif meant == "eval_data" and meant not in accepted and "data" in accepted:
            hints.append(f"did you mean {_argument('data')}?")
        elif meant in accepted:
            arguments.append(_argument(meant))
        elif "overrides" in accepted and (key := _key(given)):
            settings[key] = value
        elif "overrides" in accepted and (rows := ours_of(given, certain=True)):
            hints.append(explained(rows))
        elif (close := did_you_mean(given, accepted)) and close not in hints:
            hints.append(close)
    if arguments:
        hints.insert(0, f"did you mean {', '.join(dict.fromkeys(arguments))}?")
    if settings:
        written = []
        for key, value in settings.items():
            is_short = isinstance(value, (str, int, float, bool)) and len(repr(value)) < 40
            written.append(f'"{key}": {repr(value) if is_short else "..."}')
        hints.append(f"write overrides={{{', '.join(written)}}}")
    return "; ".join(dict.fromkeys(hints))


def _key(given: str) -> str:
    """The key that an argument sets: its own name, or what TRL or another framework calls it; empty if not one."""
    if find(given.split(".")) is not None:
        return given
    rows = ours_of(given, framework="TRL", certain=True) or ours_of(given, certain=True)
    keys = {row.ours for row in rows if row.ours and not row.note}
    if len(keys) == 1 and len(*keys) == 1 and len(rows) == 1:
        return next(iter(keys))[0]
    named = {key.dotted for key in all_keys() if key.path[-1] == given}
    sampled = {f"sampling.{given}"} & named  # max_new_tokens, which evaluation has too
    return next(iter(sampled or named)) if len(sampled or named) == 1 and not rows else ""


def _argument(name: str) -> str:
    return f"{name}={EXAMPLES.get(name, '...')}"
