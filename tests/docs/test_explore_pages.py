"""The interactive explanations in a real Chromium: they open from a disk, sliders work with the keyboard, and a page
shows the command's figures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from scripts.site.blocks import code_blocks
from scripts.site.explorations import TABLES, eviction, gae, policy_lag, ppo_clip, reward_hacking, write_tables
from tests.browser import opened
from tests.commands import run_here

PAGES = Path(__file__).resolve().parents[2] / "docs" / "explore"
DEADLINE_S = 100.0
PARTS = re.compile(r"^(<div class=\"explore\".*?</div>|<link .*?>|<script .*?</script>)$", re.MULTILINE)
pytestmark = pytest.mark.xdist_group("explore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drawing of each page, with its scripts and tables."""
    path = tmp_path_factory.mktemp("explore")
    with ThreadPoolExecutor() as another:  # a browser's event loop may run in this thread
        another.submit(write_tables, path / "tables").result()
    for file in (*PAGES.glob("*.js"), *PAGES.glob("*.css")):
        shutil.copy(file, path)
    for name in TABLES:
        parts = "\n".join(PARTS.findall((PAGES / f"{name}.md").read_text(encoding="utf-8")))
        start = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title></head>'
        (path / f"{name}.html").write_text(f"{start}<body><main><h1>{name}</h1>{parts}</main></body></html>")
    return path


def move(page: Page, positions: Mapping[str, int]) -> None:
    """Move sliders with the keyboard to positions from 0."""
    for name, position in positions.items():
        page.focus(f"[data-slider={name}]")
        page.keyboard.press("Home")
        for _ in range(position):
            page.keyboard.press("ArrowRight")
        assert page.input_value(f"[data-slider={name}]") == str(position)


def shown(page: Page, figure: str) -> str:
    return page.inner_text(f"[data-figure={figure}]")


def plan(*argv: Any) -> Any:
    ran = run_here("plan", *map(str, argv), "--json")
    assert ran.code == 0, ran.err
    return ran.data


def short(value: float) -> str:
    """Three significant digits, as the pages write numbers."""
    text = f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(count: float) -> str:
    return f"{short(count / 1e12)} TB" if count >= 1e12 else f"{short(count / 1e9)} GB"


def weight_transfer(page: Page, positions: Mapping[str, int]) -> None:
    table = TABLES["weight-transfer"]()
    given = {"params": table["parameters"][positions["model"]], "link-gbps": table["links"][positions["link"]]}
    given |= {"workers": table["workers"][positions["workers"]], "step-s": table["steps"][positions["step"]]}
    data = plan("weights", *(word for name, value in given.items() for word in (f"--{name}", value)))
    assert shown(page, "seconds") == f"{short(data['seconds'])} s"
    assert shown(page, "slack_s") == f"{short(abs(data['slack_s']))} s"
    assert (" to spare" in page.inner_text(".ex-summary")) == data["hides"]


def memory(page: Page, positions: Mapping[str, int]) -> None:
    table = TABLES["memory"]()
    options = ["--params", table["parameters"][positions["model"]]]
    options += ["--algorithm", table["algorithms"][positions["algorithm"]]]
    options += ["--gpu", table["gpus"][positions["gpu"]]["name"], "--gpus", table["counts"][positions["count"]]]
    data = plan("memory", *options)
    assert shown(page, "total_bytes") == size(data["total_bytes"])
    assert shown(page, "min_gpus") == f"{data['min_gpus']:,}"
    assert shown(page, "min_gpus_with_activations") == f"{data['min_gpus_with_activations']:,}"


def overlap(page: Page, positions: Mapping[str, int]) -> None:
    table = TABLES["overlap"]()
    options = ["--rollout", table["rollouts"][positions["rollout"]]]
    options += ["--training", table["trainings"][positions["training"]], "--gpus", table["gpus"][positions["gpus"]]]
    data = plan("overlap", *options)
    for name in ("utilisation_in_sequence", "utilisation_overlapped", "utilisation_resized"):
        assert shown(page, name) == f"{short(100 * data[name])} %"
    assert shown(page, "rollout_gpus") == str(data["rollout_gpus"])


