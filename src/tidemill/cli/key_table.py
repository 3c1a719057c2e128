"""The configuration's keys as a table, for `--help`: read off the schema, so that it cannot be out of date."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tidemill.config.keys import Key, all_keys
from tidemill.config.toml import write_value

FOOTER = "Give a key as --section.key value, or in a recipe as  [section]  key = value.  The value none unsets a key."


def print_keys() -> None:
    """Every key with its documentation, type and default, on standard output."""
    console = Console()
    console.print(key_table())
    console.print(FOOTER, markup=False, highlight=False)


def key_table() -> Table:
    """One section after another, in the schema's order."""
    table = Table(box=box.SIMPLE_HEAD, title="Configuration", title_justify="left", pad_edge=False)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("meaning, (type, default)", ratio=1)
    section = ""
    for key in all_keys():
        if section and key.path[0] != section:
            table.add_section()
        section = key.path[0]
        table.add_row(escape(key.dotted), f"{escape(meaning(key))} [dim]({escape(accepted(key))})[/dim]")
    return table


def meaning(key: Key) -> str:
    """The key's documentation; of a key that only one kind of task has, that first."""
    return f'kind = "{key.variant}": {key.doc}' if key.variant else key.doc


def accepted(key: Key) -> str:
    """`integer >= 1, default 8`."""
    return f"{key.words}, {'required' if key.required else f'default {shown_default(key)}'}"


def shown_default(key: Key) -> str:
    """The default as it would stand in a recipe."""
    if key.default is None:
        return "none"
    if key.dotted == "scoring.rewards":
        return write_value([{"kind": reward.kind} for reward in key.default])
    return write_value(key.default)
