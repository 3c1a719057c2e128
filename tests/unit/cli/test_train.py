from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Pretend, Run
from tidemill.cli.key_help import ESSENTIAL
from tidemill.config.keys import all_keys
from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.formatting import long_duration

SUMMARY: dict[str, Any] = {
    "steps": 20,
    "total_steps": 20,
    "wall_s": 192.4,
    "eval": {"before": {"greedy_accuracy": 0.28, "n": 64}, "after": {"greedy_accuracy": 0.83, "n": 64}, "n": 64},
}


def test_a_run_and_its_summary(run: Run, pretend: Pretend) -> None:
    asked: list[RunSpec] = []

    def train(spec: RunSpec, **_: Any) -> dict[str, Any]:
        asked.append(spec)
        print("a library's noise")
        return SUMMARY

    pretend("tidemill.jobs.train", "train", train)
    ran = run("train", "@char-addition", "--trainer.steps", "20", "--run.dir", "D")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "a library's noise",
        "finished: 20 of 20 steps in 3 min 12 s",
        "held-out greedy accuracy 0.28 → 0.83 (n = 64)",
        "curves and samples: D/report.html",
    ]
    assert asked[0].trainer.steps == 20
    as_json = run("train", "--json")
    assert as_json.data == SUMMARY
    assert "a library's noise" in as_json.err


def test_accuracies_measured_on_different_prompts_say_so(run: Run, pretend: Pretend) -> None:
    measured = {"before": {"greedy_accuracy": 0.25, "n": 20}, "after": {"greedy_accuracy": 0.0, "n": 3}, "n": 3}
    pretend("tidemill.jobs.train", "train", lambda _, **__: SUMMARY | {"eval": measured})
    assert "held-out greedy accuracy 0.25 → 0.00 (n = 20, then 3)" in run("train").out


def test_interrupted(run: Run, pretend: Pretend) -> None:
    pretend(
        "tidemill.jobs.train",
        "train",
        lambda _, **__: {"steps": 3, "total_steps": 9, "interrupted": True, "wall_s": 5},
    )
    ran = run("train")
    assert ran.code == 130
    assert ran.out.splitlines() == [
        "interrupted: 3 of 9 steps in 5 s",
        "the same command resumes it",
        "curves and samples: runs/run/report.html",
    ]
    assert run("train", "--json").code == 130


def test_already_finished(run: Run, pretend: Pretend) -> None:
    pretend("tidemill.jobs.train", "train", lambda _, **__: {**SUMMARY, "already_finished": True})
    assert run("train").out.startswith("already finished: 20 of 20 steps")


