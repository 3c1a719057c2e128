"""Help on configuration keys: the essential ones, one section, all, and `tidemill config search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.cli.output import Json, Result
from tidemill.config.keys import Key, all_keys, did_you_mean, sections
from tidemill.config.toml import write_value
from tidemill.core.errors import UserError

ESSENTIAL = (
    "runtime", "run.name", "run.dir", "run.seed", "model.source", "model.lora.rank", "task.kind", "task.path",
    "task.columns", "scoring.rewards", "sampling.max_new_tokens", "sampling.temperature", "sampling.stop",
    "engine.slots", "pool.kind", "pool.workers", "batch.prompts", "batch.group_size", "batch.minibatches",
    "batch.microbatch_tokens", "schedule.max_policy_lag", "algorithm.name", "algorithm.advantage", "algorithm.kl_beta",
    "optimizer.learning_rate", "trainer.steps", "trainer.device", "eval.every_steps", "eval.prompts",
    "checkpoint.every_steps", "telemetry.sinks",
)  # fmt: skip
"""Keys that most users set, in the order in which they are shown."""
EXAMPLES = """Examples:
  tidemill train @smollm2-addition --run.dir runs/mine
  tidemill train @jsonl --task.path my.jsonl --batch.prompts 16
  tidemill train @jsonl --scoring.rewards '[{ kind = "python", function = "my.py:score" }]'
  tidemill train @smollm2-addition --algorithm.name dapo --dry-run"""
FOOTER = """Set a key with --section.key value, or in a recipe with  [section]  key = value.  The value none unsets it.
`--help SECTION` shows one section, `--help-all` every key, `tidemill config search WORD` finds keys."""


def print_keys(words: Sequence[str], *, everything: bool) -> None:
    """Print the essential keys, those of the sections or keys in `words`, or all.

    Raises:
        UserError: a word is neither a section nor a key.
    """
    keys = [key for key in all_keys() if key.dotted in ESSENTIAL]
    title = "The most used keys"
    if everything:
        keys, title = list(all_keys()), "All keys"
    elif words:
        keys, title = [key for word in words for key in keys_below(word)], ", ".join(words)
    console = Console()
    console.print(key_table(keys, title))
    if not words and not everything:
        console.print(EXAMPLES, markup=False, highlight=False)
    console.print(FOOTER, markup=False, highlight=False)


def keys_below(word: str) -> list[Key]:
    """The keys of a section, or one key. Raises UserError: there is neither."""
    found = [key for key in all_keys() if key.dotted == word or key.dotted.startswith((f"{word}.", f"{word}[]"))]
    if not found:
        names = {".".join(path) for path in sections()} | {key.dotted for key in all_keys()}
        close = did_you_mean(word, names)
        hint = close or f"sections: {', '.join(dict.fromkeys(key.path[0] for key in all_keys()))}"
        raise UserError("no such section or key", where=word, hint=hint)
    return found


app = App(name="config", help="Find configuration keys.", help_epilogue="")


@app.command(name="search")
def search(word: Annotated[str, Parameter(name="WORD")], /, *, json: Json = False) -> Result:
    """List the keys whose name, values or documentation contain a word.

    Parameters
    ----------
    word
        A word, in upper or lower case.
    """
    lowered = word.lower()
    found = [key for key in all_keys() if lowered in f"{key.dotted} {key.accepts} {key.doc}".lower()]
    found.sort(key=lambda key: lowered not in key.dotted)
    if not found:
        names = [part for key in all_keys() for part in key.path]
        hint = did_you_mean(lowered, names) or "`tidemill train --help-all` lists every key"
        raise UserError("no key contains this word", where=word, hint=hint)
    rows = [{"key": key.dotted, "accepts": key.accepts, "default": shown_default(key), "doc": key.doc} for key in found]
    return Result(data={"keys": rows}, text=key_table(found, f"Keys with {word!r}"))


def key_table(keys: Sequence[Key], title: str) -> Table:
    """One row per key."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("meaning, (type, default)", ratio=1)
    section = ""
    for key in keys:
        if section and key.path[0] != section:
            table.add_section()
        section = key.path[0]
        table.add_row(escape(key.dotted), f"{escape(meaning(key))} [dim]({escape(accepted(key))})[/dim]")
    return table


def meaning(key: Key) -> str:
    """The documentation of a key; a key of one variant is prefixed with its kind."""
    return f'kind = "{key.variant}": {key.doc}' if key.variant else key.doc


def accepted(key: Key) -> str:
    """`integer >= 1, default 8`."""
    return f"{key.accepts}, {'required' if key.required else f'default {shown_default(key)}'}"


def shown_default(key: Key) -> str:
    """The default in recipe syntax."""
    if key.default is None:
        return "none"
    if key.dotted == "scoring.rewards":
        return write_value([{"kind": reward.kind} for reward in key.default])
    return write_value(key.default)
