"""A run directory, finished or in progress."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.api.entry import entry_point
from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import decimal
from tidemill.models.model_source import checkpoints_of, locate, stage_folders
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.metrics import HELD_OUT, LOSS, PAIRWISE_ACCURACY, TOKEN_ACCURACY
from tidemill.telemetry.progress_views import label_of
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import SUPERVISED, RunDirectory, read_json
from tidemill.telemetry.sample_files import Sample

DATA_KINDS = ("demonstrations", "pairs")
ROWS = "rows.jsonl"
SUPERVISED_FIGURES = ("held_out", "stopped_early")


class Run:
    """The results of a run. Everything is read from its directory when it is asked for.

    Attributes:
        stages: the runs of a recipe's stages by name, in order; empty for a single run. Metrics, samples and
            checkpoints are those of the last stage that trained.

    Args:
        path: the run directory.

    Raises:
        UserError: there is no run, or it was written by another version of Tidemill.
    """

    @entry_point
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.stages = {name: Run(folder) for name, folder in stage_folders(self.path).items()}
        trained = [run for run in self.stages.values() if run.checkpoints]
        self._directory: RunDirectory = trained[-1]._directory if trained else RunDirectory(self.path)
        if not self._directory.config.is_file():
            raise UserError("there is no run here (no config.toml)", where=str(path), hint="name a run directory")
        self._directory.refuse_other_format()

    @property
    def config(self) -> RunSpec:
        """The configuration."""
        return from_toml(self._directory.config.read_text(encoding="utf-8"), source=str(self._directory.config))

    @property
    def summary(self) -> dict[str, Any]:
        """Steps, outcome, times, tokens, evaluations and cost, as in summary.json; with stages, the result of each.

        Of supervised training also `held_out`, the newest held-out figures; of rows their number and figures.
        """
        if self.stages:
            return read_json(PipelineFolder(self.path).summary)
        data = self._data()
        if self.kind in DATA_KINDS:
            return data.stored_summary
        return data.summary | {key: value for key, value in data.stored_summary.items() if key in SUPERVISED_FIGURES}

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict per step: `step` and every metric of the reference. Step 0 is the evaluation before training."""
        return [{"step": line.step, **line.values} for line in self._data().metrics]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event log."""
        return list(self._data().events)

    @entry_point
    def samples(self, *, training: bool | None = None) -> list[Sample]:
        """Samples by step.

        Args:
            training: True for training samples, False for held-out ones, None for both.
        """
        return self._data().samples(training=training)

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the checkpoints, oldest first; each loads with `AutoModelForCausalLM.from_pretrained`."""
        return checkpoints_of(self._directory.path)

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint. Raises UserError: there is none yet."""
        if not (found := self.checkpoints):
            raise UserError("the run has no checkpoint", where=str(self.path), hint="train at least one step")
        return found[-1]

    @property
    def kind(self) -> str:
        """`rl`, `sft`, `reward_model` or `dpo` for training, `demonstrations` or `pairs` for rows; with stages, that of
        the last stage that trained."""
        return str(self._directory.read_manifest().get("kind", "rl"))

    @property
    def model(self) -> Path:
        """The folder of the trained model, for the next call: the newest checkpoint, or after `sft`, `reward_model` and
        `dpo` the one with the lowest held-out loss (`checkpoint.keep_best`). Raises UserError: there is none."""
        source = locate(self.path)
        assert source.folder is not None, "a path has a folder"
        return source.folder

    @property
    def rows_file(self) -> Path:
        """The file of the rows that `demonstrations` or `pairs` wrote. Raises UserError: there is none."""
        path = self.path / ROWS
        if not path.is_file():
            hint = "give a run of tidemill.demonstrations or tidemill.pairs, or the rows"
            raise UserError("the run has written no rows", where=str(self.path), hint=hint)
        return path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows that `demonstrations` or `pairs` wrote. Raises UserError: there are none."""
        return [json.loads(line) for line in self.rows_file.read_bytes().splitlines()]

    @property
    def weights_digest(self) -> str:
        """Digest of the newest weights."""
        return str(self._data().summary["weights_digest"])

    @property
    def finished(self) -> bool:
        return bool(self.summary["finished"])

    @property
    def interrupted(self) -> bool:
        """Whether the last session was stopped by the user or a callback; the run can be resumed."""
        return bool(self.summary["interrupted"])

    @entry_point
    def report(self) -> Path:
        """Write report.html again and return its path."""
        if self.stages:
            return PipelineFolder(self.path).report
        from tidemill.telemetry.report import write_report

        return write_report(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        summary = self.summary
        rows = [(stage["name"], stage.get("headline", stage["state"])) for stage in summary.get("stages", ())]
        if self.kind in DATA_KINDS:
            return _table([("kind", self.kind), ("rows", summary["headline"]), ("file", str(self.rows_file))])
        if not rows:
            rows = [("kind", self.kind), ("steps", f"{summary['steps']} of {summary['total_steps']}")]
            rows += [("outcome", summary["outcome"]), *self._changes()]
            for when in ("before", "after"):
                mean = (summary["eval"].get(when) or {}).get("reward_mean")
                rows += [(f"held-out reward {when}", f"{mean:.3f}")] if mean is not None else []
        rows.append(("report", str(self.path / "report.html")))
        return _table(rows)

    def _changes(self) -> list[tuple[str, str]]:
        """Loss and accuracies of a supervised run, first and last, on held-out examples; without them in training."""
        if self.kind not in SUPERVISED:
            return []
        data = self._data()
        for prefix in (HELD_OUT, ""):
            found = {name: data.values(f"{prefix}{name}") for name in (LOSS, TOKEN_ACCURACY, PAIRWISE_ACCURACY)}
            if found[LOSS]:
                return [
                    (label_of(f"{prefix}{name}"), f"{decimal(values[0])} → {decimal(values[-1])}")
                    for name, values in found.items()
                    if values
                ]
        return []

    def _data(self) -> RunData:
        return RunData.load(self._directory)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"
