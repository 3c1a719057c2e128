"""Weights that are broadcast: the same bits arrive, and every failure is one error within a deadline."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters import adapted
from tests.model_shapes import llama
from tests.rank_processes import fork_context
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.records import TensorEntry
from tidemill.models.weight_stream import BroadcastGroup, check_dtypes, stream_layout, streamed_weights
from tidemill.models.weights_digest import bit_sum

TIMEOUT_S, DEADLINE_S = 3.0, 60.0
TENSORS = {"matrix": torch.arange(600.0).view(20, 30), "halves": torch.linspace(-3, 3, 1001).bfloat16()}
LAYOUT = [
    TensorEntry(
        name=name, dtype=str(tensor.dtype)[6:], shape=tuple(tensor.shape), offset=0, nbytes=tensor.nbytes, checksum=0
    )
    for name, tensor in TENSORS.items()
]


def join(meeting: Path, index: int) -> BroadcastGroup:
    cpu = torch.device("cpu")
    return BroadcastGroup(meeting, size=2, index=index, device=cpu, timeout_s=TIMEOUT_S, one_machine=True)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def engine(meeting: Path, pipe: Connection, versions: int) -> None:
    """Receives, and reports what arrived or the error."""
    torch.set_num_threads(1)
    group = join(meeting, 1)
    for _ in range(versions):
        try:
            pipe.send({name: bits(tensor) for name, tensor in group.receive(LAYOUT)})
        except WeightsError as error:
            pipe.send(error)


class Engine:
    """A process that takes `versions` versions."""

    def __init__(self, folder: Path, versions: int = 1) -> None:
        self.meeting = folder / "meeting"
        context = fork_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=engine, args=(self.meeting, theirs, versions), daemon=True)
        self.process.start()
        self.trainer = BroadcastGroup(
            self.meeting,
            size=2,
            index=0,
            device=torch.device("cpu"),
            timeout_s=30.0,  # the process has to start
            one_machine=True,
        )

    def answer(self) -> Any:
        assert self.pipe.poll(DEADLINE_S), "no answer"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


def test_what_arrives_has_the_same_bits_version_after_version(tmp_path: Path) -> None:
    running = Engine(tmp_path, versions=2)
    try:
        for factor in (1, -2):
            sent = {name: tensor * factor for name, tensor in TENSORS.items()}
            running.trainer.send(iter(sent.items()))
            arrived = running.answer()

            assert arrived == {name: bits(tensor) for name, tensor in sent.items()}
    finally:
        running.end()


def test_other_bits_than_were_sent_are_an_error_that_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "tidemill.models.weight_stream.bit_sum"
    monkeypatch.setattr(wrong, lambda tensors: bit_sum(tensors) + (tensors[0].ndim == 1))
    running = Engine(tmp_path)
    try:
        running.trainer.send(iter(TENSORS.items()))

        assert str(running.answer()) == "halves arrived with other bits than were sent"
    finally:
        running.end()


def test_a_trainer_that_sends_only_a_part_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    running = Engine(tmp_path)
    try:
        began_s = time.monotonic()
        running.trainer._broadcast(TENSORS["matrix"].clone())

        assert isinstance(running.answer(), WeightsError)
        assert TIMEOUT_S - 0.5 < time.monotonic() - began_s < TIMEOUT_S + 10
    finally:
        running.end()


def test_an_engine_that_dies_in_a_transfer_is_an_error(tmp_path: Path) -> None:
    running = Engine(tmp_path)
    running.end()
    large = torch.zeros(4 << 20)

    began_s = time.monotonic()
    with pytest.raises(WeightsError, match="not broadcast"):
        running.trainer.send(iter([("large", large)] * 4))
    assert time.monotonic() - began_s < 40


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_member_that_does_not_come_is_one_error_within_the_deadline(tmp_path: Path, folder: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(UserError, match="do not find each other") as refused:
        join(tmp_path / folder / "meeting", 0)

    assert refused.value.where == "weights.lane"
    assert time.monotonic() - began_s < TIMEOUT_S + 10


def test_a_stream_has_the_layout_that_was_announced() -> None:
    model = llama()
    layout = stream_layout(model, torch.bfloat16)
    streamed = list(streamed_weights(model, torch.bfloat16))

    assert [(entry.name, entry.shape) for entry in layout] == [(name, tuple(each.shape)) for name, each in streamed]
    assert {each.dtype for _, each in streamed} == {torch.bfloat16}
    assert {entry.dtype for entry in layout} == {"bfloat16"}
    check_dtypes(layout, "bfloat16")
    with pytest.raises(UserError, match=r"mixed dtypes: .* is sent as bfloat16, and the engine has float32"):
        check_dtypes(layout, "float32")


def test_a_base_is_a_part_of_its_own() -> None:
    model = adapted()
    learned, base = (dict(streamed_weights(model, torch.float32, part=part)) for part in ("learned", "base"))

    assert learned.keys().isdisjoint(base)
    assert all("lora_" in name for name in learned)