def by_hand(page: Page, positions: Mapping[str, int]) -> None:
    rewards = [(positions[f"r{t}"] - 20) / 10 for t in range(1, 5)]
    values = [positions[f"v{t}"] / 10 for t in range(1, 5)]
    gamma, lam = gae.GAMMAS[positions["gamma"]], gae.LAMBDAS[positions["lam"]]
    end = gae.ENDS[positions["end"]]
    found = gae.advantages(rewards, values, positions["next"] / 10, gamma=gamma, lam=lam, end=end).tolist()
    assert [shown(page, f"A{t}") for t in range(1, 5)] == [f"{each:.4f}".replace("-", "−") for each in found]


def clip(page: Page, positions: Mapping[str, int]) -> None:
    logprob, advantage = ppo_clip.LOGPROBS[positions["logprob"]], ppo_clip.ADVANTAGES[positions["advantage"]]
    low, high = ppo_clip.LOWS[positions["low"]], ppo_clip.HIGHS[positions["high"]]
    dual = ppo_clip.DUALS[positions["dual"]]
    (ratio,), (objective,), (gradient,) = ppo_clip.surrogate(
        [logprob], ppo_clip.PROXIMAL, advantage, low=low, high=high, dual=dual
    )
    assert shown(page, "ratio") == f"{ratio:.4f}"
    assert shown(page, "loss") == f"{-objective:.2f}".replace("-", "−")
    assert shown(page, "gradient") == (f"{gradient:.3f}".replace("-", "−") if gradient else "0")


def lag(page: Page, positions: Mapping[str, int]) -> None:
    logprobs_KT = policy_lag.logprobs_of_versions(policy_lag.CHANGES[positions["change"]])
    kind, high = policy_lag.SETTINGS[positions["setting"]]
    weights_T = policy_lag.corrected(logprobs_KT, policy_lag.LAGS[positions["lag"]], kind, high).weights_T
    assert shown(page, "weights_effective") == percent(policy_lag.effective(weights_T))
    assert shown(page, "weight_mean") == f"{weights_T.mean().item():.3f}"


def evicted(page: Page, positions: Mapping[str, int]) -> None:
    with ThreadPoolExecutor() as another:  # the browser's event loop runs in this thread
        run, _ = another.submit(eviction.simulated, eviction.NOTICES_S[positions["notice"]]).result()
        table = another.submit(eviction.table).result()
    assert shown(page, "tokens_lost") == f"{run.total('tokens_lost'):.0f}"
    moment = table["runs"][positions["notice"]]["moments"][positions["moment"]]
    assert moment["text"] in page.inner_text(".ex-summary")


def hacked(page: Page, positions: Mapping[str, int]) -> None:
    _, evidence = reward_hacking.recorded("flawed")
    gain, gap = reward_hacking.GAIN_LIMITS[positions["gain"]], reward_hacking.GAP_LIMITS[positions["gap"]]
    alarm = reward_hacking.first_alarm(evidence, gain_limit=gain, gap_limit=gap)
    assert alarm is not None
    assert (shown(page, "step"), shown(page, "test")) == (str(alarm["step"]), alarm["test"])


