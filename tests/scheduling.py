"""Which tests a process of pytest-xdist runs: whole files, or all tests of a group.

One by one, the tests of a file would come to all processes, and each would repeat what they share: fixtures of the
module and cached results.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]


class FileScheduling(LoadGroupScheduling):
    """As `--dist loadgroup`, but it does not divide files, and keeps the order of the folders.

    So the long tests of `tests/integration` come before the short ones of `tests/unit`, and all processes end together.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope.partition("::")[0]
