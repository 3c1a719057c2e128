from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.fabricated_guard import REASON, hacked_run
from tests.fabricated_run import FabricatedRun
from tests.unit.telemetry.report.test_report import ATTACK
from tidemill.core.records import FleetRow
from tidemill.telemetry.live_state import LiveState, Phase, SampleUnderWay
from tidemill.telemetry.report.sections import run_page, section
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_state import RunState

RUNNING = RunState(name="running", text="The run is in progress.")


def live_state() -> LiveState:
    row = FleetRow(
        lease_id="lease-7", worker_id="spot-7", kind="preemptible", state="serving", version=4, running=3, queued=1,
        tokens_per_s=51.5, price_usd_per_hour=0.4, age_s=61.0,
    )  # fmt: skip
    sample = SampleUnderWay(
        step=5, prompt_id=ATTACK, index=2, worker="spot-7", lease="lease-7", tokens=17, versions=(3, 4)
    )
    return LiveState(
        run_id="r", session=1, beat=1, unix_s=0.0, elapsed_s=9.0, step=4, total_steps=20, left_s=90.0,
        phases=(Phase(name="rollout", done=3, total=8),), fleet=(row,), samples=(sample,), samples_total=2,
    )  # fmt: skip


def test_the_sections_show_the_live_state_of_a_run_in_progress_only(tmp_path: Path) -> None:
    data = RunData.load(FabricatedRun(tmp_path).make())
    overview = section(data, "overview", state=RUNNING, live=live_state())
    for words in ("rollout", "3 of 8", "step 4 of 20", "1:30 left", "2 samples under way on 1 worker", "spot-7 <b>1"):
        assert words in overview, words
    fleet = section(data, "fleet", state=RUNNING, live=live_state())
    for words in ("lease-7", "51.5", "1:01", "$0.4000", "3, 4", "and 1 more", "&lt;img src=x"):
        assert words in fleet, words
    assert "<img" not in fleet
    killed = RunState(name="killed", text="The run was killed.")
    assert "lease-7" not in section(data, "fleet", state=killed, live=live_state())


def test_the_live_page_of_a_run_that_ended_early_names_the_command(tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "rl-1"
    data = RunData.load(FabricatedRun(stage, steps=1).make())
    killed = RunState(name="killed", text="The run was killed.")
    assert f"<code>tidemill resume {stage}</code>" in section(data, "overview", state=killed)
    (tmp_path / "pipeline.json").write_text("{}")
    assert f"<code>tidemill resume {tmp_path}</code>" in section(data, "overview", state=killed)
    assert "tidemill resume" not in run_page(data, state=killed)  # a file that is shown elsewhere
    assert "tidemill resume" not in section(data, "overview", state=RUNNING)


def test_the_setup_lists_what_differs_from_the_defaults(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    run.write_config('[telemetry]\ngroup = "</td><script>"\n[optimizer]\nlearning_rate = 3e-4\n')
    text = section(RunData.load(run), "setup")
    assert "<td>optimizer.learning_rate</td><td>0.0003</td><td>" in text
    assert "<td>telemetry.group</td><td>&lt;/td&gt;&lt;script&gt;</td>" in text and "<td>optimizer.kind" not in text
    run.write_config("[of_a_later_version]\nkey = 1\n")
    assert "of_a_later_version" in section(RunData.load(run), "setup")


def test_trust_has_the_decisions_of_the_guard_and_the_health_of_machines(tmp_path: Path) -> None:
    run = hacked_run(tmp_path)
    tainted = {"event": "tainted", "session": 1, "worker": "spot-3", "restarted": 2, "tokens": 99, "trained": {"7": 4}}
    with run.events.open("a") as file:
        file.write(json.dumps(tainted) + "\n")
    text = section(RunData.load(run), "trust")
    for words in (REASON, "node-7", "quarantined", "(0.310, limit 0.050)", '<td class="number">99</td>', ">7</td>"):
        assert words in text, words


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = ({f"metric_{at}": (step * at * 7919) % 1013 / 7 for at in range(100)} for step in range(2000))
    run.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(lines)))
    data = RunData.load(run)
    assert len(gzip.compress(run_page(data).encode())) < 200_000
    live = run_page(data, key="k")
    assert "Content-Security-Policy" not in live and "<script>" not in live and 'src="/assets/page.js"' in live
