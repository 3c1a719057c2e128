from __future__ import annotations

from pathlib import Path

import pytest

from scripts.site.blocks import UnclosedBlockError, code_blocks

PAGE = """\
# Page

```python
a = 1

b = 2
```

Text with ```inline``` marks.

<!-- not run: needs a cluster -->
```bash title="node"
kubectl get nodes
```

1. A list

    ```toml
    [run]
      steps = 3
    ```

~~~~text
```
not a block
```
~~~~

```
```
"""


def test_the_blocks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert [(block.line, block.language, block.text, block.reason) for block in code_blocks(page)] == [
        (3, "python", "a = 1\n\nb = 2\n", ""),
        (12, "bash", "kubectl get nodes\n", "needs a cluster"),
        (18, "toml", "[run]\n  steps = 3\n", ""),
        (23, "text", "```\nnot a block\n```\n", ""),
        (29, "", "", ""),
    ]
    assert [block.title for block in code_blocks(page)] == ["", "node", "", "", ""]
    assert {block.page for block in code_blocks(page)} == {page}


def test_a_reason_belongs_to_the_next_line_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: far away -->\n\n```bash\nls\n```\n")
    (block,) = code_blocks(page)
    assert not block.reason


def test_a_block_without_an_end_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\na = 1\n")
    with pytest.raises(UnclosedBlockError, match=r"page\.md:3: "):
        code_blocks(page)
