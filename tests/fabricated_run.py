"""A run directory fabricated from a seed through the recorder, for tests of reports and summaries."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from pathlib import Path

from tidemill.config.schema import RunSpec
from tidemill.core.records import (
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    Segment,
    StepMetrics,
    Trajectory,
    VersionRun,
    pack_logprobs,
    pack_tokens,
)
from tidemill.telemetry.events import span
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

ALPHABET = "\n 0123456789+=-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>/'\"()&;.!é*{}:,_"
HELD_OUT = 64


class FakeClock:
    """A clock that advances only on request."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def decode(token_ids: Sequence[int]) -> str:
    """Token ids of ALPHABET, one per character."""
    return "".join(ALPHABET[token_id] for token_id in token_ids)


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def make_prompt(text: str, answer: str = "7") -> Prompt:
    return Prompt(prompt_id=f"p-{text}", token_ids=pack_tokens(encode(text)), text=text, answer=answer)


def make_trajectory(
    prompt: Prompt,
    completion: str,
    *,
    logprobs: Sequence[float] | None = None,
    reward: Reward | None = None,
    purpose: str = "train",
    index: int = 0,
    finish: str = "stop",
    version: int = 0,
) -> Trajectory:
    """A single-turn sample, one token per character."""
    prompt_ids, ids = encode(prompt.text), encode(completion)
    end = len(prompt_ids) + len(ids)
    return Trajectory(
        sample_id=SampleId(run_seed=0, purpose=purpose, prompt_id=prompt.prompt_id, epoch=0, index=index),
        token_ids=pack_tokens([*prompt_ids, *ids]),
        segments=(
            Segment(role="prompt", start=0, end=len(prompt_ids), trained=False),
            Segment(role="action", start=len(prompt_ids), end=end, trained=True),
        ),
        rollout_logprobs=pack_logprobs(logprobs if logprobs is not None else [-0.5] * len(ids)),
        versions=(VersionRun(version=PolicyVersion(number=version, digest="d0"), start=0, end=len(ids)),),
        finish=finish,  # type: ignore[arg-type]
        text=completion,
        reward=reward,
    )


