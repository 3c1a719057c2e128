"""A run directory belongs to one run: what may differ when it is resumed, and what must not."""

from __future__ import annotations

from typing import Any

from tidemill.config.load import differences, from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.telemetry.run_dir import RunDirectory

RESUMABLE = ("run.dir", "run.name", "trainer.steps", "trainer.threads", "engine.tick_s", "checkpoint.", "telemetry.",
             "eval.", "runtime", "pool.", "fleet.", "ray.", "placement.", "reading.", "simulation.",
             "scoring.concurrency", "scoring.timeout_s", "supervised.epochs")  # fmt: skip
"""Keys (or sections) that may differ when a run is resumed: the user's to change. (More steps stretch a falling
learning-rate schedule; other threads, or chunks of other sizes, may round differently.)"""
MODEL_DIGEST, TASK_DIGEST, DATA_DIGEST, THREADS = "model_digest", "task_digest", "data_digest", "threads"
"""In the manifest: the weights, the prompts or examples and the threads the run began with; noted just before its first
step."""


def check_same_run(run: RunDirectory, spec: RunSpec) -> None:
    """A run directory belongs to one configuration, once its run has begun: until then a mistake may be corrected.

    Raises:
        UserError: naming every key that differs.
    """
    stored = run.read_config()
    if stored is None or MODEL_DIGEST not in run.read_manifest():
        return
    changed = [
        f"{key} = {new!r}, the run has {old!r}"
        for key, old, new in differences(from_toml(stored, source=str(run.config)), spec)
        if not key.startswith(RESUMABLE)
    ]
    if changed:
        raise UserError(
            "this run was started with another configuration: " + "; ".join(changed),
            where=str(run.path),
            cure="resume with the configuration in its config.toml, or choose another --run.dir",
        )


def with_threads(spec: RunSpec, manifest: dict[str, Any]) -> RunSpec:
    """A resumed run keeps the number of threads it measured at its beginning: another may round sums differently."""
    threads = spec.trainer.threads or int(manifest.get(THREADS, 0))
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"threads": threads})})


def check_same_model(manifest: dict[str, Any], digest: str) -> None:
    """Raises UserError: the weights are not those the run began with. Notes them when it begins now."""
    if manifest.setdefault(MODEL_DIGEST, digest) != digest:
        raise UserError(
            "the model has changed since this run began",
            where="model.source",
            cure="put the former weights back, or choose another --run.dir",
        )
