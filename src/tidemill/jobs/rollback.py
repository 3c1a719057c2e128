"""Returns a run to an earlier checkpoint with other settings, and keeps what it leaves behind.

`amendments.jsonl` has one line per rollback; config.toml stays the user's. Every step can be repeated after a kill: the
journalled decision counts until the line is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from tidemill.config.guard import AmendConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.evidence import GoldPair
from tidemill.runtime.memory_check import check_memory
from tidemill.scoring.builtin_rewards import reward_names
from tidemill.telemetry.jsonl import disk_error, encode, read_lines, remove_partial_files, write_atomically
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import CURRICULUM, TRAINING_PURPOSE, RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore

WHERE = "guard.amend"
SHOWN = ("prompt", "messages", "completion", "answer")
"""Keys of a sample that disputed.jsonl keeps."""


def amendments(run: RunDirectory) -> list[AmendConfig]:
    """The amendments of a run, one per rollback."""
    if not run.amendments.is_file():
        return []
    return [AmendConfig.model_validate(line["amend"]) for _, line in read_lines(run.amendments)]


def amended(spec: RunSpec, amend: AmendConfig) -> RunSpec:
    """A run with other settings.

    Raises:
        UserError: it cannot have them.
    """
    algorithm: dict[str, float] = {}
    if amend.kl_beta is not None:
        algorithm["kl_beta"] = amend.kl_beta
    if amend.entropy_bonus is not None:
        algorithm["entropy_bonus"] = amend.entropy_bonus
    names = reward_names(spec.scoring.rewards)
    if unknown := sorted(set(amend.reward_weights) - set(names)):
        hint = f"rewards: {', '.join(names)}"
        raise UserError(f"no reward is named {', '.join(unknown)}", where=f"{WHERE}.reward_weights", hint=hint)
    rewards = tuple(
        reward.model_copy(update={"weight": amend.reward_weights.get(name, reward.weight)})
        for name, reward in zip(names, spec.scoring.rewards, strict=True)
    )
    changed = spec.model_copy(
        update={
            "algorithm": spec.algorithm.model_copy(update=algorithm),
            "scoring": spec.scoring.model_copy(update={"rewards": rewards}),
        }
    )
    issues = [*changed.issues(), *changed.algorithm.issues(), *(issue for each in rewards for issue in each.issues())]
    if not any(reward.weight for reward in rewards):
        issues.append("no reward has a weight; leave one above 0")
    if issues:
        what, _, hint = issues[0].partition("; ")
        raise UserError(f"the run would be refused after a rollback: {what}", where=WHERE, hint=hint)
    return changed


def check_amendment(spec: RunSpec) -> None:
    """Refuse an amendment that the run could not make. Raises UserError."""
    if spec.guard.action == "rollback":
        check_memory(amended(spec, spec.guard.amend), "rl", note=lambda _: None)


def roll_back(run: RunDirectory, recorder: Recorder, *, target: int, amend: AmendConfig, ahead: int = 0) -> None:
    """Return to a checkpoint; 0 is the initial model. Later metrics and samples move to `abandoned/N`.

    Args:
        ahead: later steps whose prompts a sampler chose before the checkpoint; these choices are kept.

    Raises:
        UserError: the files cannot be changed.
    """
    number = len(amendments(run)) + 1
    folder, choices = run.path / "abandoned" / str(number), run.path / CURRICULUM
    try:
        CheckpointStore(run.checkpoints, keep_last=1).retire_after(target)
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        remove_partial_files(folder)  # of this rollback, if it was killed before
        for step, _, path in run.sample_files():
            if step > target:
                path.replace(folder / "samples" / path.name)
        _copy_later(run.metrics, target or -1, folder / "metrics.jsonl")
        if choices.is_file():
            kept = _copy_later(choices, target, folder / CURRICULUM, kept=lambda line: _is_ahead(line, target + ahead))
            write_atomically(choices, kept)
    except OSError as error:
        raise disk_error(error, folder) from error
    recorder.rewind(target)
    line = {"number": number, "step": target, "amend": amend.model_dump(mode="json", exclude_defaults=True)}
    earlier = run.amendments.read_bytes() if run.amendments.is_file() else b""
    write_atomically(run.amendments, earlier + encode(line) + b"\n")


def _is_ahead(line: Mapping[str, Any], last: int) -> bool:
    return "prompts" in line and int(line["step"]) <= last


def _copy_later(
    source: Path, target: int, into: Path, *, kept: Callable[[Mapping[str, Any]], bool] = lambda line: False
) -> bytes:
    """Copy the lines of steps after `target`, unless that was done; returns the others, and those that are `kept`."""
    lines = [line for _, line in read_lines(source)] if source.is_file() else []

    def is_later(line: Mapping[str, Any]) -> bool:
        return int(line.get("step", 0)) > target

    later = b"".join(encode(line) + b"\n" for line in lines if is_later(line))
    if later and not into.is_file():
        write_atomically(into, later)
    return b"".join(encode(line) + b"\n" for line in lines if not is_later(line) or kept(line))


def write_disputed(run: RunDirectory, pairs: Sequence[GoldPair]) -> int:
    """Write disputed.jsonl: samples that the reward likes more than gold does, the most disputed first.

    Returns:
        Number of samples.
    """
    if len(pairs) < 2:
        return 0
    proxies, golds = [pair.proxy for pair in pairs], [pair.gold for pair in pairs]

    def dispute(pair: GoldPair) -> float:
        return _units(pair.proxy, proxies) - _units(pair.gold, golds)

    texts = _texts(run, {pair.step for pair in pairs})
    rows = list[dict[str, Any]]()
    for pair in sorted(pairs, key=dispute, reverse=True):
        found = texts.get((pair.step, pair.prompt_id, pair.index))
        if found is not None and dispute(pair) > 0:
            kept: dict[str, Any] = {key: found[key] for key in SHOWN if key in found}
            rows.append({**kept, "reward": pair.proxy, "gold": pair.gold, "step": pair.step})
    write_atomically(run.path / "disputed.jsonl", b"".join(encode(row) + b"\n" for row in rows))
    return len(rows)


def _units(value: float, all_values: Sequence[float]) -> float:
    return (value - fmean(all_values)) / (pstdev(all_values) or 1.0)


def _texts(run: RunDirectory, steps: set[int]) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Lines of samples files, by step, prompt and index."""
    files = [path for step, purpose, path in run.sample_files() if step in steps and purpose == TRAINING_PURPOSE]
    lines = (line for path in files for _, line in read_lines(path))
    return {(int(line["step"]), line["prompt_id"], int(line["index"])): line for line in lines}
