"""Print what a robot's recipe achieved: success before and after training with intervals, twin, bundle, pages.

python scripts/robot_story.py runs/demo-robot
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.formatting import interval
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.run_data import RunData


def main(argv: Sequence[str]) -> int:
    folder = PipelineFolder(Path(argv[0]))
    stages = {stage["kind"]: stage for stage in folder.read_state()["stages"]}
    run = folder.path / stages["control"]["folder"]
    print()
    for when, found in RunData.read(run).robot_evaluations.items():
        shown = f"mean return {found['return_mean']:.3f}, falls {found['falls']:.3f} (n = {found['episodes']})"
        if "success" in found:
            bounds = interval(found["success_interval"])
            shown = f"success {found['success']:.3f} (95 %: {bounds}; n = {found['episodes']})"
        print(f"{when:<6} training: {shown}")
    results = {result.result.kind: result.result for result in folder.found().values() if result.result}
    for kind in ("twin", "bundle"):
        print(f"{kind}: {results[kind].headline}" if kind in results else f"{kind}: none")
    for page in (run / "report.html", folder.path / stages["twin"]["folder"] / "report.html", folder.report):
        print(f"file://{page.absolute()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
