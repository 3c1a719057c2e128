"""Every command on a real, small run; their results agree."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.commands import DEADLINE_S, Ran, run_here
from tidemill.cli import package_trials
from tidemill.cli.package_trials import try_packages
from tidemill.config.load import RECIPES

RECIPE = f"@{RECIPES / 'char-addition.toml'}"
# Held-out problems are rarely solved; the small reward for a number is learned soon, so accuracy is not all 0.
SHAPE = ("--trainer.steps=12", "--optimizer.learning_rate=3e-3", "--trainer.threads=1", "--eval.every_steps=6",
         "--checkpoint.every_steps=6", "--batch.prompts=8", "--task.held_out_fraction=0.9")  # fmt: skip


class Trained(NamedTuple):
    run: Path
    ran: Ran

    @property
    def summary(self) -> dict[str, Any]:
        data: dict[str, Any] = self.ran.data
        return data


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Iterator[Trained]:
    """A finished run of twelve steps, in a directory given as a relative path."""
    folder = tmp_path_factory.mktemp("verbs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Trained(folder / "runs/a", run_here("train", RECIPE, *SHAPE, "--run.dir=runs/a", "--json"))


def test_training_prints_where_its_results_are(trained: Trained) -> None:
    assert trained.ran.code == 0, trained.ran.err
    assert trained.summary["run_dir"] == "runs/a"
    assert (trained.run / "report.html").is_file()


def test_eval_of_a_checkpoint_equals_the_runs_evaluation(trained: Trained) -> None:
    expected = trained.summary["eval"]
    ran = run_here("eval", "--checkpoint", str(trained.run), "--json")
    assert ran.code == 0, ran.err
    found = ran.data
    assert found["n"] == expected["n"] == 64
    assert found["greedy_accuracy"] == expected["after"]["greedy_accuracy"]
    assert found["weights_digest"] == trained.summary["weights_digest"]
    # The completions too, one by one.
    told = (trained.run / "samples" / "step_000012.eval-held_out.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = {line["prompt"]: line["completion"] for line in map(json.loads, told)}
    assert {sample["prompt"]: sample["completion"] for sample in found["samples"]} == recorded
    assert sum(sample["correct"] for sample in found["samples"]) / found["n"] == found["greedy_accuracy"]


def test_eval_without_a_checkpoint_uses_the_untrained_model(trained: Trained) -> None:
    ran = run_here("eval", RECIPE, *SHAPE, "--json")
    assert ran.data["greedy_accuracy"] == trained.summary["eval"]["before"]["greedy_accuracy"]
    assert ran.data["weights_digest"] != trained.summary["weights_digest"]


def test_eval_draws_samples_for_pass_at_k_and_compares(trained: Trained) -> None:
    asked = ("--eval.samples_per_prompt=4", "--eval.pass_at=[1,2,4]", "--eval.prompts=32")
    ran = run_here("eval", "--checkpoint", str(trained.run), "--compare=char", *asked, "--json")
    assert ran.code == 0, ran.err
    found = ran.data
    drawn, other = found["drawn"], found["compared_with"]
    chances = [drawn["pass_at"][k]["value"] for k in ("1", "2", "4")]
    assert chances == sorted(chances)
    assert all(figure["low"] <= figure["value"] <= figure["high"] for figure in drawn["pass_at"].values())
    assert drawn["samples_per_prompt"] == 4
    assert 0 < drawn["distinct_1"] <= 1
    low, high = found["greedy_accuracy_interval"]
    assert low <= found["greedy_accuracy"] <= high
    # The other model is the run's initial one; McNemar's counts are of the two lists of completions.
    assert other["weights_digest"] != found["weights_digest"]
    right = [(that["correct"], this["correct"]) for that, this in zip(other["samples"], found["samples"], strict=True)]
    figure = other["figures"]["greedy_accuracy"]
    assert (figure["higher"], figure["lower"]) == (right.count((False, True)), right.count((True, False)))
    assert figure["this"] == found["greedy_accuracy"]
    assert other["figures"]["drawn_accuracy"]["this"] == pytest.approx(drawn["pass_at"]["1"]["value"])
    # A second call gives the same samples.
    again = run_here("eval", "--checkpoint", str(trained.run), *asked, "--json").data
    assert again["drawn"] == drawn


def test_two_sets_are_evaluated_during_training_and_by_eval(tmp_path: Path, session_cache: Path) -> None:
    for name, first in (("low", 0), ("high", 6)):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(first, first + 3) for b in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = tmp_path / "sets.toml"
    recipe.write_text(
        '[[eval.sets]]\nname = "low"\npath = "low.jsonl"\n'
        '[[eval.sets]]\nname = "high"\npath = "high.jsonl"\nprompts = 4\n[eval]\nsamples_per_prompt = 3\n'
    )
    asked = (RECIPE, f"@{recipe}", *SHAPE, "--eval.prompts=8", "--trainer.steps=6", f"--run.dir={tmp_path / 'run'}")
    ran = run_here("train", *asked)
    assert ran.code == 0, ran.err
    for line in ("low reward after step 6: ", "high reward after step 0: ", "drawn samples ", "pass@2 "):
        assert line in ran.err
    assert "\nlow mean reward " in ran.out and "(n = 4)" in ran.out
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (last["eval/n"], last["eval/low/n"], last["eval/high/n"]) == (8, 8, 4)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(f'"{title}"' in page for title in ("pass@k", "pass@k, low", "pass@k, high"))
    # `tidemill eval` draws the same samples of the same weights.
    found = run_here("eval", "--checkpoint", str(tmp_path / "run"), "--compare=char", "--json").data
    for prefix, figures in (("eval/", found), *((f"eval/{name}/", each) for name, each in found["sets"].items())):
        assert last[f"{prefix}greedy_accuracy"] == figures["greedy_accuracy"]
        assert last[f"{prefix}drawn_reward_mean"] == pytest.approx(figures["drawn"]["reward_mean"]["value"])
        assert {k: last[f"{prefix}pass_at_{k}"] for k in (1, 2)} == {
            int(k): pytest.approx(figure["value"]) for k, figure in figures["drawn"]["pass_at"].items()
        }
        assert figures["compared_with"]["figures"]["reward_mean"]["n"] == figures["n"]


def test_eval_can_use_an_earlier_checkpoint(trained: Trained) -> None:
    ran = run_here("eval", "--checkpoint", str(trained.run / "checkpoints/step_6"), "--json")
    at_6 = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][-7]
    assert at_6["step"] == 6
    assert ran.data["weights_digest"] == at_6["weights_digest"]
    assert ran.data["greedy_accuracy"] == at_6["eval/greedy_accuracy"]


def test_generate_is_reproducible_by_seed(trained: Trained) -> None:
    def drawn(*argv: str) -> list[dict[str, Any]]:
        ran = run_here("generate", "1+2=", "3+4=", "9+9=", "--checkpoint", str(trained.run), "--json", *argv)
        assert ran.code == 0, ran.err
        samples: list[dict[str, Any]] = ran.data["samples"]
        return samples

    long = "--sampling.max_new_tokens=20"
    first = drawn(long)
    assert [sample["prompt"] for sample in first] == ["1+2=", "3+4=", "9+9="]
    assert drawn(long) == first
    assert drawn(long, "--run.seed=1") != first
    assert all(0 < sample["tokens"] <= 20 and sample["logprob"] < 0 for sample in first)
    greedy = drawn("--sampling.temperature=0")
    assert drawn("--sampling.temperature=0", "--run.seed=1") == greedy
    stopped = drawn("--sampling.temperature=0", '--sampling.stop=["1"]', long)
    assert all(sample["completion"].partition("1")[2] == "" for sample in stopped)


def test_generate_reads_standard_input(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress goes to one stream, the text to the other."""
    greedy = ("--checkpoint", str(trained.run), "--sampling.temperature=0")
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2="))
    ran = run_here("generate", "-", *greedy)
    assert ran.code == 0, ran.err
    here = run_here("generate", "1+2=", *greedy, "--json")
    assert ran.out == f"1+2={here.data['samples'][0]['completion']}\n"


