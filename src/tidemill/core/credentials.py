"""Secrets from the environment: configurations, logs and errors have only the names of their variables."""

from __future__ import annotations

import os

from tidemill.core.errors import UserError


def secret_of(variable: str, *, where: str) -> str:
    """The value of an environment variable, which fits into an HTTP header.

    Raises:
        UserError: it is not set, or has other characters. `where` is the key that names the variable.
    """
    secret = os.environ.get(variable, "").strip()
    if not secret:
        hint = f"export {variable} before starting, or remove {where.rpartition('.')[2]}"
        raise UserError(f"the environment variable {variable} is not set", where=where, hint=hint)
    if not (secret.isascii() and secret.isprintable()):
        what = f"the value of {variable} has characters that are not allowed in a header"
        raise UserError(what, where=where, hint="set it to one line of plain ASCII")
    return secret
