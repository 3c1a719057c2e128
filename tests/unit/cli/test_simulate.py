"""`tidemill simulate` in this process, on a scenario of a few samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_rows import engine_row, train_step_row, write_rows
from tests.unit.cli.conftest import Run
from tidemill.config.load import SCENARIOS, load_spec
from tidemill.sim.comparison import plan_scenario

TINY = """
[batch]
prompts = 2
group_size = 2
order = "arrival"
microbatch_tokens = 16384
[sampling]
max_new_tokens = 200
[trainer]
steps = 2
[pool]
workers = 2
[simulation]
parameters = 1e9
machine = "rlboost-8xh100"
completion_tokens = 100
boot_s = 1
"""
LONG = [
    "--sampling.max_new_tokens=9000000",
    "--simulation.completion_sigma=0",
    "--simulation.completion_tokens=9000000",
]
PROMISED = {"throughput_tokens_per_s", "tokens_per_usd", "cost_usd", "trainer_idle_share", "tokens_recomputed"}


@pytest.fixture(autouse=True)
def scenario(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY, encoding="utf-8")


def test_every_schedule_trains_on_the_same_samples(run: Run) -> None:
    schedules = run("simulate", "@tiny.toml", "--json").data["schedules"]
    assert list(schedules) == list(load_spec([]).simulation.schedules)
    for name, figures in schedules.items():
        assert figures.keys() >= PROMISED, name
        assert figures["tokens_trained"] == schedules["colocated"]["tokens_trained"], name
        assert figures["throughput_tokens_per_s"] == pytest.approx(figures["tokens_trained"] / figures["seconds"])
        assert figures["tokens_per_usd"] == pytest.approx(figures["tokens_trained"] / figures["cost_usd"])
    # Reserved machines alone cost 83.79 an hour; the two preemptible ones 5.32 each, from beginning to end.
    alone, both = schedules["colocated"], schedules["tidemill"]
    assert alone["cost_usd"] == pytest.approx(83.79 * alone["seconds"] / 3600)
    assert both["cost_usd"] == pytest.approx((83.79 + 2 * 5.32) * both["seconds"] / 3600, rel=1e-3)
    assert alone["worker_idle_share"] is None
    assert 0 <= both["worker_idle_share"] <= 1


def test_table_and_page(run: Run, tmp_path: Path) -> None:
    ran = run("simulate", "@tiny.toml", "--simulation.schedules", '["colocated", "one_step_off"]', "--html", "a.html")
    assert "colocated: 8 GPUs train and generate" in ran.out
    assert "one_step_off: " in ran.out
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Tidemill simulation" in page
    assert "://" not in page  # nothing is fetched
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    colocated, ahead = data["fleets"]
    assert colocated["rows"] == ahead["rows"] == ["trainer", "local"]
    learned = [bar for bar in colocated["bars"] if colocated["kinds"][bar[1]] == "learn"]
    assert len(learned) == 2  # once a step, when everything is generated


@pytest.mark.parametrize("before", [None, "an older page"])
def test_an_interrupted_simulation_keeps_an_existing_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    page = tmp_path / "a.html"
    if before is not None:
        page.write_text(before, encoding="utf-8")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tidemill.cli.forecasting.simulate_planned", interrupt)
    assert run("simulate", "@tiny.toml", "--html", "a.html").code == 130
    assert (page.read_text(encoding="utf-8") if page.exists() else None) == before


def test_a_full_cache_is_reported(run: Run) -> None:
    # Of an H100's 80 GB, 90 % are used; beside 2 GB of workspace and 60 GB of weights, 10 GB are left, of which a token
    # takes 59 layers x 2 x 8 heads x 128 x 2 bytes. That is 41,380 tokens, 13 samples of 3,128.
    crowd = ["--simulation.parameters=30e9", "--simulation.engine_gpus=1", "--sampling.max_new_tokens=3000"]
    crowd += ["--simulation.completion_sigma=0", "--simulation.completion_tokens=3000", "--simulation.machines=2"]
    crowd += ["--batch.prompts=256", "--trainer.steps=1", "--simulation.schedules", '["colocated"]']
    crowded = run("simulate", "@tiny.toml", *crowd, "--simulation.prompt_tokens=128", "--engine.slots=64", "--json")
    (note,) = crowded.data["notes"]
    assert note.startswith("colocated: full caches")
    assert "about 13 samples of mean length, 13 of the longest; engine.slots = 64" in note
    assert run("simulate", "@tiny.toml", *crowd, "--engine.slots=8", "--json").data["notes"] == []


def test_the_smallest_cache_is_reported(run: Run) -> None:
    crowd = ["--simulation.parameters=14e9", "--simulation.engine_gpus=1", "--sampling.max_new_tokens=3000"]
    crowd += ["--simulation.completion_sigma=0", "--simulation.completion_tokens=3000", "--simulation.machines=3"]
    crowd += ["--simulation.machine=aws-p4d.24xlarge-block", "--simulation.worker_machine=aws-p5e.48xlarge-block"]
    crowd += ["--batch.prompts=768", "--trainer.steps=1", "--engine.slots=64", "--fleet.queue_limit=1000"]
    crowd += ["--fleet.seed_window_s=10000"]
    told = run("simulate", "@tiny.toml", *crowd, "--simulation.schedules", '["colocated", "tidemill"]').out
    alone, both = (" ".join(note.split()) for note in told.split("full caches caused")[1:])
    assert alone.split("holds about")[1].split(";")[0] == both.split("holds about")[1].split(";")[0]


def test_dry_run_shows_resolved_settings(run: Run) -> None:
    ran = run("simulate", "@tiny.toml", "--dry-run", "--json")
    assert ran.data["schedules"]["tidemill"]["preemptible"] is True
    assert ran.data["schedules"]["bounded_staleness"]["schedule"]["max_policy_lag"] == 4
    assert (ran.data["reserved_usd_per_hour"], ran.data["preemptible_usd_per_hour"]) == (83.79, 5.32)
    assert ran.data["assumed_shape"] is True


def test_measured_rows_replace_assumed_efficiencies(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", train_step_row(2.0), engine_row(20.0, engine="embedded"))
    write_rows(tmp_path / "other.json", engine_row(20.0), device="NVIDIA H200")
    schedules = ("--simulation.schedules", '["colocated"]')
    assumed = run("simulate", "@tiny.toml", *schedules, "--json").data
    assert assumed["scenario"]["efficiencies"] == []
    files = ("--simulation.measured", '["rows.json", "other.json"]')
    found = run("simulate", "@tiny.toml", *schedules, *files, "--json").data
    assert found["schedules"]["colocated"]["seconds"] > assumed["schedules"]["colocated"]["seconds"]
    training, engines, unused = found["scenario"]["efficiencies"]
    assert training.endswith("measured: rows.json, NVIDIA H100 80GB HBM3, row 1 (1.7B, shared)")
    assert engines.endswith("measured: rows.json, NVIDIA H100 80GB HBM3, row 2 (1.7B, embedded)")
    assert unused.startswith("other.json is not used: ")
    out = run("simulate", "@tiny.toml", *files, "--dry-run").out
    assert all(f"note: {line}\n" in out for line in (training, engines, unused))


def test_rows_that_the_project_measured_are_used(run: Run) -> None:
    simulated = ("simulate", "@tiny.toml", "--simulation.schedules", '["colocated"]', "--json")
    h200 = (*simulated, "--simulation.machine", "aws-p5e.48xlarge-block")
    kept = run(*h200).data
    assert all(" measured: 2026-11-27, torch 2.11.0, " in line for line in kept["scenario"]["efficiencies"])
    assert len(kept["scenario"]["efficiencies"]) == 2
    assumed = run(*simulated).data  # a slower GPU, of which nothing was measured
    assert assumed["scenario"]["efficiencies"] == []
    assert assumed["schedules"]["colocated"]["seconds"] < kept["schedules"]["colocated"]["seconds"]


def test_without_measured_rows_of_the_recipes_engine_it_is_assumed(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", engine_row(20.0))
    out = run("simulate", "@tiny.toml", "--simulation.measured", '["rows.json"]', "--dry-run").out
    assert "2 ms per step, assumed (no measured row of embedded)\n" in out


def test_without_seeding_reserved_gpus_only_train(run: Run) -> None:
    arguments = ("--fleet.seeding", "false", "--simulation.schedules", '["tidemill", "rlboost", "colocated"]')
    out = run("simulate", "@tiny.toml", "--dry-run", *arguments).out
    assert "tidemill: 8 GPUs train, preemptible workers generate\n" in out
    assert "rlboost: 8 GPUs train, preemptible workers generate\n" in out
    assert "colocated: 8 GPUs train and generate\n" in out
    ran = run("simulate", "@tiny.toml", *arguments, "--json").data
    assert [one["generating_gpus"] for one in ran["scenario"]["schedules"].values()] == [0, 0, 8]
    assert ran["schedules"]["tidemill"]["reserved_generating_s"] == 0


def test_machines_without_a_price_are_reported(run: Run) -> None:
    out = run("simulate", "@tiny.toml", "--dry-run", "--simulation.worker_machine", "rlboost-8xh100").out
    assert "preemptible rlboost-8xh100 (no price)\n" in out
    assert "set fleet.preemptible_usd_per_hour" in out


def test_singular_forms(run: Run) -> None:
    arguments = ("--trainer.steps", "1", "--simulation.engine_gpus", "7", "--pool.workers", "0")
    out = run("simulate", "@tiny.toml", "--dry-run", *arguments, "--simulation.schedules", '["streamed"]').out
    assert "1 step of 2 × 2 samples, seed 0" in out
    assert "streamed: 1 GPU trains, 7 generate\n" in out


def test_dry_run_reports_unused_gpus(run: Run) -> None:
    arguments = ("--simulation.machines", "3", "--simulation.engine_gpus", "5", "--pool.workers", "0")
    out = run("simulate", "@tiny.toml", "--dry-run", *arguments).out
    assert "colocated: 24 GPUs train, 15 of them generate\n" in out
    assert "note: engines of 5 GPUs use 5 of the 8 GPUs of rlboost-8xh100" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--simulation.machine", "rlboost-8h100"], "did you mean rlboost-8xh100?"),
        (
            ["--simulation.machin", "x"],
            "simulation.machin: unknown key (command line); did you mean simulation.machine",
        ),
        (["--simulation.schedules", '["colocatd"]'], "did you mean colocated?"),
        (["--simulation.parameters", "none"], "simulation: no model given"),
        (["--simulation.parameters", "36e9"], ": 2.0 GB are missing"),
        (["--simulation.parameters", "70e9", "--simulation.engine_gpus", "4"], "GB of 1120 GB are missing"),
        (["--simulation.engine_gpus", "4"], "simulation.engine_gpus"),
        (
            ["--simulation.engine_gpus", "16", "--simulation.machines", "2"],
            "simulation.engine_gpus: colocated: an engine needs 16 GPUs, rlboost-8xh100 has 8\n  set at most 8",
        ),
        (LONG, "9,000,512 tokens"),
        (["--simulation.completion_tokens", "300"], "a mean of 300 tokens"),
        (["--simulation.measured", '["none.json"]'], "none.json: cannot be read: No such file or directory"),
        (["--html", "nowhere/a.html"], "--html nowhere/a.html: the page cannot be written: No such file or directory"),
        (["--html", "."], "--html .: the page cannot be written: Is a directory"),
        (["--simulation.hours", "1e-7"], "simulation.hours: no step finished within 1e-07 h"),
    ],
)
def test_invalid_settings_are_refused_before_the_run(run: Run, arguments: list[str], said: str) -> None:
    ran = run("simulate", "@tiny.toml", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0,1\n-5,2\n", "bad.csv:2: -5 is a negative time"),
        ("0,1\n60,2\n30,1\n", "bad.csv:3: time decreases from 60 to 30"),
    ],
)
def test_an_invalid_trace_names_the_row(run: Run, tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "bad.csv").write_text(rows, encoding="utf-8")
    ran = run("simulate", "@tiny.toml", "--pool.kind", "trace", "--pool.path", "bad.csv")
    assert ran.code == 2
    assert said in ran.err


def test_a_scenario_without_engines_ends_with_a_finding(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("0,0\n", encoding="utf-8")
    arguments = ("--pool.kind", "trace", "--pool.path", "empty.csv", "--fleet.seeding", "false")
    ran = run("simulate", "@tiny.toml", *arguments, "--simulation.schedules", '["tidemill"]')
    assert ran.code == 2
    assert "pool: no engine to generate: no machine appeared in 24 h" in ran.err

    ran = run("simulate", "@tiny.toml", *arguments, "--simulation.schedules", '["tidemill", "colocated"]', "--json")
    assert ran.code == 0
    assert ran.data["schedules"]["tidemill"].keys() == {"finding"}
    assert "no machine appeared" in ran.data["schedules"]["tidemill"]["finding"]
    assert ran.data["schedules"]["colocated"]["steps"] == 2


def test_hours_replace_steps(run: Run) -> None:
    arguments = ("--simulation.schedules", '["colocated"]', "--simulation.hours", "0.01", "--json")
    figures = run("simulate", "@tiny.toml", *arguments).data["schedules"]["colocated"]
    assert figures["steps"] > 2
    assert figures["seconds"] <= 36


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_projects_own_scenarios_can_be_simulated(path: Path) -> None:
    scenario = plan_scenario(load_spec([f"@{path}"], purpose="read"))
    assert not scenario.remarks


@pytest.mark.parametrize(
    ("recipe", "learning", "generating", "price"),
    [("llama-70b", 16, 4, 2 * 10.64), ("qwen3-8b", 4, 4, None)],  # a machine of eight has two workers of four GPUs
)
def test_recipes_with_ranks_keep_their_placement(
    run: Run, recipe: str, learning: int, generating: int, price: float | None
) -> None:
    argv = ("simulate", f"@{recipe}", "--simulation.schedules", '["tidemill"]', "--trainer.steps", "2")
    data = run(*argv, "--json").data
    planned = data["scenario"]["schedules"]["tidemill"]
    assert (planned["learning_gpus"], planned["generating_gpus"]) == (learning, generating)
    assert planned["preemptible"] is (price is not None)
    shown = run(*argv, "--dry-run").out
    assert 'pool.kind = "ray" has no timetable' in shown
    assert price is None or f"${price:.2f} per hour each" in shown
    assert data["schedules"]["tidemill"]["cost_usd"] > 0


def test_a_large_recipe_shows_the_memory_of_what_it_places(run: Run) -> None:
    out = " ".join(run("simulate", "@llama-70b", "--dry-run").out.split())
    assert "memory of a GPU: engine: 2 B × 70.6e9 / 4 = 35.3 GB" in out
    assert "new weights: 141 GB to each machine, once; 2.8 s at 400 Gbit/s" in out
    assert "memory of a GPU" not in run("simulate", "@tiny.toml", "--dry-run").out
