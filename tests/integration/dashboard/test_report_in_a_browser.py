"""Reports, and what they share with live pages, in a real Chromium."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import opened
from tests.fabricated_fleet import FabricatedFleet
from tests.unit.dashboard.served import open_run, page_of, pages
from tests.unit.telemetry.report.test_report import ATTACK
from tidemill.telemetry.report import write_report
from tidemill.telemetry.report.sections import SECTIONS

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = FabricatedFleet(tmp_path_factory.mktemp("fleet")).make()
    with run.metrics.open("a") as file:  # a constant with an error of rounding, and a name that is markup
        for step in (21, 22, 23):
            file.write(json.dumps({"step": step, "flat": 0.1 + 0.2, "noise": 1.4e-17 * step, ATTACK: step}) + "\n")
    return write_report(run.path).as_uri()


def test_the_report_has_sections_keys_filters_and_themes(browser: Browser, report: str) -> None:
    with opened(browser, f"{report}#learning") as page:
        expect(page.locator("#badge")).to_have_text("frozen")
        assert page.locator("[data-action]:visible").count() == 0
        for number, name in enumerate(SECTIONS, 1):
            page.keyboard.press(str(number))
            expect(page.locator(".panel:visible")).to_have_id(name)
        page.keyboard.press("3")
        folded = page.locator("#learning .folded")
        expect(folded).to_contain_text("metrics are constant")
        expect(folded).to_contain_text("flat 0.3, noise 0")
        for text in ("0.30000000000000004", "e-17"):
            assert text not in page.locator("#learning").inner_text()
        page.keyboard.press("/")
        page.keyboard.type("entropy")
        expect(page.locator("#learning figcaption:visible .title")).to_have_text(["Entropy"])
        page.keyboard.press("Tab")
        page.locator("#theme").click()
        page.locator("#theme").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        page.reload()
        assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_zoom_is_shared_and_reset(browser: Browser, report: str) -> None:
    ranges = "[...document.querySelectorAll('#overview .plot')].map((home) => charts.range(home))"
    with opened(browser, report) as page:
        plot = page.locator("#overview .u-over").first
        plot.wait_for()
        box = plot.bounding_box()
        assert box
        page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 50, steps=4)
        page.mouse.up()
        zoomed = page.evaluate(ranges)
        assert len({tuple(map(round, one)) for one in zoomed}) == 1 and zoomed[0][0] > 3 and zoomed[0][1] < 20
        page.get_by_role("button", name="Reset zoom").click()
        assert page.evaluate(ranges)[0] == [0, 23]


def test_without_scripts_and_in_print_everything_is_there(browser: Browser, report: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report)
    assert all(page.locator(f"#{name}").is_visible() for name in SECTIONS)
    context.close()
    with opened(browser, report, dark=True) as page:
        page.emulate_media(media="print", color_scheme="dark")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert all(page.locator(f"#{name}").is_visible() for name in SECTIONS)
        assert page.locator(".plot").count() == page.locator(".plot canvas").count()
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(22, 37, 45)"  # the light theme's


def test_a_live_page_follows_its_run_and_keeps_what_the_reader_opened(browser: Browser, tmp_path: Path) -> None:
    run, recorder = open_run(tmp_path / ATTACK.replace("/", "_"))
    with pages(tmp_path) as client, opened(browser, f"{client.base_url}", height=400) as page:
        page.goto(f"{client.base_url}".rstrip("/") + page_of(tmp_path, ATTACK.replace("/", "_")))
        expect(page.locator("#badge")).to_have_text("live")
        expect(page.locator("#run")).to_contain_text("step 1 of")
        page.keyboard.press("6")
        page.locator("#config summary").click()
        page.evaluate("scrollTo(0, 120)")
        run.learn(recorder, 2)
        expect(page.locator("#run")).to_contain_text("step 2 of", timeout=3000)
        assert page.locator("#config").get_attribute("open") is not None
        assert page.evaluate("scrollY") == 120
        page.keyboard.press("1")
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        assert not [*(tmp_path / ATTACK.replace("/", "_") / "control").glob("*")]
    recorder.close()
    recorder.run.close()
