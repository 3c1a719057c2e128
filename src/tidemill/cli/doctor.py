"""`tidemill doctor`: what this machine has, what would run, and what to mend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from tidemill.cli.findings import Finding, judge
from tidemill.cli.machine import gather
from tidemill.cli.result import Json, Result
from tidemill.config.schema import RunConfig, RunSpec

STYLES = {"ok": "green", "note": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(*, json: Json = False) -> Result:
    """What this machine has, what would run, and what to mend. Exit code 0 if Tidemill can be used, else 2."""
    facts = gather(RunSpec(run=RunConfig()).directory.parent)
    findings = judge(facts)
    usable = all(finding.status != "fail" for finding in findings)
    data = {"usable": usable, "findings": [asdict(finding) for finding in findings], "machine": facts}
    return Result(data=data, text=table(findings, facts["python"], facts["system"]), exit_code=0 if usable else 2)


def table(findings: Sequence[Finding], python: str, system: str) -> Table:
    """A line a finding, its cure below it."""
    shown = Table(
        box=None, show_header=False, pad_edge=False, title=f"Python {python} on {system}", title_justify="left"
    )
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column()
    for finding in findings:
        style = STYLES[finding.status]
        shown.add_row(f"[{style}]{finding.status}[/{style}]", finding.topic, escape(finding.text))
        if finding.cure:
            shown.add_row("", "", f"[dim]→[/dim] {escape(finding.cure)}")
    return shown
