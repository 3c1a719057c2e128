"""A profile: what the parts of a run take on one machine, each number with its spread and what it rests on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Record, decode_json
from tidemill.models.cache import cache_dir
from tidemill.telemetry.jsonl import write_atomically

FORMAT = 2
CACHE_CURE = "set TIDEMILL_CACHE to a directory with room that can be written"


class Quantity(NamedTuple):
    """What a number of a profile means."""

    unit: str
    meaning: str


QUANTITIES: dict[str, Quantity] = {
    "engine_pass_s": Quantity("s", "a forward pass of an engine, whatever is in it"),
    "engine_row_s": Quantity("s", "a running sample in it"),
    "engine_prefill_token_s": Quantity("s", "a token of a new sample in it"),
    "engine_drawn_s": Quantity("s", "drawing a token"),
    "engine_context_token_s": Quantity("s", "attending to a token of a sample's own"),
    "train_step_s": Quantity("s", "an optimizer's step, and what makes a version of it"),
    "train_token_s": Quantity("s", "a packed token, forward and backward"),
    "train_pair_s": Quantity("s", "a pair of tokens in one microbatch"),
    "train_first_s": Quantity("s", "what the first step of a session takes beyond that"),
    "controller_sample_s": Quantity("s", "a sample on the controller's own thread: scored, journalled, written"),
    "call_s": Quantity("s", "a message between controller and worker or trainer; all that nothing else explains"),
    "publish_s": Quantity("s", "a version until it can be pulled"),
    "pull_s": Quantity("s", "fetching and verifying it"),
    "swap_s": Quantity("s", "swapping to it, generation standing still"),
    "boot_s": Quantity("s", "a worker from its lease to an engine without weights"),
    "checkpoint_s": Quantity("s", "a checkpoint"),
    "start_s": Quantity("s", "from the command to the controller's loop"),
    "prompt_tokens": Quantity("tokens", "a prompt"),
    "prompt_new_share": Quantity("", "of a group's prompt, what it does not have in common with others"),
    "packed_prompt_tokens": Quantity("tokens", "what training computes of a group's prompt"),
    "peak_rss_bytes": Quantity("bytes", "the controller's process at its largest; in-process, everything"),
    "held_out_prompts": Quantity("prompts", "an evaluation; fewer where a recipe asks for fewer"),
    "learned_share": Quantity("", "of the groups, those that add a gradient"),
}

MOST: dict[str, float] = {"s": 3600.0, "tokens": 1e8, "bytes": 1e18, "prompts": 1e8, "": 2.0}
"""Of each unit, more than any profile has: whoever reads more reads a file that was damaged or made up."""


class Measure(Record):
    """One number."""

    value: float
    error: float  # standard error
    count: int  # observations; 0 is an assumption


class Machine(Record):
    """What computed; two machines of which all of this is equal are taken to be alike."""

    processor: str
    cores: int
    device: str
    threads: int  # inside one operation


class RunProfile(Record, forbid_unknown_fields=True):
    """What `tidemill calibrate` writes."""

    format: int
    run: str
    run_id: str
    steps: int
    settings: dict[str, Any]  # of the run's configuration, what decides about costs
    machine: Machine
    numbers: dict[str, Measure]  # of each of QUANTITIES
    new_by_depth: tuple[float, ...]  # see `hardware.measured_profile.Packing`
    lengths: dict[int, int]  # of training completions: tokens, how many
    cut: dict[int, int]  # of them, those that a limit ended
    held_out_lengths: dict[int, int]
    step_s: Measure  # wall time of the run's own steps but the first of each session, on average
    step_cpu_s: Measure  # CPU time of the same steps: engines, trainer, controller
    simulated_step_s: float  # a step in simulation, where nothing else is on the machine
    residuals: dict[str, float]  # share of the time that what was fitted does not explain: engine, training
    processor_share: float  # of the time that engines computed, what they had a processor
    notes: tuple[str, ...]  # what could not be told, and what was assumed

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value


def cost_settings(spec: RunSpec) -> dict[str, Any]:
    """What a profile is of besides the machine: a run that differs here takes other times for the same work."""
    placement = spec.placement
    return {
        "runtime": spec.runtime,
        **_model_settings(spec),
        "trainer.precision": spec.trainer.precision,
        "trainer.device": spec.trainer.device,
        "trainer.activation_checkpointing": spec.trainer.activation_checkpointing,
        "engine.batch_invariant": spec.engine.batch_invariant,
        "algorithm.advantage": "gae" if spec.algorithm.needs_critic else "of siblings",
        "algorithm.kl_beta": spec.algorithm.kl_beta > 0,
        "algorithm.proximal": spec.algorithm.proximal,
        "scoring.rewards": sorted(reward.kind for reward in spec.scoring.rewards),
        "placement": sorted(placement.on_actors),
        "ray.address": spec.ray.address if spec.runtime == "ray" else "",
    }


def _model_settings(spec: RunSpec) -> dict[str, Any]:
    """The whole section, so that no setting of a shape is forgotten, but for what a model like this does not read."""
    model = spec.model.model_dump(mode="json")
    if spec.model.source != "char":
        del model["char"]
    if not spec.model.lora.enabled:
        model["lora"] = {"rank": 0}
    return {name: value for name, value in _flat("model", model) if not name.endswith(".seed")}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    else:
        yield name, value


def unlike(profile: RunProfile, spec: RunSpec) -> list[str]:
    """In words, where a run is not of the kind that the profile was measured on."""
    asked = cost_settings(spec)
    return [
        f"{name} is {asked[name]!r}, and the profile was measured with {profile.settings.get(name)!r}"
        for name in asked
        if asked[name] != profile.settings.get(name)
    ]


def write_profile(profile: RunProfile, path: Path, *, where: str = "", hint: str = CACHE_CURE) -> None:
    """
    Args:
        where: what named the path; by default the path itself.
        hint: of a path that cannot be written; by default of one in the cache.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except (OSError, UserError) as error:
        reason = error.what if isinstance(error, UserError) else error.strerror
        raise UserError(f"the profile cannot be written: {reason}", where=where or str(path), hint=hint) from error