def test_a_character_without_a_token_is_refused(trained: Trained) -> None:
    ran = run_here("generate", "1+é=", "--checkpoint", str(trained.run))
    assert ran.code == 2
    assert "é" in ran.err


def test_models_are_listed_and_fetched_once(trained: Trained) -> None:
    listed = {model["name"]: model for model in run_here("model", "list", "--json").data["models"]}
    assert "smollm2-135m" in " ".join(listed) and "char" in " ".join(listed)
    wanted = ("model", "get", "char", "--model.char.layers=1", "--model.char.hidden_size=16", "--json")
    first = Path(run_here(*wanted).data["path"])
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert Path(run_here(*wanted).data["path"]) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert run_here("model", "get", str(first)).out == f"{first}\n"
    checkpoint = trained.run / "checkpoints/step_12"
    assert run_here("model", "get", str(checkpoint)).out == f"{checkpoint}\n"


def test_a_report_can_be_written_again_after_the_run(trained: Trained) -> None:
    page = trained.run / "report.html"
    before = page.read_text(encoding="utf-8")
    page.unlink()
    assert run_here("report", str(trained.run)).out == f"{page}\n"
    again = page.read_text(encoding="utf-8")
    assert "char-addition" in again
    assert abs(len(again) - len(before)) < 200  # the same page; only times of day may differ


def test_the_stored_configuration_reproduces_the_run(trained: Trained) -> None:
    said = run_here("train", RECIPE, *SHAPE, "--run.dir=runs/a", "--dry-run", "--json").data
    assert said["config"]["batch"]["prompts"] == 8
    assert "8 prompts × 16 samples = 128 samples" in " ".join(topic["text"] for topic in said["words"])
    again = run_here("train", f"@{trained.run / 'config.toml'}", "--dry-run", "--json").data
    for one in (said, again):  # free memory changes
        one["words"] = [word for word in one["words"] if "are free" not in word["text"]]
    assert again == said
    before = (trained.run / "metrics.jsonl").read_bytes()
    finished = run_here("train", f"@{trained.run / 'config.toml'}", "--json")
    assert finished.data["already_finished"] is True
    assert (trained.run / "metrics.jsonl").read_bytes() == before


def test_a_dry_run_creates_no_files(tmp_path: Path) -> None:
    for verb in ("train", "eval", "generate"):
        ran = run_here(verb, RECIPE, f"--run.dir={tmp_path / 'run'}", "--dry-run")
        assert ran.code == 0, ran.err
        assert "held_out_fraction = 0.2" in ran.out
    assert not list(tmp_path.iterdir())


def test_doctor_checks_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # The imports of all packages take most of its time.
    monkeypatch.setattr(package_trials, "try_packages", lambda names: try_packages(names[:3]))
    ran = run_here("doctor", "--json")
    assert ran.code == 0, ran.err
    check_doctor(ran.data)


@pytest.mark.slow
def test_doctor_prints_valid_json(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m tidemill doctor --json | '{sys.executable}' -m json.tool"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    check_doctor(json.loads(done.stdout))


def check_doctor(found: dict[str, Any]) -> None:
    assert found["usable"] is True
    assert {finding["status"] for finding in found["findings"]} <= {"ok", "note", "warn"}
    assert found["machine"]["cpu"]["usable"] >= 1
    assert found["machine"]["torch"]["threads"]["1"] > 0
