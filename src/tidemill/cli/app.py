"""`tidemill VERB ...`: parses the command line, runs the verb, and writes its result and exit code.

Exit codes: 0 success, 1 bug or missed deadline, 2 invalid input, 3 stopped by a guard, 130 interrupted (Ctrl-C). With
`--json` exactly one JSON object goes to standard output in every case: the verb's result, or
`{"error": {...}, "exit_code": N}`; everything else goes to standard error.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownCommandError, UnusedCliTokensError

from tidemill import __version__
from tidemill.cli.output import (
    BUG_CODE,
    INTERRUPTED_CODE,
    Result,
    close_stdout,
    explain,
    output_is_closed,
    prepare_streams,
    reserved_stdout,
    write_json,
    write_result,
)
from tidemill.core.errors import UserError

VERBS = {
    "train": ("tidemill.cli.train_command:train", "Train a model, or resume a run."),
    "pause": ("tidemill.cli.control_commands:pause", "Pause a run after its current step."),
    "resume": ("tidemill.cli.control_commands:resume", "Continue a paused run, or one that ended early."),
    "checkpoint": ("tidemill.cli.control_commands:checkpoint", "Let a run write a checkpoint after its current step."),
    "stop": ("tidemill.cli.control_commands:stop", "End a run after a checkpoint, as Ctrl-C does."),
    "eval": ("tidemill.cli.evaluate:evaluate", "Evaluate a model on held-out prompts; compare two."),
    "generate": ("tidemill.cli.evaluate:generate", "Generate completions with a model or a checkpoint."),
    "serve": ("tidemill.cli.evaluate:serve", "Serve a model or a checkpoint over HTTP, as OpenAI's API does."),
    "sandbox": ("tidemill.cli.sandbox_command:app", "Serve sandboxes to other machines."),
    "deploy": (
        "tidemill.cli.deploy_command:app",
        "Run a recipe on Kubernetes, Slurm, SkyPilot or OSMO.",
    ),
    "algorithms": ("tidemill.cli.algorithms:algorithms", "List algorithms and loss terms with formulas and sources."),
    "simulate": ("tidemill.cli.forecasting:simulate", "Simulate a run under several schedules."),
    "plan": (
        "tidemill.cli.plan_commands:app",
        "Forecast memory, weight transfer, placement, staleness, time and cost.",
    ),
    "calibrate": ("tidemill.cli.forecasting:calibrate", "Fit a cost profile to the logs of a run, for forecasts."),
    "recipe": ("tidemill.cli.recipes:app", "List, show and copy the built-in recipes."),
    "env": ("tidemill.cli.env_commands:app", "List environments; install those of other packages."),
    "config": ("tidemill.cli.key_help:app", "Find configuration keys."),
    "export": ("tidemill.cli.model_commands:export", "Write a run's model as a Hugging Face folder, or upload it."),
    "model": ("tidemill.cli.model_commands:app", "List models; download one into the cache; merge an adapter."),
    "report": ("tidemill.cli.evaluate:report", "Write report.html of a run, finished or in progress."),
    "watch": ("tidemill.cli.watch:watch", "Show a run, or all runs of a folder, in the browser while they happen."),
    "check": ("tidemill.cli.check:check", "Judge samples of a run by hand: verdicts of people for its guard."),
    "doctor": ("tidemill.cli.doctor:doctor", "Check this machine: packages, memory, disk, GPUs."),
}
CONFIGURED_VERBS = ("train", "eval", "generate", "serve", "simulate")  # their --help lists the configuration's keys
OTHER_WORDS = {
    "grpo rloo ppo sft dpo kto reward rlhf finetune fine-tune run launch start": (
        "write `tidemill train @recipe.toml`; `tidemill recipe list` lists recipes"
    ),
    "continue restart unpause": "write `tidemill resume RUN_DIRECTORY`",
    "kill cancel abort interrupt quit": "write `tidemill stop RUN_DIRECTORY`",
    "chat infer inference predict complete sample": 'write `tidemill generate "PROMPT" --checkpoint RUN_DIRECTORY`',
    "compare": "write `tidemill report RUN RUN`, or `tidemill eval --checkpoint MODEL --compare MODEL`",
    "merge": "write `tidemill model merge CHECKPOINT DIRECTORY`",
    "download pull": "write `tidemill model get NAME`",
    "convert push upload": "write `tidemill export MODEL DIRECTORY`",
    "list ls": "write `tidemill recipe list` or `tidemill model list`",
    "init new create": "write `tidemill recipe copy NAME FILE`",
    "kubernetes k8s kubectl gke slurm sbatch sky osmo cluster apply": "write `tidemill deploy render @recipe.toml`",
    "search": "write `tidemill config search WORDS`",
    "info": "write `tidemill doctor`",
    "judge label annotate rate review": "write `tidemill check RUN_DIRECTORY`",
    "dashboard board tensorboard ui view monitor show": "write `tidemill watch RUN_OR_FOLDER`",
    "help": "write `tidemill --help`",
    "version": "write `tidemill --version`",
}
"""Verbs of similar programs: what to write here."""
HELP_FLAGS = ("--help", "-h")
HELP_ALL = "--help-all"
VERSION_FLAGS = ("--version",)
DESCRIPTION = """Post-trains language models with reinforcement learning.

