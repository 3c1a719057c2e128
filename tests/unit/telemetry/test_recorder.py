from __future__ import annotations

import errno
import io
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fabricated_run import FabricatedRun, FakeClock, decode, make_prompt, make_trajectory
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import Telemetry
from tidemill.core.records import PolicyVersion, Reward, SampleUpdate, StepMetrics, pack_logprobs
from tidemill.telemetry import sinks
from tidemill.telemetry.control import ControlFolder, new_request
from tidemill.telemetry.events import event_text, read_events
from tidemill.telemetry.live_state import UnderWay, read_live
from tidemill.telemetry.metrics import EPISODE_ENDS, read_metrics
from tidemill.telemetry.progress_views import PlainView
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import read_samples


def spec_of(directory: Path, **telemetry: Any) -> RunSpec:
    return RunSpec.model_validate({"run": {"dir": str(directory)}, "telemetry": telemetry})


def open_recorder(
    directory: Path, clock: FakeClock | None = None, of: RunSpec | None = None, **telemetry: Any
) -> Recorder:
    return Recorder(
        RunDirectory.open(directory),
        of or spec_of(directory, **telemetry),
        decode=decode,
        stream=io.StringIO(),
        clock=clock or FakeClock(),
        unix_time=lambda: 0.0,
        memory=lambda: 123,
        processor=itertools.accumulate(itertools.repeat(0.5)).__next__,
        process=itertools.accumulate(itertools.repeat(0.75)).__next__,
    )


def end(recorder: Recorder) -> None:
    recorder.close()
    recorder.run.close()


def metrics_of(step: int, **values: float) -> StepMetrics:
    return StepMetrics(step=step, version=PolicyVersion(number=step, digest="d"), optimizer_steps=1, values=values)


