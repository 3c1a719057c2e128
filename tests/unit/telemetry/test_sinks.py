from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tidemill.core.errors import UserError
from tidemill.telemetry import sinks
from tidemill.telemetry.sinks import SinkContext, SinkSet, TensorBoardSink, TrackioSink, WandbSink, check_sinks


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


class Calls(list[tuple[str, dict[str, Any]]]):
    """A stand-in for a module or object: every call is noted, and returns itself."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Calls:
            self.append((name, {f"arg{index}": arg for index, arg in enumerate(args)} | kwargs))
            return self

        return call


@pytest.mark.parametrize(("module", "sink"), [("wandb", WandbSink), ("trackio", TrackioSink)])
def test_steps_that_a_resumed_run_repeats_are_not_sent_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, sink: type[WandbSink | TrackioSink]
) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, module, calls)
    opened = sink(SinkContext(run="demo", directory=tmp_path, config={}, run_id="id7", last_step=4))
    for step in (3, 4, 5):
        opened.step(step, {"x": 1.0})
    assert calls[1:] == [("log", {"arg0": {"x": 1.0}, "step": 5})]


def test_trackio_does_not_print_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, context: SinkContext, capsys: pytest.CaptureFixture[str]
) -> None:
    chatty = SimpleNamespace(init=lambda **_: print("hello"), finish=lambda: print("bye"))
    monkeypatch.setitem(sys.modules, "trackio", chatty)
    TrackioSink(context).close(failed=False)
    assert capsys.readouterr() == ("", "hello\nbye\n")


def test_wandb_resumes_under_the_same_id(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "wandb", calls)
    sink = WandbSink(context)
    sink.step(3, {"x": 1.0})
    sink.rewind(1)
    sink.close(failed=True)
    (_, opened), logged, finished = calls
    assert (opened["id"], opened["resume"], opened["name"], opened["config"]) == ("id7", "allow", "demo", {"a": 1})
    assert logged == ("log", {"arg0": {"x": 1.0}, "step": 3}) and finished == ("finish", {"exit_code": 1})


def test_trackio_resumes_under_the_same_name(monkeypatch: pytest.MonkeyPatch, context: SinkContext) -> None:
    calls = Calls()
    monkeypatch.setitem(sys.modules, "trackio", calls)
    sink = TrackioSink(context)
    sink.step(3, {"x": 1.0})
    sink.rewind(1)
    sink.close(failed=False)
    assert calls[0][1]["name"] == "demo-id7" and calls[0][1]["resume"] == "allow"
    assert calls[1:] == [("log", {"arg0": {"x": 1.0}, "step": 3}), ("finish", {})]


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
