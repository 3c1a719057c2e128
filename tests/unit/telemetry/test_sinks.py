from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tidemill.config.telemetry import TelemetryConfig
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion, StepMetrics
from tidemill.telemetry import sinks
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.metrics import metric_line
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sinks import (
    HistorySink,
    SinkContext,
    SinkSet,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
    check_sinks,
)


class FakeSink:
    """Takes values until step `fail_at`."""

    def __init__(self, fail_at: int = 10**9) -> None:
        self.fail_at, self.calls = fail_at, list[Any]()

    def step(self, step: int, values: dict[str, float]) -> None:
        if step >= self.fail_at:
            raise ConnectionError("the other end hung up\nand more")
        self.calls.append((step, values))

    def rewind(self, step: int) -> None:
        self.calls.append(("rewind", step))

    def close(self, *, failed: bool) -> None:
        self.calls.append(("close", failed))


@pytest.fixture
def context(tmp_path: Path) -> SinkContext:
    return SinkContext(run="demo", directory=tmp_path, config={"a": 1}, run_id="id7", last_step=0)


def open_fakes(
    monkeypatch: pytest.MonkeyPatch, context: SinkContext, **fakes: FakeSink
) -> tuple[SinkSet, list[tuple[str, str]]]:
    monkeypatch.setattr(sinks, "SINKS", {name: lambda _, fake=fake: fake for name, fake in fakes.items()})
    warnings: list[tuple[str, str]] = []
    opened = SinkSet(lambda name, error: warnings.append((name, error)))
    opened.open(list(fakes), context)
    return opened, warnings


