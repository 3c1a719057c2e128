"""Episodes of a robot, played in a real Chromium without WebGL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import opened
from tests.fabricated_robot import metrics_of, robot_run, twin_run
from tests.unit.dashboard.served import page_of, pages
from tidemill.telemetry.report import write_report

pytestmark = pytest.mark.xdist_group("browser")
PIXELS = "(at) => { const c = document.querySelectorAll('.episodes canvas')[at]; return c.toDataURL(); }"


def seek(page: Page, seconds: float) -> None:
    page.locator("[data-time]").evaluate(
        "(range, seconds) => { range.value = seconds; range.dispatchEvent(new Event('input')); }", seconds
    )


def test_episodes_play_are_searched_and_have_keys(browser: Browser, tmp_path: Path) -> None:
    report = write_report(robot_run(tmp_path / "run").path).as_uri()
    with opened(browser, f"{report}#episodes") as page:
        clock, button = page.locator(".episodes output"), page.locator("[data-play]")
        expect(page.locator(".episodes .now").first).to_have_text("ended after 2.0 s")  # it plays by itself
        seek(page, 1.0)
        expect(button).to_have_text("Play")
        expect(clock).to_have_text("1.0 of 4.0 s")
        before = [page.evaluate(PIXELS, at) for at in (0, 1)]
        assert before[0] != before[1], "the motion before training is twice as fast"
        page.locator(".episodes canvas").first.focus()
        page.keyboard.press("ArrowRight")
        expect(clock).to_have_text("1.1 of 4.0 s")
        assert page.evaluate(PIXELS, 1) != before[1]
        page.keyboard.press("ArrowLeft")
        expect(clock).to_have_text("1.0 of 4.0 s")
        assert page.evaluate(PIXELS, 1) == before[1]
        page.locator("#theme").click()
        page.locator("#theme").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        assert page.evaluate(PIXELS, 1) != before[1], "in the colours of the theme"
        page.keyboard.press("p")
        expect(button).to_have_text("Pause")


def test_without_motion_nothing_plays_by_itself(browser: Browser, tmp_path: Path) -> None:
    report = write_report(robot_run(tmp_path / "run").path).as_uri()
    context = browser.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{report}#episodes")
    expect(page.locator(".episodes output")).to_have_text("0.0 of 4.0 s")
    expect(page.locator("[data-play]")).to_have_text("Play")
    context.close()


def test_the_live_page_has_episodes_and_twins(browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    robot_run(root / "walk")
    twin_run(root / "twin")
    with pages(root) as client:
        with opened(browser, f"{client.base_url}{page_of(root, 'walk')}#episodes", ignored="404") as page:
            expect(page.locator(".episodes output")).to_contain_text("of 4.0 s")
            seek(page, 1.0)
            # A new evaluation takes the place of the one that is shown.
            stored = json.loads((root / "walk" / "episodes.json").read_text())
            (root / "walk" / "episodes.json").write_text(json.dumps(stored | {"plays": stored["plays"][1:]}))
            with (root / "walk" / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics_of(4)) + "\n")
            expect(page.locator(".episodes canvas")).to_have_count(1)
            seek(page, 1.0)
            expect(page.locator(".episodes output")).to_have_text("1.0 of 4.0 s")
        with opened(browser, f"{client.base_url}{page_of(root, 'twin')}", ignored="404") as page:
            expect(page.locator("#twin .sensitivity")).to_have_count(1)
