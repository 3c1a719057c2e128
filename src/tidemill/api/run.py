"""A run directory, finished or in progress."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.models.model_source import checkpoints_of, locate, stage_folders
from tidemill.pipeline.state import PipelineFolder
from tidemill.telemetry.metrics import MetricLine
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory, read_json
from tidemill.telemetry.sample_files import Sample


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
        """Steps, outcome, times, tokens, evaluations and cost, as in summary.json; with stages, the result of each."""
        return read_json(PipelineFolder(self.path).summary) if self.stages else self._data().summary

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict per step: `step` and every metric of docs/metrics.md. Step 0 is the evaluation before training."""
        return [_flat(line) for line in self._data().metrics]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event log."""
        return list(self._data().events)

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
        source = locate(self.path)
        assert source.folder is not None, "a path has a folder"
        return source.folder

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
        if not rows:
            rows = [("steps", f"{summary['steps']} of {summary['total_steps']}"), ("outcome", summary["outcome"])]
            for when in ("before", "after"):
                mean = (summary["eval"].get(when) or {}).get("reward_mean")
                rows += [(f"held-out reward {when}", f"{mean:.3f}")] if mean is not None else []
        rows.append(("report", str(self.path / "report.html")))
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows)
        return f"<table>{cells}</table>"

    def _data(self) -> RunData:
        return RunData.load(self._directory)


def _flat(line: MetricLine) -> dict[str, float]:
    return {"step": line.step, **line.values}
