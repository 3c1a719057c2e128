"""The pages of `tidemill watch` in a real Chromium."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser import opened
from tests.fabricated_agents import FabricatedAgents
from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_guard import FabricatedGuard
from tests.fabricated_run import FabricatedRun, make_prompt, make_trajectory
from tests.rotation import daily
from tests.unit.dashboard.served import make_run, open_run, page_of, pages, tokens
from tidemill.core.records import Reward
from tidemill.telemetry.control import ControlFolder
from tidemill.telemetry.report import write_report
from tidemill.telemetry.report.compare import write_comparison
from tidemill.telemetry.report.sections import SECTIONS

pytestmark = pytest.mark.xdist_group("browser")
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>{{7*7}}</script>\u202e'
SERIOUS = ("serious", "critical")
PHONE = 360


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with machines."""
    root = tmp_path_factory.mktemp("runs")
    for at, name in enumerate(("one", "other")):
        FabricatedFleet(root / name, seed=at).make()
    return root


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    with pages(folder) as client:
        yield str(client.base_url).rstrip("/")


def problems(page: Page, within: str | None = None) -> list[str]:
    """Serious ones of the page, or of an element."""
    found = Axe().run(page, within).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in SERIOUS]


def overflows(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@pytest.mark.parametrize("dark", daily([False, True], 1))
def test_every_section_is_accessible_and_fits_a_phone(browser: Browser, site: str, folder: Path, dark: bool) -> None:
    with opened(browser, site + page_of(folder, "one"), width=PHONE, dark=dark) as page:
        for name in SECTIONS:
            page.locator(f".tabs a[href='#{name}']").click()
            expect(page.locator(f"#{name} h2").first).to_be_visible()
            assert not overflows(page), name
            assert problems(page, f"#{name}") == [], name
        assert problems(page) == []


@pytest.mark.parametrize("address", ["/", "/compare?run={one}&run={other}", "{one_page}check"])
def test_the_other_pages_are_accessible_and_fit_a_phone(
    browser: Browser, site: str, folder: Path, address: str
) -> None:
    one, other = (page_of(folder, name) for name in ("one", "other"))
    keys = {"one": one.split("/")[2], "other": other.split("/")[2], "one_page": one}
    with opened(browser, site + address.format(**keys), width=PHONE) as page:
        expect(page.locator("h1")).to_be_attached()
        assert not overflows(page)
        assert problems(page) == []


def test_a_report_is_the_same_page_frozen(browser: Browser, site: str, folder: Path) -> None:
    shown = list[list[str]]()
    for address in (site + page_of(folder, "one"), write_report(folder / "one").as_uri()):
        with opened(browser, address) as page:
            page.locator(".tabs a[href='#learning']").click()
            expect(page.locator("#learning figure").first).to_be_visible()
            shown.append(page.locator("#learning figcaption").all_inner_texts())
    assert shown[0] == shown[1] and len(shown[0]) > 20


def test_keys_open_the_sections_and_the_theme_stays(browser: Browser, site: str, folder: Path) -> None:
    with opened(browser, site + page_of(folder, "one")) as page:
        for number, name in enumerate(SECTIONS, 1):
            page.keyboard.press(str(number))
            expect(page.locator(f"#{name}")).to_be_visible()
        page.keyboard.press("t")
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_runs_are_filtered_selected_and_compared(browser: Browser, site: str) -> None:
    with opened(browser, f"{site}/") as page:
        page.get_by_label("Filter the runs").fill("other")
        expect(page.locator("#rows tr:visible")).to_have_count(1)
        page.get_by_label("Filter the runs").fill("")
        for box in page.locator("#rows input").all():
            box.check()
        page.locator("#compare").click()
        expect(page.locator("figure").first).to_be_visible()
        page.locator("[data-axis]").select_option("dollars")
        expect(page.locator("figure .keys").first).to_contain_text("other")


def test_a_comparison_is_written_as_a_file(browser: Browser, folder: Path, tmp_path: Path) -> None:
    path = write_comparison([folder / "one", folder / "other"], tmp_path / "comparison.html")
    with opened(browser, path.as_uri(), width=PHONE) as page:
        expect(page.locator("figure").first).to_be_visible()
        assert problems(page) == [] and not overflows(page)


def test_prompts_completions_and_errors_stay_inert(browser: Browser, tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path / "run", steps=2, groups=2, group_size=2)
    recorder = run.session()
    run.learn(recorder, 1)
    prompt = make_prompt("7", answer=HOSTILE)
    bad = make_trajectory(prompt, "8", reward=Reward(value=0.0, components={}, valid=False, reason=HOSTILE))
    recorder.samples(2, [msgspec.structs.replace(bad, text=HOSTILE)], [msgspec.structs.replace(prompt, text=HOSTILE)])
    recorder.event("waiting", awaited=HOSTILE, waited_s=1.0)
    recorder.finish("failed", error=ValueError(HOSTILE))
    recorder.run.close()
    with pages(tmp_path) as client:
        addresses = [
            str(client.base_url).rstrip("/") + page_of(tmp_path, "run"),
            write_report(tmp_path / "run").as_uri(),
        ]
        for address in addresses:
            with opened(browser, address) as page:
                for name in SECTIONS:
                    page.locator(f".tabs a[href='#{name}']").click()
                    expect(page.locator(f"#{name} h2").first).to_be_visible()
                assert "onerror" in page.locator("body").inner_text()
                assert page.evaluate("window.hit") is None
                assert page.locator("img").count() == 0


def test_long_names_stay_inside_the_page(browser: Browser, tmp_path: Path) -> None:
    name, long = "run" * 80, "metric" * 50
    FabricatedAgents(tmp_path / name, steps=2).make()
    manifest = tmp_path / name / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"run": name}))
    metrics = tmp_path / name / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(line | {long: line["step"]}) + "\n" for line in lines))
    with pages(tmp_path) as client:
        site = str(client.base_url).rstrip("/")
        with opened(browser, f"{site}/") as page:
            state = page.locator("#rows .ending").bounding_box()
            assert state is not None and state["x"] < page.viewport_size["width"]  # type: ignore[index]
        with opened(browser, site + page_of(tmp_path, name) + "#learning", width=PHONE) as page:
            expect(page.get_by_text(long)).to_be_visible()
            assert not overflows(page)
            page.goto(site + page_of(tmp_path, name) + "#samples")
            page.get_by_role("link", name="Group of this sample").first.click()
            expect(page.locator(".group")).to_be_visible()
            assert not overflows(page)
            page.goto(site + page_of(tmp_path, name) + "check")
            assert not overflows(page)


