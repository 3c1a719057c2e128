"""A script that gets a signal while it trains, evaluates or generates: `tests/forked.py` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import tidemill as tm

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
SMALL: dict[str, Any] = {
    "model.char.layers": 1,
    "model.char.hidden_size": 32,
    "model.char.heads": 2,
    "batch.prompts": 4,
    "batch.group_size": 4,
    "trainer.steps": 4,
    "trainer.threads": 1,
    "engine.batch_invariant": True,
    "eval.every_steps": 0,
    "eval.prompts": 4,
    "checkpoint.every_steps": 1,
    "sampling.max_new_tokens": 2,
}


class Signal(tm.Callback):
    """Sends this process a signal after its second step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step(self, step: int, metrics: Any) -> None:
        if step == 2 and self.name:
            os.kill(os.getpid(), getattr(signal, self.name))


def arguments(name: str) -> dict[str, Any]:
    return {"data": ROWS, "rewards": ["exact"], "overrides": SMALL, "run_dir": "run", "callbacks": [Signal(name)]}


sent = threading.Lock()


@tm.reward(process=False)
def interrupting(completion: str) -> float:
    if sent.acquire(blocking=False):  # a second one would end the clean-up
        os.kill(os.getpid(), signal.SIGINT)
    return 0.0


async def train_in_a_loop(name: str) -> None:
    tm.train("char-addition", **arguments(name))


async def await_training(name: str) -> None:
    await tm.train_async("char-addition", **arguments("") | {"callbacks": [Signal(name)]})


def main() -> int:
    action, name = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    if action == "train":
        tm.train("char-addition", **arguments(name))
    elif action == "catch":
        try:
            tm.train("char-addition", **arguments(name))
        except (KeyboardInterrupt, SystemExit) as error:
            run: tm.Run = error.run  # type: ignore[union-attr]
            print(run.interrupted, run.summary["steps"], len(run.checkpoints) > 0)
            return 7
    elif action == "loop":
        asyncio.run(train_in_a_loop(name))
    elif action == "await":
        asyncio.run(await_training(name))
    elif action == "evaluate":
        tm.evaluate("char-addition", data=ROWS, rewards=[interrupting], overrides=SMALL)
    elif action == "generate":
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        many = {"sampling.max_new_tokens": 200, "model.char.layers": 8, "model.char.hidden_size": 256}
        tm.generate(["1+1="] * 3000, recipe="char-addition", overrides=SMALL | many)
    print("the next line")
    return 0
