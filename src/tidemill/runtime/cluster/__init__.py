"""The Ray runtime: trainer and workers are actors, on one machine or many."""

from __future__ import annotations

from importlib.util import find_spec

from tidemill.core.errors import UserError
from tidemill.core.packages import install_command

if find_spec("ray") is None:
    raise UserError(
        "Ray is not installed",
        where="runtime",
        hint=f'`{install_command("cluster")}`, or set runtime = "inprocess"',
    )
