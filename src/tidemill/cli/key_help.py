"""Help on configuration keys: the essential ones, one section, all, and `tidemill config search`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tidemill.cli.output import Json, Result
from tidemill.config.foreign_names import ForeignName, explained, listed, ours_of
from tidemill.config.keys import Key, all_keys, did_you_mean, sections
from tidemill.config.search import SearchResult, suggestion
from tidemill.config.search import search as search_keys
from tidemill.config.toml import write_value
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted

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
`--help SECTION` shows one section, `--help-all` every key. `tidemill config search WORDS` finds keys, also by
their names in TRL, verl, OpenRLHF and prime-rl."""
MAX_KEYS = 12  # shown by a search
MAX_NAMES = 6


def print_keys(words: Sequence[str], *, everything: bool) -> None:
    """Print the essential keys, those of the sections or keys in `words`, or all.

    Raises:
        UserError: a word is neither a section nor a key.
    """
    console = Console()
    if everything:
        console.print(key_table(all_keys(), "All keys"))
    elif words:
        console.print(key_table([key for word in words for key in keys_below(word)], ", ".join(words)))
    else:
        console.print(key_table([key for key in all_keys() if key.dotted in ESSENTIAL], "The most used keys"))
        console.print(EXAMPLES, markup=False, highlight=False)
    console.print(FOOTER, markup=False, highlight=False)


def keys_below(word: str) -> list[Key]:
    """The keys of a section, or one key. Raises UserError: there is neither."""
    found = [key for key in all_keys() if key.dotted == word or key.dotted.startswith((f"{word}.", f"{word}[]"))]
    if not found:
        names = {".".join(path) for path in sections()} | {key.dotted for key in all_keys()}
        foreign = ours_of(word, certain=True)
        close = explained(foreign) if foreign else did_you_mean(word, names)
        hint = close or f"sections: {', '.join(dict.fromkeys(key.path[0] for key in all_keys()))}"
        raise UserError("no such section or key", where=word, hint=hint)
    return found


app = App(name="config", help="Find configuration keys.", help_epilogue="")


@app.command(name="search")
def search(
    *words: Annotated[str, Parameter(name="WORD", allow_leading_hyphen=True)],
    json: Json = False,
) -> Result:
    """List the keys that match every word: in their name, values or text, or in what other frameworks call them.

    Parameters
    ----------
    words
        Words, in upper or lower case: `kl penalty`. A name of TRL, verl, OpenRLHF or prime-rl: `num_generations`.
    """
    query = " ".join(words)
    if not query.strip():
        raise UserError("expected a word", hint="write for example `tidemill config search kl penalty`")
    found = search_keys(words)
    if not found.keys and not found.names:
        raise UserError("no key matches all of these words", where=query, hint=suggestion(words))
    rows = [
        {"key": key.dotted, "accepts": key.accepts, "default": shown_default(key), "doc": key.doc} for key in found.keys
    ]
    names = [
        {"framework": name.framework, "place": name.place, "name": name.name, "keys": name.ours, "note": name.note}
        for name in found.names
    ]
    return Result(data={"keys": rows, "foreign": names}, text=Group(*_found(found, query)))


def _found(found: SearchResult, query: str) -> list[RenderableType]:
    """The result of a search. Names of other frameworks come first if the query is one of them."""
    names: list[RenderableType] = []
    if found.names:
        names.append(name_table(found.names[:MAX_NAMES], f"{query!r} in other frameworks"))
        names += _left_out(len(found.names) - MAX_NAMES, "name")
    keys: list[RenderableType] = []
    if found.keys:
        keys.append(key_table(found.keys[:MAX_KEYS], f"Keys for {query!r}", by_section=False))
        keys += _left_out(len(found.keys) - MAX_KEYS, "key")
    return [*names, *keys] if found.is_name else [*keys, *names]


def _left_out(count: int, what: str) -> list[str]:
    return [f"{counted(count, f'more {what}')}: add a word, or see all with --json\n"] if count > 0 else []


def name_table(names: Sequence[ForeignName], title: str) -> Table:
    """One row per name of another framework."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("framework")
    table.add_column("name", style="bold", overflow="fold")
    table.add_column("here", ratio=1)
    for name in names:
        key = escape(listed(name.ours)) if name.ours else "no counterpart"
        note = f"[dim]: {escape(name.note)}[/dim]" if name.note else ""
        table.add_row(name.framework, escape(name.shown), f"{key}{note}")
    return table


def key_table(keys: Sequence[Key], title: str, *, by_section: bool = True) -> Table:
    """One row per key, with space between sections unless the keys are in another order."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("meaning, (type, default)", ratio=1)
    section = ""
    for key in keys:
        if by_section and section and key.path[0] != section:
            table.add_section()
        section = key.path[0]
        meaning = f'kind = "{key.variant}": {key.doc}' if key.variant else key.doc
        accepted = f"{key.accepts}, {'required' if key.required else f'default {shown_default(key)}'}"
        table.add_row(escape(key.dotted), f"{escape(meaning)} [dim]({escape(accepted)})[/dim]")
    return table


def shown_default(key: Key) -> str:
    """The default in recipe syntax."""
    if key.default is None:
        return "none"
    if key.dotted == "scoring.rewards":
        return write_value([{"kind": reward.kind} for reward in key.default])
    return write_value(key.default)
