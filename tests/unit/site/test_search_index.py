from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.site.search_index import groups, names_of, write_index


def written(folder: Path, items: list[dict[str, Any]], titles: dict[str, str]) -> dict[str, Any]:
    (folder / "search.json").write_text(json.dumps({"items": items}))
    write_index(folder / "search.json", folder, titles, folder / "index.js")
    text = (folder / "index.js").read_text().removeprefix("window.SEARCH_INDEX = ").removesuffix(";\n")
    index: dict[str, Any] = json.loads(text)
    return index


def test_sections_have_plain_text_and_their_page_its_keywords(tmp_path: Path) -> None:
    (tmp_path / "how-to").mkdir()
    (tmp_path / "how-to" / "data.md").write_text(
        "---\ndescription: Rows of your own.\nkeywords: [jsonl]\nsearch: {boost: 1.5}\n---\n# Data\n"
    )
    items = [
        {
            "location": "how-to/data.html",
            "level": 1,
            "title": "Data",
            "text": "<p>A &lt;row&gt; of <code>x</code>.</p>",
        },
        {
            "location": "how-to/data.html#key",
            "level": 2,
            "title": "<code>task.path</code>",
            "text": f'<p>Text</p><span class="keywords" data-search>dataset</span><pre><code>{"y" * 5000}</code></pre>',
        },
    ]
    index = written(tmp_path, items, {"how-to/data.md": "How-to › Train"})
    (page,) = index["pages"]
    assert page["keywords"] == "Rows of your own. jsonl how-to data"
    assert (page["group"], page["boost"]) == ("How-to › Train", 1.5)
    first, second = index["sections"]
    assert (first["text"], first["anchor"]) == ("A <row> of x .", "")
    assert (second["title"], second["keywords"]) == ("task.path", "dataset")
    assert len(second["text"]) < 1000


def test_the_page_of_a_framework_is_found_by_every_name_of_its_settings() -> None:
    assert {"num_generations", "per_device_train_batch_size"} <= set(names_of("coming-from/trl.md"))
    assert {"actor_rollout_ref.rollout.n", "n"} <= set(names_of("coming-from/verl.md"))
    assert not names_of("how-to/data.md")


def test_the_group_of_a_page_is_its_place_in_the_navigation() -> None:
    assert dict(groups([{"How-to": ["a.md", {"Agents": ["b.md"]}]}])) == {"a.md": "How-to", "b.md": "How-to › Agents"}
