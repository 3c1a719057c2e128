from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.formulas import evaluated
from tests.gpu_rows import engine_row, train_step_row, write_rows
from tests.planted import planted, spec_of
from tests.unit.cli.conftest import Run
from tests.unit.hardware.test_model_shape import SMOLLM2
from tidemill.config.schema import RunSpec
from tidemill.hardware.model_config import HUB_MODELS
from tidemill.hardware.run_profile import write_profile
from tidemill.planner.forecast import cluster_forecast
from tidemill.pool.provider import Timetable
from tidemill.sim.outcome import SimulatedRun
from tidemill.sim.simulation import CostModel, simulate_run
from tidemill.sim.workload import Workload


@pytest.mark.parametrize(
    ("verb", "printed"), [("memory", 10), ("weights", 7), ("overlap", 3), ("staleness", 2), ("placement", 11)]
)
def test_every_plan_has_help_and_derives_its_numbers(run: Run, verb: str, printed: int, tmp_path: Path) -> None:
    (tmp_path / "lags.csv").write_text("0,.1,.5\n2,.1,.9\n", encoding="utf-8")
    arguments = {
        "memory": ["--params", "7b"],
        "weights": ["--params", "7b"],
        "overlap": ["--rollout", "3", "--training", "1"],
        "staleness": ["--table", "lags.csv"],
        "placement": ["--params", "7b", "--machines", "rlboost-8xh100"],
    }[verb]
    assert f"Usage: tidemill plan {verb}" in run("plan", verb, "--help").out
    assert "explain" not in run("plan", verb, *arguments, "--json").data
    data = run("plan", verb, *arguments, "--json", "--explain").data
    figures = data["explain"]
    derived = [figure for figure in figures if number_of(data, figure["name"]) is not None]
    assert len(derived) == printed
    for figure in derived:
        assert number_of(data, figure["name"]) == evaluated(figure["formula"], figure["inputs"]), figure
    assert all(figure.keys() == {"name", "value", "unit", "formula", "inputs", "source"} for figure in figures)
    out = run("plan", verb, *arguments, "--explain").out
    for figure in figures:
        assert f"{figure['name']} = " in out
        assert f"  = {figure['formula']}" in out


def number_of(data: Any, name: str) -> float | None:
    """What a plan prints under the name of a figure; None if it does not print that figure."""
    owner, _, last = name.rpartition(".")
    if not owner:
        places = [data, data.get("best", {})]
    else:
        lags = {f"lag_{row['lag']}": row for row in data.get("lags", ())}
        places = [sections.get(owner, {}) for sections in (data, data.get("paths", {}), data.get("roles", {}), lags)]
    return next((place[last] for place in places if last in place), None)


def test_the_group_lists_its_verbs(run: Run) -> None:
    out = run("plan", "--help").out
    assert all(verb in out for verb in ("memory", "weights", "overlap", "placement", "staleness", "run"))


