"""The Ray runtime: trainer and workers are actors, on one machine or many."""

from __future__ import annotations

from importlib.util import find_spec

from tidemill.core.errors import UserError

if find_spec("ray") is None:
    raise UserError(
        "Ray is not installed",
        where="runtime",
        hint='install it with `pip install "tidemill[cluster]"`, or set runtime = "inprocess"',
    )
