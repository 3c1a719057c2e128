"""User functions of the standard runs; as a program, a run of the Python API (`chat`: a model with a chat template)."""

from __future__ import annotations

import itertools
import json
import string
import sys
from pathlib import Path
from typing import Any

import tidemill as tm

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def least_visited(count: int, results: list[list[float]]) -> list[int]:
    """The rows that were chosen least often."""
    return sorted(range(len(results)), key=lambda row: len(results[row]))[:count]


class Letters(tm.ToolEnvironment):
    """Counts letters in its sandbox, as a tool and for the reward; the teacher first calls the tool."""

    needs_sandbox = True

    def __init__(self) -> None:
        self.called = False

    @classmethod
    def tasks(cls, split: str, count: int) -> list[dict[str, Any]]:
        words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
        return [{"prompt": word} for word in words if (word[0] == "a") == (split == "held_out")][:count]

    def demonstrate(self) -> str:
        if self.called:
            return "3 letters"
        self.called = True
        call = {"name": "count", "arguments": {"text": self.task["prompt"]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    @tm.tool
    def count(self, text: str) -> str:
        """Count letters.

        Args:
            text: The letters.
        """
        self.sandbox.write("text.txt", text.encode())
        letters = self.sandbox.run(["tr", "-cd", "a-z"], stdin=self.sandbox.read("text.txt")).stdout
        return str(len(letters))

    def score(self, answer: str) -> float:
        return int(self.count(answer)) / 10


def write_chat_model() -> None:
    """`chat`: a character model that knows all of ASCII, with a chat template."""
    alphabet = "".join(sorted(set(string.printable) - set("\r\x0b\x0c")))
    overrides = {"model.char.alphabet": alphabet, "model.char.context": 2048, "trainer.steps": 1}
    tm.export(tm.train("small.toml", overrides=overrides, run_dir="first"), "chat")
    path = Path("chat", "tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))


def even(completion: str, answer: str) -> float:
    return float(completion[:1] in "02468") - 0.1 * abs(len(completion) - len(answer))


def use_python() -> None:
    """Rows, functions and objects in place of names; then their results as the input of the next stage."""
    rows = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}\n"} for a in range(9) for b in range(9)]
    lessons = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    data = {"data.end_token": False, "supervised.minibatch_tokens": 128, "supervised.microbatch_tokens": 64}
    first = tm.sft("small.toml", data=lessons, overrides=data, run_dir="sft")
    run = tm.train("small.toml", model=first, data=rows, eval_sets={"few": rows[:5]}, rewards=[even], run_dir="run")
    print(json.dumps({"evaluation": tm.evaluate(run), "generated": repr(tm.generate(["1+2=", "8+8="], model=run))}))


if __name__ == "__main__":
    write_chat_model() if sys.argv[1:] == ["chat"] else use_python()
