"""A run of agents fabricated from a seed, for tests of reports: a calculator's calls, and turns without calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fabricated_run import FabricatedRun, encode, make_prompt
from tests.trajectories import Part, agent_trajectory
from tidemill.controller.batching import sample_figures
from tidemill.core.records import (
    Call,
    EpisodeEnd,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    SourceRun,
    Trajectory,
    Turn,
    VersionRun,
    pack_logprobs,
)
from tidemill.telemetry.events import ENVIRONMENT_WARNING
from tidemill.telemetry.recorder import Recorder

FAULT = "a result of calculate is not a text (list)"


class FabricatedAgents(FabricatedRun):
    """Groups with an even number multiply with a calculator, the others guess a number."""

    def _sample(self, step: int, group: int, index: int, purpose: str = "train") -> tuple[Trajectory, Prompt]:
        able, left = self.random.random() < self.skill(step), 10 + group
        end: EpisodeEnd = "done"
        if group % 2 == 0:
            prompt = make_prompt(f"Multiply with the calculator.\n{left} * 47 =", str(left * 47))
            asked = f'{{"expression": "{left} * 47"}}' if able else f'{{"expressions": "{left} 47"}}'
            result = str(left * 47) if able else "error: calculate has no argument expressions"
            call_id = f"{step}-{group}-{index}"
            call = Call(call_id=call_id, name="calculate", arguments=asked, result=result, error=not able)
            said = [(f"<tool>{asked}</tool>", result, (call,)), (str(left * (47 if able else 40)), "", ())]
        else:
            prompt = make_prompt(f"{left}-{left + 8}\n")
            tries = (4, 6, 5) if able else (4, 4, 4, 4)
            answers = ("higher\n", "lower\n", "") if able else ("higher\n", "higher\n", "higher\n", "")
            said = [(f"{left + at}\n", answer, ()) for at, answer in zip(tries, answers, strict=True)]
            end = "done" if able else "turns"
        fault = FAULT if purpose == "train" and self.random.random() < 0.04 else ""
        reward = Reward(value=float(able), valid=not fault, reason=fault)
        sample_id = SampleId(run_seed=0, purpose=purpose, prompt_id=prompt.prompt_id, epoch=0, index=index)
        ended: dict[str, Any] = {"reward": reward, "episode_end": "fault" if fault else end, "fault": fault}
        return self._episode(step, prompt, said, able=able, sample_id=sample_id, **ended), prompt

    def _episode(
        self, step: int, prompt: Prompt, said: Sequence[tuple[str, str, tuple[Call, ...]]], *, able: bool, **fields: Any
    ) -> Trajectory:
        """An episode of (text, answer, calls) turns: an eviction interrupts it, and a newer version continues it."""
        turns, parts, at = list[Turn](), list[Part](), 0
        for text, answer, calls in said:
            end = at + len(text)
            last = len(turns) + 1 == len(said)
            turns.append(
                Turn(
                    start=at,
                    end=end,
                    text=text,
                    observation=answer,
                    observation_end=end + len(answer),
                    reward=float(able and last),
                    calls=calls,
                )
            )
            parts += [("action", encode(text)), ("observation", encode(answer))]
            at = end + len(answer)
        moved = self.random.randrange(1, at)
        old, new = (PolicyVersion(number=max(0, step - lag), digest=f"d{step - lag}") for lag in (2, 1))
        logprobs = [-self.random.expovariate(1.5) for text, _, _ in said for _ in text]
        return agent_trajectory(
            encode(prompt.text),
            parts,
            [turn.reward for turn in turns],
            turns=tuple(turns),
            text="".join(f"{text}{answer}" for text, answer, _ in said),
            rollout_logprobs=pack_logprobs(logprobs),
            versions=(VersionRun(version=old, start=0, end=moved), VersionRun(version=new, start=moved, end=at)),
            sources=(
                SourceRun(source="vllm/spot-3", start=0, end=moved),
                SourceRun(source="embedded/local", start=moved, end=at),
            ),
            **fields,
        )

    def _values(
        self, step: int, trajectories: Sequence[Trajectory], rollout_s: float, train_s: float
    ) -> dict[str, float]:
        calls = [call for one in trajectories for turn in one.turns for call in turn.calls]
        return {
            **super()._values(step, trajectories, rollout_s, train_s),
            **sample_figures(trajectories),
            "time_env_answer_s": self.random.uniform(0.01, 0.03),
            "env_calls": float(len(calls)),
            "env_mistakes": float(sum(call.error for call in calls)),
            "env_timeouts": float(self.random.randint(0, 2)),
            "env_retries": 1.0,
            "env_failures": 0.0,
            "env_faults": float(sum(bool(one.fault) for one in trajectories)),
        }

    def leave(self, recorder: Recorder) -> None:
        recorder.event(ENVIRONMENT_WARNING, reason=FAULT)
