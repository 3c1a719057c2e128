from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.report.pages import findings, headline
from tidemill.telemetry.report.sections import logged_state
from tidemill.telemetry.run_data import LoggedEvaluation, RunData, clearly_differs, comparable
from tidemill.telemetry.run_dir import RunDirectory


def data_of(tmp_path: Path, metrics: str = "", events: str = "", config: str = "") -> RunData:
    run = RunDirectory(tmp_path)
    run.metrics.write_text(metrics)
    run.events.write_text(events)
    run.config.write_text(config)
    return RunData.load(run)


def lines(name: str, values: list[float]) -> str:
    return "".join(f'{{"step":{step},"{name}":{value}}}\n' for step, value in enumerate(values, 1))


def evaluated(step: int, accuracy: float) -> str:
    figures = f'"reward_mean":{accuracy},"reward_stderr":0.05,"greedy_accuracy":{accuracy}'
    return f'{{"event":"evaluation","step":{step},{figures},"n":64}}\n'


def graded(step: int, reward: float, stderr: float = 0.05) -> str:
    return f'{{"event":"evaluation","step":{step},"reward_mean":{reward},"reward_stderr":{stderr},"n":64}}\n'


def errors(**counts: float) -> str:
    """A step with these counts of environments."""
    return json.dumps({"step": 1, **{f"env_{kind}": count for kind, count in counts.items()}}) + "\n"


ONE_STEP = lines("entropy", [1.0])


@pytest.mark.parametrize(
    ("before", "after", "n", "clear"),
    [(0.28, 0.83, 64, True), (0.83, 0.28, 64, True), (0.50, 0.55, 64, False), (0.50, 0.55, 5000, True)],
)
def test_shares_differ_significantly_or_not(before: float, after: float, n: int, clear: bool) -> None:
    first, last = comparable([LoggedEvaluation(0, before, None, before, n), LoggedEvaluation(5, after, None, after, n)])
    assert clearly_differs(first, last) is clear


@pytest.mark.parametrize(("stderr", "clear"), [(0.03, True), (0.04, False), (None, False)])
def test_means_differ_significantly_or_not(stderr: float | None, clear: bool) -> None:
    # 95 % of the difference of 0.1: 1.96 · sqrt(2) · 0.03 = 0.083, with 0.04 it is 0.111
    first, last = comparable([LoggedEvaluation(0, 1.5, stderr, None, 64), LoggedEvaluation(5, 1.6, stderr, None, 64)])
    assert clearly_differs(first, last) is clear


@pytest.mark.parametrize(
    ("metrics", "events", "sentence"),
    [
        ("", "", "No step has been completed yet."),
        (lines("samples_invalid", [8.0, 8.0]), "", "2 steps have been completed, none with a valid reward."),
        ("", evaluated(0, 0.25), "Held-out accuracy is 0.250 before the first step."),
        (lines("reward_mean", [0.2, 0.4]), "", "Mean reward went from 0.200 to 0.400 in 2 steps."),
        (lines("reward_mean", [0.2]), evaluated(0, 0.28), "Mean reward is 0.200 after 1 step."),
        (ONE_STEP, evaluated(0, 0.28) + evaluated(1, 0.83), "Held-out accuracy rose from 0.280 to 0.830 in 1 step."),
        (ONE_STEP, evaluated(0, 0.83) + evaluated(1, 0.28), "Held-out accuracy fell from 0.830 to 0.280 in 1 step."),
        (
            ONE_STEP,
            evaluated(0, 0.50) + evaluated(1, 0.55),
            "Held-out accuracy went from 0.500 to 0.550 in 1 step, which is within sampling error.",
        ),
        ("", graded(0, 0.9), "Held-out mean reward is 0.900 before the first step."),
        (ONE_STEP, graded(0, 0.9) + graded(1, 1.5), "Held-out mean reward rose from 0.900 to 1.500 in 1 step."),
        (ONE_STEP, graded(0, 0.9, 0.0) + graded(1, 1.5), "Held-out mean reward went from 0.900 to 1.500 in 1 step."),
        (ONE_STEP, evaluated(0, 0.0) + graded(1, 1.5), "Held-out mean reward rose from 0.000 to 1.500 in 1 step."),
        (
            ONE_STEP,
            graded(0, 1.5, 0.5) + graded(1, 0.9, 0.5),
            "Held-out mean reward went from 1.500 to 0.900 in 1 step, which is within sampling error.",
        ),
    ],
)  # fmt: skip
def test_headlines(tmp_path: Path, metrics: str, events: str, sentence: str) -> None:
    assert headline(data_of(tmp_path, metrics, events)) == sentence


@pytest.mark.parametrize(
    ("metrics", "events", "config", "title"),
    [
        ("", '{"event":"data","few":["3 prompts"]}\n', "", "Few held-out prompts"),
        (lines("samples_invalid", [0, 2, 1]), "", "", "3 samples without a valid reward"),
        (lines("groups_without_signal", [7] * 6), "", "[batch]\nprompts = 8\n", "88 % of recent groups had no signal"),
        (lines("truncated_fraction", [0.0, 0.5]), "", "", "25 % of recent completions were truncated"),
        (lines("entropy", [2.0] + [0.1] * 6), "", "", "Entropy collapsed: 2.000 → 0.100 nats"),
        (lines("mismatch_kl", [0.01]), "", "", "Engine and trainer logprobs differ"),
        (lines("env_faults", [0.0, 1.0]), "", "", "Errors of the environment"),
        (errors(calls=10, mistakes=3), "", "", "Errors of the environment"),
        (lines("episodes_ended/fault", [0.0, 0.1]), "", "", "5.0 % of episodes were left out"),
        (lines("episodes_ended/turns", [0.4, 0.6]), "", "", "50 % of recent episodes were cut"),
        (lines("loss", [1, 1]), evaluated(1, 0.9) + evaluated(2, 0.4), "", "Held-out accuracy fell below its best"),
        (lines("loss", [1, 1]), graded(1, 1.5) + graded(2, 0.9), "", "Held-out mean reward fell below its best"),
        ("", '{"event":"checkpoint","error":"OSError"}\n', "", "1 error in the event log"),
        ("", '{"event":"quarantine","session":1,"worker":"w"}\n', "", "1 worker quarantined"),
        ("", '{"event":"session_start","session":3,"elapsed_s":0}\n', "", "Resumed 2 times"),
    ],
)
def test_each_finding_is_reported(tmp_path: Path, metrics: str, events: str, config: str, title: str) -> None:
    assert [finding.title for finding in findings(data_of(tmp_path, metrics, events, config))] == [title]


