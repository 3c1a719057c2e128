"""Bytes from here to there: links with a rate and a latency, shared by whoever sends at once."""

from __future__ import annotations

import math

from tidemill.core.records import Record

ETHERNET_LATENCY_S = 50e-6
"""Of one message between two machines of a data centre; assumed."""


class Link(Record):
    """One direction of a connection."""

    bytes_per_s: float
    latency_s: float = ETHERNET_LATENCY_S

    def seconds(self, size_bytes: float, *, sharers: int = 1) -> float:
        """Of one transfer among `sharers` that go on all the while and get equal parts."""
        return self.latency_s + size_bytes * sharers / self.bytes_per_s


def fan_out_s(size_bytes: float, *, source: Link, sink: Link, receivers: int) -> float:
    """One sender, every receiver its own copy: the sender's link is shared, no receiver is faster than its own."""
    return max(source.seconds(size_bytes, sharers=receivers), sink.seconds(size_bytes))


def broadcast_s(size_bytes: float, *, slowest: Link, receivers: int) -> float:
    """Passed on from receiver to receiver in pieces, as NCCL's rings do: the size does not multiply with the receivers,
    only the latency does."""
    return size_bytes / slowest.bytes_per_s + slowest.latency_s * receivers


def all_reduce_s(size_bytes: float, *, members: int, link: Link) -> float:
    """Of a ring: each member sends 2 (n - 1) / n of the size (Thakur et al. 2005, section 4)."""
    if members == 1:
        return 0.0
    steps = 2 * (members - 1)
    return steps / members * size_bytes / link.bytes_per_s + link.latency_s * math.log2(members)


def gather_s(size_bytes: float, *, members: int, link: Link) -> float:
    """All-gather or reduce-scatter of `size_bytes` in all: half of an all-reduce."""
    return (members - 1) / members * size_bytes / link.bytes_per_s if members > 1 else 0.0