def test_the_first_step_is_drawn(browser: Browser, tmp_path: Path) -> None:
    FabricatedRun(tmp_path, steps=1).make()
    drawn = """() => [...document.querySelectorAll("#overview canvas")].map((canvas) => {
        const found = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return found.some((value, at) => at % 4 === 0 && value < 20 && found[at + 1] > 100 && found[at + 3] > 200);
    })"""
    with opened(browser, write_report(tmp_path).as_uri()) as page:
        expect(page.locator("#overview canvas").nth(5)).to_be_visible()
        assert page.evaluate(drawn) == [True] * 6


def test_a_step_appears_without_a_reload_and_is_not_repeated_after_a_resume(browser: Browser, tmp_path: Path) -> None:
    run, recorder = open_run(tmp_path / "run")
    with (
        pages(tmp_path) as client,
        opened(browser, str(client.base_url).rstrip("/") + page_of(tmp_path, "run")) as page,
    ):
        expect(page.locator("#badge")).to_have_text("live")
        page.keyboard.press("3")
        expect(page.locator("#learning figure").first).to_be_visible()
        for step in range(2, 8):
            run.learn(recorder, step)
        expect(page.locator("#run")).to_contain_text("7")
        steps = "charts.query().match(/after=(\\d+)/)[1]"
        wait_for(lambda: page.evaluate(steps) == "7")
        recorder.event("resume", step=3)
        recorder.rewind(3)
        wait_for(lambda: page.evaluate(steps) == "3")
        for step in range(4, 7):
            run.learn(recorder, step)
        wait_for(lambda: page.evaluate(steps) == "6")
    recorder.finish("interrupted")
    recorder.run.close()


