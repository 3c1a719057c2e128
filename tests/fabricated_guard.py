"""A fabricated run whose reward is hacked from step 8 on; the guard returns it to step 5, and it ends healthy."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

ONSET, DECIDED, TARGET = 8, 14, 5
REASON = "The reward rose by 0.41 since step 0, and gold fell by 0.20 on 96 samples. Mean length doubled."


class FabricatedGuard(FabricatedRun):
    """Also one machine that computes wrongly, and one that is slow for a while."""

    hacked = True

    def make(self) -> RunDirectory:
        recorder = self.session()
        recorder.event("guard_probe", probe="empty", score=1.0, typical=0.25, text="")
        self.evaluate(recorder, 0)
        for step in range(1, DECIDED + 1):
            self.learn(recorder, step)
            self.gold(recorder, step)
        recorder.event(
            "guard", number=1, step=DECIDED, onset=ONSET, test="gain", action="rollback", reason=REASON, target=TARGET,
            proxy=(0.42, 0.83), gold=(0.41, 0.21),
        )  # fmt: skip
        self.abandon(recorder.run)
        self.hacked = False
        for step in range(TARGET + 1, self.steps + 1):
            self.learn(recorder, step)
            self.gold(recorder, step)
        recorder.finish("finished")
        recorder.run.close()
        return RunDirectory(self.path)

    def abandon(self, run: RunDirectory) -> None:
        """Move metrics and samples after the target away, as a rollback does."""
        folder = run.path / "abandoned" / "1"
        folder.mkdir(parents=True)
        shutil.copy(run.metrics, folder / "metrics.jsonl")
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[TARGET:]))
        shutil.copytree(run.samples, folder / "samples")
        for step, _, path in RunDirectory(folder).sample_files():
            if step <= TARGET:
                path.unlink()
        run.rewind(TARGET)

    def gold(self, recorder: Recorder, step: int) -> None:
        """Eight pairs of a step, of which step 4 lacks two; in step 9 a machine becomes suspect."""
        fallen = 0.08 * (step - ONSET) if self.hacked and step >= ONSET else 0.0
        recorder.event(
            "gold", step=step, proxy_mean=self.skill(step) + fallen, gold_mean=self.skill(step) - 2 * fallen,
            pair_proxy_mean=self.skill(step), pairs=6 if step == 4 else 8, missing=2 if step == 4 else 0,
            why_missing="the judge did not answer within 10 s" if step == 4 else "", witnesses={"length": 12.0},
        )  # fmt: skip
        if step in (9, 10) and self.hacked:
            figures = {"lease": "L1", "worker": "spot-3", "machine": "node-7", "value": 0.31, "limit": 0.05}
            state = "suspect" if step == 9 else "quarantined"
            recorder.event("worker_health", state=state, cause="its logprobs differ from its cohort's", **figures)
        if step == 9 and self.hacked:
            recorder.event(
                "worker_health", state="suspect", cause="1.4 × slower than before", worker="spot-1", lease="L2"
            )

    def skill(self, step: int) -> float:
        return super().skill(step) * (0.8 if self.hacked else 1.0)


def hacked_run(path: Path) -> RunDirectory:
    return FabricatedGuard(path).make()
