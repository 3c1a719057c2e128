"""`tidemill VERB ...`: finds the verb, runs it, and turns what comes of it into output and an exit code.

Exit codes: 0 fine, 2 the user's input, 3 stopped by a guard, 130 interrupted (Ctrl-C), 1 a bug or something that never
came. With `--json` exactly one JSON object goes to standard output, whatever happens: the verb's result, or
`{"error": {...}, "exit_code": N}`; everything else goes to standard error.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from tidemill import __version__
from tidemill.cli.output import (
    BUG_CODE,
    INTERRUPTED_CODE,
    Result,
    close_stdout,
    explain,
    prepare_streams,
    reader_has_gone,
    reserved_stdout,
    write_json,
    write_result,
)
from tidemill.core.errors import UserError

VERBS = {
    "train": ("tidemill.cli.train_command:train", "Train a model, or resume a run."),
    "eval": ("tidemill.cli.evaluate:evaluate", "Measure a model on held-out prompts; compare two."),
    "generate": ("tidemill.cli.evaluate:generate", "Try prompts on a model or a checkpoint."),
    "algorithms": ("tidemill.cli.algorithms:algorithms", "List the algorithms a recipe can name, with their formulas."),
    "simulate": ("tidemill.cli.forecasting:simulate", "What a run would come to, under several schedules, simulated."),
    "plan": (
        "tidemill.cli.plan_commands:app",
        "What a run needs and costs: memory, weights, placement, staleness, time.",
    ),
    "calibrate": ("tidemill.cli.forecasting:calibrate", "Fit a profile to a run's logs, for the forecasts of others."),
    "model": ("tidemill.cli.model_commands:app", "List the built-in models; fetch one into the cache."),
    "report": ("tidemill.cli.evaluate:report", "Write report.html of a run, finished or not."),
    "doctor": ("tidemill.cli.doctor:doctor", "What this machine has, what would run, what to mend."),
}
CONFIGURED_VERBS = ("train", "eval", "generate", "simulate")  # their --help lists the configuration's keys
HELP_FLAGS = ("--help", "-h")
VERSION_FLAGS = ("--version",)
DESCRIPTION = """Post-trains language models with reinforcement learning.

tidemill VERB @recipe.toml [@more.toml] [--section.key value]"""
EPILOGUE = """Recipes compose from left to right, --section.key value goes on top.
`tidemill train --help` lists every key.

  --dry-run  the resolved configuration and what it amounts to
  --json     one JSON object on standard output, logs on standard error
  --debug    the traceback of an error

Exit codes: 0 fine, 1 a bug, 2 your input, 3 stopped by a guard,
130 interrupted."""


def build_app(called: str = "") -> App:
    """The command line's grammar; a verb's module is imported when the verb is called, and then speaks for itself."""
    app = App(
        name="tidemill",
        help=DESCRIPTION,
        help_epilogue=EPILOGUE,
        version=__version__,
        help_format="plaintext",  # markdown would cost a quarter of the time of --help
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for order, (name, (target, words)) in enumerate(VERBS.items()):
        options = {} if target.endswith(":app") else {"help_epilogue": ""}
        app.command(target, name=name, help=None if name == called else words, sort_key=order, **options)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `argv` is without the program's name, by default the process's own."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = "--json" in tokens, "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    prepare_streams()
    code = BUG_CODE
    try:
        with reserved_stdout(as_json) as stdout:
            try:
                result = dispatch(tokens)
                code = result.exit_code
                write_result(result, stdout, as_json=as_json)
            except BaseException as error:  # noqa: BLE001 (the one place where every error ends)
                if reader_has_gone(error):
                    code = 0
                else:
                    failure = explain(error, debug=debug)
                    code = failure.exit_code
                    sys.stderr.write(f"{failure.text}\n" if failure.text else "")
                    if as_json:
                        write_json({"error": failure.data, "exit_code": code}, stdout)
    except OSError:
        pass  # standard output or error takes nothing any more
    except KeyboardInterrupt:
        code = INTERRUPTED_CODE
    finally:
        close_stdout()
    return code


def dispatch(tokens: Sequence[str]) -> Result:
    """The result of a verb; help and version are printed, and have none.

    Raises:
        UserError: no such verb, or arguments it does not take.
    """
    verb = tokens[0] if tokens else ""
    app = build_app(verb)
    if verb and verb not in (*VERBS, *HELP_FLAGS, *VERSION_FLAGS):
        raise unknown_verb(verb)
    if verb in CONFIGURED_VERBS and any(token in HELP_FLAGS for token in tokens):
        from tidemill.cli.arguments import print_keys

        app.help_print([verb])
        print_keys()
        return Result()
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UserError(
            str(error).strip(), hint=f"see `{' '.join(['tidemill', *(error.command_chain or ())])} --help`"
        ) from None
    return result if isinstance(result, Result) else Result()


def unknown_verb(verb: str) -> UserError:
    """What was probably meant: a verb, or a recipe or key without one before it."""
    close = difflib.get_close_matches(verb, VERBS, 1, 0.5)
    if verb.startswith(("@", "-")):
        return UserError("a verb comes first", where=verb, hint=f"write `tidemill train {verb}`, or another verb")
    hint = f"did you mean `tidemill {close[0]}`?" if close else f"verbs: {', '.join(VERBS)}"
    return UserError("unknown verb", where=verb, hint=hint)
