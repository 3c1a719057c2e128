from __future__ import annotations

import pytest

from scripts.site import api, configuration
from scripts.site.pages import Page
from scripts.site.stage import with_key_links, within_site
from tidemill.config.keys import all_keys


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return configuration.pages()


def test_every_key_has_a_heading_with_its_anchor(
    pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pages")
    anchors = {name: Page(folder / "page.md", text).anchors for name, text in pages.items()}
    assert configuration.names() == list(pages)
    for key in all_keys():
        page, _, anchor = configuration.anchors()[key.dotted].partition("#")
        assert anchor in anchors[page], key.dotted


def test_a_key_shows_values_default_preset_and_other_names(pages: dict[str, str]) -> None:
    text = pages["reference/configuration/algorithm.md"]
    section = text.partition("{ #algorithm.kl_beta }")[2].partition("\n## ")[0]
    assert "**Accepts:** number ≥ 0; **default:** `0.0`." in section
    assert "`reinforce_pp` sets `0.001`" in section
    assert "`beta`" in section
    assert "verl `actor.kl_loss_coef`" in section


def test_a_key_of_some_variants_names_them_and_its_unit(pages: dict[str, str]) -> None:
    section = pages["reference/configuration/pool.md"].partition("{ #pool.notice_s }")[2].partition("\n## ")[0]
    assert "**unit:** seconds" in section
    assert 'Only with `pool.kind` = `"trace"` or `"synthetic"`.' in section


def test_the_public_names_are_on_the_pages_of_the_api() -> None:
    pages = api.pages()
    assert list(pages) == list(api.names())
    assert "::: tidemill.train\n" in pages["reference/api/training.md"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Set `algorithm.lam`.", "Set [`algorithm.lam`](../reference/configuration/algorithm.md#algorithm.lam)."),
        ("`--trainer.steps`", "[`--trainer.steps`](../reference/configuration/trainer.md#trainer.steps)"),
        ("[`algorithm.lam`](x.md)", "[`algorithm.lam`](x.md)"),
        ("# `algorithm.lam`", "# `algorithm.lam`"),
        ("`config.toml` and `run.samples`", "`config.toml` and `run.samples`"),
        ("```text\n`algorithm.lam`\n```", "```text\n`algorithm.lam`\n```"),
    ],
)
def test_keys_in_a_page_are_links(line: str, expected: str) -> None:
    assert with_key_links(f"{line}\n", "how-to/page.md") == f"{expected}\n"


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](../../ARCHITECTURE.md#map)", "[a](../project/architecture.md#map)"),
        ("[a](../../README.md#installation)", "[a](../index.md)"),
        ("[a](../../src/tidemill/__init__.py)", "a"),
        ("[a](data.md#rows)", "[a](data.md#rows)"),
        ("[a](https://example.com)", "[a](https://example.com)"),
    ],
)
def test_links_to_the_repository_lead_to_pages_or_become_text(link: str, expected: str) -> None:
    assert within_site(f"{link}\n", "how-to/page.md", "docs/how-to/page.md") == f"{expected}\n"


def test_links_of_the_projects_pages_lead_to_the_docs() -> None:
    text = within_site("[a](docs/how-to/data.md)\n", "project/contributing.md", "CONTRIBUTING.md")
    assert text == "[a](../how-to/data.md)\n"
