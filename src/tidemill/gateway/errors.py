"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

INVALID, AUTHENTICATION = "invalid_request_error", "authentication_error"
RATE, SERVER = "rate_limit_error", "server_error"


class ApiError(Exception):
    """An error that the client sees.

    Args:
        param: name of the parameter at fault.
        retry_s: when to try again; with status 409, 429 and 503 always.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_s = 1 if retry_s is None and status in (409, 429, 503) else retry_s

    @property
    def content(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        return found | {"www-authenticate": "Bearer"} if self.status == 401 else found


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """The error for a request that cannot be obeyed."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    return invalid(f"`{param}` is not supported: {why}", param, code="unsupported_parameter")
