"""CPU seconds of control policies: Tidemill's PPO and rsl_rl's to the same return, and the targets of each task.

    python -m benchmarks.control [--tasks swingup quadruped] [--seeds 5] [--only race targets delays]

Race: both sides train in one process, an iteration of each in turn, on the same simulation with the same networks and
settings, until the mean return of the episodes that ended in the last iterations reaches a goal. Both simulate all
worlds at once. Targets: whole runs of `train_control` with the evaluation after training; `tandem` with a central
critic and with separate ones, without a target. Delays: falls of `quadruped` with actions that take effect later, of a
policy trained without delay and of one trained with delays and history.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from benchmarks.measuring import exit_code, write_part
from benchmarks.origin import parsed
from benchmarks.stopping import INTERRUPTED_CODE
from tidemill.config.schema import RunSpec
from tidemill.core.chunks import Array, ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.core.records import PolicyVersion
from tidemill.jobs.control import train_control
from tidemill.models.actor import arrays_of
from tidemill.robots.episodes import play_episodes
from tidemill.robots.experience import Experience
from tidemill.robots.policy_arrays import pack, unpack
from tidemill.robots.policy_folder import read_policy
from tidemill.robots.setup import build, describe, setup_of, task_of, undisturbed
from tidemill.robots.simulation import Simulation
from tidemill.robots.step_random import StepRandom
from tidemill.runtime.simulators import LocalChunks
from tidemill.trainer.control import ControlLearner, ControlNetworks

GOALS = {"swingup": 9.0, "quadruped": 30.0}
"""Mean return of training episodes that both sides train to: most episodes succeed."""
WALK: dict[str, Any] = {"num_steps_per_env": 16, "desired_kl": 0.02, "gamma": 0.97, "init_noise_std": 0.4}
SETTINGS: dict[str, dict[str, Any]] = {
    "swingup": {},
    "quadruped": WALK,
    "reach": WALK,
    "tandem": WALK,
    "tandem-separate": WALK | {"critic": "separate"},
}
"""[control] of each task, of both sides."""
WINDOW = 3  # iterations whose episodes count
LIMIT_S = {"swingup": 150.0, "quadruped": 300.0}
"""CPU seconds after which a side has not reached the goal."""
RATIO = 1.0  # greatest median of ours / theirs
TARGETS: dict[str, dict[str, float]] = {
    "swingup": {"success": 0.95, "cpu_s": 60.0},
    "quadruped": {"success": 0.9, "falls": 0.02, "cpu_s": 90.0},
    "reach": {"success": 0.95, "cpu_s": 60.0},
    "tandem": {},
    "tandem-separate": {},
}
ITERATIONS = {"swingup": 130, "quadruped": 90, "reach": 120, "tandem": 120, "tandem-separate": 120}
EPISODES = 256  # of each evaluation after training, which is not part of the CPU time
SEEDS, PARTS = 3, ["race", "targets", "delays"]
DELAYS_S = (0.0, 0.02, 0.04)
DELAYED: dict[str, Any] = {"history": 3, "randomise": {"delay_s": [0.0, 0.04]}}  # [robot] of the second policy
FALLS = 0.02  # greatest share at a delay of 20 ms after training with delays


def spec_of(task: str, seed: int, **sections: dict[str, Any]) -> RunSpec:
    base: dict[str, dict[str, Any]] = {
        "run": {"seed": seed, "name": f"{task}-{seed}"},
        "robot": {"task": task.partition("-")[0]},
        "control": SETTINGS[task],
        "trainer": {"steps": ITERATIONS[task], "threads": 1},
        "telemetry": {"live": False},
    }
    return RunSpec.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


class Ours:
    """Iterations as those of `train_control`, without its files."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.iteration = spec, 0
        description = describe(spec)
        networks = ControlNetworks(description, spec.control, seed=spec.run.seed)
        self.learner = ControlLearner(networks, spec.control, description, seed=spec.run.seed)
        self.chunks = LocalChunks([setup_of(spec)])
        self.states: list[Any] = [{}] * spec.robot.shards

    def iterate(self) -> np.ndarray[Any, Any]:
        """Returns of the episodes that ended."""
        requests = [
            ChunkRequest(
                key=ChunkKey(seed=self.spec.run.seed, purpose="train", shard=shard, iteration=self.iteration),
                steps=self.spec.control.num_steps_per_env,
                state=state,
            )
            for shard, state in enumerate(self.states)
        ]

        answers: list[ChunkAnswer] = []

        async def simulate() -> None:  # without a result, whose repr asyncio.run would make
            weights = pack(arrays_of(self.learner.networks.actors))
            await self.chunks.publish(PolicyVersion(number=self.iteration, digest=""), weights)
            answers.extend(await self.chunks.run(self.iteration, requests))

        asyncio.run(simulate())
        self.states = [answer.state for answer in answers]
        experience = [unpack(answer.experience) for answer in answers]
        self.learner.update(experience, self.iteration)
        self.iteration += 1
        return np.concatenate([chunk.get("episode/return", np.zeros(0)) for chunk in experience])


