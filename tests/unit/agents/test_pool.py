"""Episodes against a pool: results, budgets, and whose fault an error is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests import agent_environments as envs
from tests.agent_format import LineFormat, Play, call
from tidemill.agents.find import find_environment
from tidemill.agents.instances import CallOutcome
from tidemill.agents.pool import EnvironmentPool
from tidemill.agents.turn_plan import TurnPlanner
from tidemill.config.agent import BUILT_IN, EnvConfig
from tidemill.core.errors import GuardStop, UserError
from tidemill.core.records import unpack_tokens
from tidemill.extensions.registry import given_function, provide

FILE = envs.__file__


@asynccontextmanager
async def open_pool(
    environment: type, *, report: Callable[[str], None] = lambda _: None, **keys: Any
) -> AsyncIterator[EnvironmentPool]:
    name = environment.__name__
    config = EnvConfig(name=name.lower() if name.lower() in BUILT_IN else f"{FILE}:{name}", **keys)
    pool = EnvironmentPool(find_environment(config), config, LineFormat(), run_id="run", report=report)
    try:
        yield pool
    finally:
        await pool.close()


async def test_an_environment_answers_its_turns() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {"seed": 5, "prompt": "go"}, "go")
        seen = await play.act("a")
        assert (seen.text, seen.reward, seen.state_key, seen.end) == ("1 a 5", 0.5, "k1", "")
        assert unpack_tokens(seen.token_ids) == [ord(char) for char in "1 a 5"]
        assert (await play.act("b")).text == "2 b 5"
        last = await play.act("done")
        assert (last.text, last.reward, last.end, last.token_ids) == ("over", 1.0, "done", b"")
        counts = pool.take_counts()
        assert counts.pop("calls") == 3
        assert not any(counts.values())


async def test_methods_may_be_coroutines() -> None:
    async with open_pool(envs.AsyncCounter) as pool:
        play = Play(pool, {}, "go")
        assert [(await play.act("x")).text for _ in range(3)] == ["1", "2", "3"]


async def test_tools_answer_and_the_answer_is_scored() -> None:
    async with open_pool(envs.Tools) as pool:
        play = Play(pool, {"prompt": "add"}, "add")
        seen = await play.act(call("add", number=2) + call("add", number=3))
        assert [each.result for each in seen.calls] == ["2", "5"]
        assert [each.call_id for each in seen.calls] == [
            f"run-{play.sample_id.key:016x}-0-1-{index}" for index in (0, 1)
        ]
        last = await play.act("5")
        assert (last.end, last.reward, last.calls) == ("done", 1.0, ())
        finished = await Play(pool, {"prompt": "add"}, "add").act(call("finish", answer="0"))
        assert (finished.end, finished.reward) == ("done", 1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{not json", "error: the call is not JSON"),
        (
            call("nothing"),
            "error: there is no tool nothing; the tools are add, sleep, wait, wrong, hang, pay, fail, finish",
        ),
        (call("add"), "error: add: number: Field required"),
        (call("add", number="2"), "error: add: number: Input should be a valid integer"),
        (call("add", number=2, extra=1), "error: add: extra: Extra inputs are not permitted"),
        (call("fail", text="no such page"), "error: RuntimeError: no such page"),
        (call("hang"), "error: hang did not return within 0.3 s"),
    ],
)
async def test_mistakes_of_the_agent_are_observations(text: str, error: str) -> None:
    async with open_pool(envs.Tools) as pool:
        play = Play(pool, {"prompt": "add"}, "add")
        await play.act(call("add", number=1))
        seen = await play.act(text)
        assert (seen.text, seen.end, seen.calls[0].error) == (error, "", True)
        assert seen.timeouts == pool.take_counts()["timeouts"] == ("hang" in text)
        assert (await play.act(call("add", number=1))).text == "2"  # the state is as before the mistake


async def test_mistakes_in_calls_are_cleaned_and_calls_at_the_same_time_may_raise_anything() -> None:
    async with open_pool(envs.Loose, call_timeout_s=1.0) as pool:
        play = Play(pool, {"prompt": ""})
        seen = await play.act(call("a\0b") + call("\ud800"))
        assert seen.text.startswith("error: there is no tool a\ufffdb; ")
        assert "there is no tool \ufffd; " in seen.text
        assert (await play.act(call("find", text="a") * 2)).text == "error: StopIteration\nerror: StopIteration"


async def test_an_exception_of_a_step_is_an_observation_that_repeats_exactly() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        seen = await play.act("raise")
        assert seen.text == "error: ValueError: bad action <object object at 0x…>"
        assert (await play.act("exit")).text == "error: SystemExit: 3"
        pool.forget([play.sample_id])  # restored by replay
        assert (await play.act("a")).text.startswith("3 a")
        assert pool.take_counts()["mistakes"] == 2


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("number", "returned int, and a Step is needed"),
        ("none", "returned NoneType, and text is needed"),
        ("nan", "returned the reward nan, and a finite number is needed"),
        ("vast", f"returned the reward 1{'0' * 39}, and a finite number is needed"),
        ("digits", "returned the reward <int>, and a finite number is needed"),
        ("array", "returned the reward array([1., 2.]), and a finite number is needed"),
        (
            "flag",
            "returned Step(text='x', reward=0.0, done=1, state_key=''); done is True or False, and state_key is text",
        ),
        ("opaque", "returned <Step>; done is True or False, and state_key is text"),
    ],
)
async def test_what_is_not_an_observation_is_the_environments_fault(action: str, reason: str) -> None:
    reports: list[str] = []
    async with open_pool(envs.Counter, report=reports.append, max_environment_errors=3) as pool:
        for index in range(2):
            seen = await Play(pool, {}, index=index).act(action)
            assert (seen.end, seen.reason) == ("fault", f"Counter.step {reason}")
        assert reports == [f"Counter.step {reason}"]
        with pytest.raises(GuardStop, match="3 episodes were lost to faults of the environment Counter; the first: "):
            await Play(pool, {}, index=3).act(action)


CLEANED = [  # action, observation, whether it was cut, and cleaned
    ("nul", "a\ufffdb", 0, 1),
    ("surrogate", "\ufffd", 0, 1),
    ("long 1300", "ab" * 11 + "a\n[2555 tokens cut]\n" + "ab" * 11, 1, 0),
    ("huge", "x" * 19 + "\n[9999962 characters cut]\n" + "x" * 19, 1, 0),
    ("silent", "error: Opaque: its __str__ raised SystemExit", 0, 0),
    ("mistake 3", "error: a\ufffdb\ufffdccc", 0, 1),
    ("mistake 20000", "error: a\ufffdb\ufffdccccccccc\n[19971 characters cut]\n" + "c" * 20, 1, 1),
]


async def test_observations_are_cleaned_and_cut_at_any_length() -> None:
    async with open_pool(envs.Counter, observation_tokens=64, max_environment_errors=1) as pool:
        for index, (action, text, cut, cleaned) in enumerate(CLEANED):
            play = Play(pool, {"seed": 5}, index=index)
            seen = await play.act(action)
            assert (seen.text, seen.end) == (text, "")
            counts = pool.take_counts()
            assert (counts["cut"], counts["cleaned"]) == (cut, cleaned)
            pool.forget([play.sample_id])  # restored by replay
            assert (await play.act("a")).text == "2 a 5"


async def test_state_keys_of_any_length_stay_different() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        keys = [(await play.act(action)).state_key for action in ("longkey a", "longkey b", "longkey a", "key")]
        assert keys[0] == keys[2]
        assert [len(key) for key in {*keys}] == [32] * 3


async def test_scalars_of_numpy_and_subclasses_of_step_are_results() -> None:
    async with open_pool(envs.Counter) as pool:
        seen = await Play(pool, {}).act("scalars")
        assert (seen.text, seen.reward, seen.end, seen.state_key) == ("x", 0.5, "done", "3")


async def test_wrong_results_of_tools_are_faults() -> None:
    async with open_pool(envs.Tools) as pool:
        seen = await Play(pool, {"prompt": ""}).act(call("wrong"))
        assert (seen.end, seen.reason) == ("fault", "Tools.wrong returned int, and text is needed")


async def test_an_answer_that_breaks_its_score_gets_the_failure_reward() -> None:
    reasons = {
        "broken": "raised ValueError: no score",
        "slow": "did not return within 0.3 s",
        "none": "returned the reward None, and a finite number is needed",
    }
    async with open_pool(envs.Tools, call_timeout_s=0.3, failure_reward=-1.0, max_environment_errors=1) as pool:
        for index, (answer, reason) in enumerate(reasons.items()):
            seen = await Play(pool, {"prompt": ""}, index=index).act(answer)
            assert (seen.end, seen.outcome) == ("failure", -1.0)
            assert seen.reason == f"Tools.score {reason}, while the answer '' has a score"


async def test_a_score_that_always_fails_is_a_fault() -> None:
    async with open_pool(envs.Unscored) as pool:
        seen = await Play(pool, {"prompt": "", "answer": "3"}).act("3")
        assert (seen.end, seen.reason) == ("fault", "Unscored.score raised OSError: no grader")


async def test_a_step_after_the_end_is_a_fault() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        await play.act("done")
        seen = await play.act("a")
        assert (seen.end, seen.reason) == ("fault", "Counter.step was called after the end of the episode")


async def test_long_observations_lose_their_middle() -> None:
    async with open_pool(envs.Counter, observation_tokens=64) as pool:
        seen = await Play(pool, {}).act("long 100")
        assert seen.text == "ab" * 11 + "a\n[154 tokens cut]\nb" + "ab" * 11
        assert len(unpack_tokens(seen.token_ids)) == 64


async def test_budgets_end_episodes() -> None:
    async with open_pool(envs.Counter, turns=3) as pool:  # the environment never ends
        play = Play(pool, {})
        assert [(await play.act("a")).end for _ in range(3)] == ["", "", "turns"]
    async with open_pool(envs.Tools, calls=3, seconds=0.5) as pool:
        play = Play(pool, {"prompt": ""})
        await play.act(call("add", number=1) * 2)
        seen = await play.act(call("add", number=1) * 2)
        assert (seen.end, [each.result for each in seen.calls]) == ("calls", ["3"])
        seen = await Play(pool, {"prompt": ""}, index=1).act(call("sleep", seconds=9))
        assert (seen.end, seen.timeouts) == ("seconds", 1)
        assert seen.text.startswith("error: sleep did not return within 0.")  # what was left of the 0.5 s


async def test_an_episode_that_kills_every_process_gets_its_failure_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.agents.pool.BACKOFF_S", 0.0)
    async with open_pool(envs.Counter, failure_reward=-1.0) as pool:
        play, other = Play(pool, {}), Play(pool, {}, index=1)
        await other.act("a")
        seen = await play.act("die")
        assert (seen.end, seen.outcome) == ("failure", -1.0)
        assert seen.reason == "its process was ended by SIGKILL (3 attempts), while a new process can be reset"
        assert (await other.act("b")).text.startswith("2 b")
        counts = pool.take_counts()
        assert (counts["retries"], counts["failures"], counts["faults"]) == (2, 1, 0)


LOSSES = [  # environment, actions of which the last one loses the episode, its end, what the reason ends with
    (envs.Counter, ["random", "sleep", "a"], "failure", "after a call of the episode ended its process"),
    (envs.Counter, ["random", "die"], "failure", "after a call of the episode ended its process"),
    (envs.Loose, [call("now"), call("hang"), call("now")], "failure", "after a call of the episode ended its process"),
    (envs.OnceCounter, ["sleep", "a"], "failure", "the state of the episode was lost with a late step"),
    (envs.OnceCounter, ["die"], "fault", "must not be repeated, and its process was ended by SIGKILL"),
    (envs.Tools, [call("pay", file="/dev/null", how="die")], "fault", "its process was ended by SIGKILL"),
]


@pytest.mark.parametrize(("environment", "actions", "end", "reason"), LOSSES)
async def test_an_agent_that_loses_its_process_does_not_end_the_run(
    environment: type, actions: list[str], end: str, reason: str
) -> None:
    async with open_pool(environment, call_timeout_s=0.3, failure_reward=-1.0, max_environment_errors=1) as pool:
        play = Play(pool, {"prompt": ""})
        assert [(await play.act(action)).end for action in actions[:-1]] == [""] * (len(actions) - 1)
        seen = await play.act(actions[-1])
        assert (seen.end, seen.outcome) == (end, -1.0 if end == "failure" else None)
        assert seen.reason.endswith(reason)


async def test_what_is_not_deterministic_is_left_out_and_does_not_end_the_run() -> None:
    async with open_pool(envs.Counter, max_environment_errors=1) as pool:
        play = Play(pool, {})
        await play.act("random")
        pool.forget([play.sample_id])  # as in a resumed run
        seen = await play.act("a")
        assert seen.end == "fault"
        assert seen.reason.startswith("the environment Counter is not deterministic: repeating turn 1 gave ")
    async with open_pool(envs.Counter, max_environment_errors=1) as pool:
        with pytest.raises(GuardStop, match="repeating turn 0 gave 'go' instead of 'went'"):  # its own `reset`
            await Play(pool, {"prompt": "go"}, "went").act("a")


async def test_a_process_that_dies_is_retried(tmp_path: Path) -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        await play.act("a")
        assert (await play.act(f"dieonce {tmp_path}/mark")).text == "survived"
        assert (await play.act("b")).text.startswith("3 b")


async def test_an_environment_that_cannot_be_reset_is_not_the_agents_fault(tmp_path: Path) -> None:
    async with open_pool(envs.DiesAtReset, attempts=2) as pool:
        seen = await Play(pool, {}).act("a")
        assert seen.end == "fault"
        assert "ended with exit code 9 (2 attempts), and a new process fails too" in seen.reason
    async with open_pool(envs.Broken) as pool:
        seen = await Play(pool, {}).act("a")
        assert (seen.end, seen.reason) == ("fault", "Broken.reset raised ConnectionError: no database")
    async with open_pool(envs.Counter, attempts=1) as pool:  # the health check fails
        seen = await Play(pool, {"once": f"{tmp_path}/once"}).act("die")
        assert seen.end == "fault"


async def test_calls_that_must_not_be_repeated_are_not(tmp_path: Path) -> None:
    file = tmp_path / "payments"
    async with open_pool(envs.Tools) as pool:
        play = Play(pool, {"prompt": ""})
        text = call("pay", file=str(file)) + call("add", number=1)
        await play.act(text)
        assert (play.log.starts, play.log.ends[0].result) == ([0], "paid")
        again = Play(pool, {"prompt": ""}, index=1)  # after the controller was killed: the result is durable
        seen = await again.act(text, finished=play.log.ends, started=(0,))
        assert [each.result for each in seen.calls] == ["paid", "1"]
        seen = await Play(pool, {"prompt": ""}, index=2).act(text, started=(0,))  # it is not
        assert (seen.end, seen.reason) == ("fault", "Tools.pay was interrupted, and must not be repeated")
        dying = Play(pool, {"prompt": ""}, index=3)
        seen = await dying.act(call("pay", file=str(file), how="die"))
        assert seen.end == "fault"
        assert seen.reason == "Tools.pay must not be repeated, and its process was ended by SIGKILL"
        pool.forget([play.sample_id])  # restoring skips it, and repeats the others
        assert (await play.act(call("add", number=1))).text == "2"
        lines = file.read_text().splitlines()
        assert lines == [f"run-{each.sample_id.key:016x}-0-1-0" for each in (play, dying)]


async def test_a_late_call_is_killed_once_calls_that_must_not_be_repeated_have_ended(tmp_path: Path) -> None:
    file = tmp_path / "payments"
    async with open_pool(envs.Tools) as pool:
        play = Play(pool, {"prompt": ""})
        texts = [call("add", number=1), call("hang"), call("pay", file=str(file), seconds=0.8)]
        seen = await play.act("".join([*texts, call("sleep", seconds=1.2)]))
        results = ["1", "error: hang did not return within 0.3 s", "paid", "slept"]
        assert [each.result for each in seen.calls] == results
        assert (await play.act(call("add", number=1))).text == "2"
        assert len(file.read_text().splitlines()) == 1
        seen = await play.act(call("pay", file=str(file), seconds=3))  # late itself: durable, never repeated
        assert seen.text == play.log.ends[0].result == "error: pay did not return within 2 s"


async def test_state_that_cannot_be_repeated_is_not_restored() -> None:
    async with open_pool(envs.OnceCounter) as pool:
        play = Play(pool, {})
        await play.act("a")
        assert (await play.act("b")).text.startswith("2 b")
        assert play.log.starts == [0, 0]
        pool.forget([play.sample_id])
        assert (await play.act("c")).end == "fault"


async def test_an_interrupted_run_is_not_the_environments_fault() -> None:
    async with open_pool(envs.OnceCounter, max_environment_errors=1) as pool:
        play = Play(pool, {})
        await play.act("a")
        pool.forget([play.sample_id])
        assert (await play.act("b")).end == "fault"
    async with open_pool(envs.Tools, max_environment_errors=1) as pool:
        seen = await Play(pool, {"prompt": ""}).act(call("pay", file="x"), started=(0,))
        assert (seen.end, seen.reason) == ("fault", "Tools.pay was interrupted, and must not be repeated")


async def test_every_evaluation_has_call_ids_of_its_own() -> None:
    ids = []
    for purpose in ("train", "eval:held_out"):
        for _ in range(2):
            async with open_pool(envs.Tools) as pool:
                play = Play(pool, {"prompt": ""})
                play.sample_id = structs.replace(play.sample_id, purpose=purpose)
                ids.append((await play.act(call("add", number=1))).calls[0].call_id)
                pool.forget([play.sample_id])
    assert ids[0] == ids[1]
    assert len({*ids}) == 3


async def test_a_different_observation_in_a_replay_is_a_fault() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        await play.act("random")
        pool.forget([play.sample_id])
        seen = await play.act("a")
        assert seen.end == "fault"
        assert seen.reason.startswith("the environment Counter is not deterministic: repeating turn 1 gave ")
        seen = await Play(pool, {"prompt": "now"}, "earlier", index=1).act("a")
        assert "repeating turn 0 gave 'now' instead of 'earlier'" in seen.reason


async def test_stateless_tools_are_not_repeated() -> None:
    async with open_pool(envs.Stateless) as pool:
        play = Play(pool, {"prompt": ""})
        await play.act(call("now"))
        pool.forget([play.sample_id])
        assert (await play.act(call("now"))).end == ""


@pytest.mark.parametrize(
    ("characters", "seen"), [("error: ValueError", "error: ValueError"), ("ero", "error"), ("x", "")]
)
def test_a_mistake_is_shortened_to_what_the_vocabulary_expresses(characters: str, seen: str) -> None:
    class Narrow(LineFormat):
        def encode_text(self, text: str) -> list[int]:
            if set(text) - set(characters):
                raise UserError("the vocabulary lacks characters", where="model")
            return super().encode_text(text)

    planner = TurnPlanner(envs.Counter, EnvConfig(), Narrow())
    outcome = CallOutcome(index=0, text="ValueError", error="raised")
    assert planner.settle(planner.step("x"), outcome).text == seen
    text = f"\t{characters * 300}ü"  # also the marker of a cut cannot be expressed
    known = planner.settle(planner.step("x"), CallOutcome(index=0, text=text))
    assert (known.text, known.cleaned) == (text[1:129] + text[-129:-1], True)
    assert planner.lacking == {"\t", "ü"}


async def test_exceptions_and_late_steps_never_gain(tmp_path: Path) -> None:
    async with open_pool(envs.OnceCounter, call_timeout_s=0.5) as pool:
        assert (await Play(pool, {}).act("raise")).reward == -2.0
        assert (await Play(pool, {}, index=1).act(f"hang {tmp_path / 'pid'}")).reward == -2.0


async def test_the_final_answer_is_text_without_calls() -> None:
    async with open_pool(envs.Tools) as pool:
        assert (await Play(pool, {"prompt": ""}).act("3")).final == "3"
        assert (await Play(pool, {"prompt": ""}, index=1).act(call("finish", answer="4"))).final == "4"
        assert (await Play(pool, {"prompt": ""}, index=2).act(call("add", number=1))).final is None
    async with open_pool(envs.Counter) as pool:
        assert (await Play(pool, {}).act("done")).final is None


async def test_episodes_reuse_processes_and_repeat_in_every_session() -> None:
    texts = set()
    for _ in range(3):
        async with open_pool(envs.Counter) as pool:
            for index in range(5):
                play = Play(pool, {}, index=index)
                texts.add((await play.act("order")).text)
                pool.forget([play.sample_id])
            assert len(pool.placement._hosts) == 1
    assert len(texts) == 1


async def test_parallel_calls_run_at_once_and_answer_in_order() -> None:
    async with open_pool(envs.Tools) as pool:
        play = Play(pool, {"prompt": ""})
        await play.act(call("add", number=1))
        begun = time.perf_counter()
        seen = await play.act(
            "".join(call("sleep", seconds=0.5 - number / 10, text=str(number)) for number in range(4))
            + call("wait", seconds=0.5)
        )
        assert 0.5 <= time.perf_counter() - begun < 0.9
        assert seen.text == "0\n1\n2\n3\nwaited"


async def test_concurrency_limits_calls_and_waiting_costs_no_time() -> None:
    async with open_pool(envs.Tools, concurrency=2) as pool:
        plays = [Play(pool, {"prompt": ""}, index=index) for index in range(12)]  # share 8 processes
        await asyncio.gather(*[play.act(call("add", number=1)) for play in plays])
        begun = time.perf_counter()
        seen = await asyncio.gather(*[play.act(call("sleep", seconds=0.5)) for play in plays])
        assert 3.0 <= time.perf_counter() - begun < 3.9
        assert {each.text for each in seen} == {"slept"}  # although the deadline is 2 s
        many = await plays[0].act(call("add", number=1) * 5)
        assert len(many.calls) == 5


async def test_episodes_of_a_class_with_costly_processes_share_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    async with open_pool(envs.CostlyCounter, concurrency=8) as pool:
        plays = [Play(pool, {"seed": index}, index=index) for index in range(12)]
        await asyncio.gather(*[play.act("a") for play in plays])

        assert len(pool.placement._hosts) == 3


async def test_many_episodes() -> None:
    async with open_pool(envs.Counter, concurrency=8) as pool:
        plays = [Play(pool, {"seed": index}, index=index) for index in range(200)]

        async def play(each: Play) -> None:
            for turn in range(1, 4):
                assert (await each.act("a")).text == f"{turn} a {each.sample_id.index}"
            assert (await each.act("done")).end == "done"
            pool.forget([each.sample_id])

        await asyncio.gather(*map(play, plays))
        assert pool.take_counts()["calls"] == 800


async def test_classes_of_the_session_run_on_threads() -> None:
    class Local(envs.Counter):
        def do_sleep(self, value: str) -> Any:
            time.sleep(float(value))
            return super().step("x")

    extension = given_function(Local, "environment", where="env.name")
    provide([extension])
    config = EnvConfig(name=extension.ref, call_timeout_s=0.2)
    assert config.name == "session:Local"
    pool = EnvironmentPool(find_environment(config), config, LineFormat())
    play = Play(pool, {"seed": 1})
    assert (await play.act("a")).text == "1 a 1"
    assert (await play.act("raise")).text.startswith("error: ValueError: bad action")
    assert (await play.act("sleep 0.6")).text == "error: step did not return within 0.2 s"
    assert (await play.act("b")).text == "3 b 1"
    await asyncio.sleep(0.6)
    await pool.close()
