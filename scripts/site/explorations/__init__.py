"""Tables of the interactive explanations in `docs/explore/`: what planner, algorithms, simulation and guard compute for
each position of the sliders. The pages only draw them.

    python -m scripts.site.explorations FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from scripts.site.explorations import eviction, gae, planning, policy_lag, ppo_clip, reward_hacking

Table: TypeAlias = dict[str, Any]
TABLES: dict[str, Callable[[], Table]] = {
    "policy-lag": policy_lag.table,
    "ppo-clip": ppo_clip.table,
    "gae": gae.table,
    "weight-transfer": planning.weight_transfer,
    "memory": planning.memory,
    "overlap": planning.overlap,
    "eviction": eviction.table,
    "reward-hacking": reward_hacking.table,
}
"""By page in `docs/explore/`."""


def write_tables(folder: Path) -> None:
    """Write `NAME.js` for each page: plain scripts, because a page that is opened from a disk loads no JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in TABLES.items():
        text = json.dumps(table(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        script = f'window.TABLES=window.TABLES||{{}};\nwindow.TABLES["{name}"]={text};\n'
        (folder / f"{name}.js").write_text(script, encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    write_tables(Path(sys.argv[1]))
