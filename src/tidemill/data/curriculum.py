"""Prompts that a user function selects for each step, from the rewards of earlier steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import index
from pathlib import Path
from statistics import fmean
from typing import Any

from tidemill.core.errors import UserError, exception_text
from tidemill.core.records import Prompt, Trajectory
from tidemill.data.prompts import ListedSource, content_id
from tidemill.extensions.registry import resolve
from tidemill.extensions.results import placed, raised, shown, wrong_result
from tidemill.extensions.signature import check_offered, wanted_arguments
from tidemill.telemetry.jsonl import JsonlWriter, read_lines

WHERE = "batch.sampler"
INPUTS = ("step", "seed", "count", "rows", "results")


class Curriculum:
    """Implements `core.protocols.PromptSource`. Choices and rewards are stored, so that a resumed run repeats them.

    Args:
        source: the prompts to select from.
        ref: the user function, see `tidemill.prompt_sampler`.
        count: prompts per step.
        lag: `RunSpec.prompts_ahead`; a step sees the rewards of all but the last `lag` steps before it, which may be
            unknown when its first prompt starts.
        store: file of choices and rewards.

    Raises:
        UserError: the function does not exist, takes other arguments, or the task has no list of prompts.
    """

    def __init__(self, source: Any, ref: str, *, count: int, seed: int, lag: int, store: Path) -> None:
        if not isinstance(source, ListedSource):
            what = "selects from a list of prompts, and this task draws its prompts from a large set"
            raise UserError(what, where=WHERE, hint="use a task with rows, or one with fewer digits")
        self._extension = resolve(ref, "prompt_sampler", where=WHERE)
        self._wanted = wanted_arguments(self._extension.function, called="sampler(step, count, rows)", where=WHERE)
        name = placed(self._extension.name, self._extension.function)
        check_offered(self._wanted, INPUTS, name=name, where=WHERE)
        self._source, self._count, self._seed, self._lag = source, count, seed, lag
        items = source.train_items
        self._rows = [{**item.metadata, "prompt": item.messages[-1].content, "answer": item.answer} for item in items]
        if count > len(items):
            what = f"batch.prompts = {count} exceeds the {len(items)} training prompts"
            raise UserError(what, where=WHERE, hint="lower batch.prompts")
        self._ids = list(map(content_id, items))  # stored instead of row numbers, which depend on the file's order
        self._row = {prompt_id: row for row, prompt_id in enumerate(self._ids)}
        self._chosen: dict[int, list[int]] = {}
        self._rewards: dict[int, dict[str, float]] = {}  # by step and prompt id
        if store.is_file():
            for _, line in read_lines(store):
                if "prompts" in line:
                    self._chosen[int(line["step"])] = [self._row[prompt_id] for prompt_id in line["prompts"]]
                else:
                    self._rewards[int(line["step"])] = line["rewards"]
        self._writer = JsonlWriter(store)

    def held_out(self, limit: int | None = None) -> Sequence[Prompt]:
        return self._source.held_out(limit)

    def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
        """The (epoch, prompt) pairs of 1-based `step`; a prompt's epoch is the number of its earlier visits."""
        for number in range(1, step + 1):
            if number not in self._chosen:
                self._chosen[number] = self._choose(number)
                self._writer.write({"step": number, "prompts": [self._ids[row] for row in self._chosen[number]]})
        visits = Counter(row for number in range(1, step) for row in self._chosen[number])
        return [(visits[row], self._source.render(row)) for row in self._chosen[step]]

    def observe(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Store the mean reward of each prompt of a trained step."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for each in trajectories:
            if each.reward is not None and each.reward.valid:
                rewards[each.sample_id.prompt_id].append(each.reward.value)
        self._rewards[step] = {prompt_id: fmean(values) for prompt_id, values in rewards.items()}
        self._writer.write({"step": step, "rewards": self._rewards[step]})

    def close(self) -> None:
        self._writer.close()

    def _choose(self, step: int) -> list[int]:
        results: list[list[float]] = [[] for _ in self._rows]
        for number in range(1, step - self._lag):
            for prompt_id, mean in self._rewards.get(number, {}).items():
                results[self._row[prompt_id]].append(mean)
        inputs = {"step": step, "seed": self._seed, "count": self._count, "rows": self._rows, "results": results}
        name, function = f"prompt sampler {self._extension.name}", self._extension.function
        expected = f"return a list of {self._count} different row numbers below {len(self._rows)}"
        try:
            returned = function(**self._wanted.choose(inputs))
        except (Exception, SystemExit) as error:
            raise raised(name, function, error, where=WHERE) from error
        try:
            found = [index(row) for row in returned]
        except (TypeError, ValueError) as error:
            fault = f"returned {shown(returned)} ({exception_text(error)})"
            raise wrong_result(name, function, fault, where=WHERE, expected=expected) from None
        if len(found) != self._count or len({*found} & {*range(len(self._rows))}) != self._count:
            fault = f"returned {found[:8]!r} for step {step}"
            raise wrong_result(name, function, fault, where=WHERE, expected=expected)
        return found