EQUAL = {
    "weight-transfer": weight_transfer,
    "memory": memory,
    "overlap": overlap,
    "gae": by_hand,
    "ppo-clip": clip,
    "policy-lag": lag,
    "eviction": evicted,
    "reward-hacking": hacked,
}
"""Compares the figures of a page with those of the product at the same positions."""


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("weight-transfer", {"model": 6, "link": 5, "workers": 0, "step": 1}),
        ("weight-transfer", {"model": 10, "link": 2, "workers": 3, "step": 4}),
        ("memory", {"model": 6, "algorithm": 0, "gpu": 1, "count": 5}),
        ("memory", {"model": 3, "algorithm": 1, "gpu": 2, "count": 3}),
        ("overlap", {"rollout": 5, "training": 3, "gpus": 1}),
        ("overlap", {"rollout": 2, "training": 8, "gpus": 3}),
        ("gae", {"r1": 20, "r4": 30, "v1": 5, "v2": 6, "v3": 7, "v4": 8, "next": 5, "gamma": 2, "lam": 4, "end": 0}),
        ("gae", {"r1": 3, "r4": 35, "v1": 0, "v2": 20, "v3": 1, "v4": 2, "next": 17, "gamma": 0, "lam": 1, "end": 1}),
        ("ppo-clip", {"logprob": 20, "advantage": 7, "low": 1, "high": 1, "dual": 0}),
        ("ppo-clip", {"logprob": 27, "advantage": 0, "low": 2, "high": 2, "dual": 1}),
        ("policy-lag", {"lag": 3, "change": 2, "setting": 2}),
        ("policy-lag", {"lag": 10, "change": 3, "setting": 6}),
        ("eviction", {"notice": 0, "moment": 11}),
        ("eviction", {"notice": 1, "moment": 6}),
        ("reward-hacking", {"gain": 3, "gap": 4}),
        ("reward-hacking", {"gain": 7, "gap": 7}),
    ],
)
def test_a_page_shows_the_products_figures(
    name: str, positions: dict[str, int], folder: Path, browser: Browser
) -> None:
    with opened(browser, (folder / f"{name}.html").as_uri()) as page:
        move(page, positions)
        at_rest = {"r2": 20, "r3": 20} if name == "gae" else {}  # where the page starts
        EQUAL[name](page, at_rest | positions)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("gae", {"A1": "0.4292", "A2": "0.3564", "A3": "0.2801", "A4": "0.2000"}),
        ("ppo-clip", {"loss": "−0.96", "ratio": "1.6487"}),
        ("weight-transfer", {"seconds": "2.8 s", "slack_s": "7.2 s"}),
        ("memory", {"total_bytes": "2.52 TB", "min_gpus": "32"}),
        ("overlap", {"utilisation_in_sequence": "40 %", "utilisation_overlapped": "66.7 %"}),
    ],
)
def test_a_page_starts_with_its_worked_example(
    name: str, figures: dict[str, str], folder: Path, browser: Browser
) -> None:
    with opened(browser, (folder / f"{name}.html").as_uri()) as page:
        assert {each: shown(page, each) for each in figures} == figures
        page.locator("[data-slider]").first.focus()
        page.keyboard.press("End")
        page.keyboard.press("Home")
        page.click(".ex-reset")
        assert {each: shown(page, each) for each in figures} == figures


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", TABLES)
def test_a_page_fits_its_window_and_is_accessible(
    name: str, width: int, dark: bool, folder: Path, browser: Browser
) -> None:
    with opened(browser, (folder / f"{name}.html").as_uri(), width=width, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for slider in page.locator("[data-slider]").all():
            assert slider.get_attribute("aria-valuetext")
            slider.press("End")
            slider.press("Home")
        assert "NaN" not in page.inner_html("svg")
        assert "undefined" not in page.inner_text(".explore")
        serious = [
            (found["id"], [node["html"][:80] for node in found["nodes"]])
            for found in Axe().run(page, options={"preload": False}).response["violations"]
            if found["impact"] in ("serious", "critical")
        ]
        assert not serious


def test_a_page_without_scripts_names_what_is_missing(folder: Path, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    for name in TABLES:
        page = context.new_page()
        page.goto((folder / f"{name}.html").as_uri())
        assert "needs JavaScript" in page.inner_text(".explore")
    context.close()


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_its_scripts_in_order_and_no_other_address(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f'data-explore="{name}"' in text
    assert re.findall(r'<script src="(.*?)">', text) == ["explore.js", f"tables/{name}.js", f"{name}.js"]
    scripts = [PAGES / "explore.js", PAGES / "explore.css", PAGES / f"{name}.js"]
    assert not any(re.search(r"https?://(?!www\.w3\.org/2000/svg)", each.read_text()) for each in scripts)


@pytest.fixture(scope="module")
def path_with_tidemill(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search path whose `tidemill` is this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "tidemill"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidemill "$@"\n')
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("policy-lag", ["best lag: 3", "0.150", "0.204", "0.214", "0.121", "-0.053"]),
        ("ppo-clip", ["ratio 1.6487, loss -0.96, clipped True"]),
        ("gae", ["[0.4292, 0.3564, 0.2801, 0.2]"]),
        ("weight-transfer", ["2.8 s", "hidden, 7.2 s to spare"]),
        ("memory", ["2.52 TB", "at least 32 GPUs; everything: at least 128", "1.26 TB", "at least 16 GPUs"]),
        ("overlap", ["busy 40 % of the time", "67 %", "of 8 GPUs 5 to generate and 3 to train"]),
    ],
)
def test_the_example_of_a_page_prints_its_figures(
    name: str, printed: list[str], path_with_tidemill: str, tmp_path: Path
) -> None:
    blocks = code_blocks(PAGES / f"{name}.md")
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    (example,) = [block for block in blocks if block.language in ("bash", "python")]
    command = ["bash", "-e", "-c"] if example.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run(
        [*command, example.text],
        cwd=tmp_path,
        env={**os.environ, "PATH": path_with_tidemill, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(figure in done.stdout for figure in printed), done.stdout
