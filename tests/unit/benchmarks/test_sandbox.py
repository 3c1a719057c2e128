from __future__ import annotations

import pytest

from benchmarks.sandbox import check_kills, check_output, check_work
from tidemill.sandbox import Finished

DONE = Finished(stdout=b"[] 1\n", stderr=b"", code=0)
KILLS = {"killed_while_a_command_started_or_ran": 687, "seen_after_the_kill": 700}


def test_commands_that_fail_or_do_other_work_fail() -> None:
    check_work([DONE, DONE], [DONE, DONE])
    failed = Finished(stdout=b"", stderr=b"no python3", code=127)
    for alone, together in (([DONE, failed], [DONE]), ([DONE], [failed]), ([failed], [failed])):
        with pytest.raises(RuntimeError, match="other work"):
            check_work(alone, together)


def test_lost_output_fails() -> None:
    check_output(Finished(stdout=b"12345", stderr=b"", code=0, discarded_bytes=999_999_995))
    with pytest.raises(RuntimeError, match="output was lost"):
        check_output(Finished(stdout=b"12345", stderr=b"", code=0, discarded_bytes=999_999_994))


@pytest.mark.parametrize("name", KILLS)
def test_kills_that_left_nothing_to_end_fail(name: str) -> None:
    check_kills(KILLS)
    with pytest.raises(RuntimeError, match=f"owners: no {name.replace('_', ' ')}"):
        check_kills(KILLS | {name: 0})