class SimulationEnv:
    """The simulation as rsl_rl's VecEnv, with all worlds in one step."""

    def __init__(self, spec: RunSpec) -> None:
        setup = msgspec.structs.replace(setup_of(spec), worlds=spec.robot.worlds)
        simulation = build(setup)
        assert isinstance(simulation, Simulation)
        self.simulation = simulation
        self.num_envs, self.num_actions = setup.worlds, len(self.simulation.task.joints)
        self.max_episode_length, self.device = self.simulation.limit, "cpu"
        self.cfg: dict[str, Any] = {}
        self.key = ChunkKey(seed=spec.run.seed, purpose="train", shard=0, iteration=0)
        self.state = self.simulation.start(self.key)
        self.returns: list[Any] = []

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return torch.from_numpy(self.state["steps"])

    def get_observations(self) -> TensorDict:
        observed = self.simulation._observations(self.state)
        groups = {name.removeprefix("obs/"): torch.from_numpy(each.copy()) for name, each in observed.items()}
        return TensorDict(groups, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        simulation, state, experience = self.simulation, self.state, Experience()
        random = StepRandom(state["seeds"], state["steps"])
        bad = simulation._advance(state, actions.numpy().astype(np.float64), random)
        worlds = simulation.view(state)
        ended, _ = simulation._judge(state, worlds, bad, experience)
        simulation._remember(state, simulation._observe(worlds, random))
        if ended.any():
            rows = np.flatnonzero(ended)
            self.returns.append(state["totals"][rows, -1].copy())
            simulation._next_episodes(state, rows, [self.key])
        found = experience.arrays()[0]
        time_outs = torch.from_numpy(found["truncated"][:, 0])
        rewards = torch.from_numpy(found["rewards"][:, 0])
        return self.get_observations(), rewards, torch.from_numpy(ended), {"time_outs": time_outs}


class Theirs:
    def __init__(self, spec: RunSpec) -> None:
        torch.manual_seed(spec.run.seed)
        self.env, control = SimulationEnv(spec), spec.control
        std = {
            "class_name": "rsl_rl.modules.distribution.GaussianDistribution",
            "init_std": control.init_noise_std,
            "std_type": "log",
        }
        model = {"class_name": "rsl_rl.models.MLPModel", "activation": control.activation, "obs_normalization": True}
        groups = {name: list(each) for name, each in self.env.simulation.obs_groups.items()}
        names = ["num_learning_epochs", "num_mini_batches", "clip_param", "gamma", "lam", "value_loss_coef"]
        names += ["entropy_coef", "learning_rate", "max_grad_norm", "use_clipped_value_loss", "schedule", "desired_kl"]
        settings = {
            "num_steps_per_env": control.num_steps_per_env,
            "save_interval": 10**9,
            "obs_groups": {"actor": groups["policy"], "critic": groups["critic"]},
            "algorithm": {"class_name": "rsl_rl.algorithms.PPO", "rnd_cfg": None, "symmetry_cfg": None}
            | {name: getattr(control, name) for name in names},
            "actor": model | {"hidden_dims": list(control.actor_hidden_dims), "distribution_cfg": std},
            "critic": model | {"hidden_dims": list(control.critic_hidden_dims)},
        }
        self.runner = OnPolicyRunner(self.env, settings, log_dir=None, device="cpu")

    def iterate(self) -> np.ndarray[Any, Any]:
        self.env.returns.clear()
        self.runner.learn(1)
        return np.concatenate([*self.env.returns, np.zeros(0)])


def race(task: str, seed: int) -> dict[str, Any]:
    """CPU seconds of each side until its goal; infinity without."""
    spec = spec_of(task, seed)
    sides: dict[str, Callable[[RunSpec], Any]] = {"tidemill": Ours, "rsl_rl": Theirs}
    running = {name: make(spec) for name, make in sides.items()}
    spent_s = dict.fromkeys(running, 0.0)
    iterations = dict.fromkeys(running, 0)
    recent: dict[str, deque[Any]] = {name: deque(maxlen=WINDOW) for name in running}
    result: dict[str, Any] = {"task": task, "seed": seed}
    while running:
        for name, side in list(running.items()):
            started_s = time.process_time()
            recent[name].append(side.iterate())
            spent_s[name] += time.process_time() - started_s
            iterations[name] += 1
            returns = np.concatenate(list(recent[name]))
            reached = len(returns) > 0 and returns.mean() >= GOALS[task]
            if reached or spent_s[name] > LIMIT_S[task]:
                result[name] = {
                    "cpu_s": spent_s[name] if reached else math.inf,
                    "iterations": iterations[name],
                    "cpu_s_per_iteration": spent_s[name] / iterations[name],
                    "return": float(returns.mean()) if len(returns) else None,
                }
                del running[name]
    result["ratio"] = result["tidemill"]["cpu_s"] / result["rsl_rl"]["cpu_s"]
    print(result, file=sys.stderr, flush=True)
    return result


def trained(spec: RunSpec) -> tuple[Mapping[str, Array], float]:
    """The policy of a whole run, and its CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"dir": Path(folder) / "run"})})
        started_s = time.process_time()
        with (Path(folder) / "view.txt").open("w") as view:
            policy = train_control(spec, telemetry_stream=view)["policy"]
        cpu_s = time.process_time() - started_s
        return pack(read_policy(Path(policy), where="benchmark").weights), cpu_s


def target(task: str, seed: int) -> dict[str, Any]:
    """A whole run and whether it reaches the targets of the task."""
    spec, wanted = spec_of(task, seed), TARGETS[task]
    weights, cpu_s = trained(spec)
    figures = asyncio.run(_play(spec, weights, 0.0))
    reached = (
        figures["success"] >= wanted.get("success", 0.0)
        and cpu_s <= wanted.get("cpu_s", math.inf)
        and figures["fell"] <= wanted.get("falls", 1.0)
    )
    result: dict[str, Any] = {"task": task, "seed": seed, "cpu_s": cpu_s, "reached": reached} | figures
    print(result, file=sys.stderr, flush=True)
    return result


def delays(seed: int) -> dict[str, Any]:
    """Falls and success at each delay of a policy trained without delay, and of one trained with delays."""
    result: dict[str, Any] = {"seed": seed}
    for name, robot in {"without": {}, "with": DELAYED}.items():
        spec = spec_of("quadruped", seed, robot=robot)
        weights, cpu_s = trained(spec)
        played = {f"{1e3 * each:g} ms": asyncio.run(_play(spec, weights, each)) for each in DELAYS_S}
        result[name] = {"cpu_s": cpu_s} | played
    print(result, file=sys.stderr, flush=True)
    return result


async def _play(spec: RunSpec, weights: Mapping[str, Array], delay_s: float) -> dict[str, float]:
    """Figures of a policy without exploration and with one delay."""
    setup = undisturbed(setup_of(spec))
    randomise = setup.robot["randomise"] | {"delay_s": [delay_s, delay_s]}
    chunks = LocalChunks([msgspec.structs.replace(setup, robot=setup.robot | {"randomise": randomise})])
    await chunks.publish(PolicyVersion(number=0, digest=""), weights)
    steps = task_of(spec.robot).steps_per_episode()
    played = await play_episodes(chunks, 0, purpose="benchmark", seed=0, episodes=EPISODES, steps=steps)
    names = [each for each in played.figures if each in ("success", "fell", "return") or each.startswith("figure/")]
    return {each: played.mean(each) for each in names}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def raced(tasks: Sequence[str], seeds: int) -> dict[str, Any]:
    """Every race, and the medians of each task."""
    races = [race(task, seed) for task in tasks if task in GOALS for seed in range(seeds)]
    medians: dict[str, dict[str, float]] = {}
    for task in {each["task"]: None for each in races}:
        own = [each for each in races if each["task"] == task]
        medians[task] = {
            side: statistics.median(each[side]["cpu_s"] for each in own) for side in ("tidemill", "rsl_rl")
        }
        medians[task]["ratio"] = statistics.median(each["ratio"] for each in own)
    reached = {task: each["ratio"] <= RATIO for task, each in medians.items()}
    rows = [
        [task, *(f"{each[name]:.3g}" for name in ("tidemill", "rsl_rl", "ratio")), outcome(reached[task])]
        for task, each in medians.items()
    ]
    columns = ["task", "tidemill", "rsl_rl", "ratio", f"at most {RATIO:g}"]
    show("CPU seconds to the same return: medians of the seeds, one thread, sides interleaved", columns, rows)
    for each in races:
        for side in ("tidemill", "rsl_rl"):
            if math.isinf(each[side]["cpu_s"]):  # JSON has no infinity
                each[side]["cpu_s"] = None
    return {"goals": GOALS, "medians": medians, "races": races, "reached": reached}


def targeted(tasks: Sequence[str], seeds: int) -> dict[str, Any]:
    """Every run, and how many of each task reach its targets."""
    runs = [target(task, seed) for task in tasks for seed in range(seeds)]
    rows = []
    for task in tasks:
        own = [each for each in runs if each["task"] == task]
        spans = [[each[name] for each in own] for name in ("success", "fell", "return", "cpu_s")]
        count = f"{sum(each['reached'] for each in own)} of {len(own)}" if TARGETS[task] else "no target"
        rows.append([task, *(f"{min(span):.3g} to {max(span):.3g}" for span in spans), count])
    columns = ["task", "success", "falls", "return", "CPU seconds", "runs that reach the targets"]
    show("whole runs", columns, rows)
    return {"targets": TARGETS, "runs": runs, "reached": all(each["reached"] for each in runs)}


def delayed(seeds: int) -> dict[str, Any]:
    """Falls of each policy at each delay, medians of the seeds."""
    runs = [delays(seed) for seed in range(seeds)]
    names = [f"{1e3 * each:g} ms" for each in DELAYS_S]
    falls = {
        trained: {name: statistics.median(each[trained][name]["fell"] for each in runs) for name in names}
        for trained in ("without", "with")
    }
    rows = [[f"{trained} delays", *(f"{each:.1%}" for each in at.values())] for trained, at in falls.items()]
    show("quadruped: falls in 10 s, medians of the seeds", ["policy trained", *names], rows)
    return {"falls": falls, "runs": runs, "reached": falls["with"]["20 ms"] <= FALLS}


def outcome(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, help="the others keep their results")
    options = parsed(parser)
    torch.set_num_threads(1)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "race": lambda: raced(options.tasks, options.seeds),
        "targets": lambda: targeted(options.tasks, options.seeds),
        "delays": lambda: delayed(options.seeds),
    }
    missed = 0
    for part in options.only:
        figures = measures[part]()
        missed |= exit_code(figures)
        write_part("control" if options.seeds >= SEEDS else "control-quick", part, figures, parts=PARTS)
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
