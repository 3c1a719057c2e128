"""The rows of GPU sessions that `tidemill plan` and `tidemill simulate` use: hardware/measured_gpus.json.

python -m benchmarks.gpu.kept_rows

Training steps in shared trees and Tidemill's engines, with date and versions. A test fails if the file is not that of
results/gpu.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measuring
from benchmarks.gpu import engine, train_step
from benchmarks.gpu.qwen_shapes import SHAPES, config_fields
from tidemill.hardware.measured_rows import ENGINES, KEPT

ENGINE = re.compile(rf"({'|'.join(ENGINES)}), (\S+), (\d+) samples of (\d+) \+ (\d+)$")
STEP = re.compile(r"(\S+), shared(?:, (\d+) × (\d+) × \((\d+) \+ (\d+)\))?$")


def main() -> int:
    KEPT.write_text(written(sorted((measuring.RESULTS / "gpu").glob("*.json"))), encoding="utf-8")
    print(f"written: {KEPT}")
    return 0


def written(files: Sequence[Path]) -> str:
    results = [result for file in files for result in kept(json.loads(file.read_text(encoding="utf-8")))]
    return "[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n"


def kept(session: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of each check that has some, as in a file of `--measured`."""
    for check in session["checks"]:
        rows = [found for row in check["rows"] if row["verdict"] == "ok" and (found := _kept_row(row))]
        if rows:
            code = check["origin"]["commit"][:9] or f"source {check['origin'].get('source', '')[:9]}"
            versions = f"torch {session['machine']['torch']}, Tidemill {session['machine']['tidemill']} ({code})"
            yield {
                "device": session["device"],
                "measured": f"{check['origin']['date']}, {versions}",
                "rows": rows,
            }


def _kept_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if found := ENGINE.match(row["row"]):
        kind, model, *sizes = found.groups()
        samples, prompt, completion = map(int, sizes)
        own = {"row": "engine", "engine": kind, "slots": engine.SLOTS}
        size = engine.GROUP_SIZE
    elif found := STEP.match(row["row"]):
        model, *given = found.groups()
        default = (train_step.GROUPS, train_step.GROUP_SIZE, train_step.PROMPT, train_step.COMPLETION)
        groups, size, prompt, completion = map(int, given) if given[0] else default
        samples, recomputes = groups * size, row["figures"]["recomputes"]
        own = {"row": "train_step", "way": "shared", "lora": False, "recomputes": recomputes}
        own["microbatch_tokens"] = train_step.MICROBATCH_TOKENS
    else:
        return None
    if model not in SHAPES:
        return None
    work = {"samples": samples, "group_size": size, "prompt_tokens": prompt, "completion_tokens": completion}
    about = {"status": "measured", "model": model, "config": config_fields(SHAPES[model])}
    return {**own, **about, **work, "seconds": row["figures"]["seconds"]}


if __name__ == "__main__":
    sys.exit(main())
