from __future__ import annotations

from pathlib import Path

import pytest

from scripts.site.check import Documentation, check
from scripts.site.names import Names
from scripts.site.pages import ROOT

NAMES = Names(
    verbs={"train": frozenset(), "plan": frozenset({"memory", "run"}), "recipe": frozenset({"list"})},
    recipes=frozenset({"guess"}),
    targets=frozenset({"demo", "docs"}),
)
NAV = """\
[project]
nav = [
  "index.md",
  { "More" = ["page.md", "reference/*"] },
]
"""
INDEX = "# Home\n\nSee [the page](page.md).\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Project\n\nSee [the docs](docs/index.md).\n")
    (tmp_path / "zensical.toml").write_text(NAV)
    (tmp_path / "docs" / "index.md").write_text(INDEX)
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## Own data\n")
    return tmp_path


GOOD = """\
---
description: A page.
---

# Page

## Own data

See [home](index.md), [above](#own-data), [the key](reference/configuration/algorithm.md#algorithm.kl_beta),
[train](reference/api/training.md#tidemill.train), [elsewhere](https://example.com/x) and ![a picture](picture.svg).
`tidemill train @guess --algorithm.kl_beta 0.1`, `tidemill plan memory`, `make docs`, `algorithm.kl_beta = 0.1`,
`[algorithm.correction]`, `config.toml`, `run.checkpoint`, `--stage.sft.trainer.steps 5`, `@recipe`, `@reward`.
Names of other frameworks: `actor_rollout_ref.rollout.n`, `data.train_batch_size`.

```bash
tidemill train @guess \\
  --trainer.steps 3   # a comment; with a semicolon
```

<!-- not run: needs a cluster -->
```yaml
a: 1
```

```toml
[[stage]]
name = "a"
kind = "rl"
[stage.trainer]
steps = 3

[task]
kind = "python"
params = { free = 1 }
```

```text
output
```
"""


def test_pages_without_a_fault_have_no_finding(root: Path) -> None:
    (root / "docs" / "picture.svg").write_text("<svg/>")
    (root / "docs" / "page.md").write_text(GOOD)
    assert check(root, NAMES) == []


FAULTS = {
    "second title": ("# B\n", "3: a second title, 'B'; write `##` for its sections"),
    "lost page": ("[x](home/index.md)\n", "3: home/index.md does not exist; correct the path"),
    "moved page": ("[x](old/page.md)\n", "3: old/page.md does not exist; did you mean page.md?"),
    "lost picture": ("![x](x.png)\n", "3: x.png does not exist; correct the path"),
    "lost anchor": ("## Own data\n\n[x](#own-date)\n", "5: this page has no heading #own-date; did you mean own-data?"),
    "lost key of a link": (
        "[x](reference/configuration/algorithm.md#algorithm.kl_bet)\n",
        "3: reference/configuration/algorithm.md has no heading #algorithm.kl_bet; did you mean algorithm.kl_beta?",
    ),
    "absolute link": ("[x](/page.md)\n", "3: /page.md is an absolute link; write the path from this page"),
    "lost verb": ("`tidemill trian @guess`\n", "3: there is no command `tidemill trian`; did you mean train?"),
    "lost verb in a block": (
        "```bash\ntidemill train @guess\ntidemill plan memry\n```\n",
        "5: there is no command `tidemill plan memry`; did you mean memory?",
    ),
    "lost recipe": ("`tidemill train @gues`\n", "3: there is no recipe @gues; did you mean guess?"),
    "lost target": ("`make demos`\n", "3: there is no target `make demos`; did you mean demo?"),
    "lost key": ("Set `algorithm.kl_bta`.\n", "3: there is no key algorithm.kl_bta; did you mean algorithm.kl_beta?"),
    "lost option": (
        "```bash\ntidemill train @guess \\\n  --batch.group_sizes 4\n```\n",
        "4: there is no key --batch.group_sizes; did you mean batch.group_size?",
    ),
    "lost key of a recipe": (
        "```toml\n[batch]\nprompts = 4\ngroup_sise = 4\n```\n",
        "6: there is no key batch.group_sise; did you mean batch.group_size?",
    ),
    "malformed recipe": ("```toml\n[batch]\nprompts 4\n```\n", "5: not valid TOML"),
    "block without language": (
        "```\nx\n```\n",
        "3: the code block names no language; write ```text for output and drawings",
    ),
    "block without reason": (
        "```yaml\nx: 1\n```\n",
        "3: nothing runs this block of yaml; write <!-- not run: REASON --> on the line before it",
    ),
    "command without reason": (
        "```bash\nkubectl get pods\n```\n",
        "4: no test runs the command kubectl; write <!-- not run: REASON --> on the line before it",
    ),
    "block without end": ("```python\nx = 1\n", "3: the code block has no end; add the closing fence"),
    "list in a paragraph": ("Text:\n- one\n- two\n", "4: a list begins within a paragraph; add a blank line before it"),
    "long page": (
        1800 * "123456789\n",
        "1: the page has 17.6 KB; split it: pages outside docs/reference/ have at most 15 KB",
    ),
}
"""Text below the title of a page, and its finding."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_page_and_line(fault: str, root: Path) -> None:
    text, finding = FAULTS[fault]
    (root / "docs" / "page.md").write_text(f"# A\n\n{text}")
    found = check(root, NAMES)
    assert len(found) == 1, found
    assert found[0].startswith(f"docs/page.md:{finding}")


def test_a_page_without_a_title_is_named(root: Path) -> None:
    (root / "docs" / "page.md").write_text("Text only.\n")
    assert check(root, NAMES) == ["docs/page.md:1: the page has no title; begin it with `# Title`"]


def test_a_page_outside_of_the_navigation_is_named(root: Path) -> None:
    (root / "docs" / "lost.md").write_text("# Lost\n")
    assert check(root, NAMES) == ["docs/lost.md:1: the page is not in the navigation; add it to nav in zensical.toml"]


def test_a_page_of_the_navigation_that_does_not_exist_is_named(root: Path) -> None:
    (root / "docs" / "page.md").unlink()
    (root / "docs" / "index.md").write_text("# Home\n")
    assert check(root, NAMES) == ["zensical.toml:4: docs/page.md does not exist; remove it from nav, or write the page"]


def test_the_readme_is_checked_too(root: Path) -> None:
    (root / "README.md").write_text("# Project\n\nRun `tidemill trian`.\n")
    assert check(root, NAMES)[0].startswith("README.md:3: there is no command")


def test_the_names_are_those_of_this_version() -> None:
    names = Names.of_this_version(ROOT)
    assert {"train", "simulate", "plan"} <= set(names.verbs)
    assert names.verbs["plan"] >= {"memory", "weights", "staleness"}
    assert {"smollm2-addition", "rlboost-14b"} <= names.recipes
    assert {"check", "check-docs", "test-vllm", "docs"} <= names.targets
    assert "README.md" in Documentation(ROOT, names).pages
