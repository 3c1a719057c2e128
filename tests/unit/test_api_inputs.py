"""Objects given to `tidemill.train`, as configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent_environments import Stateless, Tools
from tidemill.api.inputs import Inputs


@pytest.mark.parametrize(("environment", "scores"), [(Tools, True), (Stateless, False)])
def test_an_environment_with_a_score_rewards_rows(environment: type, scores: bool, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path, kept=False)
    inputs.add_data([{"prompt": "a", "answer": "b"}], None, None)
    inputs.add_environment(environment, None)
    assert inputs.overrides.get("scoring.rewards") == ([{"kind": "environment"}] if scores else None)
    inputs.add_rewards(["exact"])
    assert [each["kind"] for each in inputs.overrides["scoring.rewards"]] == ["exact"]
