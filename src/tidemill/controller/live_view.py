"""What the rollout side of a run is doing, for live.json."""

from __future__ import annotations

from itertools import chain, islice

from tidemill.controller.run import TrainingRun
from tidemill.controller.samples import Sample, SampleState
from tidemill.telemetry.live_state import MOST_SAMPLES, SampleUnderWay, UnderWay


def under_way(run: TrainingRun) -> UnderWay:
    """The workers, and the training samples that are not finished: running ones first."""
    in_flight, fleet = run.in_flight, run.rollout.fleet
    ranks = {position: rank for rank, position in enumerate(in_flight.groups)}

    def row(sample: Sample) -> SampleUnderWay:
        running = sample.state is SampleState.RUNNING and sample.lease_id in fleet
        return SampleUnderWay(
            step=run.step + 1 + ranks[in_flight.position(sample)] // run.spec.batch.prompts,
            prompt_id=sample.sample_id.prompt_id,
            index=sample.sample_id.index,
            worker=fleet[sample.lease_id].lease.worker_id if running else "",
            lease=sample.lease_id if running else "",
            tokens=sample.length,
            versions=tuple(version.number for version, _ in sample.version_starts),
        )

    running = (sample for lease_id in in_flight.leases for sample in in_flight.held(lease_id).values())
    others = (sample for sample in in_flight if sample.state in (SampleState.WAITING, SampleState.ACTING))
    return UnderWay(
        fleet=tuple(fleet.rows()),
        samples=tuple(map(row, islice(chain(running, others), MOST_SAMPLES))),
        samples_total=in_flight.unfinished,
    )
