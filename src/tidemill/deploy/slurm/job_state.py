"""Jobs as squeue prints them, and their states in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

FIELDS = ("ArrayJobID", "JobArrayID", "Name", "State", "Reason", "NodeList", "RestartCnt", "exit_code")
LIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "STOPPED", "SIGNALING", "STAGE_OUT")
STATES = {
    "PENDING": "waits in the queue",
    "RUNNING": "runs",
    "COMPLETING": "ends",
    "CONFIGURING": "its machines start",
    "SUSPENDED": "is suspended",
    "COMPLETED": "has ended",
    "FAILED": "has failed",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit before its checkpoint",
    "NODE_FAIL": "lost its machine",
    "PREEMPTED": "was preempted, and not requeued",
    "OUT_OF_MEMORY": "ran out of memory: raise deploy.head_memory_gb or deploy.worker_memory_gb",
}
REASONS = {
    "None": "until Slurm has looked at it",
    "Resources": "for machines",
    "Priority": "behind jobs of higher priority",
    "Dependency": "for the reserved job to start",
    "BeginTime": "until the previous start has ended everywhere (two minutes by default)",
    "PartitionTimeLimit": "for ever: deploy.hours is more than the partition allows",
    "PartitionNodeLimit": "for ever: the partition has fewer machines",
    "ReqNodeNotAvail": "for machines that are down or reserved",
    "JobHeldUser": "as it is held: scontrol release lets it go",
    "JobHeldAdmin": "as the administrator holds it",
}
NO_LOG = 53
"""Slurm's signal number for a job whose output cannot be opened."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job, or a task of an array: FIELDS."""

    job_id: str  # of the array
    shown_id: str
    name: str
    state: str
    reason: str
    nodes: str
    restarts: int
    wait_status: int  # exit code * 256 + signal

    @classmethod
    def of(cls, line: str) -> Self:
        """From a line of squeue with FIELDS, each followed by a bar."""
        job_id, shown_id, name, state, reason, nodes, restarts, status = line.split("|")[: len(FIELDS)]
        return cls(job_id, shown_id, name, state, reason, nodes, int(restarts), int(status))

    @property
    def words(self) -> str:
        text = STATES.get(self.state, self.state.lower())
        if self.state == "PENDING":
            text += f" {REASONS.get(self.reason, f'({self.reason})')}"
        elif self.nodes:
            text += f" on {self.nodes}"
        if self.state == "FAILED":
            no_log = ": the machine could not open the log; do all nodes share deploy.slurm.runs?"
            text += no_log if self.wait_status & 0x7F == NO_LOG else f" with code {self.wait_status >> 8}"
        return text + (f", start {self.restarts + 1}" if self.restarts else "")
