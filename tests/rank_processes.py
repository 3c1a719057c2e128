"""Functions run on every rank of a process group, one process per rank."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.trainer.sharding import join_ranks

DEADLINE_S = 120.0
PRELOADED = [
    *("tests.integration.trainer.test_sharding", "tests.critic_processes", "torch.distributed.fsdp"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma3", "llama", "qwen3")),
]
"""Imported once, in a server of which every process is a fork: also the modules of the functions that ranks call."""


def fork_context() -> ForkServerContext:
    """A multiprocessing context whose processes are forks of a server that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(ranks, *arguments)` on every rank; returns their results. With one rank it is called here."""
    if size == 1:
        return [function(ONE_RANK, *arguments)]
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            target = (Path(folder) / "meeting", size, index, theirs, function, arguments)
            processes.append(context.Process(target=_run, args=target, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join(DEADLINE_S)


def stop_rank_server() -> None:
    """Stop the server, if there is one."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for index, pipe in enumerate(pipes) if index not in results]
        ready = wait(waiting, DEADLINE_S)
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(set(range(len(pipes))) - results.keys())} sent no result within {DEADLINE_S:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            failure, result = pipe.recv()
            assert not failure, failure
            results[pipes.index(pipe)] = result
    return [results[index] for index in range(len(pipes))]


def _run(
    meeting: Path, size: int, index: int, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        ranks: Ranks = join_ranks(
            meeting, size=size, index=index, device=torch.device("cpu"), timeout_s=DEADLINE_S, one_machine=True
        )
        pipe.send(("", function(ranks, *arguments)))
    except BaseException:  # noqa: BLE001 - shown by the test
        pipe.send((traceback.format_exc(), None))
    # Until `on_ranks` kills it: a connection that closes could break the last exchange of a rank that is slower.
    pipe.poll(None)
