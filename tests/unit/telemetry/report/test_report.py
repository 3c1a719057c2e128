from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from tests.fabricated_agents import FAULT, FabricatedAgents
from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_forecast import make_forecast
from tests.fabricated_guard import DECIDED, ONSET, REASON, TARGET, hacked_run
from tests.fabricated_run import FabricatedRun, make_prompt, make_trajectory
from tidemill.core.errors import UserError
from tidemill.core.formatting import percent
from tidemill.core.records import Call, Reward, SourceRun, Turn
from tidemill.telemetry.manifest import write_forecast
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.report import write_report
from tidemill.telemetry.report.pages import script_json
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&</pre>"


class Page(HTMLParser):
    """The elements of an HTML page."""

    VOID = frozenset({"meta", "link", "rect", "line", "path", "img", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.scripts[self.tags[-1][1].get("id") or ""] = data
        else:
            self.text += data


def page_of(run: RunDirectory) -> Page:
    return Page(write_report(run.path).read_text(encoding="utf-8"))


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    return FabricatedRun(tmp_path).make()


def test_the_page_has_all_sections(finished: RunDirectory) -> None:
    page = page_of(finished)
    assert page.mismatched == [] and page.open == []
    for words in (
        "Held-out accuracy rose from 0.422 to 0.906 in 20 steps.",
        "Mean reward: before 0.422, after 0.906.",
        "The run is finished.",
        "Resumed once",
        "Highest reward",
        "Lowest reward",
        "Held-out prompts, before and after",
        "session_start",
        "learning_rate = 1e-5",
        "smollm2-135m, seed 0",
        "@recipes/smollm2-addition.toml",
    ):
        assert words in page.text, words
    data = json.loads(page.scripts["data"])
    assert data["steps"] == list(range(21)) and data["resumed"] == [10]
    drawn = {chart["title"] for chart in data["charts"]}
    assert drawn >= {
        "Held-out accuracy", "Held-out reward", "Reward", "Entropy", "KL", "Clip fraction", "Completion length",
        "Gradient norm", "Time per step", "Generation speed",
    }  # fmt: skip
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 4, "three histograms and the mark"


def test_preemptible_workers_have_a_section(tmp_path: Path) -> None:
    run = FabricatedFleet(tmp_path).make()
    page = page_of(run)
    assert page.mismatched == [] and page.open == []
    summary = run.read_summary()
    for words in ("The fleet", f"{summary['evictions']} evictions", "Preemptible share", "reserved only", "eviction"):
        assert words in page.text, words
    data = json.loads(page.scripts["data"])
    assert data["fleets"][0]["rows"] == ["trainer", "local", "spot-1", "spot-2", "spot-3", "spot-4"]
    assert {"Evictions", "Lost and recomputed"} <= {chart["title"] for chart in data["charts"]}


def test_a_run_without_preemptible_workers_has_a_timeline_and_no_figures_of_them(finished: RunDirectory) -> None:
    page = page_of(finished)
    assert "Reserved machines only" in page.text and "Preemptible share" not in page.text
    assert json.loads(page.scripts["data"])["fleets"][0]["rows"] == ["trainer"]


def test_the_page_of_agents_shows_turns_calls_workers_and_errors(tmp_path: Path) -> None:
    page = page_of(FabricatedAgents(tmp_path, steps=12).make())
    assert page.mismatched == [] and page.open == []
    for words in (
        "Turn 4", "spot-3 v", "local v", "Environment", "calculate", "higher", "ended by its environment",
        "ended by a fault of its environment", "error: calculate has no argument expressions",
        "calculate → error: calculate", "Errors of the environment", f"First warning: {FAULT}",
        "episodes were left out",
    ):  # fmt: skip
        assert words in page.text, words
    charts = {chart["title"]: chart for chart in json.loads(page.scripts["data"])["charts"]}
    assert charts.keys() >= {"Turns and calls", "Answers of environments", "Mistakes of agents", "Environment faults"}
    ends = charts["Ends of episodes"]["series"]
    assert [one["label"] for one in ends] == ["done", "turns", "fault"]
    assert sum(one["values"][-1] for one in ends) == pytest.approx(100, abs=0.01)


def test_the_page_needs_no_network(finished: RunDirectory) -> None:
    text = write_report(finished.path).read_text(encoding="utf-8")
    for tag, attributes in Page(text).tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value == "data:," or value.startswith("#"), (tag, name, value)
    policy = next(a["content"] for tag, a in Page(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert (
        policy
        and "default-src 'none'" in policy
        and "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    )
    assert "@import" not in text and not re.search(r"url\(\s*['\"]?http", text)


def test_nothing_a_model_writes_becomes_markup(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path, steps=2, groups=1, group_size=2)
    fabricated.spec = fabricated.spec.model_copy(
        update={"run": fabricated.spec.run.model_copy(update={"name": ATTACK})}
    )
    recorder = fabricated.session()
    run = recorder.run
    run.write_config(f"# {ATTACK}\n")
    run.write_manifest(
        {
            "format": RUN_FORMAT,
            "run": ATTACK,
            "model": ATTACK,
            "seed": 0,
            "sessions": [{"argv": [ATTACK], "versions": {ATTACK: ATTACK}}],
        }
    )
    prompt = make_prompt(ATTACK, ATTACK)
    for step, purpose in ((0, "eval:x"), (1, "train"), (2, "train"), (2, "eval:x")):
        rewards = [
            Reward(value=float(i), components={ATTACK: 1.0, "b": 0.0}, valid=i < 2, reason=f"\u202e{ATTACK}")
            for i in range(3)
        ]
        samples = [
            make_trajectory(prompt, ATTACK, reward=one, purpose=purpose, index=i) for i, one in enumerate(rewards)
        ]
        call = Call(call_id="", name=ATTACK, arguments=ATTACK, result=ATTACK)
        turn = Turn(start=0, end=len(ATTACK), text=ATTACK, observation=ATTACK)
        turns = (turn, msgspec.structs.replace(turn, end=1, calls=(call,)))
        source = (SourceRun(source=ATTACK, start=0, end=len(ATTACK)),)
        samples[0] = msgspec.structs.replace(samples[0], turns=turns, sources=source, fault=ATTACK)
        recorder.samples(step, samples, [prompt] * 3)
    recorder.event("environment_warning", reason=f"\u202e{ATTACK}")
    named = {"lease": ATTACK, "worker": ATTACK, "kind": "preemptible"}
    recorder.event("lease", **named, price_usd_per_hour=0.0)
    for event in ("eviction", "join_failed", "notice", "quarantine", "decode"):
        recorder.event(event, **named, cause=ATTACK, purpose=ATTACK, step=ATTACK)
    recorder.event("evaluation", step=0, reward_mean=0.5, n=3, note=ATTACK, error=ATTACK)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 1, ATTACK: 1.0, "samples_invalid": 1}) + "\n")
    recorder.close()
    run.close()
    page = page_of(run)
    assert page.mismatched == [] and page.open == []
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    assert "\u202e" not in page.text and "[U+202E]" in page.text  # it would reverse what follows it
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == 6 and all("nonce" in one or one.get("type") == "application/json" for one in scripts)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert ATTACK in page.text, "it is shown escaped"
    data = json.loads(page.scripts["data"])
    assert data["charts"][-1]["title"] == ATTACK and data["fleets"][0]["rows"][1] == ATTACK


def test_json_cannot_end_its_script_element() -> None:
    text = script_json({"x": "</script>&\u2028<!--"})
    assert "<" not in text and ">" not in text and "&" not in text and "\u2028" not in text
    assert json.loads(text) == {"x": "</script>&\u2028<!--"}


def test_the_page_of_a_new_run(tmp_path: Path) -> None:
    recorder = FabricatedRun(tmp_path).session()
    page = page_of(recorder.run)
    assert "No step has been completed yet." in page.text and "The run is in progress." in page.text
    assert json.loads(page.scripts["data"])["charts"] == []
    recorder.close()
    recorder.run.close()


@pytest.mark.parametrize("keep", ["config.toml", "manifest.json", "events.jsonl", "metrics.jsonl"])
def test_the_page_of_a_directory_with_missing_files(finished: RunDirectory, keep: str) -> None:
    for path in (finished.config, finished.manifest, finished.events, finished.metrics, finished.summary):
        if path.name != keep:
            path.unlink()
    for _, _, path in finished.sample_files():
        path.unlink()
    assert page_of(finished).mismatched == []


@pytest.mark.parametrize("cut", [1, 7, 60, 333])
def test_the_page_of_a_run_killed_during_a_write(finished: RunDirectory, cut: int) -> None:
    for path in (finished.events, finished.metrics, *(path for _, _, path in finished.sample_files())):
        path.write_bytes(path.read_bytes()[:-cut])
    finished.summary.write_bytes(finished.summary.read_bytes()[:cut])
    finished.config.write_bytes(b"[run\nname = \xff")
    page = page_of(finished)
    assert page.mismatched == [] and "Held-out accuracy rose" in page.text


def test_unreadable_lines_are_reported(finished: RunDirectory) -> None:
    assert "cannot be read" not in page_of(finished).text
    with finished.events.open("ab") as log:
        log.write(b"garbage\n\xff\n")
    with finished.metrics.open("ab") as log:
        log.write(b"garbage\n")
    lines = finished.metrics.read_bytes().count(b"\n")
    assert f"1 of {lines} lines of metrics.jsonl cannot be read, 2 of" in page_of(finished).text


def test_unreadable_metrics_do_not_replace_an_existing_report(finished: RunDirectory) -> None:
    before = write_report(finished.path).read_bytes()
    finished.metrics.write_bytes(b"garbage\n" * 9)
    with pytest.raises(UserError) as caught:
        write_report(finished.path)
    assert caught.value.where.endswith("metrics.jsonl")
    assert finished.report.read_bytes() == before


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        write_report(tmp_path / "nowhere")
    assert caught.value.where == str(tmp_path / "nowhere") and "--run.dir" in caught.value.hint


def test_the_uplot_license_comes_with_it(finished: RunDirectory) -> None:
    assert "Leon Sorokin" in page_of(finished).text


def test_the_page_shows_the_trainers_idle_share(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"step":1,"time_step_s":4.0,"time_trainer_idle_s":3.0}\n')
    assert "Trainer idle75 %of training, waiting for samples" in page_of(run).text.replace("\n", "")


def test_the_page_shows_the_error_of_the_forecast(finished: RunDirectory) -> None:
    lines = [line for line in read_metrics(finished.metrics) if line.step > 0]
    actual = sum(line.values["time_step_s"] for line in lines)
    # Twenty steps of 2 s were expected.
    doubtful = msgspec.structs.replace(make_forecast(2.0, total_s=3600.0), notes=("the machine was busy",))
    write_forecast(finished.path, doubtful)
    words = page_of(finished).text
    off = actual / 40 - 1
    assert "1:00:00" in words
    assert "from a profile of another run; the machine was busy" in words
    assert f"the run took {percent(abs(off))} {'longer' if off > 0 else 'less'} so far, steps only" in words


def test_the_page_tells_the_story_of_a_hacked_run(tmp_path: Path) -> None:
    page = page_of(hacked_run(tmp_path))
    assert page.mismatched == [] and page.open == []
    for words in (
        f"Guard, step {DECIDED}: the reward rises and quality does not since about step {ONSET}; the run returns",
        f"to step {TARGET}. {REASON}",
        "Guard: the reward likes a text that it should not (empty): score 1.000, typical 0.250.",
        "2 gold scores missing. The guard cannot judge these samples. First: the judge did not answer within 10 s.",
        "Samples of steps 12-14, taken back",
        "Quarantined node-7: its logprobs differ from its cohort's (0.310, limit 0.050). Worker: spot-3.",
    ):
        assert words in page.text, words
    quality = json.loads(page.scripts["data"])["charts"][0]
    assert (quality["title"], quality["marks"]) == ("Reward and gold", [[ONSET, "onset"], [DECIDED, "decided"]])
    values = {one["label"]: one["values"] for one in quality["series"]}
    assert [at for at, value in enumerate(values["gold, taken back"]) if value] == list(range(TARGET + 1, DECIDED + 1))
    assert all(values["reward"][1:]) and all(values["gold"][1:])
