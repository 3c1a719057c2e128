from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.browser import chromium, opened
from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_guard import REASON, hacked_run
from tests.fabricated_run import FabricatedRun
from tests.unit.dashboard.served import open_run, page_of, pages
from tests.unit.telemetry.report.test_report import ATTACK
from tidemill.core.records import FleetRow
from tidemill.telemetry.live_state import LiveState, Phase, SampleUnderWay
from tidemill.telemetry.report import write_report
from tidemill.telemetry.report.sections import SECTIONS, run_page, section
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_state import RunState

RUNNING = RunState(name="running", text="The run is in progress.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = FabricatedFleet(tmp_path_factory.mktemp("fleet")).make()
    with run.metrics.open("a") as file:  # a constant with an error of rounding, and a name that is markup
        for step in (21, 22, 23):
            file.write(json.dumps({"step": step, "flat": 0.1 + 0.2, "noise": 1.4e-17 * step, ATTACK: step}) + "\n")
    return write_report(run.path).as_uri()


def live_state() -> LiveState:
    row = FleetRow(
        lease_id="lease-7", worker_id="spot-7", kind="preemptible", state="serving", version=4, running=3, queued=1,
        tokens_per_s=51.5, price_usd_per_hour=0.4, age_s=61.0,
    )  # fmt: skip
    sample = SampleUnderWay(
        step=5, prompt_id=ATTACK, index=2, worker="spot-7", lease="lease-7", tokens=17, versions=(3, 4)
    )
    return LiveState(
        run_id="r", session=1, beat=1, unix_s=0.0, elapsed_s=9.0, step=4, total_steps=20, left_s=90.0,
        phases=(Phase(name="rollout", done=3, total=8),), fleet=(row,), samples=(sample,), samples_total=2,
    )  # fmt: skip


def test_the_sections_show_the_live_state_of_a_run_in_progress_only(tmp_path: Path) -> None:
    data = RunData.load(FabricatedRun(tmp_path).make())
    overview = section(data, "overview", state=RUNNING, live=live_state())
    for words in ("rollout", "3 of 8", "step 4 of 20", "1:30 left", "2 samples under way on 1 worker", "spot-7 <b>1"):
        assert words in overview, words
    fleet = section(data, "fleet", state=RUNNING, live=live_state())
    for words in ("lease-7", "51.5", "1:01", "$0.4000", "3, 4", "and 1 more", "&lt;img src=x"):
        assert words in fleet, words
    assert "<img" not in fleet
    killed = RunState(name="killed", text="The run was killed.")
    assert "lease-7" not in section(data, "fleet", state=killed, live=live_state())


def test_the_setup_lists_what_differs_from_the_defaults(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    run.write_config('[telemetry]\ngroup = "</td><script>"\n[optimizer]\nlearning_rate = 3e-4\n')
    text = section(RunData.load(run), "setup")
    assert "<td>optimizer.learning_rate</td><td>0.0003</td><td>" in text
    assert "<td>telemetry.group</td><td>&lt;/td&gt;&lt;script&gt;</td>" in text and "<td>optimizer.kind" not in text
    run.write_config("[of_a_later_version]\nkey = 1\n")
    assert "of_a_later_version" in section(RunData.load(run), "setup")


def test_trust_has_the_decisions_of_the_guard_and_the_health_of_machines(tmp_path: Path) -> None:
    run = hacked_run(tmp_path)
    tainted = {"event": "tainted", "session": 1, "worker": "spot-3", "restarted": 2, "tokens": 99, "trained": {"7": 4}}
    with run.events.open("a") as file:
        file.write(json.dumps(tainted) + "\n")
    text = section(RunData.load(run), "trust")
    for words in (REASON, "node-7", "quarantined", "(0.310, limit 0.050)", '<td class="number">99</td>', ">7</td>"):
        assert words in text, words


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = ({f"metric_{at}": (step * at * 7919) % 1013 / 7 for at in range(100)} for step in range(2000))
    run.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(lines)))
    data = RunData.load(run)
    assert len(gzip.compress(run_page(data).encode())) < 200_000
    live = run_page(data, key="k")
    assert "Content-Security-Policy" not in live and "<script>" not in live and 'src="/assets/page.js"' in live


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


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pages_are_accessible_and_fit_a_phone(browser: Browser, report: str, dark: bool) -> None:
    with opened(browser, report, width=360, dark=dark) as page:
        for number, name in enumerate(SECTIONS if dark else SECTIONS[:3], 1):
            page.keyboard.press(str(number))
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
            found = Axe().run(page).response["violations"]
            assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == [], name


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
