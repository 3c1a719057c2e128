"""A fleet whose mailbox tests can read, and write as forgotten workers."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.controller.fleet import Fleet
from tidemill.core.evidence import MachineHealth
from tidemill.core.records import WorkerReport


class ObservedFleet(Fleet):
    @property
    def unread_ends(self) -> set[str]:
        """Leases whose end has not been read yet."""
        return {ended.lease_id for ended in self._mailbox.messages.ended} if self._mailbox is not None else set()

    def finds(self, found: MachineHealth) -> None:
        """A worker, which may have ended, computed wrong tokens."""
        self.tainted[found.lease_id] = found
        if self._mailbox is not None:
            self._mailbox.messages.tainted = True
            self._mailbox.notify()
        self.end_lease(found.lease_id, "it computes wrongly")

    def arrives_late(self, reports: Iterable[WorkerReport]) -> None:
        """Deliver reports of workers with ended leases."""
        if self._mailbox is not None:
            self._mailbox.put_reports(list(reports))
