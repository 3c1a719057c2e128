"""What a judge said and cost, in a file: no question is paid for twice, and a budget holds over all sessions of a run.

{"call": ID, "usd": MOST}        before each call: a killed process has paid it, too
{"done": ID, "usd": COST}        after it
{"key": KEY, "verdict": 0.7}

One process works on a run, so that nobody else starts a call between reading the file and writing to it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from tidemill.config.task import RewardConfig
from tidemill.core.formatting import dollars
from tidemill.telemetry.jsonl import SharedLines, finite_number


class BudgetUsed(Exception):
    """The next call would exceed the budget of a judge."""


class JudgeLedger:
    """Verdicts and costs of one judge.

    Args:
        config: has the budget: `most_calls`, `most_usd`.
        budget: only calls with this mark count against it; by default all calls in a run's folder have the same.
    """

    def __init__(self, path: Path, config: RewardConfig, *, budget: str = "") -> None:
        self._lines, self._budget, self._config = SharedLines(path), budget, config
        self._verdicts: dict[str, float] = {}
        self._reserved: dict[str, float] = {}  # costs of calls without an end, by id
        self.calls = 0  # those under way included
        self.usd = 0.0  # with the reserved costs

    def verdict(self, key: str) -> float | None:
        self._read()
        return self._verdicts.get(key)

    def keep(self, key: str, verdict: float) -> None:
        self._verdicts[key] = verdict
        with suppress(OSError):  # the next session asks again
            self._lines.append({"key": key, "verdict": verdict})

    def start(self, usd: float) -> str:
        """The id of a new call that costs at most `usd`.

        Raises:
            BudgetUsed: it would exceed the budget.
            OSError: the file cannot be written.
        """
        self._read()
        most_calls, most_usd = self._config.most_calls, self._config.most_usd
        if most_calls and self.calls >= most_calls:
            raise BudgetUsed(f"its {most_calls} calls are used up (most_calls)")
        if most_usd and self.usd + usd > most_usd:
            spent = dollars(self.usd - sum(self._reserved.values()))
            raise BudgetUsed(f"{spent} are spent, and another call could exceed most_usd = {most_usd:g}")
        call = secrets.token_hex(6)
        self._lines.append({"call": call, "usd": usd, "budget": self._budget})
        return call

    def finish(self, call: str, usd: float, *, unused: bool = False) -> None:
        """The cost of a call. `unused`: it did not reach the judge and counts no more."""
        with suppress(OSError):  # then it counts with its highest cost
            self._lines.append({"done": call, "usd": usd, **({"unused": True} if unused else {})})

    def _read(self) -> None:
        for line in filter(None, self._lines.new_lines()):
            usd = finite_number(line.get("usd")) or 0.0
            call, done = str(line.get("call", "")), str(line.get("done", ""))
            if call and line.get("budget") == self._budget:
                self.calls += 1
                self.usd += usd
                self._reserved[call] = usd
            elif done in self._reserved:
                self.usd += usd - self._reserved.pop(done)
                self.calls -= line.get("unused") is True
            elif (verdict := finite_number(line.get("verdict"))) is not None:
                self._verdicts[str(line.get("key"))] = verdict