def read_profile(path: Path) -> RunProfile:
    """
    Raises:
        UserError: it is not there, or is none of this version.
    """
    hint = "make one with `tidemill calibrate RUN_DIR --out FILE`"
    try:
        profile = decode_json(path.read_bytes(), RunProfile)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError("no profile there", where=str(path), hint=hint) from None
    except msgspec.DecodeError as error:
        raise UserError(f"not a profile: {error}", where=str(path), hint=hint) from None
    if profile.format != FORMAT or profile.numbers.keys() != QUANTITIES.keys():
        what = f"a profile of format {profile.format}, and this version reads {FORMAT}"
        raise UserError(what, where=str(path), hint=hint)
    if wrong := fault(profile):
        raise UserError(f"not a profile: {wrong}", where=str(path), hint=hint)
    return profile


def fault(profile: RunProfile) -> str:
    """What no measurement can have been, and what a simulation would divide by or never end with; empty for nothing."""
    for name, one in profile.numbers.items():
        most = MOST[QUANTITIES[name].unit]
        for what, value in (("", one.value), ("the error of ", one.error)):
            if not 0 <= value <= most:  # neither is one that is not a number
                return f"{what}{name} is {value:g}, which is not from 0 to {most:g}"
    if profile.machine.cores < 1:
        return f"a machine of {profile.machine.cores} cores"
    if not all(0 <= share < math.inf for share in profile.new_by_depth):
        return "new_by_depth holds what is no share"
    return _fault_of_lengths(profile)


def _fault_of_lengths(profile: RunProfile) -> str:
    told = {"lengths": profile.lengths, "cut": profile.cut, "held_out_lengths": profile.held_out_lengths}
    for name, counts in told.items():
        if any(length < 0 or count < 0 for length, count in counts.items()):
            return f"{name} holds a number below 0"
        if (counts or name == "lengths") and not any(length * count for length, count in counts.items()):
            return f"{name} holds no completion that has a token" if name != "cut" else ""
    if any(count > profile.lengths.get(length, 0) for length, count in profile.cut.items()):
        return "of some length more completions were cut than there were"
    return ""


def profiles_folder() -> Path:
    return cache_dir() / "profiles"


def kept_path(profile: RunProfile) -> Path:
    """Where the newest profile of such a machine and such settings is kept."""
    about = msgspec.json.encode([profile.machine, profile.settings], order="sorted")
    return profiles_folder() / f"{hashlib.blake2b(about, digest_size=8).hexdigest()}.json"


def _written_s(path: Path) -> float:
    """0 where nothing is, as behind a dangling link or of a file that is going."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def kept_profiles(machine: dict[str, Any]) -> list[RunProfile]:
    """Of machines like this one, the newest first; what cannot be read is passed over.

    Args:
        machine: as `telemetry.manifest.machine` tells.
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
