from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import standard_runs
from benchmarks.measuring import RESULTS
from benchmarks.standard_cases import RUNS, SAME
from benchmarks.standard_runs import differences, disagreements, encoded, printed_values, read
from tidemill.config.load import built_in_recipes

Content = dict[str, Any]


def content() -> Content:
    """Of a run of one step with two samples, one of them of an agent."""
    sample = {"step": 1, "purpose": "train", "prompt_id": "p", "epoch": 0, "index": 0, "prompt": "1+1=", "answer": "2"}
    sample |= {"token_ids": [3, 4], "logprobs": [-0.5, -1.0], "reward": 1.0, "components": {"exact": 1.0}}
    sample |= {"valid": True, "reason": "", "weight": 1.0, "finish": "stop", "versions": [[0, "aa", 0, 2]]}
    turn = {"start": 0, "end": 2, "text": "2", "segments": [{"start": 0, "end": 2, "worker": "spot-1", "version": 0}]}
    step = {"step": 1, "weights_digest": "ab", "time": "noon", "session": 1, "loss": 0.25, "time_train_s": 0.1}
    step |= {"peak_rss_bytes": 7, "tokens_per_s": 3.0, "evictions": 0}
    return {
        "samples": [sample, sample | {"index": 1, "turns": [turn], "episode_end": "done"}],
        "metrics": step,
        "tensor": torch.tensor([1.0, 2.0]),
        "rows": [{"prompt": "1+1=", "completion": "2"}],
    }


def parts_of(folder: Path, run: Content, *, moves: bool = False) -> dict[str, str]:
    """The digests of a run directory with this content."""
    for name in ("samples", "checkpoints/step_1/trainer_state"):
        (folder / "run" / name).mkdir(parents=True)
    lines = {"samples/step_000001.jsonl": run["samples"], "metrics.jsonl": [run["metrics"]], "rows.jsonl": run["rows"]}
    for name, rows in lines.items():
        (folder / "run" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file({"w": run["tensor"]}, folder / "run/checkpoints/step_1/model.safetensors", metadata={"by": str(folder)})
    return {part: encoded(value).decode() for part, value in read(folder, moves=moves)}


def last_sample(**values: Any) -> Callable[[Content], None]:
    return lambda run: run["samples"][1].update(values)


def step(**values: Any) -> Callable[[Content], None]:
    return lambda run: run["metrics"].update(values)


@pytest.mark.parametrize(
    ("plant", "differs"),
    [
        (lambda run: run.update(tensor=torch.tensor([1.0, 2.0000002])), "checkpoints/step_1/model.safetensors weights"),
        (lambda run: run.update(tensor=torch.tensor([[1.0, 2.0]])), "checkpoints/step_1/model.safetensors weights"),
        (step(weights_digest="ac"), "weights after step 1"),
        (step(loss=0.25000000000000006), "metric loss"),
        (step(evictions=1), "metric evictions"),
        (step(other=1), "metric other"),
        (lambda run: run["metrics"].pop("loss"), "metric loss"),
        (last_sample(token_ids=[3, 5]), "samples tokens"),
        (last_sample(logprobs=[-0.5, -1.000001]), "samples logprobs"),
        (last_sample(weight=0.0), "samples rewards"),
        (last_sample(answer="3"), "samples prompts"),
        (last_sample(versions=[[1, "aa", 0, 2]]), "samples versions"),
        (last_sample(finish="length"), "samples ends"),
        (last_sample(turns=[{"start": 0, "end": 2, "text": "3"}]), "samples turns"),
        (lambda run: run["rows"].append({}), "rows.jsonl"),
    ],
)
def test_a_difference_is_named(plant: Callable[[Content], Any], differs: str, tmp_path: Path) -> None:
    planted = content()
    plant(planted)
    before, now = parts_of(tmp_path / "before", content()), parts_of(tmp_path / "now", planted)
    separator = "/" if differs.startswith(("checkpoints", "rows")) else " "
    assert differences({"grpo": before}, {"grpo": now}) == [f"grpo: run{separator}{differs}"]


def test_times_machines_metadata_and_the_order_of_samples_are_no_difference(tmp_path: Path) -> None:
    other = content()
    other["samples"].reverse()
    other["samples"][0]["turns"][0]["segments"] = []
    other["metrics"].update(time="night", session=2, time_train_s=0.2, peak_rss_bytes=8, tokens_per_s=4.0, evictions=3)
    found = [parts_of(tmp_path / str(number), run, moves=True) for number, run in enumerate((content(), other))]
    assert found[0] == found[1]


def test_printed_results_are_compared_without_places_and_times(tmp_path: Path) -> None:
    printed = {
        "model": f"{tmp_path}/run",
        "wall_s": 0.5,
        "note": "needs 3 MB, and 23.9 GB are free",
        "n": [{"duration_s": 1}],
    }
    assert dict(printed_values(json.dumps(printed), tmp_path)) == {
        "model": "./run",
        "note": "needs 3 MB, and ",
        "n": [{}],
    }
    assert dict(printed_values("a\nb\n", tmp_path)) == {"text": ["a", "b"]}


def test_runs_that_repeat_another_need_its_samples_and_weights_only() -> None:
    found = {
        "evicted": {"run samples tokens": "a", "run metric loss": "b"},
        "quiet": {"run samples tokens": "a", "run metric loss": "c"},
    }
    assert disagreements(found, {"evicted": "quiet"}) == []
    found["evicted"]["run samples tokens"] = "d"
    assert disagreements(found, {"evicted": "quiet"}) == ["evicted is not quiet: run samples tokens"]


def test_a_difference_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads((RESULTS / "standard_runs.json").read_text())["runs"]
    assert recorded.keys() == RUNS.keys()
    monkeypatch.setattr(sys, "argv", ["standard_runs", "--only", "dapo"])
    monkeypatch.setattr(standard_runs, "values_of", lambda name, run: {"run metric loss": 1})
    assert standard_runs.main() == 1
    assert capsys.readouterr().out.startswith("dapo: run ")


def test_all_recipes_are_among_the_runs() -> None:
    commands = " ".join(RUNS["recipes"].commands)
    here = built_in_recipes().keys() - {"llama-70b", "qwen3-8b"}  # the others need a cluster with GPUs
    assert all(f"@{name} " in commands for name in here)
    assert SAME.keys() | set(SAME.values()) <= RUNS.keys()
