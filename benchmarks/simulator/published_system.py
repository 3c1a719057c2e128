"""RLBoost as simulated: its machines and models, its published figures, and which of them are fitted.

Published figures are from arXiv 2510.19225: GRPO, 128 prompts x 8 samples of up to 14k tokens; 8 H100 are reserved, 2
are an instance. Only static figures, with a fixed number of instances, may be used for fitting; all others are compared
with the results.

The published baseline is veRL, which generates on the training GPUs and gives each engine a fixed part of a batch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.simulator.availability import MOST
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.hardware.completion_lengths import log_normal_of_mean
from tidemill.hardware.engine_profile import EngineEfficiency, EngineProfile, engine_profile, rollout_of
from tidemill.hardware.gpu_catalog import Link, load_catalog
from tidemill.hardware.model_shape import DTYPE_BYTES, FROZEN_BYTES, TRAINED, shape_of_parameters
from tidemill.hardware.trainer_profile import TrainerEfficiency, trainer_profile
from tidemill.sim.baselines import chunked_components, rlboost_fleet
from tidemill.sim.costs import ProfiledEngine, ProfiledTrainer, WeightCosts
from tidemill.sim.simulation import CostModel
from tidemill.sim.workload import Workload

PROMPTS, GROUP, LONGEST = 128, 8, 14_336
RESERVED, INSTANCE = load_catalog().machine("rlboost-8xh100"), load_catalog().machine("rlboost-2xh100")
H100 = load_catalog().gpu(RESERVED.gpu)
PARAMETERS = {"8B": 8e9, "14B": 14e9}

# Published, static.
COLOCATED_TOKENS_PER_S = 10_000.0
"""8B; not published for 14B."""
SPEEDUPS = {"8B": {1: 1.2, 2: 1.4, 3: 1.6, 4: 1.8}, "14B": {1: 1.37, 6: 1.37 * 1.64}}
"""Throughput by number of instances, relative to colocated."""

# Published, predicted here.
WINDOWS_S = {"8B": (190.0, 160.0, 105.0, 70.0), "14B": (346.0, 212.0, 145.0, 60.0, 8.0, 5.0)}
"""Published seeding windows with 1, 2, ... instances: the initial values of the public code."""
DYNAMIC_SPEEDUP = {"8B": 1.66, "14B": 1.97}
TOKENS_PER_USD = {"8B": 1.34, "14B": 1.49}
NO_SEEDING, MEMORY = -0.19, 0.06
SHORT_SPEEDUP = 1.47
"""14B with 3 instances over colocated, responses of at most 5k tokens."""
OVER_DOUBLED = 1.24
"""14B with varying instances relative to colocated on twice the reserved machines: at most."""
SAVED_BY_MIGRATING = {100: 0.33, 200: 0.76}
"""Share of the time added by killing 3 of 6 instances this many seconds into a step that migration saves."""

# Assumed.
SIGMA = 0.8
"""Standard deviation of the logarithm of lengths, which are log-normal and cut at `LONGEST`."""
PROMPT_CORRELATION = 0.8
"""Between the lengths of a prompt's samples; the better fit of 0.5 and 0.8."""
PROMPT_TOKENS = 128
BASELINE = chunked_components()
"""Of the colocated baseline."""
PASSES = 6
"""Forward-sized: logprobs of old policy and reference, and 4 of training with recomputation."""
MICROBATCH_TOKENS = 16_384
BOOT_S = 60.0
"""From a lease to an engine without weights."""
RELOAD_S = 5.0
"""Time until reserved engines have new weights, or instances can pull them."""
SWAP_S = 0.5
LOST_S = 0.125
"""Tokens of an instance's last moments are lost: about 5 per sample, the mean of 0 to 10."""


MOST_SAMPLES = 1024
"""Most samples that an engine decodes at once: veRL's default `rollout.max_num_seqs`."""


class Calibration(Record):
    """The fitted numbers; see `benchmarks.simulator.calibration`."""

    bandwidth: float  # share of the peak that engines reach
    compute: float  # share of the peak that the trainer reaches


class Setting(Record):
    """Lengths, and the number of reserved machines."""

    mean_tokens: float = 5000.0  # of a completion; assumed
    longest: int = LONGEST
    machines: int = 1


SETTING = Setting()
SHORT = Setting(mean_tokens=3605.0, longest=5120)
"""The same lengths, cut earlier."""
FITTED = Calibration(bandwidth=0.55, compute=0.41)