def test_a_failing_sink_warns_once_and_is_dropped(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    good, bad = FakeSink(), FakeSink(fail_at=2)
    opened, warnings = open_fakes(monkeypatch, context, good=good, bad=bad)
    for step in (1, 2, 3):
        opened.step(step, {"x": 1.0})
    opened.close(failed=False)
    assert warnings == [("bad", "ConnectionError: the other end hung up")]
    assert bad.calls == [(1, {"x": 1.0})]
    assert good.calls == [(1, {"x": 1.0}), (2, {"x": 1.0}), (3, {"x": 1.0}), ("close", False)]


def test_only_finite_values_are_sent(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    sink = FakeSink()
    opened, _ = open_fakes(monkeypatch, context, one=sink)
    opened.step(1, {"x": 1.0, "nan": float("nan"), "inf": float("inf")})
    opened.rewind(0)
    assert sink.calls == [(1, {"x": 1.0}), ("rewind", 0)]


def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb") as caught:
        check_sinks(["wandb"])
    assert caught.value.hint.startswith('pip install "wandb>=')
    check_sinks([])


def refuse(context: SinkContext) -> FakeSink:
    raise RuntimeError("not logged in")


def test_a_sink_that_cannot_open_stops_a_new_run(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    monkeypatch.setattr(sinks, "SINKS", {"wandb": refuse})
    with pytest.raises(UserError, match="not logged in") as caught:
        SinkSet(lambda *_: None).open(["wandb"], context)
    assert "telemetry.sinks" in caught.value.hint


def test_a_sink_that_cannot_open_does_not_stop_a_resumed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sinks, "SINKS", {"wandb": refuse})
    warnings: list[tuple[str, str]] = []
    resumed = SinkContext(run="demo", directory=tmp_path, config={}, run_id="id7", last_step=4)
    SinkSet(lambda name, error: warnings.append((name, error))).open(["wandb"], resumed)
    assert warnings == [("wandb", "RuntimeError: not logged in")]


@dataclass
class FakeRun:
    """A run of W&B or trackio."""

    name: str
    id: str
    kept: list[FakeRun]  # where it is stored
    offline: bool = True
    first_step: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    sent: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def step(self) -> int:
        return max([self.first_step, *(step + 1 for step, _ in self.sent)])

    def log(self, values: dict[str, Any], step: int) -> None:
        assert not self.offline or step >= self.step
        self.sent.append((step, values))

    def finish(self, exit_code: int = 0) -> None:
        self.ended.append(exit_code)

    def delete(self) -> None:
        self.kept.remove(self)


class FakePackage:
    """Stands for the modules `wandb` and `trackio`: keeps runs, W&B's offline ones as folders."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []
        self.online_step: int | None = None  # of W&B: offline if None
        self._numbers = itertools.count()

    def init(self, **options: Any) -> FakeRun:
        number = str(next(self._numbers))
        run = FakeRun(options["name"], options.get("id", number), self.runs, options=options)
        if "dir" in options:
            folder = Path(options["dir"]) / "wandb" / f"offline-run-{number}-{run.id}"
            run.offline, run.first_step = self.online_step is None, self.online_step or 0
            if run.offline:
                folder.mkdir(parents=True)
            run.sync_dir = str(folder)  # type: ignore[attr-defined]
        self.runs.append(run)
        return run

    def log(self, values: dict[str, Any], step: int) -> None:
        self.runs[-1].log(values, step)

    def finish(self) -> None:
        self.runs[-1].finish()

    def Api(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(runs=lambda project: self.runs)

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[list[Any]]:  # noqa: N802
        return [columns, *data]


def session_of(sink: type[HistorySink], folder: Path, *, last_step: int, **more: Any) -> HistorySink:
    return sink(SinkContext(run="demo", directory=folder, config={"a": 1}, run_id="id7", last_step=last_step, **more))


def learn(sink: HistorySink, folder: Path, *steps: int, value: float = 1.0) -> None:
    for step in steps:
        metrics = StepMetrics(step=step, version=PolicyVersion(number=step, digest="d"), optimizer_steps=1, values={})
        line = metric_line(metrics, {"x": value}, unix_s=0.0, session=1, elapsed_s=0.0)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(encode(line) + b"\n")
        sink.step(step, {"x": value})


def rewind(sink: HistorySink, folder: Path, step: int) -> None:
    RunDirectory(folder).rewind(step)
    sink.rewind(step)


def history(run: FakeRun) -> list[tuple[int, float]]:
    return [(step, values["x"]) for step, values in run.sent]


BOTH = pytest.mark.parametrize(("module", "sink"), [("wandb", WandbSink), ("trackio", TrackioSink)])


@BOTH
def test_kills_resumes_and_a_rollback_leave_histories_without_gap_or_duplicate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, sink: type[HistorySink]
) -> None:
    package = FakePackage()
    monkeypatch.setitem(sys.modules, module, package)
    (tmp_path / "samples").mkdir()
    learn(session_of(sink, tmp_path, last_step=0), tmp_path, *range(8))  # killed
    for _ in range(2):  # resumed from the checkpoint of step 5, and killed again
        resumed = session_of(sink, tmp_path, last_step=7)
        rewind(resumed, tmp_path, 5)
        learn(resumed, tmp_path, 6, 7)
    assert history(package.runs[-1]) == [(step, 1.0) for step in range(8)]
    (tmp_path / "abandoned" / "1").mkdir(parents=True)
    for target in (4, 4):  # the rollback, then the resume after it
        rewind(resumed, tmp_path, target)
    learn(resumed, tmp_path, 5, 6, value=2.0)
    assert package.runs[-2].ended == [0]
    last = session_of(sink, tmp_path, last_step=6)
    rewind(last, tmp_path, 6)
    learn(last, tmp_path, 7, value=2.0)
    last.close(failed=True)
    run = package.runs[-1]
    assert history(run) == [*((step, 1.0) for step in range(5)), *((step, 2.0) for step in (5, 6, 7))]
    assert run.ended == [int(module == "wandb")]
    if module == "wandb":
        ids = {(run.id, run.name): Path(run.sync_dir).name for run in package.runs}  # type: ignore[attr-defined]
        assert list(ids) == [("id7", "demo"), ("id7-r1", "demo-r1")]
        assert {folder.name for folder in (tmp_path / "wandb").iterdir()} == set(ids.values())
    else:
        assert [run.name for run in package.runs] == ["demo-id7", "demo-id7-r1"]


def test_wandb_online_gets_only_steps_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = FakePackage()
    package.online_step = 4
    monkeypatch.setitem(sys.modules, "wandb", package)
    learn(session_of(WandbSink, tmp_path, last_step=6), tmp_path, *range(7))
    assert history(package.runs[0]) == [(4, 1.0), (5, 1.0), (6, 1.0)], "4 and 5 were lost in the kill"
    assert package.runs[0].options["resume"] == "allow"


@BOTH
def test_project_group_tags_and_a_table_of_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, sink: type[HistorySink]
) -> None:
    package = FakePackage()
    monkeypatch.setitem(sys.modules, module, package)
    (tmp_path / "samples").mkdir()
    lines = [{"prompt": "<b>", "completion": "x" * 5000, "reward": None, "tokens": ["t"]}] * 9
    (tmp_path / "samples" / "step_000000.jsonl").write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    opened = session_of(sink, tmp_path, last_step=0, telemetry=TelemetryConfig(project="p", tags=("t",), group="g"))
    learn(opened, tmp_path, 0, 1)
    (run,) = package.runs
    assert (run.options["project"], run.options["group"], run.options["config"]) == ("p", "g", {"a": 1})
    assert run.options.get("tags", ["t"]) == ["t"]
    (_, first), (_, second) = run.sent
    assert first["completions"] == [["prompt", "completion", "reward"], *[["<b>", "x" * 2000, None]] * 4]
    assert second == {"x": 1.0}


def test_trackio_does_not_print_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, context: SinkContext, capsys: pytest.CaptureFixture[str]
) -> None:
    chatty = SimpleNamespace(init=lambda **_: print("hello"), finish=lambda: print("bye"))
    monkeypatch.setitem(sys.modules, "trackio", chatty)
    TrackioSink(context).close(failed=False)
    assert capsys.readouterr() == ("", "hello\nbye\n")


def test_tensorboard_gets_scalars_by_step(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    written: list[Any] = []

    def record(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)

    class Summary(SimpleNamespace):
        Value = staticmethod(record)

    class SessionLog(SimpleNamespace):
        START = 1

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_event(self, event: Any) -> None:
            written.append(event)

        def close(self) -> None:
            written.append("closed")

    modules: dict[str, dict[str, Any]] = {
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": Writer},
        "tensorboard.compat.proto.event_pb2": {"Event": record, "SessionLog": SessionLog},
        "tensorboard.compat.proto.summary_pb2": {"Summary": Summary},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        monkeypatch.setitem(sys.modules, name, module)
    sink = TensorBoardSink(context)
    sink.rewind(2)
    sink.step(3, {"x": 0.5})
    sink.close(failed=False)
    folder, rewound, scalar, closed = written
    assert folder == str(context.directory / "tensorboard") and closed == "closed"
    assert (rewound.step, rewound.session_log.status) == (3, 1), "from step 3 on, earlier files no longer count"
    assert (scalar.step, scalar.summary.value[0].tag, scalar.summary.value[0].simple_value) == (3, "x", 0.5)
