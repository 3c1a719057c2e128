"""The verbs of `tidemill deploy` on a target, through the user's programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import yaml

from tidemill.config.deploy import KUBERNETES, DeployConfig
from tidemill.core.errors import UserError
from tidemill.deploy.documents import Rendered
from tidemill.deploy.kubernetes.job_state import job_state
from tidemill.deploy.kubernetes.kubectl import Kubectl, job_of, server_refusals
from tidemill.deploy.osmo.client import OsmoService
from tidemill.deploy.sky.jobs import SkyPilot
from tidemill.deploy.slurm.queue import SlurmQueue


class Target(Protocol):
    """Every method raises UserError if a program is missing, or the target does not answer or refuses."""

    def diff(self, rendered: Rendered) -> str:
        """What `apply` would change, as a unified diff; empty if nothing."""
        ...

    def apply(self, rendered: Rendered) -> list[str]:
        """Start the job; returns one line for each thing that is created or changed."""
        ...

    def status(self, rendered: Rendered) -> list[dict[str, str]]:
        """Rows of kind, name, role and state in plain words; none if there is no such job."""
        ...

    def print_log(self, rendered: Rendered, *, follow: bool) -> None:
        """Pass on what the run prints, until its end."""
        ...

    def delete(self, rendered: Rendered, *, storage: bool) -> list[str]:
        """Stop and remove the job; its run directory only with `storage`."""
        ...

    def refusals(self, rendered: Rendered) -> list[str]:
        """What the target says to a dry run; nothing if it accepts all."""
        ...


class KubernetesCluster:
    """Args: context: of kubectl's configuration; empty: its current one."""

    def __init__(self, context: str) -> None:
        self._kubectl = Kubectl(context=context)

    def diff(self, rendered: Rendered) -> str:
        return self._kubectl.diff(rendered)

    def apply(self, rendered: Rendered) -> list[str]:
        return self._kubectl.apply(rendered)

    def status(self, rendered: Rendered) -> list[dict[str, str]]:
        return job_state(self._kubectl, job_of(rendered))

    def print_log(self, rendered: Rendered, *, follow: bool) -> None:
        self._kubectl.print_log(job_of(rendered), follow=follow)

    def delete(self, rendered: Rendered, *, storage: bool) -> list[str]:
        return self._kubectl.delete(job_of(rendered), storage=storage)

    def refusals(self, rendered: Rendered) -> list[str]:
        return server_refusals(list(yaml.safe_load_all(rendered.text)))


TARGETS: dict[str, Callable[[DeployConfig], Target]] = {
    "slurm": lambda deploy: SlurmQueue(),
    "sky": SkyPilot,
    "osmo": OsmoService,
}
"""By name; those of Kubernetes apart."""


def target_of(deploy: DeployConfig, *, context: str = "") -> Target:
    """Raises UserError: a context for a target that is no Kubernetes cluster."""
    if deploy.target in KUBERNETES:
        return KubernetesCluster(context)
    if context:
        raise UserError("is of kubectl", where="--context", hint=f"leave it out for {deploy.target}")
    return TARGETS[deploy.target](deploy)
