"""A profile: measured costs of a run's parts on one machine, each with its error and number of observations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import cache_dir
from tidemill.core.records import Record, decode_json
from tidemill.telemetry.jsonl import write_atomically

FORMAT = 2
CACHE_CURE = "set TIDEMILL_CACHE to a writable directory with free space"


class Quantity(NamedTuple):
    """Unit and meaning of a number of a profile."""

    unit: str
    meaning: str


QUANTITIES: dict[str, Quantity] = {
    "engine_pass_s": Quantity("s", "a forward pass of an engine, regardless of its size"),
    "engine_row_s": Quantity("s", "a running sample in a pass"),
    "engine_prefill_token_s": Quantity("s", "a token of a new sample in a pass"),
    "engine_drawn_s": Quantity("s", "drawing a token"),
    "engine_context_token_s": Quantity("s", "attention to one token of a sample's context"),
    "train_step_s": Quantity("s", "an optimizer step, including the new version"),
    "train_token_s": Quantity("s", "a packed token, forward and backward"),
    "train_pair_s": Quantity("s", "a pair of tokens in one microbatch"),
    "train_first_s": Quantity("s", "additional time of the first step of a session"),
    "controller_sample_s": Quantity("s", "a sample on the controller's thread: scoring, journal, logs"),
    "call_s": Quantity("s", "a message between controller and worker or trainer; includes all unexplained time"),
    "publish_s": Quantity("s", "publishing a version"),
    "pull_s": Quantity("s", "fetching and verifying a version"),
    "swap_s": Quantity("s", "switching to a version, while generation stands still"),
    "boot_s": Quantity("s", "a worker from its lease to an engine without weights"),
    "checkpoint_s": Quantity("s", "a checkpoint"),
    "start_s": Quantity("s", "from the command to the controller's loop"),
    "prompt_tokens": Quantity("tokens", "a prompt"),
    "prompt_new_share": Quantity("", "share of a group's prompt that other prompts do not have in common"),
    "packed_prompt_tokens": Quantity("tokens", "tokens that training computes of a group's prompt"),
    "peak_rss_bytes": Quantity("bytes", "peak memory of the controller's process; in-process, of everything"),
    "held_out_prompts": Quantity("prompts", "an evaluation; fewer if a recipe sets fewer"),
    "learned_share": Quantity("", "share of the groups that contribute a gradient"),
}


class Measure(Record):
    """One number."""

    value: float
    error: float  # standard error
    count: int  # observations; 0: assumed


class Machine(Record):
    """The machine of a run; machines with equal fields are treated as the same."""

    processor: str
    cores: int
    device: str
    threads: int  # within one operation


class RunProfile(Record, forbid_unknown_fields=True):
    """The result of `tidemill calibrate`."""

    format: int
    run: str
    run_id: str
    steps: int
    settings: dict[str, Any]  # settings of the run that affect costs
    machine: Machine
    numbers: dict[str, Measure]  # by name of QUANTITIES
    new_by_depth: tuple[float, ...]  # see `hardware.measured_profile.Packing`
    lengths: dict[int, int]  # completions in training: number by length
    cut: dict[int, int]  # of these, the number truncated by a limit
    held_out_lengths: dict[int, int]
    step_s: Measure  # mean wall time of the run's steps without the first of each session
    step_cpu_s: Measure  # CPU time of the same steps: engines, trainer, controller
    simulated_step_s: float  # simulated time of a step on an otherwise idle machine
    residuals: dict[str, float]  # fraction of the time that the fit does not explain: engine, training
    processor_share: float  # fraction of the engines' time on a processor
    notes: tuple[str, ...]  # what could not be measured, and what was assumed

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value


def cost_settings(spec: RunSpec) -> dict[str, Any]:
    """The settings that affect costs; a profile is valid for runs in which they are equal."""
    model = spec.model.model_dump(mode="json")  # without keys that do not apply to this kind of model
    if spec.model.source != "char":
        del model["char"]
    if not spec.model.lora.enabled:
        model["lora"] = {"rank": 0}
    return {
        "runtime": spec.runtime,
        **{name: value for name, value in _flat("model", model) if not name.endswith(".seed")},
        "trainer.precision": spec.trainer.precision,
        "trainer.device": spec.trainer.device,
        "trainer.activation_checkpointing": spec.trainer.recomputes(on_gpu=False),
        "engine.batch_invariant": spec.engine.batch_invariant,
        "algorithm.advantage": "gae" if spec.algorithm.needs_critic else "of siblings",
        "algorithm.kl_beta": spec.algorithm.kl_beta > 0,
        "algorithm.proximal": spec.algorithm.proximal,
        "scoring.rewards": sorted(reward.kind for reward in spec.scoring.rewards),
        "placement": sorted(spec.placement.on_actors),
        "ray.address": spec.ray.address if spec.runtime == "ray" else "",
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield name, value


def setting_differences(profile: RunProfile, spec: RunSpec) -> list[str]:
    """The differences between a run and the profile's settings, for the user."""
    asked = cost_settings(spec)
    return [
        f"{name} is {asked[name]!r}, and the profile was measured with {profile.settings.get(name)!r}"
        for name in asked
        if asked[name] != profile.settings.get(name)
    ]


def write_profile(profile: RunProfile, path: Path, *, where: str = "", hint: str = CACHE_CURE) -> None:
    """Write a profile.

    Args:
        where: the option that named the path; default: the path.
        hint: shown if the path is not writable; default: for a path in the cache.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except (OSError, UserError) as error:
        reason = error.what if isinstance(error, UserError) else error.strerror
        raise UserError(f"cannot write the profile: {reason}", where=where or str(path), hint=hint) from error


def read_profile(path: Path) -> RunProfile:
    """Read a profile.

    Raises:
        UserError: the file does not exist, or has another format.
    """
    hint = "create one with `tidemill calibrate RUN_DIR --out FILE`"
    try:
        profile = decode_json(path.read_bytes(), RunProfile)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError("no profile there", where=str(path), hint=hint) from None
    except msgspec.DecodeError as error:
        raise UserError(f"not a profile: {error}", where=str(path), hint=hint) from None
    if profile.format != FORMAT or profile.numbers.keys() != QUANTITIES.keys():
        what = f"profile has format {profile.format}, expected {FORMAT}"
        raise UserError(what, where=str(path), hint=hint)
    return profile


def profiles_folder() -> Path:
    return cache_dir() / "profiles"


def kept_path(profile: RunProfile) -> Path:
    """Path in the cache of the newest profile with this machine and these settings."""
    about = msgspec.json.encode([profile.machine, profile.settings], order="sorted")
    return profiles_folder() / f"{hashlib.blake2b(about, digest_size=8).hexdigest()}.json"


def _written_s(path: Path) -> float:
    """Time of the last change; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def kept_profiles(machine: dict[str, Any]) -> list[RunProfile]:
    """Profiles of machines like this one, newest first; unreadable ones are skipped.

    Args:
        machine: as returned by `telemetry.manifest.machine`.
    """
    found = []
    for path in sorted(profiles_folder().glob("*.json"), key=_written_s, reverse=True):
        try:
            profile = read_profile(path)
        except (UserError, OSError):
            continue
        if (profile.machine.processor, profile.machine.cores) == (machine.get("processor"), machine.get("cores")):
            found.append(profile)
    return found
