from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.robots.training_episodes import TrainingEpisodes


def chunk(returns: list[float], **more: Any) -> dict[str, Any]:
    figures = {"world": np.arange(len(returns)), "return": np.array(returns), "fell": np.zeros(len(returns), bool)}
    return {f"episode/{name}": values for name, values in (figures | more).items()}


def test_shards_may_have_no_episodes_and_no_success(tmp_path: Path) -> None:
    episodes = TrainingEpisodes(tmp_path)
    episodes.write(1, [{"rewards": np.zeros(1)}, chunk([1.0, 2.0]), chunk([3.0], success=np.array([True]))])
    episodes.write(2, [chunk([1.0])])
    episodes.write(3, [{"rewards": np.zeros(1)}])
    episodes.close()
    first, second = [json.loads(line) for line in (tmp_path / "training_episodes.jsonl").read_text().splitlines()]
    assert {name: first[name] for name in ("step", "shard", "return", "success")} == {
        "step": 1,
        "shard": [1, 1, 2],
        "return": [1.0, 2.0, 3.0],
        "success": [False, False, True],
    }
    assert second["step"] == 2
    assert "success" not in second
