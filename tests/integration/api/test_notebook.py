"""A notebook trains SmolLM2 with own rows, reward, advantage and callback; an interrupt of the kernel stops a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

SETUP = """
import tidemill as tm

rows = [{"prompt": f"2+2=4\\n3+5=8\\n{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]

@tm.reward
def right(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)

@tm.advantage
def centred(rewards, valid):
    return (rewards - rewards[valid].mean()) * valid

class Watch(tm.Callback):
    def on_step(self, step, metrics):
        rewards.append(metrics["reward_mean"])

rewards = []
"""
TRAIN = """
few = {"trainer.steps": 1, "trainer.threads": 1, "batch.prompts": 2, "batch.group_size": 2, "eval.prompts": 4,
       "sampling.max_new_tokens": 3, "sampling.stop": ["\\n"]}
run = tm.train(model="smollm2-135m", data=rows, rewards=[right], advantage=centred, callbacks=[Watch()],
               overrides=few, run_dir="runs/notebook")
run
"""
AFTER = """
assert run.finished and len(rewards) == 1
assert await tm.train_async(run_dir="runs/notebook", rewards=[right], advantage=centred) is not None
"""
INTERRUPT = """
import os, signal, threading

class Interrupt(tm.Callback):
    def on_step(self, step, metrics):
        if step == 1:  # what the stop button does
            os.kill(os.getpid(), signal.SIGINT)

small = {"trainer.steps": 100000, "trainer.threads": 1, "eval.every_steps": 0}
stopped = tm.train("char-addition", callbacks=[Interrupt()], overrides=small, run_dir="runs/stopped")
assert stopped.interrupted and stopped.summary["steps"] < 100000 and stopped.checkpoints
assert 1 + 1 == 2
"""


def executed(tmp_path: Path, *cells: str) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    return client.execute()


@pytest.mark.slow  # test_documented.py trains this model in a script, and test_live.py shows panels
@pytest.mark.usefixtures("shared_cache")
@pytest.mark.timeout(300)
def test_a_notebook_trains_a_model_and_shows_a_panel(tmp_path: Path) -> None:
    assert len((SETUP + TRAIN).splitlines()) <= 40
    done = executed(tmp_path, SETUP, TRAIN, AFTER)
    outputs = done.cells[1].outputs
    html = " ".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert "step 1/1" in html  # the panel
    assert "held-out reward after" in html  # the run's table


@pytest.mark.slow  # test_interrupts.py interrupts runs from Python
@pytest.mark.timeout(300)
def test_interrupting_the_kernel_writes_a_checkpoint(tmp_path: Path) -> None:
    executed(tmp_path, "import tidemill as tm", INTERRUPT)
