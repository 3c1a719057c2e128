"""Corruptions of worker reports."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidemill.core.records import TokenDelta, WorkerReport

Corruption = Callable[[WorkerReport], WorkerReport]

_replace = msgspec.structs.replace


def _each(change: Callable[[TokenDelta], TokenDelta]) -> Corruption:
    def corrupt(report: WorkerReport) -> WorkerReport:
        return _replace(report, deltas=tuple(map(change, report.deltas)))

    return corrupt


CORRUPTIONS: dict[str, Corruption] = {
    "omits tokens": _each(lambda delta: _replace(delta, start=delta.start + 2)),
    "names a future version": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=delta.version.number + 1000))
    ),
    "names an old version": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=-1)) if delta.token_ids else delta
    ),
    "omits logprobs": _each(lambda delta: _replace(delta, logprobs=delta.logprobs[:-4])),
    "breaks tokens": _each(lambda delta: _replace(delta, token_ids=delta.token_ids[:-1])),
    "invents samples": _each(
        lambda delta: _replace(delta, sample_id=_replace(delta.sample_id, prompt_id="nobody's"), finish="stop")
    ),
    "restarts at token 0": _each(lambda delta: _replace(delta, start=0)),
    "uses another lease": _each(lambda delta: _replace(delta, lease_id="lease-of-another")),
    "sends garbage": lambda report: b"\xff",  # type: ignore[dict-item, return-value]
}


def corrupted(report: WorkerReport) -> WorkerReport:
    """A report with changed tokens and finished samples, which the controller must ignore."""
    deltas = [
        _replace(delta, token_ids=bytes(byte ^ 1 for byte in delta.token_ids), finish="stop") for delta in report.deltas
    ]
    return _replace(report, deltas=tuple(deltas))