def test_dry_run_trains_nothing(run: Run, pretend: Pretend) -> None:
    pretend("tidemill.jobs.train", "train", lambda _, **__: pytest.fail("it trained"))
    ran = run("train", "--dry-run", "--run.seed=3")
    assert ran.code == 0
    text, words = ran.out.split("\nmodel  ", 1)
    assert from_toml(text).run.seed == 3
    assert "8 prompts × 8 samples = 64 samples" in words
    data = run("train", "--dry-run", "--json").data
    assert data["config"]["batch"]["prompts"] == 8
    assert data["derived"]["samples_per_step"] == 64
    assert data["words"][0]["topic"] == "model"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read the capacity trace"),
        ("", "the file is empty"),
        ("0,2\n10,x\n", "not a whole number of machines"),
    ],
)
def test_a_dry_run_reads_the_trace(run: Run, tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_text(text)
    ran = run("train", "--dry-run", "--pool.kind=trace", f"--pool.path={path}")
    assert ran.code == 2
    assert says in ran.err


def test_a_dry_run_warns_about_the_trace(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,0\n7200,1\n9000,1\n")
    arguments = ("train", "--dry-run", "--pool.kind=trace", f"--pool.path={tmp_path / 't.csv'}")
    told = "no machine for the first 2 h;"
    assert told in run(*arguments).out
    assert told in run(*arguments, "--json").data["words"][-1]["text"]


@pytest.mark.parametrize(
    ("rows", "code", "says"),
    [
        ("", 0, "rows.jsonl is not on this machine"),
        ("1 2|1 2|2 3|3 4", 0, "data: 2 training rows, 1 held out; left out: 1 repeated"),
        ("1 2|2 3|3", 0, "warning: 1 of 3 rows have no answer, which the reward exact needs"),
        ("1|2|3", 2, "3 of 3 rows have no answer, which the reward exact needs"),
    ],
)
def test_a_dry_run_counts_the_rows(run: Run, tmp_path: Path, rows: str, code: int, says: str) -> None:
    made = [dict(zip(("prompt", "answer"), row.split(), strict=False)) for row in rows.split("|")]
    if rows:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, made)))
    for command in ("train", "eval"):
        ran = run(command, "--dry-run", "--task.kind=file", "--task.path=rows.jsonl")
        assert ran.code == code
        assert says in ran.out + ran.err


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        ({"prompt": "1+1=", "answer": 2}, 0, "data: left out: 1 repeated in more\n"),
        ({"prompt": "1+1="}, 2, "eval.sets, more: 2 of 2 rows of more have no answer"),
    ],
)
def test_a_dry_run_counts_the_rows_of_sets(run: Run, tmp_path: Path, row: Any, code: int, says: str) -> None:
    (tmp_path / "more.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    ran = run("train", "--dry-run", "--eval.sets", '[{"name" = "more", "path" = "more.jsonl"}]')
    assert ran.code == code
    assert says in ran.out + ran.err


def test_help_lists_the_keys(run: Run) -> None:
    out = run("train", "--help-all").out
    assert "scoring.rewards[].kind" in out
    assert "Weight of the entropy bonus. (number >= 0, default 0.0)" in out
    assert 'kind = "file"' in out
    assert "required" in out


def test_help_shows_the_most_used_keys_and_examples(run: Run) -> None:
    out = run("train", "--help").out
    assert set(ESSENTIAL) <= {key.dotted for key in all_keys()}
    assert all(name in out for name in ESSENTIAL)
    assert "scoring.rewards[].kind" not in out
    assert "tidemill train @smollm2-addition" in out


def test_help_on_one_section(run: Run) -> None:
    out = run("train", "--help", "critic").out
    assert "critic.value_clip" in out
    assert "batch.prompts" not in out
    assert run("train", "--help", "critc").code == 2
    assert "TRL's num_generations is batch.group_size" in run("train", "--help", "num_generations").err


def test_config_search_finds_keys_by_their_documentation(run: Run) -> None:
    found = run("config", "search", "curriculum", "--json").data["keys"]
    assert [each["key"] for each in found] == ["batch.sampler"]
    assert run("config", "search", "zzzz").code == 2


def test_config_search_takes_words_and_names_of_other_frameworks(run: Run) -> None:
    out = run("config", "search", "kl", "penalty").out
    assert out.index("algorithm.kl_beta") < out.index("in other frameworks") < out.index("algorithm.kl_penalty")
    named = run("config", "search", "--num-generations", "--json").data
    assert [key["key"] for key in named["keys"]] == ["batch.group_size"]
    assert [(name["framework"], name["name"]) for name in named["foreign"]] == [("TRL", "num_generations")]
    many = run("config", "search", "vllm").out
    assert "more names: add a word, or see all with --json" in many
    assert "did you mean `tidemill config search kl penalty`?" in run("config", "search", "kl", "penelty").err
    assert "expected a word" in run("config", "search").err


def test_recipes_are_listed_shown_and_copied(run: Run, tmp_path: Path) -> None:
    names = [each["name"] for each in run("recipe", "list", "--json").data["recipes"]]
    assert {"char-addition", "jsonl", "rlhf"} <= set(names)
    assert "plurals.jsonl" in run("recipe", "show", "jsonl").out
    assert run("recipe", "copy", "jsonl", str(tmp_path / "mine.toml")).code == 0
    assert run("train", f"@{tmp_path / 'mine.toml'}", "--dry-run").code == 0
    assert run("recipe", "copy", "jsonl", str(tmp_path / "mine.toml")).code == 2
    assert run("recipe", "show", "jsonk").code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.4, "59 min 59 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert long_duration(seconds) == text


GRADED = {"greedy_accuracy": None, "reward_mean": 0.25, "n": 8}
BINARY = {"greedy_accuracy": 0.5, "reward_mean": 0.75, "n": 8}


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            BINARY,
            BINARY | {"greedy_accuracy": 0.625},
            "held-out mean reward 0.75 → 0.75, greedy accuracy 0.50 → 0.62 (n = 8)",
        ),
        (GRADED, GRADED | {"reward_mean": 1.5}, "held-out mean reward 0.25 → 1.50 (n = 8)"),
        (BINARY, GRADED, "held-out mean reward 0.75 → 0.25 (n = 8)"),
    ],
)
def test_mean_reward_and_accuracy_are_reported_where_they_were_measured(
    run: Run, pretend: Pretend, before: dict[str, Any], after: dict[str, Any], line: str
) -> None:
    measured = {"before": before, "after": after, "n": 8}
    pretend("tidemill.jobs.train", "train", lambda _, **__: SUMMARY | {"eval": measured})
    assert line in run("train").out.splitlines()


@pytest.mark.parametrize("measured", [{}, {"before": None, "after": BINARY}, {"before": {"n": 8}, "after": GRADED}])
def test_an_evaluation_that_was_not_measured_is_not_reported(
    run: Run, pretend: Pretend, measured: dict[str, Any]
) -> None:
    pretend("tidemill.jobs.train", "train", lambda _, **__: SUMMARY | {"eval": measured})
    assert "held-out" not in run("train").out
