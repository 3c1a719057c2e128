"""Whatever is changed, deleted or cut, and when: nothing finished is repeated unchanged, nothing stale is used."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.pretend_stages import STEPS, PowerCut, Quiet, Stages, read
from tidemill.config.learning import TrainerConfig
from tidemill.config.model import ModelConfig
from tidemill.config.pipeline import PipelineSpec, StageSpec
from tidemill.config.schema import RunConfig, RunSpec
from tidemill.core.errors import UserError
from tidemill.pipeline.execution import plan_pipeline, run_pipeline
from tidemill.pipeline.stage_plan import EVERYTHING, Choice
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.jsonl import write_atomically

pytestmark = pytest.mark.slow

# base ── a ── b ── d
#         └── c
SOURCES = {"a": "./base", "b": "stage:a", "c": "stage:a", "d": "stage:b"}
NAMES = tuple(SOURCES)
UNCHECKED = patch("tidemill.pipeline.execution.check_inputs")
"""The base is no model, and stages that take no time do not mind."""
MOMENTS = st.integers(0, 60)


class Pipelines(RuleBasedStateMachine):
    """One pipeline's directory over the lives of many processes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tidemill-"))
        (self.folder / "base").mkdir()
        self.seeds = dict.fromkeys(NAMES, 0)
        self.threads = 1
        self.kept: set[str] = set()  # folders of stages that were finished, and not deleted since
        self.steps: dict[str, set[int]] = {}  # by folder, what durable work there is
        self.left = -1  # until the power goes; -1 for never
        self.stages = Stages(self._tick)
        self._write_weights(0)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(name=st.sampled_from(NAMES), seed=st.integers(0, 2))
    def change_a_stage(self, name: str, seed: int) -> None:
        self.seeds[name] = seed

    @rule(threads=st.integers(1, 3))
    def change_what_does_not_matter(self, threads: int) -> None:
        self.threads = threads

    @rule(content=st.integers(0, 2))
    def change_a_file(self, content: int) -> None:
        self._write_weights(content)

    @rule()
    def run(self) -> None:
        _quiet, result = self._live()
        assert result is not None
        assert result["finished"]
        assert not any(planned.due for planned in self._live()[0].plans[0].stages)
        self._check_results()

    @rule(moment=MOMENTS)
    def run_until_the_power_goes(self, moment: int) -> None:
        self._live(cut_after=moment)

    @rule(at=st.integers(0, STEPS * len(NAMES)))
    def run_until_interrupted(self, at: int) -> None:
        self._live(interrupt_at=at)

    @rule(name=st.sampled_from(NAMES), moment=MOMENTS)
    def run_one(self, name: str, moment: int) -> None:
        if self._possible(Choice(only=name)):
            self._live(choice=Choice(only=name), cut_after=moment)

    @rule(moment=MOMENTS)
    def prune(self, moment: int) -> None:
        self._live(prune_stale=True, cut_after=moment)
        self.kept &= self._finished()
        there = PipelineFolder(self.folder / "D").found()
        self.steps = {stage: steps for stage, steps in self.steps.items() if stage in there}

    @rule(name=st.sampled_from(NAMES))
    def delete_a_product(self, name: str) -> None:
        for each in (self.folder / "D" / "stages").glob(f"{name}-*/model"):
            shutil.rmtree(each)
        self.kept &= self._finished()

    @invariant()
    def nothing_finished_is_lost(self) -> None:
        assert self.kept <= self._finished()

    def _live(
        self,
        *,
        choice: Choice = EVERYTHING,
        cut_after: int = -1,
        interrupt_at: int | None = None,
        prune_stale: bool = False,
    ) -> tuple[Quiet, dict[str, Any] | None]:
        """One process's life, to its end or until the power goes."""
        quiet = Quiet()
        self.left, self.stages.interrupt_at = cut_after, interrupt_at
        self.stages.worked.clear()

        def cut_write(path: Path, data: bytes) -> None:
            self._tick()
            write_atomically(path, data)
            self._tick()

        summary = None
        try:
            with patch("tidemill.pipeline.state.write_atomically", cut_write), UNCHECKED:
                summary = run_pipeline(
                    self._pipeline(),
                    reporter=quiet,
                    choice=choice,
                    prune_stale=prune_stale,
                    runners=self.stages.runners,
                )
        except PowerCut:
            pass
        for stage, step in self.stages.worked:
            assert stage not in self.kept, "repeated, though finished and unchanged"
            assert step not in self.steps.setdefault(stage, set()), "a durable step was done again"
            self.steps[stage].add(step)
        if not prune_stale:
            assert self.kept <= self._finished()
        self.kept |= self._finished()
        return quiet, summary

    def _tick(self) -> None:
        if self.left == 0:
            raise PowerCut
        self.left -= 1

    def _possible(self, choice: Choice) -> bool:
        try:
            with UNCHECKED:
                plan_pipeline(self._pipeline(), choice=choice)
        except UserError:
            return False
        return True

    def _pipeline(self) -> PipelineSpec:
        """The pipeline as it is configured now."""
        run = RunConfig(name="p", dir=self.folder / "D")
        return PipelineSpec(run=run, stages=tuple(map(self._stage, NAMES)))

    def _stage(self, name: str) -> StageSpec:
        source = SOURCES[name].replace("./base", str(self.folder / "base"))
        spec = RunSpec(
            run=RunConfig(name=name, seed=self.seeds[name]),
            model=ModelConfig(source=source),
            trainer=TrainerConfig(threads=self.threads),
        )
        return StageSpec(name=name, kind="rl", spec=spec)

    def _write_weights(self, content: int) -> None:
        self.content = content
        (self.folder / "base" / "weights").write_text(str(content))

    def _expected(self, name: str) -> Any:
        """What the stage must have been made from, as things are now."""
        source = SOURCES[name]
        below = str(self.content) if source == "./base" else self._expected(source.removeprefix("stage:"))
        return {"seed": self.seeds[name], "from": below}

    def _check_results(self) -> None:
        place = PipelineFolder(self.folder / "D")
        for stage in place.read_state()["stages"]:
            made = read(place.path / stage["folder"] / stage["product"])
            assert made == self._expected(stage["name"]), "made from something stale"

    def _finished(self) -> set[str]:
        return {name for name, each in PipelineFolder(self.folder / "D").found().items() if each.result}


TestPipelines = Pipelines.TestCase
TestPipelines.settings = settings(max_examples=6, stateful_step_count=16)
