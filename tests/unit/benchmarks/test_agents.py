"""The parts of the agents' benchmark fail if what they are about did not happen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import agents
from benchmarks.agent_faults import EvictedRun, KilledRun
from benchmarks.agent_runs import KINDS, LEARNING, Accuracy, AgentRun
from benchmarks.agent_tokens import ComparedTokens, check_tokens
from benchmarks.agent_waiting import Waited, check_waited

TOKENS = ComparedTokens(
    trajectories=10240, turns=35368, tokens=212161, differing=0, reencoded_differently=6644, evictions=2602
)
WAITED = Waited(wall_s=12.5, engine_s=12.4, critical_s=3.9, control_s=42.1, tokens_per_turn=32.0)
EVICTED = EvictedRun(
    seed=0, steps=12, samples=200, turns=800, evictions=200, evictions_acting=150, evictions_own_acting=90,
    differing_samples=0, differing_steps=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"evictions": 0}, "no evictions"),
        ({"reencoded_differently": 0}, "no turns reencoded differently"),
        ({"tokens": 0}, "no tokens"),
    ],
)
def test_tokens_that_nothing_could_have_changed_fail(broken: dict[str, int], why: str) -> None:
    check_tokens(TOKENS)
    with pytest.raises(RuntimeError, match=why):
        check_tokens(msgspec.structs.replace(TOKENS, **broken))


@pytest.mark.parametrize(
    ("broken", "why"),
    [({"tokens_per_turn": 20.0}, "turns have 20 tokens"), ({"critical_s": 0.9}, "did not wait 1 s a turn")],
)
def test_an_environment_that_answers_at_once_and_short_turns_fail(broken: dict[str, float], why: str) -> None:
    check_waited(WAITED)
    with pytest.raises(RuntimeError, match=why):
        check_waited(msgspec.structs.replace(WAITED, **broken))


@pytest.mark.parametrize("name", ["evictions", "evictions_own_acting"])
def test_runs_without_enough_evictions_do_not_reach_the_aim(name: str) -> None:
    assert agents.undisturbed([EVICTED])
    assert not agents.undisturbed([msgspec.structs.replace(EVICTED, **{name: 10})])


def test_a_run_whose_process_is_never_killed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unharmed(folder: Path, *, seed: int, **more: Any) -> KilledRun:
        return KilledRun(seed=seed, steps=12, kills=0, same=True)

    monkeypatch.setattr(agents, "killed_run", unharmed)
    with pytest.raises(RuntimeError, match="seed 0: no kills"):
        agents.kills_part(tmp_path, steps=12)


def test_a_recipe_without_evictions_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unharmed(folder: Path, recipe: str, kind: str, seed: int) -> AgentRun:
        return msgspec.structs.replace(agent_run(recipe, kind), evictions=0)

    monkeypatch.setattr(agents, "agent_run", unharmed)
    monkeypatch.setattr(agents, "smollm2", lambda: None)
    with pytest.raises(RuntimeError, match="guess, rewards, seed 0: no evictions"):
        agents.recipes_part(tmp_path, ["guess"], seeds=1, again=True)


def agent_run(recipe: str, kind: str) -> AgentRun:
    low, high = (Accuracy(share=share, low=share - 0.05, high=share + 0.05) for share in (0.3, 0.95))
    return AgentRun(
        recipe=recipe, kind=kind, seed=0, n=200, greedy_before=low, greedy_after=high if kind == LEARNING else low,
        sampled_before=None, sampled_after=None, evictions=1, minutes=1.0, cpu_minutes=1.0,
    )  # fmt: skip


def test_recipes_without_a_control_do_not_reach_the_aims() -> None:
    runs = [agent_run(recipe, kind) for recipe, kinds in KINDS.items() for kind in kinds]
    assert all(agents.verdict(runs).values())
    missed = [
        aim for aim, reached in agents.verdict([one for one in runs if one.kind == LEARNING]).items() if not reached
    ]
    assert missed == [f"{recipe}: controls do not learn" for recipe in KINDS]
