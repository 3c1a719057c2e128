"""What the agents of all frameworks share: a tool, and their reward."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.gateway.client import AgentSession

PRICES = {"pear": "7", "plum": "4", "fig": "9", "kiwi": "3", "lime": "5", "nut": "8"}
SYSTEM = "Use the tool."


def reward(session: AgentSession, agent: Callable[[], str], tool: bool) -> None:
    """Run an agent once. With the tool it is rewarded for the price; otherwise the run itself gives the reward."""
    try:
        answer = agent()
    except Exception as error:  # noqa: BLE001 - an agent that fails is worth nothing
        print("failed:", repr(error)[:300], flush=True)
        answer = ""
    print("answer:", repr(answer), flush=True)
    if tool:
        item = session.task["prompt"].split()[-1].rstrip("?")
        session.reward(float(answer.strip() == PRICES[item]))
