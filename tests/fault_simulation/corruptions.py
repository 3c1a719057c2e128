"""What a worker may say that is not so."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidemill.core.records import TokenDelta, WorkerReport

Lie = Callable[[WorkerReport], WorkerReport]

_replace = msgspec.structs.replace


def _each(change: Callable[[TokenDelta], TokenDelta]) -> Lie:
    def lie(report: WorkerReport) -> WorkerReport:
        return _replace(report, deltas=tuple(map(change, report.deltas)))

    return lie


LIES: dict[str, Lie] = {
    "leaves tokens out": _each(lambda delta: _replace(delta, start=delta.start + 2)),
    "names weights to come": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=delta.version.number + 1000))
    ),
    "names weights long gone": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=-1)) if delta.token_ids else delta
    ),
    "forgets logprobs": _each(lambda delta: _replace(delta, logprobs=delta.logprobs[:-4])),
    "breaks tokens": _each(lambda delta: _replace(delta, token_ids=delta.token_ids[:-1])),
    "makes up samples": _each(
        lambda delta: _replace(delta, sample_id=_replace(delta.sample_id, prompt_id="nobody's"), finish="stop")
    ),
    "says it again and again": _each(lambda delta: _replace(delta, start=0)),
    "speaks for others": _each(lambda delta: _replace(delta, lease_id="lease-of-another")),
    "speaks nonsense": lambda report: b"\xff",  # type: ignore[dict-item, return-value]
}


def spoiled(report: WorkerReport) -> WorkerReport:
    """Every token another one, every sample at its end: nobody should look at this."""
    deltas = [
        _replace(delta, token_ids=bytes(byte ^ 1 for byte in delta.token_ids), finish="stop") for delta in report.deltas
    ]
    return _replace(report, deltas=tuple(deltas))
