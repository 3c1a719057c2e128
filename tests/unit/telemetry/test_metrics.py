from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.records import PolicyVersion, StepMetrics
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.metrics import metric_line, read_metrics


def test_a_line_is_flat_and_reads_back(tmp_path: Path) -> None:
    version = PolicyVersion(number=7, digest="abc")
    metrics = StepMetrics(step=7, version=version, optimizer_steps=2, values={})
    values = {"reward_mean": 0.5, "eval/greedy_accuracy": 0.25, "entropy": float("nan")}
    line = metric_line(metrics, values, unix_s=0.0, session=1, elapsed_s=2.0004)
    assert line["reward_mean"] == 0.5 and line["policy_version"] == 7
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(encode(line) + b"\n")
    (read,) = read_metrics(path)
    assert (read.step, read.policy_version, read.weights_digest, read.optimizer_steps) == (7, 7, "abc", 2)
    assert (read.session, read.elapsed_s) == (1, 2.0)
    assert read.values == {"reward_mean": 0.5, "eval/greedy_accuracy": 0.25}, "what was not a number is absent"


def test_steps_are_sorted_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":2,"x":1}\n{"step":1,"x":5}\n{"step":2,"x":3}\n{"x":9}\n{"step":true}\n{"step":"3"}\n')
    assert [(line.step, line.values) for line in read_metrics(path)] == [(1, {"x": 5.0}), (2, {"x": 3.0})]


@pytest.mark.parametrize("value", ["[1]", '"x"', "null", "true"])
def test_values_that_are_not_numbers_are_dropped(tmp_path: Path, value: str) -> None:
    path = tmp_path / "metrics.jsonl"
    names = ("policy_version", "optimizer_steps", "session", "elapsed_s", "loss")
    fields = "".join(f', "{name}": {value}' for name in names)
    path.write_text(f'{{"step": 1{fields}}}\n{{"step": {value}}}\n')
    (line,) = read_metrics(path)
    assert line[1:] == (0, "", 0, 0, 0.0, {})
