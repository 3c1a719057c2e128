"""The built site in a real Chromium."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Response

from tests.browser import opened
from tests.docs.conftest import Site

# The site is built once, by one process.
pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.timeout(600)]
MAX_PAGE_BYTES = 300_000
KINDS = (
    "index.html",
    "quickstart.html",
    "coming-from/trl.html",
    "tutorials/first-reward.html",
    "how-to/guards.html",
    "clusters/kubernetes.html",
    "concepts/policy-lag.html",
    "explore/gae.html",
    "cookbook/rewards.html",
    "troubleshooting.html",
    "reference/glossary.html",
    "reference/configuration/algorithm.html",
    "reference/api/training.html",
    "results/index.html",
)
"""One page of each kind."""
PICTURES = (".png", ".svg", ".jpg", ".webp", ".gif")
INDEX = "/assets/search-index.js"


def test_every_page_loads_from_the_site_alone_without_errors(site: Site, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    problems: list[str] = []
    responses: list[Response] = []
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on(
        "console", lambda message: problems.append(f"{page.url}: {message.text}") if message.type == "error" else None
    )

    def keep(response: Response) -> None:  # playwright refuses a built-in method
        responses.append(response)

    page.on("response", keep)
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((site.url, "data:", "blob:"))
            else problems.append(f"{page.url} requests {request.url}")
        ),
    )
    for name in site.pages:
        responses.clear()
        page.goto(f"{site.url}/{name}", wait_until="load")
        problems += [f"{name}: {each.url} has status {each.status}" for each in responses if each.status >= 400]
        size = sum(compressed(each) for each in responses if counts(each))
        if size > MAX_PAGE_BYTES:
            problems.append(f"{name}: {size} bytes")
    context.close()
    assert not problems, "\n".join(problems)


def counts(response: Response) -> bool:
    """Whether a file counts for the size of a page: neither the search index nor a picture."""
    path = urlsplit(response.url).path
    return response.status == 200 and path != INDEX and not path.endswith(PICTURES)


def compressed(response: Response) -> int:
    return len(gzip.compress(response.body()))


class Targets(HTMLParser):
    """The links of a page and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links = set[str]()
        self.anchors = set[str]()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            if value and ((tag == "a" and name == "href") or (tag in ("img", "script") and name == "src")):
                self.links.add(value)


def test_every_link_leads_to_a_page_and_its_anchor(site: Site) -> None:
    targets = {name: Targets() for name in site.pages}
    for name, parser in targets.items():
        parser.feed((site.folder / name).read_text(encoding="utf-8"))
    broken: list[str] = []
    for name, parser in targets.items():
        for link in parser.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = (site.folder / name).parent / unquote(parts.path) if parts.path else site.folder / name
            page = Path(target).resolve().relative_to(site.folder.resolve()).as_posix()
            if not target.exists():
                broken.append(f"{name}: {link}")
            elif parts.fragment and page in targets and unquote(parts.fragment) not in targets[page].anchors:
                broken.append(f"{name}: {link} has no such anchor")
    assert not broken, "\n".join(sorted(broken))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", KINDS)
def test_no_serious_finding_of_axe(name: str, dark: bool, site: Site, browser: Browser) -> None:
    with opened(browser, f"{site.url}/{name}", dark=dark) as page:
        assert page.locator("body").get_attribute("data-md-color-scheme") == ("slate" if dark else "default")
        found = Axe().run(page).response["violations"]
        serious = [
            f"{rule['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for rule in found
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]
        assert not serious, "\n".join(serious)


@pytest.mark.parametrize("name", KINDS)
def test_a_page_fits_on_a_phone(name: str, site: Site, browser: Browser) -> None:
    with opened(browser, f"{site.url}/{name}", width=390, height=800) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_button_switches_between_light_and_dark(site: Site, browser: Browser) -> None:
    with opened(browser, f"{site.url}/index.html") as page:
        page.locator("label[for^=__palette]:visible").click()
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
        page.reload()
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"


def test_the_search_opens_on_a_phone_and_with_a_key(site: Site, browser: Browser) -> None:
    with opened(browser, f"{site.url}/index.html", width=390, height=800) as page:
        page.locator("label.md-header__button[for=__search]").click()
        page.keyboard.type("eviction")
        page.locator(".site-search__title").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with opened(browser, f"{site.url}/index.html") as page:
        page.keyboard.press("/")
        page.keyboard.type("eviction")
        page.keyboard.press("ArrowDown")
        page.locator(".site-search__title").first.wait_for()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url: "index.html" not in url or "#" in url)


def titles(page: Page, query: str) -> list[str]:
    """The pages that a search finds, best first."""
    page.locator(".site-search__input").fill(query)
    page.wait_for_function("query => document.querySelector('.site-search').dataset.shown === query", arg=query)
    found = page.locator(".site-search__title").evaluate_all("links => links.map(link => link.dataset.page)")
    return [str(each) for each in found]