def test_the_page_finds_the_server_again(browser: Browser, tmp_path: Path) -> None:
    run, recorder = open_run(tmp_path / "run")
    with (
        pages(tmp_path) as client,
        opened(browser, str(client.base_url).rstrip("/") + page_of(tmp_path, "run"), ignored="DISCONNECTED") as page,
    ):
        expect(page.locator("#badge")).to_have_text("live")
        page.context.set_offline(True)
        run.learn(recorder, 2)
        page.context.set_offline(False)
        expect(page.locator("#run")).to_contain_text("2")
    recorder.finish("interrupted")
    recorder.run.close()


def test_a_button_writes_a_request(browser: Browser, tmp_path: Path) -> None:
    _, recorder = open_run(tmp_path / "run")
    with (
        pages(tmp_path) as client,
        opened(browser, str(client.base_url).rstrip("/") + page_of(tmp_path, "run")) as page,
    ):
        page.locator("[data-action=pause]").click()
        expect(page.locator("#notice")).to_be_visible()
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#stopping")).to_be_hidden()
        written = list((tmp_path / "run" / "control").glob("*.json"))
        assert [json.loads(path.read_bytes())["action"] for path in written] == ["pause"]
        page.get_by_role("button", name="Stop", exact=True).click()
        page.get_by_role("button", name="Stop the run").click()
        wait_for(lambda: len(list((tmp_path / "run" / "control").glob("*.json"))) == 2)
    assert ControlFolder(tmp_path / "run").path.is_dir()
    recorder.finish("interrupted")
    recorder.run.close()


def test_a_guarded_run_shows_the_decision_on_trust(browser: Browser, tmp_path: Path) -> None:
    FabricatedGuard(tmp_path / "run").make()
    with (
        pages(tmp_path) as client,
        opened(browser, str(client.base_url).rstrip("/") + page_of(tmp_path, "run")) as page,
    ):
        page.keyboard.press("5")
        expect(page.locator("#trust")).to_contain_text("the reward rises and quality does not")


def test_verdicts_are_given_and_taken_back_with_keys(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with (
        pages(tmp_path) as client,
        opened(browser, str(client.base_url).rstrip("/") + page_of(tmp_path, "run") + "check") as page,
    ):
        page.keyboard.press("y")
        page.keyboard.press("u")
        page.keyboard.press("7")
        expect(page.locator("#last")).to_contain_text("You said 0.7; its reward was")
        expect(page.locator("progress")).to_have_attribute("value", "1")
        page.locator("[data-key=s]").click()
        expect(page.locator("#last")).to_contain_text("Skipped")
    [line] = (tmp_path / "run/checks/verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["verdict"] == 0.7


def test_pages_open_with_the_token_of_the_address(browser: Browser, tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one")
    make_run(tmp_path / "runs/two")
    with pages(tmp_path / "runs", token_file=tokens(tmp_path / "tokens")) as client:
        url = str(client.base_url).rstrip("/")
        with opened(browser, f"{url}/", ignored="401") as page:
            expect(page.locator("#door")).to_contain_text("needs a token")
            page.goto(f"{url}/#token=wrong")
            expect(page.locator("#door")).to_contain_text("not valid")
            page.goto(f"{url}/#token=reader-token")
            expect(page.locator("#rows tr")).to_have_count(2)
            assert page.url == f"{url}/"
            page.locator("#rows a").first.click()
            expect(page.locator("#badge")).to_have_text("live")


def wait_for(condition: Callable[[], bool], *, deadline_s: float = 10.0) -> None:
    ends_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_s, "not in time"
        time.sleep(0.05)