def test_the_recorder_implements_the_telemetry_protocol(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    telemetry: Telemetry = recorder
    telemetry.event("publish", version=1)
    end(recorder)
    names = [event["event"] for event in read_events(recorder.run.events)]
    assert names == ["session_start", "publish", "session_end"]


def test_a_step_gets_peak_memory_wall_time_and_controller_cpu_time(tmp_path: Path) -> None:
    clock = FakeClock(50.0)
    recorder = open_recorder(tmp_path, clock)
    clock.pass_s(20.0)  # loading the model
    recorder.progress("rollout", 0, 64)
    clock.pass_s(4.0)
    recorder.step(metrics_of(1, reward_mean=0.5))
    clock.pass_s(3.0)
    recorder.event("evaluation", step=1, duration_s=2.0)  # two of these three seconds
    recorder.step(metrics_of(2, peak_rss_bytes=7.0))
    end(recorder)
    first, second = read_metrics(recorder.run.metrics)
    cpu = {"cpu_controller_s": 0.5, "cpu_step_s": 0.75}
    assert first.values == {"reward_mean": 0.5, "peak_rss_bytes": 123.0, "time_step_s": 4.0, **cpu}
    assert second.values == {"peak_rss_bytes": 7.0, "time_step_s": 1.0, **cpu}
    assert (first.elapsed_s, second.elapsed_s) == (24.0, 27.0)


def test_on_ray_the_cpu_time_of_a_step_is_that_of_controller_trainer_and_workers(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, of=RunSpec(runtime="ray"))
    for _ in range(2):
        recorder.event("decode", step=1, work=[{"cpu_s": 2.0}, {"cpu_s": 1.0}])
    recorder.step(metrics_of(1, cpu_train_s=4.0))
    recorder.step(metrics_of(2))
    end(recorder)
    assert [line.values["cpu_step_s"] for line in read_metrics(recorder.run.metrics)] == [10.5, 0.5]


@pytest.mark.parametrize(("truncated", "warnings"), [("trained", 1), ("masked", 0)])
def test_many_cut_completions_are_a_warning_once(tmp_path: Path, truncated: str, warnings: int) -> None:
    recorder = open_recorder(tmp_path, of=RunSpec.model_validate({"scoring": {"truncated": truncated}}))
    for step, share in enumerate((0.2, 0.21, 0.9), 1):
        recorder.step(metrics_of(step, truncated_fraction=share))
    end(recorder)
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    said = recorder._view._stream.getvalue()
    assert said.count("were cut at sampling.max_new_tokens = 256") == warnings
    assert ("21% of the completions of step 2" in said) == bool(warnings)


@pytest.mark.parametrize(
    ("ends", "warning"),
    [
        ({"turns": 1.0}, "100% of the episodes of step 1 ended at env.turns = 8"),
        ({"seconds": 0.3, "done": 0.7}, "30% of the episodes of step 1 ended at env.seconds = 600"),
        ({"tokens": 0.5, "turns": 0.1}, "50% of the episodes of step 1 were cut at sampling.max_new_tokens = 256"),
        ({"context": 0.5}, "50% of the episodes of step 1 were cut at the model's context (engine.context_tokens)"),
        ({"done": 1.0}, ""),
    ],
)
def test_a_warning_names_the_limit_of_an_episode(tmp_path: Path, ends: dict[str, float], warning: str) -> None:
    recorder = open_recorder(tmp_path)
    figures = {name: ends.get(end, 0.0) for end, name in EPISODE_ENDS.items()}
    for step in (1, 2):
        values = {**figures, "truncated_fraction": figures[EPISODE_ENDS["tokens"]]}
        recorder.step(metrics_of(step, **values))
    end(recorder)
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    said = recorder._view._stream.getvalue()
    assert warning in said
    assert said.count("warning: ") == bool(warning)


def test_samples_with_details_are_among_a_limited_number(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, samples_per_step=2)
    prompt = make_prompt("1 + 1 =")
    samples = [make_trajectory(prompt, "2", reward=Reward(value=1.0), index=index) for index in range(4)]
    update = SampleUpdate(sample_id=samples[3].sample_id, advantage=0.5, entropies=pack_logprobs([0.1]))
    recorder.samples(1, [*samples[:3], msgspec.structs.replace(samples[3], update=update)], [prompt] * 4)
    end(recorder)
    assert [sample.index for sample in read_samples(recorder.run.samples / "step_000001.jsonl")] == [0, 3]


def test_samples_are_filed_by_step_and_purpose(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, samples_per_step=2)
    prompt = make_prompt("1 + 1 =")
    reward = Reward(value=1.0)
    train = [make_trajectory(prompt, " 2\n", reward=reward, index=index) for index in range(4)]
    held_out = make_trajectory(prompt, " 3\n", reward=reward, purpose="eval:held_out")
    recorder.samples(3, [*train, held_out], [prompt] * 5)
    end(recorder)
    folder = recorder.run.samples
    assert sorted(path.name for path in folder.glob("step_*")) == [
        "step_000003.eval-held_out.jsonl",
        "step_000003.jsonl",
    ]
    assert len(read_samples(folder / "step_000003.jsonl")) == 2
    assert read_samples(folder / "step_000003.eval-held_out.jsonl")[0].tokens == (" ", "3", "\n")


def test_a_decoder_can_be_set_later(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory.open(tmp_path), spec_of(tmp_path), stream=io.StringIO(), clock=FakeClock())
    prompt = make_prompt("1")
    recorder.samples(1, [make_trajectory(prompt, "2")], [prompt])
    recorder.use_decoder(decode)
    recorder.samples(2, [make_trajectory(prompt, "2")], [prompt])
    end(recorder)
    files = [path for _, _, path in recorder.run.sample_files()]
    assert [read_samples(path)[0].tokens for path in files] == [(), ("2",)]


def test_resuming_deletes_later_steps_and_logs_it(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    for step in (1, 2, 3):
        recorder.step(metrics_of(step, reward_mean=step / 10))
    end(recorder)
    again = open_recorder(tmp_path)
    again.resume(1)
    again.step(metrics_of(2, reward_mean=0.9))
    end(again)
    assert [line.values["reward_mean"] for line in read_metrics(again.run.metrics)] == [0.1, 0.9]
    assert [(event["event"], event["session"]) for event in read_events(again.run.events)] == [
        ("session_start", 1),
        ("session_end", 1),
        ("session_start", 2),
        ("resume", 2),
        ("session_end", 2),
    ]


def test_finishing_writes_the_summary(tmp_path: Path) -> None:
    clock = FakeClock()
    recorder = open_recorder(tmp_path, clock)
    clock.pass_s(2.5)
    summary = recorder.finish("interrupted")
    recorder.run.close()
    assert summary == recorder.run.read_summary()
    assert (summary["outcome"], summary["wall_s"], summary["peak_rss_bytes"]) == ("interrupted", 2.5, 123)


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "interrupted"), (KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_leaving_the_block_ends_the_session(tmp_path: Path, error: type[BaseException] | None, outcome: str) -> None:
    recorder = open_recorder(tmp_path)
    with suppress(KeyboardInterrupt, ValueError), recorder:
        if error:
            raise error
    recorder.run.close()
    assert read_events(recorder.run.events)[-1]["outcome"] == outcome


@pytest.mark.parametrize(
    ("error", "outcome", "text", "logged"),
    [
        (ValueError("odd"), "failed", "ValueError: odd", "ValueError: odd"),
        (
            ExceptionGroup("g", [ValueError("odd"), UserError("theirs", where="a.b", hint="mend it")]),
            "failed",
            "a.b: theirs\n  mend it",
            "UserError: a.b: theirs; mend it",
        ),
        (KeyboardInterrupt(), "interrupted", None, None),
    ],
)
def test_the_summary_and_the_event_log_have_the_error_of_a_failed_run(
    tmp_path: Path, error: BaseException, outcome: str, text: str | None, logged: str | None
) -> None:
    recorder = open_recorder(tmp_path)
    with pytest.raises(type(error)) as caught, recorder:
        raise error
    assert caught.value is error
    recorder.run.close()
    summary = recorder.run.read_summary()
    assert (summary["outcome"], summary["finished"], summary.get("error")) == (outcome, False, text)
    assert read_events(recorder.run.events)[-1].get("error") == logged


def test_a_failed_summary_does_not_hide_the_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: RunDirectory, summary: dict[str, Any]) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(RunDirectory, "write_summary", full)
    with pytest.raises(ValueError, match="odd"), open_recorder(tmp_path) as recorder:
        raise ValueError("odd")
    recorder.run.close()
    assert read_events(recorder.run.events)[-1]["outcome"] == "failed"
    assert read_events(recorder.run.events)[-1]["error"] == "ValueError: odd"


def test_closing_after_finishing_changes_nothing(tmp_path: Path) -> None:
    with open_recorder(tmp_path) as recorder:
        recorder.finish("finished")
    recorder.run.close()
    ends = [event["outcome"] for event in read_events(recorder.run.events) if event["event"] == "session_end"]
    assert ends == ["finished"]


def test_a_missing_sink_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with RunDirectory.open(tmp_path) as run, pytest.raises(UserError, match="trackio"):
        Recorder(run, spec_of(tmp_path, sinks=["trackio"]), stream=io.StringIO())
    assert not run.events.exists()


def test_a_failing_sink_is_reported_once_and_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, context: sinks.SinkContext) -> None: ...

        def step(self, step: int, values: dict[str, float]) -> None:
            raise OSError("gone")

    monkeypatch.setattr(sinks, "SINKS", {"wandb": Failing})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    recorder = open_recorder(tmp_path, sinks=["wandb"])
    recorder.step(metrics_of(1))
    recorder.step(metrics_of(2))
    end(recorder)
    failures = [event for event in read_events(recorder.run.events) if event["event"] == "sink_failed"]
    assert [(event["sink"], event["error"]) for event in failures] == [("wandb", "OSError: gone")]
    assert len(read_metrics(recorder.run.metrics)) == 2
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    assert recorder._view._stream.getvalue().count("gone") == 1