tidemill VERB @recipe.toml [@more.toml] [--section.key value]"""
EPILOGUE = """Recipes compose from left to right; --section.key value overrides them.
`tidemill train --help` lists the most used keys, `--help-all` every key.

  --dry-run  the resolved configuration and derived numbers
  --json     one JSON object on standard output, logs on standard error
  --debug    the traceback of an error

Exit codes: 0 success, 1 bug, 2 invalid input, 3 stopped by a guard,
130 interrupted."""


def build_app(called: str = "") -> App:
    """Build the command line; the module of a verb is imported when the verb is called."""
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
    """Run one command and return its exit code. `argv` excludes the program name; default: the process's arguments."""
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
            except BaseException as error:  # noqa: BLE001 (the last handler of every error)
                if output_is_closed(error):
                    code = 0
                else:
                    failure = explain(error, debug=debug)
                    code = failure.exit_code
                    sys.stderr.write(f"{failure.text}\n" if failure.text else "")
                    if as_json:
                        write_json({"error": failure.data, "exit_code": code}, stdout)
    except OSError:
        pass  # standard output or error is closed
    except KeyboardInterrupt:
        code = INTERRUPTED_CODE
    finally:
        close_stdout()
    return code


def dispatch(tokens: Sequence[str]) -> Result:
    """Run a verb and return its result; help and version are printed and return an empty result.

    Raises:
        UserError: unknown verb or arguments.
    """
    verb = tokens[0] if tokens else ""
    app = build_app(verb)
    if verb and verb not in (*VERBS, *HELP_FLAGS, *VERSION_FLAGS):
        raise unknown_verb(verb)
    if verb in CONFIGURED_VERBS and any(token in (*HELP_FLAGS, HELP_ALL) for token in tokens):
        from tidemill.cli.key_help import print_keys

        words = [token for token in tokens[1:] if not token.startswith(("-", "@"))]
        if not words:
            app.help_print([verb])
        print_keys(words, everything=HELP_ALL in tokens)
        return Result()
    try:
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        help_of_verb = f"see `{' '.join(['tidemill', *(error.command_chain or ())])} --help`"
        if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
            raise UserError("unexpected argument", where=error.unused_tokens[0], hint=help_of_verb) from None
        if isinstance(error, UnknownCommandError) and verb == "plan" and tokens[1].startswith("@"):
            hint = f"write `tidemill plan run {tokens[1]}`"
            raise UserError("expected a subject first", where=tokens[1], hint=hint) from None
        raise UserError(str(error).strip(), hint=help_of_verb) from None
    return result if isinstance(result, Result) else Result()


def unknown_verb(verb: str) -> UserError:
    """An error with a suggestion: a similar verb, or the missing verb before a recipe or key."""
    if verb.startswith("@"):
        return UserError("expected a verb first", where=verb, hint=f"write `tidemill train {verb}`, or another verb")
    if verb.startswith("-"):
        hint = "write `tidemill train @recipe.toml` and options after it; `tidemill --help` lists the verbs"
        return UserError("expected a verb first", where=verb, hint=hint)
    from tidemill.config.load import recipe_path

    if recipe_path(verb).is_file():
        return UserError("expected a verb first", where=verb, hint=f"write `tidemill train @{verb}`")
    word = verb.lower()
    known = next((hint for words, hint in OTHER_WORDS.items() if word in words.split()), "")
    begun = [each for each in VERBS if each.startswith(word)]
    close = begun or difflib.get_close_matches(word, VERBS, 1, 0.6)
    hint = known or (f"did you mean `tidemill {close[0]}`?" if close else f"verbs: {', '.join(VERBS)}")
    return UserError("unknown verb", where=verb, hint=hint)