FOUND_WINDOWS_S = {"8B": (218.0, 151.0, 115.0, 91.0), "14B": (295.0, 188.0, 115.0, 67.0, 36.0, 13.0)}
"""Windows that simulated runs with these numbers of instances find (`benchmarks.simulator.published` prints them);
initial values of the simulated policy."""


def engines(row: str, fitted: Calibration, setting: Setting = SETTING) -> tuple[EngineProfile, EngineProfile]:
    """(a reserved engine, an instance's), with as many slots as samples of the mean context fit the cache.

    During generation the reserved GPUs also hold the trainer's states and the frozen reference, sharded over all of
    them: veRL offloads neither parameters nor optimizer by default.
    """
    parameters = PARAMETERS[row]
    states = parameters * (TRAINED["adam"].total + FROZEN_BYTES)
    lengths = workload(setting).lengths
    rollout = rollout_of(lengths, samples=PROMPTS * GROUP, group_size=GROUP, prompt_tokens=PROMPT_TOKENS)

    def engine(held_bytes: float) -> EngineProfile:
        profile = engine_profile(
            shape_of_parameters(parameters),
            H100,
            gpus=INSTANCE.gpus,
            slots=MOST_SAMPLES,
            efficiency=EngineEfficiency(bandwidth=fitted.bandwidth),
            held_bytes=held_bytes,
        )
        return msgspec.structs.replace(profile, slots=max(profile.most_running(rollout.running_context), 1))

    return engine(states / (setting.machines * RESERVED.gpus)), engine(0.0)


def cost_model(row: str, fitted: Calibration, setting: Setting = SETTING, *, delta_share: float = 0.0) -> CostModel:
    """The costs of a row.

    Args:
        delta_share: bytes of a delta relative to a snapshot; 0: snapshots only.
    """
    shape = shape_of_parameters(PARAMETERS[row])
    reserved, instance = engines(row, fitted, setting)
    gpus = setting.machines * RESERVED.gpus
    trainer = trainer_profile(
        shape,
        H100,
        gpus=gpus,
        gpus_per_machine=RESERVED.gpus,
        network=Link(bytes_per_s=RESERVED.network_bytes_per_s),
        efficiency=TrainerEfficiency(compute=fitted.compute),
    )
    nbytes = round(shape.parameters * DTYPE_BYTES["bf16"])
    weights = WeightCosts(
        nbytes=nbytes,
        delta_nbytes=round(delta_share * nbytes),
        uplink_bytes_per_s=setting.machines * RESERVED.network_bytes_per_s,
        downlink_bytes_per_s=INSTANCE.network_bytes_per_s,
        swap_s=SWAP_S,
    )
    return CostModel(
        trainer=ProfiledTrainer(profile=trainer, passes=PASSES, microbatch_tokens=MICROBATCH_TOKENS),
        weights=weights,
        reserved=ProfiledEngine(profile=reserved, engines=gpus // INSTANCE.gpus),
        reserved_load_s=RELOAD_S,
        worker=ProfiledEngine(profile=instance, boot_s=BOOT_S),
    )


def workload(setting: Setting = SETTING) -> Workload:
    return Workload(
        lengths=log_normal_of_mean(setting.mean_tokens, sigma=SIGMA, limit=setting.longest),
        prompt_tokens=PROMPT_TOKENS,
        prompt_correlation=PROMPT_CORRELATION,
    )


def base_spec(*, steps: int, fleet: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    """The settings common to all systems; `fleet` and `sections` are a system's changes."""
    return RunSpec.model_validate(
        {
            "batch": {"prompts": PROMPTS, "group_size": GROUP, "order": "arrival"},
            "sampling": {"max_new_tokens": LONGEST},
            "trainer": {"steps": steps},
            "eval": {"every_steps": 0},
            "pool": {"kind": "synthetic", "workers": max(MOST.values())},
            "fleet": {
                "reserved_usd_per_hour": RESERVED.usd_per_hour,
                "preemptible_usd_per_hour": INSTANCE.preemptible_usd_per_hour,
                **fleet,
            },
            **sections,
        }
    )


def published_spec(*, steps: int, seed: int = 0, **fleet: Any) -> RunSpec:
    """Strictly on policy, with the constants of the public code; `fleet`: known windows and ablations."""
    fleet = {**rlboost_fleet(GROUP), **fleet}
    return base_spec(steps=steps, fleet=fleet, engine={"tick_s": LOST_S}, run={"seed": seed})
