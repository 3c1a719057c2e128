from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun, make_prompt, make_trajectory
from tidemill.core.errors import UserError
from tidemill.core.records import Reward
from tidemill.telemetry.report import write_report
from tidemill.telemetry.report.page import script_json
from tidemill.telemetry.run_dir import RunDirectory

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&</pre>"


class Page(HTMLParser):
    """The elements of a page, as a browser sees them."""

    VOID = frozenset({"meta", "link", "rect", "line", "path", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.words = ""
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
            self.words += data


def page_of(run: RunDirectory) -> Page:
    return Page(write_report(run.path).read_text(encoding="utf-8"))


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    return FabricatedRun(tmp_path).make()


def test_the_page_tells_the_whole_story(finished: RunDirectory) -> None:
    page = page_of(finished)
    assert page.mismatched == [] and page.open == []
    for words in (
        "Held-out accuracy rose from 0.422 to 0.906 in 20 steps.",
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
        assert words in page.words, words
    data = json.loads(page.scripts["data"])
    assert data["steps"] == list(range(21)) and data["resumed"] == [10]
    drawn = {chart["title"] for chart in data["charts"]}
    assert drawn >= {
        "Held-out accuracy", "Reward", "Entropy", "KL", "Clip fraction", "Completion length", "Gradient norm",
        "Time per step", "Generation speed",
    }  # fmt: skip
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 4, "three histograms and the mark"


def test_the_page_needs_no_network(finished: RunDirectory) -> None:
    text = write_report(finished.path).read_text(encoding="utf-8")
    for tag, attributes in Page(text).tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value == "data:,", (tag, name, value)
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
        {"run": ATTACK, "model": ATTACK, "seed": 0, "sessions": [{"argv": [ATTACK], "versions": {ATTACK: ATTACK}}]}
    )
    prompt = make_prompt(ATTACK, ATTACK)
    for step, purpose in ((0, "eval:x"), (1, "train"), (2, "train"), (2, "eval:x")):
        rewards = [
            Reward(value=float(i), components={ATTACK: 1.0, "b": 0.0}, valid=i < 2, reason=ATTACK) for i in range(3)
        ]
        samples = [
            make_trajectory(prompt, ATTACK, reward=one, purpose=purpose, index=i) for i, one in enumerate(rewards)
        ]
        recorder.samples(step, samples, [prompt] * 3)
    recorder.event("evaluation", step=0, greedy_accuracy=0.5, n=3, note=ATTACK, error=ATTACK)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 1, ATTACK: 1.0, "samples_invalid": 1}) + "\n")
    recorder.close()
    run.close()
    page = page_of(run)
    assert page.mismatched == [] and page.open == []
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == 3 and all("nonce" in one or one.get("type") == "application/json" for one in scripts)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert ATTACK in page.words, "it is shown as what it is"
    assert json.loads(page.scripts["data"])["charts"][-1]["title"] == ATTACK


def test_json_cannot_end_its_script() -> None:
    text = script_json({"x": "</script>&\u2028<!--"})
    assert "<" not in text and ">" not in text and "&" not in text and "\u2028" not in text
    assert json.loads(text) == {"x": "</script>&\u2028<!--"}


def test_a_run_that_has_only_just_begun(tmp_path: Path) -> None:
    recorder = FabricatedRun(tmp_path).session()
    page = page_of(recorder.run)
    assert "No step has been completed yet." in page.words and "The run is in progress." in page.words
    assert json.loads(page.scripts["data"])["charts"] == []
    recorder.close()
    recorder.run.close()


@pytest.mark.parametrize("keep", ["config.toml", "manifest.json", "events.jsonl", "metrics.jsonl"])
def test_a_directory_that_has_lost_most_of_its_files(finished: RunDirectory, keep: str) -> None:
    for path in (finished.config, finished.manifest, finished.events, finished.metrics, finished.summary):
        if path.name != keep:
            path.unlink()
    for _, _, path in finished.sample_files():
        path.unlink()
    assert page_of(finished).mismatched == []


@pytest.mark.parametrize("cut", [1, 7, 60, 333])
def test_a_run_killed_in_the_middle_of_a_write(finished: RunDirectory, cut: int) -> None:
    for path in (finished.events, finished.metrics, *(path for _, _, path in finished.sample_files())):
        path.write_bytes(path.read_bytes()[:-cut])
    finished.summary.write_bytes(finished.summary.read_bytes()[:cut])
    finished.config.write_bytes(b"[run\nname = \xff")
    page = page_of(finished)
    assert page.mismatched == [] and "Held-out accuracy rose" in page.words


def test_a_place_without_a_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here") as caught:
        write_report(tmp_path / "nowhere")
    assert "--run.dir" in caught.value.cure


def test_the_uplot_license_comes_with_it(finished: RunDirectory) -> None:
    assert "Leon Sorokin" in page_of(finished).words
