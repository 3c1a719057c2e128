"""A handwritten profile, and the logs that a run on such a machine would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.core.records import SampleId
from tidemill.hardware.run_profile import FORMAT, QUANTITIES, Machine, Measure, RunProfile, cost_settings
from tidemill.planner.calibration.run_observations import Hardware, Manifest, Observed, Session
from tidemill.sim.one_machine import length_of, simulate_recipe, workloads
from tidemill.telemetry.metrics import CONTROLLER_CPU
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory, samples_name
from tidemill.telemetry.sample_files import Sample

NUMBERS = {
    "engine_pass_s": 0.02,
    "engine_row_s": 0.002,
    "engine_prefill_token_s": 0.0005,
    "train_step_s": 0.3,
    "train_token_s": 0.001,
    "controller_sample_s": 0.0005,
    "prompt_tokens": 10.0,
    "prompt_new_share": 1.0,
    "packed_prompt_tokens": 10.0,
    "learned_share": 1.0,
    "held_out_prompts": 4.0,
    "checkpoint_s": 0.5,
    "start_s": 2.0,
}


def spec_of(steps: int = 5, **sections: Any) -> RunSpec:
    """Eight samples of two prompts, on four slots: batches drain through every number of running samples."""
    common = {
        "sampling": {"max_new_tokens": 40},
        "engine": {"slots": 4},
        "batch": {"prompts": 2, "group_size": 4},
        "trainer": {"steps": steps},
        "eval": {"every_steps": 0, "prompts": 4},
        "checkpoint": {"every_steps": 0},
    }
    return RunSpec.model_validate(common | sections)


def planted(spec: RunSpec, *, cores: int = 2, **numbers: float) -> RunProfile:
    """A profile with completions of 4 to 40 tokens; no two of a group share a prefix."""
    values = dict.fromkeys(QUANTITIES, 0.0) | NUMBERS | numbers
    return RunProfile(
        format=FORMAT,
        run="planted",
        run_id="0",
        steps=5,
        settings=cost_settings(spec),
        machine=Machine(processor="Abacus", cores=cores, device="cpu", threads=1),
        numbers={name: Measure(value=value, error=0.0, count=5) for name, value in values.items()},
        new_by_depth=(1.0,),
        lengths=dict.fromkeys(range(4, 41, 4), 1),
        cut={},
        held_out_lengths={5: 1},
        step_s=Measure(value=1.0, error=0.0, count=4),
        step_cpu_s=Measure(value=0.75, error=0.0, count=4),
        simulated_step_s=1.0,
        residuals={"engine": 0.0, "training": 0.0},
        processor_share=1.0,
        notes=(),
    )


def _groups(spec: RunSpec) -> int:
    return spec.trainer.steps * spec.batch.prompts


def _size(spec: RunSpec) -> int:
    return spec.batch.group_size


def _sample(spec: RunSpec, profile: RunProfile, prompt: int, index: int) -> Sample:
    """The sample that the simulator draws; its first token is unique."""
    name = f"p{prompt}"
    sample_id = SampleId(run_seed=spec.run.seed, purpose="train", prompt_id=name, epoch=0, index=index)
    length = min(length_of(*workloads(profile), sample_id), spec.sampling.max_new_tokens)
    step = 1 + prompt // spec.batch.prompts
    return Sample(step=step, prompt_id=name, token_ids=(index, *range(length - 1)), finish="stop")


def observed(spec: RunSpec, profile: RunProfile) -> Observed:
    """The logs of a run on that machine, and samples with its lengths."""
    run = simulate_recipe(spec, profile)
    lines = [line for line in run.metrics if line.step > 0]
    for line in lines:
        assert isinstance(line.values, dict)
        line.values["cpu_train_s"] = line.values["time_train_s"]
        line.values[CONTROLLER_CPU] = line.values["samples"] * profile["controller_sample_s"]
    samples = [_sample(spec, profile, prompt, index) for prompt in range(_groups(spec)) for index in range(_size(spec))]
    machine = {"event": "machine", "device": "cpu", "threads": 1, "elapsed_s": profile["start_s"]}
    hardware = Hardware(processor=profile.machine.processor, cores=profile.machine.cores)
    return Observed(
        spec=spec,
        manifest=Manifest(run_id="0", sessions=(Session(machine=hardware),)),
        machine=machine,
        events=[machine, *run.events],
        metrics=lines,
        first_steps={1},
        samples=samples,
        held_out=[Sample(step=0, token_ids=(1, 2, 3, 4, 5), finish="stop")],
    )


def write_run(path: Path, seen: Observed) -> RunDirectory:
    """Write a run directory with the same observations."""
    run = RunDirectory(path)
    run.samples.mkdir(parents=True)
    run.write_config(to_toml(seen.spec))
    run.write_manifest(msgspec.to_builtins(seen.manifest) | {"format": RUN_FORMAT})
    run.events.write_bytes(msgspec.json.Encoder().encode_lines(seen.events))
    lines = [{**line.values, "step": line.step, "optimizer_steps": line.optimizer_steps} for line in seen.metrics]
    run.metrics.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    for name, samples in {samples_name(1): seen.samples, samples_name(1, "eval"): seen.held_out}.items():
        (run.samples / name).write_bytes(msgspec.json.Encoder().encode_lines(samples))
    return run