@pytest.mark.parametrize(
    ("kind", "items"),
    [("sft", "examples"), ("reward_model", "examples"), ("dpo", "examples"), ("rl", "prompts"), ("eval", "prompts")],
)
def test_what_is_held_out_has_the_name_of_the_kind(tmp_path: Path, kind: str, items: str) -> None:
    RunDirectory(tmp_path).write_manifest({"kind": kind})
    (finding,) = findings(data_of(tmp_path, events='{"event":"data","few":["3 of them"]}\n'))
    assert finding.title == f"Few held-out {items}"


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        (
            "failed",
            "UserError: data[3]: no",
            "The run ended with an error; the same command resumes it. UserError: data[3]: no",
        ),
        ("failed", "", "The run ended with an error; the same command resumes it."),
        ("interrupted", "", "The run was interrupted; the same command resumes it."),
    ],
)
def test_the_ending_has_the_error(tmp_path: Path, outcome: str, error: str, says: str) -> None:
    earlier = {"event": "session_end", "outcome": "failed", "error": "ValueError: earlier"}
    last = {"event": "session_end", "outcome": outcome} | ({"error": error} if error else {})
    data = data_of(tmp_path, events="".join(f"{json.dumps(event)}\n" for event in (earlier, last)))
    assert logged_state(data).text == says
    assert not findings(data)


@pytest.mark.parametrize(
    ("metrics", "config"),
    [
        (lines("groups_without_signal", [4] * 6), "[batch]\nprompts = 8\n"),
        (lines("groups_without_signal", [7] * 6), "batch = 3\n"),
        (lines("groups_without_signal", [7] * 6), "not toml"),
        (lines("truncated_fraction", [0.5] + [0.1] * 5), ""),
        (lines("entropy", [2.0, 0.1]), ""),
        (lines("samples_invalid", [0, 0]), ""),
        (errors(calls=10, mistakes=1), ""),
        (lines("episodes_ended/fault", [0.0, 0.04]), ""),
        (lines("mismatch_kl", [1e-6]), ""),
    ],
)
def test_a_healthy_run_has_no_findings(tmp_path: Path, metrics: str, config: str) -> None:
    assert findings(data_of(tmp_path, metrics, "", config)) == []


def test_the_worker_with_the_largest_mismatch_is_named(tmp_path: Path) -> None:
    rows = [(0.001, 100.0), (0.03, 100.0), (0.05, 300.0)]  # of the local engine in step 1, of spot-4 in steps 1 and 2
    metrics = "".join(
        f'{{"step":{step},"mismatch_kl":0.02,"mismatch_kl/{name}":{kl},"mismatch_tokens/{name}":{tokens}}}\n'
        for step, name, (kl, tokens) in zip(
            (1, 2, 3), ("embedded/local", "vllm/spot-4", "vllm/spot-4"), rows, strict=True
        )
    )
    (finding,) = findings(data_of(tmp_path, metrics, ""))
    assert "Largest on vllm/spot-4: 0.045." in finding.text  # (0.03 · 100 + 0.05 · 300) / 400


def test_errors_of_the_environment_are_listed_by_kind(tmp_path: Path) -> None:
    metrics = errors(calls=1234, mistakes=5, timeouts=2, retries=0, failures=1, faults=3)
    warning = '{"event":"environment_warning","reason":"Shop.price gave a list"}\n'
    (finding,) = findings(data_of(tmp_path, metrics, warning + warning.replace("list", "tuple")))
    assert finding.text == (
        "5 mistakes of the agent, 2 timeouts, 1 episodes that broke their environment, "
        "3 episodes left out because of a fault, in 1.23k calls. First warning: Shop.price gave a list"
    )


def test_a_run_that_a_guard_ended_in_its_first_step_shows_the_fault(tmp_path: Path) -> None:
    warning = '{"event":"environment_warning","reason":"Shop.price gave a list"}\n'
    (finding,) = findings(data_of(tmp_path, "", warning))
    assert finding.text == "First warning: Shop.price gave a list"


def test_the_budget_that_cut_episodes_is_named(tmp_path: Path) -> None:
    metrics = '{"step":1,"truncated_fraction":0.9,"episodes_ended/calls":0.8,"episodes_ended/tokens":0.1}\n'
    (finding,) = findings(data_of(tmp_path, metrics))
    assert (finding.title, finding.text) == ("80 % of recent episodes were cut", "Consider a larger env.calls.")


def test_a_worker_that_fails_to_start_is_not_a_finding(tmp_path: Path) -> None:
    assert findings(data_of(tmp_path, "", '{"event":"join","session":1,"error":"WorkerLost"}\n')) == []


def test_the_fabricated_run_was_resumed_and_had_invalid_samples(tmp_path: Path) -> None:
    data = RunData.load(FabricatedRun(tmp_path).make())
    assert [finding.title.split(" ", 1)[-1] for finding in findings(data)] == [
        "samples without a valid reward",
        "once",
    ]
