"""The exposition by the rules of the specification, read by a strict parser of its own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.fabricated_fleet import FabricatedFleet
from tidemill.core.records import FleetRow
from tidemill.telemetry.live_state import LiveState
from tidemill.telemetry.openmetrics import STATES, Figure, exposition, run_figures
from tidemill.telemetry.run_data import RunData

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|Inf)|NaN"
SAMPLE = re.compile(rf"({NAME})(\{{(?:{LABEL}(?:,{LABEL})*)?\}})? ({NUMBER})")
SUFFIXES = {"gauge": "", "stateset": "", "counter": "_total", "info": "_info"}


class Parsed(NamedTuple):
    kind: str
    unit: str
    samples: dict[str, float]  # by labels


def parse(text: str) -> dict[str, Parsed]:
    """The families of an exposition. Fails on whatever the specification does not allow."""
    *lines, end, nothing = text.split("\n")
    assert (end, nothing) == ("# EOF", "")
    families = dict[str, Parsed]()
    for line in lines:
        if line.startswith("# "):
            _, keyword, name, rest = line.split(" ", 3)
            assert re.fullmatch(NAME, name)
            if keyword == "TYPE":
                assert rest in SUFFIXES and name not in families, "a family stands once, and together"
                families[name] = Parsed(rest, "", {})
            else:
                assert name == [*families][-1] and not families[name].samples, "metadata comes first"
                if keyword == "UNIT":
                    assert name.endswith(f"_{rest}")
                    families[name] = families[name]._replace(unit=rest)
                else:
                    assert keyword == "HELP" and not re.search(r'\\[^\\n"]', rest)
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        family = [*families][-1]
        kind, _, samples = families[family]
        assert match[1] == family + SUFFIXES[kind], "the samples of a family stand together"
        labels, value = match[2] or "", float(match[3])
        names = re.findall(rf'({NAME})="', labels)
        assert labels not in samples and len(names) == len(set(names))
        assert kind != "counter" or (value >= 0 and math.isfinite(value))
        assert kind not in ("info", "stateset") or value in (0, 1)
        assert kind != "stateset" or family in names
        samples[labels] = value
    written = [name + SUFFIXES[family.kind] for name, family in families.items()]
    assert len(set(written) | set(families)) == len(set(written)) + sum(
        family.kind in ("counter", "info") for family in families.values()
    ), "no family has the name of another's sample"
    return families


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    path = tmp_path_factory.mktemp("runs") / "fleet"
    FabricatedFleet(path).make()
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        last = json.loads((path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        values = {
            "reward/exact": 0.5, 'reward/say "hi"\\\n': 0.25, "eval/hard set/reward_mean": 0.125, "eval/eval/n": 3,
            "my own.metric": 1e-30, "my own_metric": 2.0, "requests_total": 7, "run_info": 1, "run": 2, "sessions": 3,
            "größe": 4, "lag/0": 1.0, "mismatch_kl/vllm/spot-3": 0.1, "eval/reward_mean": 0.75,
        }  # fmt: skip
        file.write(json.dumps({**last, "step": last["step"] + 1, **values}) + "\n")
    return RunData.read(path)


def live(**more: object) -> LiveState:
    row = FleetRow(
        lease_id="l", worker_id="w", kind="preemptible", state="serving", version=1, running=2, queued=0,
        tokens_per_s=1.0, price_usd_per_hour=0.5, age_s=3.0,
    )  # fmt: skip
    state = LiveState(
        run_id="r", session=1, beat=1, unix_s=0, elapsed_s=1, step=1, total_steps=2, fleet=(row, row), samples_total=9,
        left_s=90.0,
    )  # fmt: skip
    return msgspec.structs.replace(state, **more)


def labelled(samples: Iterable[str], part: str) -> list[str]:
    return [labels for labels in samples if part in labels]


def test_the_exposition_of_runs(data: RunData) -> None:
    names = ("plain", 'a "quoted"\nname\\')
    figures = [figure for name in names for figure in run_figures(name, data, state="paused", live=live())]
    families = parse(exposition(figures))
    by_run = {name: families[f"tidemill_{name}"] for name in ("step", "cost_usd", "workers", "run_state", "run")}
    assert {len(labelled(family.samples, 'run="plain"')) for family in by_run.values()} <= {1, 2, len(STATES)}
    assert sum(by_run["run_state"].samples.values()) == len(names)
    assert [*by_run["workers"].samples.values()] == [2, 2]
    assert families["tidemill_left_seconds"].unit == "seconds"
    assert families["tidemill_fleet_evictions"].kind == "counter"
    [evictions, _] = families["tidemill_fleet_evictions"].samples.values()
    assert evictions == data.summary["evictions"] > 0
    assert sum(families["tidemill_cost_usd"].samples.values()) == pytest.approx(2 * data.summary["cost_usd"])
    assert families["tidemill_time_step_seconds"].unit == "seconds"
    assert families["tidemill_peak_rss_bytes"].unit == "bytes"


def test_names_of_metrics(data: RunData) -> None:
    families = parse(exposition(run_figures("r", data, state="finished", live=None)))

    def value(name: str, label: str) -> float:
        [found] = [value for labels, value in families[f"tidemill_{name}"].samples.items() if label in labels]
        return found

    assert value("reward_part", 'part="exact"') == 0.5
    assert value("reward_part", r'part="say \"hi\"\\\n"') == 0.25
    assert value("eval_reward_mean", 'set="hard set"') == 0.125
    assert value("eval_reward_mean", 'set="held_out"') == 0.75
    assert value("eval_n", 'set="eval"') == 3
    assert value("my_own_metric", "run") in (1e-30, 2.0)
    assert value("requests_total_value", "run") == 7
    assert value("gr__e", "run") == 4
    assert value("mismatch_kl_part", 'part="vllm/spot-3"') == 0.1
    assert value("lag_part", 'part="0"') == 1
    assert families["tidemill_run"].kind == "info"
    assert families["tidemill_sessions"].kind == "counter"


def test_numbers_and_states() -> None:
    values = [0, 1, -2.5, 1e-30, 123456789012, True]
    families = parse(exposition(Figure(f"n{at}", value) for at, value in enumerate(values)))
    read = [next(iter(family.samples.values())) for family in families.values()]
    assert read == values
    assert exposition([]) == "# EOF\n"


def test_the_grafana_dashboard_shows_metrics_that_exist(data: RunData) -> None:
    board = json.loads((Path(__file__).parents[3] / "docs/assets/grafana.json").read_text(encoding="utf-8"))
    families = parse(exposition(run_figures("r", data, state="running", live=live())))
    known = {name + SUFFIXES[family.kind] for name, family in families.items()}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"tidemill_\w+", query)}
    variables = {name for one in board["templating"]["list"] for name in re.findall(r"tidemill_\w+", str(one))}
    assert shown | variables <= known | {"tidemill_run_state"}
    titles = " ".join(panel["title"].lower() for panel in board["panels"])
    for word in ("reward", "held-out", "step time", "workers", "evictions", "cost", "state"):
        assert word in titles, word
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])