def test_a_full_disk_is_reported_and_the_recorder_still_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = open_recorder(tmp_path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UserError) as caught:
        recorder.step(metrics_of(1))
    assert caught.value.where == str(recorder.run.metrics)
    recorder.close("failed")
    monkeypatch.undo()
    recorder.run.close()
    assert [event["event"] for event in read_events(recorder.run.events)] == ["session_start"]


def test_the_fabricated_run_has_one_history(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    lines = read_metrics(run.metrics)
    assert [line.step for line in lines] == list(range(1, 21))
    assert [line.session for line in lines] == [1] * 10 + [2] * 10
    assert len(run.metrics.read_text().splitlines()) == 20


def test_each_kind_of_reward_failure_is_reported_once_with_its_sample(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    prompt = make_prompt("1+1=" * 100, "2")

    def record(step: int, *faults: str) -> None:
        rewards = [Reward(value=0.0, valid=not fault, reason=fault and f"{fault} (sample {step})") for fault in faults]
        recorder.samples(step, [make_trajectory(prompt, "2", reward=one) for one in rewards], [prompt] * len(rewards))

    record(1, "", "")
    record(2, "reward a: no result within 2 s", "", "reward a: no result within 2 s")
    record(3, "reward a: no result within 3 s", "")
    record(4, "reward a: KeyError: 'x'; reward b: KeyError: 'y'")
    record(
        5, "reward a: KeyError: 'z'", "with their weights rewards are 1, inf", "with their weights rewards are 2, inf"
    )
    end(recorder)
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    shown = f"{'1+1=' * 15} … {'1+1=' * 15}"
    reasons = {
        2: "2 of 3 samples of step 2 got no valid reward; reward a: no result within 2 s",
        4: "1 of 1 samples of step 4 got no valid reward; reward a: KeyError: 'x'; reward b: KeyError: 'y'",
        5: "3 of 3 samples of step 5 got no valid reward; with their weights rewards are 1, inf",
    }
    assert [line for line in recorder._view._stream.getvalue().splitlines() if "no valid reward" in line] == [
        f"warning: {reason} (sample {step}); prompt {shown!r}, response '2'" for step, reason in reasons.items()
    ]
    logged = [event for event in read_events(recorder.run.events) if event["event"] == "reward_failed"]
    assert [event["step"] for event in logged] == [2, 4, 5]
    assert (logged[0]["reason"], logged[0]["prompt"], logged[0]["response"]) == (
        "reward a: no result within 2 s (sample 2)",
        shown,
        "2",
    )


def test_a_fault_of_an_environment_is_no_failure_of_a_reward(tmp_path: Path) -> None:
    recorder, prompt = open_recorder(tmp_path), make_prompt("1+1=")
    lost = make_trajectory(prompt, "2", reward=Reward(value=0.0, valid=False, reason="Shop.price gave a list"))
    recorder.samples(1, [msgspec.structs.replace(lost, fault="Shop.price gave a list")], [prompt])
    recorder.event("environment_warning", reason="Shop.price gave a list")
    end(recorder)
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    assert recorder._view._stream.getvalue().splitlines() == ["warning: Shop.price gave a list"]
    assert "reward_failed" not in {event["event"] for event in read_events(recorder.run.events)}


def test_fleet_events_are_shown_and_counted_at_the_end(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.event("lease", lease="l3", worker="spot-3", kind="preemptible", price_usd_per_hour=0.5)
    eviction = {"lease": "l3", "worker": "spot-3", "samples": 5, "tokens_kept": 1210, "tokens_lost": 37}
    for noticed in (False,) * 8 + (True,) * 4:
        recorder.event("eviction", **eviction, noticed=noticed)
    recorder.event("migration", lease="l3", worker="spot-3", to_worker="local", samples=58, tokens_kept=14000)
    summary = recorder.finish("finished")
    recorder.run.close()
    assert (summary["evictions"], summary["evictions_noticed"], summary["migrations"]) == (12, 4, 58)
    assert isinstance(recorder._view, PlainView) and isinstance(recorder._view._stream, io.StringIO)
    shown = recorder._view._stream.getvalue().splitlines()
    moved = "5 samples move to other workers, 1,210 tokens kept, 37 lost"
    assert shown[:8] == [f"evicted spot-3 without notice: {moved}"] * 8
    assert shown[8:] == [
        "also 4 evictions: 20 samples move to other workers, 4,840 tokens kept, 148 lost",
        "12 evictions (4 with notice): 58 samples migrated, 14,000 tokens kept, 444 lost",
    ]


def test_recomputed_tokens_of_rewound_steps_count(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    for step in (1, 2, 3):
        recorder.step(metrics_of(step, tokens_recomputed=10.0 * step))
    end(recorder)
    again = open_recorder(tmp_path)
    again.resume(1)
    again.step(metrics_of(2, tokens_recomputed=7.0))
    # 10 of step 1, 20 + 30 of the deleted steps, 7 of the repeated step 2.
    assert again.finish("finished")["tokens_recomputed"] == 67
    again.run.close()


def test_live_json_follows_the_run_at_most_once_a_second(tmp_path: Path) -> None:
    clock = FakeClock()
    recorder = open_recorder(tmp_path, clock)
    first = read_live(tmp_path)
    assert first is not None and (first.session, first.step, first.activity) == (1, 0, "working")
    for done in range(10):  # a busy phase
        clock.pass_s(0.3)
        recorder.progress("rollout", done, 64)
    live = read_live(tmp_path)
    assert live is not None
    assert live.beat - first.beat == 2 and live.phases[0].name == "rollout"
    assert live.elapsed_s == pytest.approx(2.4)
    recorder.step(metrics_of(1, time_step_s=3.0))
    clock.pass_s(1.0)
    recorder.under_way = lambda: UnderWay(samples_total=3)
    recorder.beat()
    live = read_live(tmp_path)
    assert live is not None and live.left_s is not None
    assert (live.step, live.samples_total) == (1, 3) and live.left_s < 3.0 * live.total_steps
    end(recorder)
    live = read_live(tmp_path)
    assert live is not None and (live.activity, live.samples_total, live.phases) == ("ended", 0, ())
    clock.pass_s(5.0)
    recorder.beat()
    assert read_live(tmp_path) == live


def test_a_run_whose_live_json_cannot_be_written_continues(tmp_path: Path) -> None:
    (tmp_path / "live.json").mkdir()
    recorder = open_recorder(tmp_path)
    recorder.step(metrics_of(1))
    end(recorder)
    assert len(read_metrics(recorder.run.metrics)) == 1


def test_requests_are_events_of_the_run_and_stand_in_live_json(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.control.attach(lambda reason: None)
    recorder.step(metrics_of(7))
    request = new_request("pause", run_id=recorder._run_id, session=1, by="watch")
    ControlFolder(tmp_path).write(request)
    recorder.beat(now=True)
    live = read_live(tmp_path)
    assert live is not None and live.requests == (request.request_id,)
    recorder.control.take_waiting()
    recorder.beat(now=True)
    live = read_live(tmp_path)
    assert live is not None and (live.activity, live.requests) == ("paused", ())
    end(recorder)
    (event,) = [event for event in read_events(recorder.run.events) if event["event"] == "control"]
    assert (event["step"], event["request"], event["by"]) == (7, request.request_id, "watch")
    assert event_text("control", event) == "pause after step 7 (watch)"
