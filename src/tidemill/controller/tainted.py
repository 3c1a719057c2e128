"""Tokens of workers that computed wrongly: which samples have them, and which were trained on."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from tidemill.controller.samples import Sample
from tidemill.core.evidence import MachineHealth
from tidemill.core.protocols import Telemetry
from tidemill.telemetry.events import TAINTED

REMEMBERED = 64
"""Batches whose workers are known; a worker that computes wrongly for longer was trained on in all of them."""
LISTED = 100
"""Samples that one event names."""


class TrainedLeases:
    """Remembers which leases generated the samples of the last batches."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float, dict[str, list[str]]]] = deque(maxlen=REMEMBERED)
        self.logged: set[str] = set()

    def add(self, step: int, samples: Sequence[Sample], now_s: float) -> None:
        """A batch was trained on."""
        of_lease = defaultdict[str, list[str]](list)
        for sample in samples:
            for lease in {run.lease for run in sample.sources}:
                of_lease[lease].append(_name(sample))
        self._batches.append((step, now_s, of_lease))

    def log_tainted(
        self,
        telemetry: Telemetry,
        leases: Mapping[str, MachineHealth],
        step: int,
        accumulated: Sequence[Sample],
        restarted: Sequence[Sample],
    ) -> None:
        """Name the tokens of each worker that was found since the last call.

        Args:
            accumulated: samples with such tokens that the current batch, of `step`, has already been trained on.
            restarted: those that are generated again.
        """
        for lease, found in leases.items():
            if lease in self.logged:
                continue
            self.logged.add(lease)
            trained = {at: of_lease[lease] for at, ended_s, of_lease in self._batches if ended_s >= found.since_s}
            trained[step] = [_name(sample) for sample in accumulated if sample.uses({lease})]
            again = [sample for sample in restarted if sample.uses({lease})]
            fields = {
                "restarted": len(again),
                "tokens": sum(sample.generated for sample in again),
                "trained": {str(at): len(names) for at, names in trained.items() if names},
                "samples": [name for names in trained.values() for name in names][:LISTED],
            }
            telemetry.event(TAINTED, lease=lease, worker=found.worker_id, cause=found.cause, **fields)


def _name(sample: Sample) -> str:
    return f"{sample.sample_id.prompt_id}/{sample.sample_id.index}"
