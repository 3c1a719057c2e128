from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tidemill.core.errors import UserError
from tidemill.telemetry.report.sample_pages import (
    group_section,
    sample_section,
    samples_section,
    samples_view,
    token_figures,
)
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import Sample, write_samples
from tidemill.telemetry.sample_index import SampleIndex, SampleQuery

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e"


class Markup(HTMLParser):
    """Tags, other than blocks of JSON, and names of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags |= {tag} if ("type", "application/json") not in attrs else set()
        self.attributes |= {name for name, _ in attrs}


def line(index: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "purpose": "train",
        "prompt_id": "p",
        "index": index,
        "prompt": "1 + 1 =",
        "completion": " 2",
        "token_ids": [1, 2],
        "tokens": [" ", "2"],
        "logprobs": [-0.1, -2.0],
        "reward": 0.25 * index,
        "valid": True,
        "finish": "stop",
        "versions": [[0, "d", 0, 2]],
        "sources": [["vllm/spot-1", "l-1", 0, 0, 1], ["vllm/spot-2", "l-2", 0, 1, 2]],
        "advantage": 0.5,
        "signal": True,
        **fields,
    }


def pages(path: Path, *lines: dict[str, Any]) -> tuple[RunData, SampleIndex]:
    run = RunDirectory(path)
    run.samples.mkdir()
    write_samples(run.samples / samples_name(1), lines)
    index = SampleIndex(run)
    index.refresh()
    return RunData.load(run), index


def test_the_table_keeps_its_filters_in_every_link(tmp_path: Path) -> None:
    data, index = pages(tmp_path, *(line(at % 4, prompt_id=f"p{at}") for at in range(120)))
    html = samples_section(data, index, SampleQuery(worker="spot-1", reward_min=0.25))
    assert "90 of 120" in html and "<option selected>vllm" not in html
    links = [unescape(link) for link in re.findall(r'href="\?view=samples&amp;([^"]+)#samples"', html)]
    pages_and_sorts = [link for link in links if "page=" in link or "sort=" in link]
    assert len(pages_and_sorts) >= 4 and all("worker=spot-1" in link for link in links)
    bars = re.findall(r'aria-label="reward ([^"]+)"', html)
    assert bars == ["0: 25 %", "0.25: 25 %", "0.5: 25 %", "0.75: 25 %"]
    assert any("reward_min=0.5&reward_max=0.5" in link for link in links)
    assert "No sample matches" in samples_section(data, index, SampleQuery(text="nowhere"))


def test_the_groups_samples_are_side_by_side(tmp_path: Path) -> None:
    data, index = pages(tmp_path, *(line(at) for at in range(3)))
    html = group_section(data, index, 1, "p")
    assert re.findall(r"Sample (\d)", html) == ["0", "1", "2"]
    assert html.count("1 + 1 =") == 1
    assert "spot-1 v0" in html and "spot-2 v0" in html
    for missing in ((2, "p"), (1, "q"), (1, "p", 7)):
        with pytest.raises(UserError, match="no such sample of step"):
            group_section(data, index, *missing)
    with pytest.raises(UserError, match="no such sample of step 1"):
        sample_section(data, index, 1, "p", 9)


def test_every_link_leads_to_its_page(tmp_path: Path) -> None:
    data, index = pages(tmp_path, *(line(at, prompt_id="a&b", epoch=2, purpose="eval:x y") for at in range(2)))
    html = samples_view(data, index, "samples", {"purpose": "all"})
    links = [unescape(link) for link in re.findall(r'href="\?(view=(?:sample|group)&amp;[^"]+)#samples"', html)]
    assert len(links) == 4
    for link in links:
        view, *parameters = parse_qsl(link)
        assert "eval:x y" in samples_view(data, index, view[1], dict(parameters)) or view[1] == "group"


@pytest.mark.parametrize(
    "parameters", [{}, {"step": "x", "prompt": "p"}, {"step": "1"}, {"step": "9" * 30, "prompt": "p"}]
)
def test_wrong_addresses_are_refused(tmp_path: Path, parameters: dict[str, str]) -> None:
    data, index = pages(tmp_path, line(0))
    for view in ("sample", "group"):
        with pytest.raises(UserError):
            samples_view(data, index, view, parameters)


def test_every_token_has_its_place_and_its_figures(tmp_path: Path) -> None:
    details = {"trainer_logprobs": [-0.1, None], "entropies": [0.3, None]}
    data, index = pages(tmp_path, line(0, **details, logprobs=[-0.1, None]))
    html = sample_section(data, index, 1, "p", 0)
    assert re.findall(r'<span data-at="(\d)"(?: class="(\w+)")?>', html) == [("0", ""), ("1", "untrained")]
    found = json.loads(unescape(re.findall(r'class="token-data">(.*?)</script>', html)[0]))
    assert found["tokens"] == [" ", "2"]
    assert found["figures"]["entropy"]["values"] == [0.3, None]
    assert list(found["figures"]) == ["logprob", "ratio", "entropy", "advantage", "worker", "version"]


def test_figures_of_tokens() -> None:
    sample = Sample(
        tokens=("a", "b", "c"),
        logprobs=(-1.0, None, -0.5),
        trainer_logprobs=(-1.0, None, -0.5 + 0.2),
        entropies=(0.01, None, 9.0),
        advantage=-0.75,
        sources=(("vllm/spot-1", "l-1", 3, 0, 2), ("vllm/spot-1", "l-2", 4, 2, 3)),
    )
    found = token_figures(sample)
    assert [value and round(float(value), 4) for value in found["ratio"].values] == [1.0, None, 1.2214]  # exp(0.2)
    assert found["ratio"].levels == (4, None, 6) and dict(found["ratio"].legend)[6] == "1.05 to 1.25"
    assert found["entropy"].levels == (0, None, 7)
    assert found["advantage"].values == (-0.75, None, -0.75)
    assert found["worker"].values == ("spot-1 (l-1)", "spot-1 (l-1)", "spot-1 (l-2)")
    assert found["version"].legend == ((0, "v3"), (1, "v4"))
    assert list(token_figures(Sample(completion="x"))) == []


def test_texts_of_samples_are_inert(tmp_path: Path) -> None:
    evil = dict.fromkeys(("prompt", "completion", "reason", "answer", "prompt_id", "finish"), EVIL)
    sources = [[EVIL, EVIL, 0, 0, 2]]
    data, index = pages(
        tmp_path, line(0, **evil, tokens=[EVIL, ""], sources=sources, messages=[{"role": EVIL, "content": EVIL}])
    )
    query = SampleQuery(text=EVIL, worker=EVIL)
    for html in (
        samples_section(data, index),
        samples_section(data, index, query),
        group_section(data, index, 1, EVIL),
        sample_section(data, index, 1, EVIL, 0),
    ):
        found = Markup()
        found.feed(html)
        assert found.tags.isdisjoint({"img", "script"}) and not any(name.startswith("on") for name in found.attributes)
        assert "alert(1)" in html and "\u202e" not in html.partition("token-data")[0]


def test_a_run_without_samples_has_a_page(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    index = SampleIndex(run)
    index.refresh()
    assert "No samples have been written yet" in samples_section(RunData.load(run), index)
