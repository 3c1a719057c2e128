"""The results of GPU sessions on one kind of device: a JSON file that is complete after every check, and a log.

DIR/NVIDIA-H100-80GB-HBM3.json is named after the device. Later sessions add to it: a check that they do not run keeps
its earlier result, with the code and date that it was measured with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu.session_checks import CHECKS

COLOURS = {"ok": "green", "skipped": "yellow", "wrong": "red", "failed": "red"}


class SessionResults:
    """Results of the checks on one device.

    Args:
        folder: of the files; made if necessary.
        device: its name.
        about: fields of the file beside the results.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, device: str, *, tiny: bool, about: Callable[[], Mapping[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = file_name(device) + ("-tiny" if tiny else "")
        self.path, self.log_path = folder / f"{name}.json", folder / f"{name}.log"
        self._device, self._about = device, about
        self._own: dict[str, Mapping[str, Any]] = {}
        self.log_path.open("ab").close()

    def add(self, check: Mapping[str, Any]) -> None:
        """Add a result and write the file, with what other sessions wrote meanwhile. A check that was not run does not
        replace an earlier result."""
        name, earlier = check["check"], {each["check"]: each for each in _earlier(self.path)}
        if check["verdict"] == "skipped" and not check["rows"] and earlier.get(name, {}).get("rows"):
            self._own[name] = {**earlier[name], "not_repeated": check["why"]}
        else:
            self._own[name] = check
        order = {each.name: number for number, each in enumerate(CHECKS)}
        checks = sorted((earlier | self._own).values(), key=lambda each: order.get(each["check"], len(order)))
        content = {"benchmark": "gpu_session", "device": self._device, **self._about(), "checks": checks}
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def log(self, name: str) -> IO[bytes]:
        """The log, opened to append the output of a check."""
        log = self.log_path.open("ab")
        log.write(f"\n== {name}\n".encode())
        log.flush()
        return log


def file_name(device: str) -> str:
    """Of letters, digits, dots and hyphens."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-") or "unknown"


def _earlier(path: Path) -> Sequence[Mapping[str, Any]]:
    """The checks of an earlier session; a file that cannot be read is put aside."""
    try:
        checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
        if not all({"check", "verdict", "rows"} <= check.keys() for check in checks):
            raise ValueError("of another format")
        return list(checks)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        with contextlib.suppress(OSError):
            path.replace(path.with_suffix(".json.unreadable"))
        return []


def show(path: Path, console: Console) -> None:
    """Print a file of results as a table.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not of a session.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checks, device = content["checks"], content["device"]
        table = Table("check", "row", "verdict", "figures", box=box.SIMPLE, title=f"{device}: {path.name}")
        for check in checks:
            _add_rows(table, check)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the result of a session: {error!r}") from error
    console.print(table)


def _add_rows(table: Table, check: Mapping[str, Any]) -> None:
    note = f" ({note})" if (note := check.get("not_repeated")) else ""
    where = check["origin"]["commit"][:9] or f"source {check['origin'].get('source', '')[:9]}"
    table.add_row(
        f"[bold]{check['check']}[/]",
        f"{check['seconds']:.0f} s",
        _coloured(check["verdict"]),
        f"{escape(check['why'] + note)} [dim]{where}, {check['origin']['date']}[/]",
    )
    for row in check["rows"]:
        limits = {limit["figure"]: limit for limit in row["limits"]}
        figures = [f"{name} {short(value)}{_limit(limits, name)}" for name, value in row["figures"].items()]
        words = "; ".join([*([row["why"]] if row["why"] else []), *figures])
        table.add_row("", row["row"], _coloured(row["verdict"]), escape(words))
    table.add_section()


def _limit(limits: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if name not in limits:
        return ""
    least = limits[name].get("at_least")
    return f" (≤ {short(limits[name]['at_most'])})" if least is None else f" (≥ {short(least)})"


def _coloured(verdict: str) -> str:
    colour = COLOURS.get(verdict, "red")
    return f"[{colour}]{verdict}[/]"


def short(value: Any) -> str:
    """A figure in a few characters."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {short(each)}" for name, each in value.items())
    return str(value)