def test_a_models_own_configuration(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    data = run("plan", "memory", "--model", ".", "--json").data
    assert data["parameters"] == 134_515_008
    assert data["total_bytes"] == 18 * 134_515_008
    assert not any("assumed" in note for note in data["notes"])


def test_the_parts_of_a_gpu_are_all_there_is_on_it(run: Run) -> None:
    data = run("plan", "memory", "--params", "8b", "--algorithm", "ppo", "--json").data
    per_gpu = {name: value for name, value in data["per_gpu"].items() if name.endswith("_bytes")}
    fit = next(
        fit for fit in data["fits"] if fit["gpus"] == data["per_gpu"]["gpus"] == data["min_gpus_with_activations"]
    )
    assert sum(per_gpu.values()) - per_gpu["margin_bytes"] == pytest.approx(fit["bytes_per_gpu"])
    assert per_gpu["margin_bytes"] + fit["usable_bytes"] == 80e9


def test_a_number_of_gpus_of_ones_own(run: Run) -> None:
    fits = run("plan", "memory", "--params", "70e9", "--gpus", "24", "--json").data["fits"]
    asked = next(fit for fit in fits if fit["gpus"] == 24)
    assert asked["missing_bytes"] == pytest.approx(asked["bytes_per_gpu"] - 72e9)
    assert "24 GPUs lack " in run("plan", "memory", "--params", "70e9", "--gpus", "24").out
    why = run("plan", "memory", "--params", "70e9", "--gpus", "24", "--json").data["why_not"]
    assert why["missing_bytes"] == asked["missing_bytes"]
    assert {"option", "bytes_per_gpu", "fits"} == why["options"][0].keys()
    assert run("plan", "memory", "--params", "1b", "--json").data["why_not"] is None
    assert "too much" in run("plan", "memory", "--params", "70e9", "--gpus", "24").out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("memory",), "no model given"),
        (("memory", "--params", "70e9", "--model", "."), "both --params and --model are given"),
        (("memory", "--params", "many"), "--params: 'many' is not a number of parameters"),
        (("memory", "--params", "0"), "--params: '0' is not a number"),
        (("memory", "--params", "7b", "--gpu", "h10"), "did you mean h100?"),
        (("memory", "--params", "7b", "--algorithm", "grppo"), "did you mean grpo?"),
        (("memory", "--params", "7b", "--catalog", "none.toml"), "cannot read the catalogue"),
        (("memory", "--params", "7b", "--gpu", "h10"), "--gpu: the catalogue has no GPU 'h10'"),
        (("memory", "--params", "7b", "--gpus", "1.5"), "--gpus: '1.5' is not an integer"),
        (("memory", "--params", "7b", "--context", "4e3"), "--context: '4e3' is not an integer"),
        (("memory", "--params", "7b", "--gpus", "0"), "--gpus: needs 1 or more"),
        (("memory", "--params", "7b", "--gpuz", "8"), "see `tidemill plan memory --help`"),
        (("overlap", "--rollout", "3", "--training", "1", "--gpus", "1.5"), "--gpus: '1.5' is not an integer"),
        (("weights", "--params", "7b", "--link-gbps", "0"), "--link-gbps: needs a number above 0"),
        (("weights", "--params", "7b", "--link-gbps", "-4"), "--link-gbps: needs a number above 0, was given -4"),
        (("weights", "--params", "7b", "--file-gbps", "inf"), "--file-gbps: needs a number above 0, was given inf"),
        (("weights", "--params", "7b", "--workers", "2.5"), "--workers: '2.5' is not an integer"),
        (("staleness", "--table", "none.csv"), "cannot read the table"),
        (("staleness",), "give either a table or runs"),
        (("staleness", "--table", "none.csv", "--runs", "none"), "give either a table or runs"),
        (("staleness", "--runs", "none"), "--runs none: no run there"),
        (("placement", "--params", "7b"), "no reserved machines"),
        (("placement", "--params", "7b", "--machines", "rlboost-8xh10"), "did you mean rlboost-8xh100?"),
        (("placement", "--params", "7b", "--machines", "rlboost-8xh100:x"), "'x' is not a number of machines"),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--price", "rlboost-8xh100=0"),
            "is not a price",
        ),
        (("placement", "--params", "7b", "--machines", "rlboost-8xh100:"), "'' is not a number of machines"),
        (("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--price", "foo=3"), "--price foo=3: the cat"),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--prompts", "0"),
            "--prompts: must be at least 1",
        ),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--limit", "-1"),
            "--limit: must be at least 1",
        ),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--lag", "0.5"),
            "--lag: '0.5' is not an integer",
        ),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--limit", "10"),
            "--completion-tokens: its default: a mean of 2000 tokens",
        ),
        (
            ("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--completion-tokens", "9000"),
            "--completion-tokens: a mean of 9000 tokens",
        ),
        (("placement", "--params", "7b", "--machines", "rlboost-8xh100", "--sigma", "9"), "--sigma: sigma 9"),
        (("placement", "--params", "999b", "--machines", "rlboost-8xh100"), "the model fits no placement"),
        (("mem",), "see `tidemill plan --help`"),
    ],
)
def test_bad_input(run: Run, argv: tuple[str, ...], says: str) -> None:
    ran = run("plan", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize(("text", "parameters"), [("70e9", 70e9), ("70B", 70e9), ("1.5b", 1.5e9), ("350m", 350e6)])
def test_parameters_as_people_write_them(run: Run, text: str, parameters: float) -> None:
    assert run("plan", "weights", "--params", text, "--json").data["bytes"] == pytest.approx(2 * parameters)


def test_a_rounded_number_of_gpus_is_reported(run: Run) -> None:
    # an engine of 70e9 parameters takes 4 GPUs: 140e9 bytes, at most 36e9 on each
    out = run("plan", "memory", "--params", "70e9", "--gpus", "5").out
    assert "8 GPUs lack" in out
    assert "--gpus 5 is rounded up to 8" in out
    assert "is rounded up" not in run("plan", "memory", "--params", "70e9", "--gpus", "8").out


MACHINES = ("--machines", "rlboost-8xh100", "--preemptible", "rlboost-2xh100:3")


def test_a_placement_with_its_runners_up(run: Run) -> None:
    data = run("plan", "placement", "--params", "8b", *MACHINES, "--json").data
    best = data["best"]
    assert best["training"]["gpus"] + best["training"]["gpus_apart"] == 8
    assert data["recipe"]["trainer.shards"] == best["training"]["gpus"]
    assert data["recipe"]["engine.tensor_parallel"] == best["generation"][0]["gpus_per_engine"]
    assert best["cost_usd"] == pytest.approx(best["usd_per_hour"] * best["hours"])
    assert {each["kind"] for each in (best, *data["runners_up"])} == {"colocated", "split", "hybrid"}
    out = run("plan", "placement", "--params", "8b", *MACHINES).out
    assert f"best of {data['tried']} placements: {best['kind']}: training on 1 × rlboost-8xh100" in out
    assert "tidemill simulate" in out
    assert f"trainer.shards = {best['training']['gpus']}, " in " ".join(out.split())


def test_the_catalogue_is_listed_with_ones_own_rows(run: Run, tmp_path: Path) -> None:
    row = '[machines.mine]\ngpu = "h100"\ngpus = 4\nnetwork_gbit_per_s = 100\npriced = "now"\nprice_source = "me"\n'
    (tmp_path / "own.toml").write_text(row, encoding="utf-8")
    data = run("plan", "catalog", "--catalog", "own.toml", "--json").data
    assert data["gpus"]["h200-141gb"]["memory_bytes"] == 141e9
    assert data["machines"]["mine"]["gpus"] == 4
    out = run("plan", "catalog", "--catalog", "own.toml").out
    assert "mine (now): me" in out
    assert "$83.79" in out


def test_prices_of_ones_own(run: Run) -> None:
    argv = ("plan", "placement", "--params", "8b", *MACHINES, "--json")
    dear = run(*argv, "--price", "preemptible:rlboost-2xh100=500", "--price", "rlboost-8xh100=10").data["best"]
    assert not any(each["preemptible"] for each in dear["generation"])
    assert dear["usd_per_hour"] == 10


def test_measured_rows_replace_assumed_efficiencies(run: Run, tmp_path: Path) -> None:
    argv = ("plan", "placement", "--params", "8b", *MACHINES, "--json")
    assumed = run(*argv).data
    assert assumed["efficiencies"] == []
    write_rows(tmp_path / "step.json", train_step_row(2.0))
    write_rows(tmp_path / "engine.json", engine_row(20.0))
    write_rows(tmp_path / "other.json", engine_row(20.0), device="NVIDIA H200")
    files = ("--measured", "step.json", "--measured", "engine.json", "--measured", "other.json")
    found = run(*argv, *files, "--explain").data
    assert found["best"]["training_s"] > assumed["best"]["training_s"]
    training, engines, unused = found["efficiencies"]
    assert training.startswith("h100-80gb: training at ")
    assert training.endswith(", measured: step.json, NVIDIA H100 80GB HBM3, row 1 (1.7B, shared)")
    assert engines.endswith(", measured: engine.json, NVIDIA H100 80GB HBM3, row 1 (1.7B, vllm)")
    assert unused == "other.json is not used: its rows are of h200-141gb, the machines have h100-80gb"
    sources = {figure["name"]: figure["source"] for figure in found["explain"]}
    assert "measured: step.json, " in sources["forward_token_s"]
    shown = " ".join(run(*argv[:-1], *files).out.split())
    assert all(f"• {line}" in shown for line in found["efficiencies"])


@pytest.mark.parametrize("params", ["1.7b", "14b"])
def test_rows_that_the_project_measured_are_used(run: Run, params: str) -> None:
    machines = ("--params", params, "--machines", "aws-p5e.48xlarge-block", "--json")
    placed = run("plan", "placement", *machines).data["efficiencies"]
    forecast = run("plan", "run", "--task.kind", "arithmetic", "--trainer.steps", "2", *machines).data["notes"]
    if params == "14b":
        assert not placed
        assert not [note for note in forecast if "measured" in note]
    else:
        assert ["NVIDIA H200, row 1 (1.7B, shared)" in line for line in placed] == [True, False]
        assert set(placed) <= set(forecast)
        assert any(note.startswith("speeds are in part measured") for note in forecast)


@pytest.mark.parametrize(
    ("device", "rows", "says"),
    [
        ("NVIDIA H100 80GB HBM3", [], "rows.json: has no measured row of a training step"),
        (
            "NVIDIA H100 80GB HBM3",
            [train_step_row(1e-4)],
            "rows.json, NVIDIA H100 80GB HBM3, row 1 (1.7B, shared): took",
        ),
        (
            "NVIDIA T4",
            [train_step_row(2.0)],
            "rows.json: the device 'NVIDIA T4' is no GPU of the catalogue\n  known: h100",
        ),
    ],
)
def test_unusable_measurements_are_refused(
    run: Run, tmp_path: Path, device: str, rows: list[dict[str, Any]], says: str
) -> None:
    write_rows(tmp_path / "rows.json", *rows, device=device)
    ran = run("plan", "placement", "--params", "8b", *MACHINES, "--measured", "rows.json")
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


def test_lengths_of_a_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    lines = [json.dumps({"step": 1, "token_ids": [0] * tokens}) for tokens in (100, 300)]
    (tmp_path / "samples" / "step_1.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    argv = ("plan", "placement", "--params", "8b", *MACHINES, "--lengths-from", ".", "--json")
    best = run(*argv).data["best"]
    # 128 * 8 samples of 200 tokens
    assert best["tokens_per_s"] * best["step_s"] == pytest.approx(1024 * 200)


def test_a_run_on_this_machine_needs_a_profile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    ran = run("plan", "run", "--model.source", "char", "--json")
    assert ran.code == 2
    assert "no run on this machine" in ran.data["error"]["message"]
    missing = run("plan", "run", "--profile", str(tmp_path / "none.json"), "--json")
    assert missing.code == 2
    assert "no profile there" in missing.data["error"]["message"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--boot-s", "60"), "--boot-s: applies to a described cluster"),
        (("--sigma", "0"), "--sigma: applies to a described cluster"),
        (("--price", "foo=3"), "--price: applies to a described cluster"),
        (("--params", "7b"), "--params: applies to a described cluster"),
        (("--model", "."), "--model: applies to a described cluster"),
        (("--prompt-tokens", "512"), "--prompt-tokens: applies to a described cluster"),
        (("--completion-tokens", "512"), "--completion-tokens: applies to a described cluster"),
        (("--lengths-from", "."), "--lengths-from: applies to a described cluster"),
        (("--catalog", "none.toml"), "--catalog: applies to a described cluster"),
        (("--preemptible", "rlboost-2xh100"), "--preemptible: applies to a described cluster"),
        (("--profile", "none.json", "--measure"), "--profile: conflicts with --measure"),
        (("--machines", "rlboost-8xh100", "--profile", "none.json"), "--profile: applies to this machine"),
        (("--machines", "rlboost-8xh100", "--measure"), "--measure: applies to this machine"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(run: Run, argv: tuple[str, ...], says: str) -> None:
    ran = run("plan", "run", "--model.source", "char", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--boot-s", "nan"), "--boot-s: needs 0 or more seconds, was given nan"),
        (("--boot-s", "-100"), "--boot-s: needs 0 or more seconds, was given -100"),
        (("--boot-s", "inf"), "--boot-s: needs 0 or more seconds, was given inf"),
        (("--prompt-tokens", "-5000"), "--prompt-tokens: needs 1 or more, was given -5000"),
        (("--completion-tokens", "nan"), "--completion-tokens: a mean of nan tokens"),
        (("--seeds", "1.5"), "--seeds: '1.5' is not an integer"),
    ],
)
def test_a_described_cluster_that_cannot_be(run: Run, argv: tuple[str, ...], says: str) -> None:
    ran = run("plan", "run", "--machines", "rlboost-8xh100", "--params", "8e9", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


def test_a_model_that_is_not_in_the_cache_is_fetched_by_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    ran = run("plan", "run", "--model.source", "some/model", "--machines", "rlboost-8xh100")
    assert ran.code == 2
    assert "`tidemill model get some/model`" in ran.err


def test_a_run_with_a_profile(run: Run, tmp_path: Path) -> None:
    arguments = ["--model.source", "char", "--batch.prompts", "2", "--batch.group_size", "4", "--trainer.steps", "3"]
    busy = msgspec.structs.replace(planted(spec_of(model={"source": "char"})), notes=("the machine was busy",))
    write_profile(busy, tmp_path / "profile.json")
    ran = run("plan", "run", *arguments, "--profile", str(tmp_path / "profile.json"), "--json", "--explain")
    assert ran.data["steps"] == len(ran.data["step_s"]) == 3
    assert ran.data["total_s"]["low"] <= ran.data["total_s"]["mean"] <= ran.data["total_s"]["high"]
    assert ran.data["memory_bytes"] > 16 * 800_000
    assert ran.data["unlike"] == []
    assert {"total_s", "memory_bytes"} <= {figure["name"] for figure in ran.data["explain"]}
    other = run(
        "plan", "run", *arguments, "--engine.batch_invariant", "true", "--profile", str(tmp_path / "profile.json")
    )
    assert "3 steps in" in other.out
    assert "warning: engine.batch_invariant is True" in other.out
    assert "• the machine was busy" in other.out


def test_a_run_on_a_described_cluster(run: Run) -> None:
    ran = run(
        "plan", "run", "--machines", "rlboost-8xh100", "--params", "8e9", "--trainer.steps", "2",
        "--batch.prompts", "4", "--sampling.max_new_tokens", "512", "--seeds", "1", "--json",
    )  # fmt: skip
    assert ran.data["placement"]["kind"] == "split"
    assert ran.data["cost_usd"] > 0
    assert 0 < ran.data["memory_bytes"] < ran.data["usable_bytes"]
    assert "one simulation has no spread" in " ".join(ran.data["notes"])


def test_a_described_clusters_spread_is_that_of_assumed_speeds(run: Run) -> None:
    arguments = ("--machines", "rlboost-8xh100", "--params", "8e9", "--trainer.steps", "2", "--batch.prompts", "4")
    lengths = ("--sampling.max_new_tokens", "200", "--sigma", "0")
    alone, three = (
        run("plan", "run", *arguments, *lengths, "--seeds", seeds, "--json").data["usual_step_s"] for seeds in "13"
    )
    # Equal samples, and times of 1 - 0.4 * 2 / 3, 1, 1 + 0.4 * 2 / 3: their standard deviation is 0.267.
    assert three["mean"] == pytest.approx(alone["mean"], rel=0.01)
    assert three["high"] - three["mean"] == pytest.approx(2 * 0.8 / 3 * alone["mean"], rel=0.01)
    assert alone["low"] == alone["high"]


def test_every_simulation_of_a_cluster_plays_the_recipes_trace(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "hours.csv"
    trace.write_text("0,2\n1,1\n2,2\n", encoding="utf-8")
    played = list[int]()

    def watched(
        spec: RunSpec, cost_model: CostModel, work: Workload, timetable: Timetable, **rest: Any
    ) -> SimulatedRun:
        changes = list(timetable)
        played.append(len(changes))
        return simulate_run(spec, cost_model, work, iter(changes), **rest)

    monkeypatch.setattr(cluster_forecast, "simulate_run", watched)
    pool = ("--pool", f'{{kind = "trace", path = "{trace}"}}', "--trainer.steps", "2")
    price = ("--price", "preemptible:rlboost-2xh100=0.01", "--schedule.max_policy_lag", "1")
    batch = ("--batch.prompts", "64", "--sampling.max_new_tokens", "8000", "--batch.microbatch_tokens", "16384")
    ran = run("plan", "run", "--params", "8b", *MACHINES, *pool, *batch, *price, "--seeds", "3", "--json")
    assert played == [4, 4, 4]  # two come, one goes, one comes
    notes = " ".join(ran.data["notes"])
    assert f"{trace} spans 2 s from second 0: 1.5 machines on average, 2 at most" in notes
    assert "ends 2 s into the run" in notes


def test_large_recipes_are_planned_with_their_own_placement(run: Run, tmp_path: Path) -> None:
    spot = ("--preemptible", "rlboost-8xh100:2", "--price", "preemptible:rlboost-8xh100=21.28")
    short = ("--trainer.steps", "1", "--batch.prompts", "16", "--seeds", "1")
    large = ("plan", "run", "@llama-70b", f"--run.dir={tmp_path}/run", *spot, *short)
    data = run(*large, "--machines", "aws-p5.48xlarge-block:3", "--json").data
    placement = data["placement"]
    assert placement["training"] == {"machines": {"aws-p5.48xlarge-block": 3}, "gpus": 16, "gpus_apart": 8}
    reserved, workers = placement["generation"]
    assert (reserved["reserved_engine"], reserved["gpus_per_engine"]) == (True, 4)
    assert (workers["machines"], workers["preemptible"], workers["gpus_per_engine"]) == (2, True, 4)
    # Three machines of 39.33 dollars, two of 21.28: the reserved engine costs nothing more.
    assert placement["usd_per_hour"] == pytest.approx(3 * 39.33 + 2 * 21.28)
    # 141.1e9 bytes over the workers' 200 Gbit/s, once to each machine; three receive it from 3 * 3,200 Gbit/s
    assert placement["pull_s"] == pytest.approx(2 * 70_553_706_496 / 25e9, rel=1e-3)
    assert any("trainer: gathered layers 7.63 GB" in note for note in data["notes"])
    assert "memory_bytes" not in data  # of every role, in the notes
    reserved_only = [each for each in large if each not in spot]
    alone = run(*reserved_only, "--machines", "aws-p5.48xlarge-block:3", "--json").data
    assert [each["preemptible"] for each in alone["placement"]["generation"]] == [False]
    assert any("the reserved engine generates alone" in note for note in alone["notes"])
    few = run(*large, "--machines", "aws-p5.48xlarge-block:2")
    assert "need 3 machines of aws-p5.48xlarge-block, and 2 are offered" in few.err
    wide = run(*large, "--machines", "aws-p5.48xlarge-block:9", "--engine.tensor_parallel", "16")
    assert "the reserved engine needs 16 GPUs of one machine" in wide.err
    auto = run(*large, "--machines", "aws-p5.48xlarge-block:3", "--engine.tensor_parallel", "0", "--json").data
    assert auto["placement"] == placement
    assert auto["notes"][0].startswith("engine.tensor_parallel = 4: the fewest that fit")


def test_the_search_finds_a_placement_that_is_faster_than_the_recipe_and_can_be_planned(
    run: Run, tmp_path: Path
) -> None:
    short = (f"--run.dir={tmp_path}/run", "--trainer.steps", "1", "--seeds", "1")
    machine = ("--machines", "aws-p5.48xlarge-block", "--completion-tokens", "800", "--prompt-tokens", "256", "--json")
    own = run("plan", "run", "@qwen3-8b", *machine, *short).data
    assert "reserved machine 1: 4 × trainer, 1 × reserved engine, 3 × worker" in own["notes"]
    model = tmp_path / "config.json"
    fields = tomllib.loads(HUB_MODELS.read_text(encoding="utf-8"))["Qwen/Qwen3-8B"]
    model.write_text(json.dumps(fields), encoding="utf-8")
    batch = ("--prompts", "64", "--limit", "2048", "--microbatch-tokens", "4096", "--lag", "1", "--model", str(model))
    found = run("plan", "placement", *machine, "--algorithm", "dr_grpo", *batch).data
    assert found["best"]["step_s"] < own["placement"]["step_s"]
    names = ("trainer.shards", "engine.tensor_parallel", "engine.slots", "pool.max_workers")
    keys = [f"--{name}={found['recipe'][name]}" for name in names]
    planned = run("plan", "run", "@qwen3-8b", *keys, *machine, *short).data["placement"]
    assert planned["step_s"] == pytest.approx(found["best"]["step_s"], rel=0.02)
