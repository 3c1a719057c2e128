"""A trained policy for tests of transfer, and the recipes of its twin and bundle.

`data/swingup_policy` was trained by a control stage: task swingup, history 2, 512 worlds, 200 iterations, seed 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.robots.matching import policy_digest

POLICY = Path(__file__).parent / "data" / "swingup_policy"


def recipe(folder: Path, **sections: Any) -> RunSpec:
    """Of a stage in a folder."""
    robot = {"task": "swingup", "history": 2} | sections.pop("robot", {})
    return RunSpec.model_validate({"run": {"dir": str(folder)}, "robot": robot} | sections)


def twin_file(folder: Path, **changes: Any) -> Path:
    """The report of a passed twin, with changes."""
    report = {"policy": policy_digest(POLICY), "passed": True, "reasons": [], "cells": []}
    file = folder / "twin.json"
    file.write_text(json.dumps(report | changes))
    return file