class FabricatedRun:
    """Twenty steps in which a model learns to add, killed after step 13 and resumed from the checkpoint of step 10."""

    config = '[run]\nname = "smollm2-addition"\n\n[trainer]\nsteps = 20\nlearning_rate = 1e-5\n'

    def __init__(self, path: Path, *, seed: int = 0, steps: int = 20, groups: int = 8, group_size: int = 8) -> None:
        self.path, self.steps, self.groups, self.group_size = path, steps, groups, group_size
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.spec = RunSpec.model_validate(
            {"run": {"name": "smollm2-addition", "dir": str(path)}, "trainer": {"steps": steps}}
        )

    def session(self) -> Recorder:
        """Open the run for another session; the previous one must be closed."""
        run = RunDirectory.open(self.path)
        unix_s = 1_790_000_000 + self.clock.now_s
        if not run.exists:
            run.write_config(self.config)
        earlier = run.read_manifest()
        argv = ["tidemill", "train", "@recipes/smollm2-addition.toml", "--run.dir", "runs/demo"]
        run.write_manifest(
            build_manifest(earlier, run="smollm2-addition", model="smollm2-135m", seed=0, unix_s=unix_s, argv=argv)
        )
        origin_s = self.clock.now_s
        return Recorder(
            run,
            self.spec,
            decode=decode,
            stream=io.StringIO(),
            clock=self.clock,
            unix_time=lambda: unix_s + self.clock.now_s - origin_s,
            memory=lambda: 2_900_000_000,
        )

    def make(self) -> RunDirectory:
        """The whole run, from the first session to summary.json."""
        first = self.session()
        self.evaluate(first, 0)
        for step in range(1, min(13, self.steps) + 1):
            self.learn(first, step)
        # A kill: nothing is closed and no session_end is written.
        first._events.close()
        first._metrics.close()
        first.run.close()
        self.clock.pass_s(3600.0)
        second = self.session()
        second.resume(10)
        for step in range(11, self.steps + 1):
            self.learn(second, step)
        self.leave(second)
        second.finish("finished")
        second.run.close()
        return RunDirectory(self.path)

    def leave(self, recorder: Recorder) -> None:
        """Called at the end of a session that is not killed."""

    def spend(self, recorder: Recorder, seconds: float) -> None:
        self.clock.pass_s(seconds)

    def skill(self, step: int) -> float:
        return 0.28 + 0.58 / (1 + math.exp(-(step - 7) / 2.2))

    def learn(self, recorder: Recorder, step: int) -> None:
        """One training step, with an evaluation every fifth and a checkpoint every tenth."""
        recorder.progress("rollout", 0, self.groups * self.group_size)
        pairs = [self._sample(step, group, index) for group in range(self.groups) for index in range(self.group_size)]
        trajectories = [trajectory for trajectory, _ in pairs]
        rollout_s, train_s = self.work(recorder, step)
        recorder.samples(step, trajectories, [prompt for _, prompt in pairs])
        values = self._values(step, trajectories, rollout_s, train_s)
        if step % 5 == 0:
            values |= self.evaluate(recorder, step)
        recorder.step(
            StepMetrics(
                step=step,
                version=PolicyVersion(number=step, digest=f"{step:032x}"),
                optimizer_steps=1,
                values=values,
            )
        )
        if step % 10 == 0:
            with span(recorder, self.clock, "checkpoint", step=step):
                self.spend(recorder, 1.4)

    def work(self, recorder: Recorder, step: int) -> tuple[float, float]:
        """Generate and train; returns both times."""
        rollout_s, train_s = self.random.uniform(0.8, 1.1), self.random.uniform(2.6, 3.1)
        with span(recorder, self.clock, "rollout", step=step):
            self.spend(recorder, rollout_s)
        with span(recorder, self.clock, "training", step=step):
            self.spend(recorder, train_s)
        return rollout_s, train_s

    def evaluate(self, recorder: Recorder, step: int) -> dict[str, float]:
        """Log the samples and the event of an evaluation; returns its step metrics."""
        pairs = [self._sample(step, index, 0, purpose="eval:held_out") for index in range(HELD_OUT)]
        accuracy = sum((t.reward.value if t.reward else 0.0) for t, _ in pairs) / HELD_OUT
        with span(recorder, self.clock, "evaluation", step=step) as fields:
            self.spend(recorder, 1.9)
            stderr = math.sqrt(accuracy * (1 - accuracy) / (HELD_OUT - 1))
            figures = {"reward_mean": accuracy, "reward_stderr": stderr, "greedy_accuracy": accuracy}
            fields |= {**figures, "n": HELD_OUT}
        recorder.samples(step, [t for t, _ in pairs], [p for _, p in pairs])
        values = {f"eval/{name}": value for name, value in figures.items()}
        return {**values, "eval/n": float(HELD_OUT), "time_eval_s": 1.9}

    def _sample(self, step: int, group: int, index: int, purpose: str = "train") -> tuple[Trajectory, Prompt]:
        chance = self.random
        pick = random.Random(f"{purpose}{group}{step if purpose == 'train' else 0}")
        left, right = pick.randint(0, 9), pick.randint(0, 9)
        prompt = make_prompt(f"3 + 4 = 7\n8 + 1 = 9\n{left} + {right} =", str(left + right))
        right_answer = chance.random() < self.skill(step)
        number = left + right if right_answer else chance.randint(0, 18)
        completion = f" {number}\n"
        sureness = 0.2 + 2.5 * (1 - self.skill(step))
        logprobs = [-chance.expovariate(1 / (sureness * weight)) for weight in (0.1, *[1.0] * len(str(number)), 0.2)]
        if purpose == "train" and chance.random() < 0.08 * (1 - self.skill(step)) + 0.01:
            completion, right_answer = " the answer is", False
            logprobs = [-chance.expovariate(0.7) for _ in completion]
        value = 1.0 if right_answer or completion == f" {left + right}\n" else 0.0
        reward = Reward(value=value, components={"exact": value})
        if purpose == "train" and chance.random() < 0.004:
            reward = Reward(value=0.0, valid=False, reason="reward raised ValueError: not a number")
        finish = "length" if completion.endswith("is") else "stop"
        trajectory = make_trajectory(
            prompt, completion, logprobs=logprobs, reward=reward, purpose=purpose, index=index, finish=finish,
            version=max(0, step - 1),
        )  # fmt: skip
        return trajectory, prompt

    def _values(
        self, step: int, trajectories: Sequence[Trajectory], rollout_s: float, train_s: float
    ) -> dict[str, float]:
        rewards = [t.reward.value for t in trajectories if t.reward and t.reward.valid]
        mean = sum(rewards) / len(rewards)
        lengths = [t.completion_length for t in trajectories]
        chance, tokens = self.random, sum(lengths)
        return {
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)),
            "entropy": 0.25 + 1.6 * (1 - self.skill(step)) * chance.uniform(0.9, 1.1),
            "approx_kl": 2e-4 * chance.uniform(0.6, 2.4),
            "clip_fraction": 0.01 * chance.uniform(0.2, 2),
            "completion_tokens_mean": tokens / len(lengths),
            "completion_tokens_max": float(max(lengths)),
            "truncated_fraction": sum(t.truncated for t in trajectories) / len(lengths),
            "groups_without_signal": float(chance.randint(0, 1 + step // 6)),
            "groups_skipped_invalid": 0.0,
            "samples_invalid": float(len(trajectories) - len(rewards)),
            "tokens_generated": float(tokens),
            "tokens_trained": float(tokens),
            "prompt_tokens_computed": 240.0,
            "prompt_tokens_reused": 1240.0,
            "loss": -0.01 * chance.random(),
            "grad_norm": 0.6 + 1.2 * math.exp(-step / 6) * chance.uniform(0.7, 1.4),
            "learning_rate": 1e-5,
            "mismatch_kl": 3e-7 * chance.random(),
            "ratio_mean": 1.0 + 1e-4 * chance.random(),
            "ratio_var": 1e-4,
            "ratio_max": 1.2 + chance.random() / 5,
            "effective_sample_size": 0.999,
            "time_rollout_s": rollout_s,
            "time_train_s": train_s,
            "time_score_s": 0.02,
            "tokens_per_s": tokens / rollout_s,
        }
