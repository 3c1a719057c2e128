"""A fleet whose mailbox can be looked into, and written to by workers that it has forgotten."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.controller.fleet import Fleet
from tidemill.core.records import WorkerReport


class OverheardFleet(Fleet):
    @property
    def unread_ends(self) -> set[str]:
        """Leases of which nobody has read yet that they ended."""
        return {ended.lease_id for ended in self._mailbox.messages.ended} if self._mailbox is not None else set()

    def arrives_late(self, reports: Iterable[WorkerReport]) -> None:
        """Letters that were under way when their sender's lease ended."""
        if self._mailbox is not None:
            self._mailbox.put_reports(list(reports))
