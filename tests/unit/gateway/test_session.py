"""A session's log."""

from __future__ import annotations

from pathlib import Path

from tidemill.gateway.session import SessionEvent, SessionLog


def test_a_log_remembers_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = SessionLog(path)
    log.write(SessionEvent(session="a", event="reward", value=0.5))
    log.write(SessionEvent(session="a", event="ended"))
    log.close()
    with path.open("ab") as file:
        file.write(b'{"session": "b", "ev')
    again = SessionLog(path)
    again.write(SessionEvent(session="b", event="attached"))
    again.close()

    last = SessionLog(path)
    assert [noted.event for noted in last.earlier["a"]] == ["reward", "ended"]
    assert [noted.event for noted in last.earlier["b"]] == ["attached"]
    assert not last.earlier["c"]
    last.close()
