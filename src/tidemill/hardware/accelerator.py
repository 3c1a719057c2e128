"""The GPU that `deploy.accelerator` names."""

from __future__ import annotations

from tidemill.config.deploy import DeployConfig
from tidemill.config.keys import did_you_mean
from tidemill.core.errors import UserError
from tidemill.hardware.gpu_catalog import Gpu, load_catalog

GKE_GPUS = {
    "nvidia-b200": "b200-180gb",
    "nvidia-h200-141gb": "h200-141gb",
    "nvidia-h100-mega-80gb": "h100-80gb",
    "nvidia-h100-80gb": "h100-80gb",
    "nvidia-a100-80gb": "a100-80gb",
    "nvidia-tesla-a100": "a100-40gb",
    "nvidia-l4": "l4-24gb",
}
"""GKE's names of the catalogue's GPUs (values of the node label cloud.google.com/gke-accelerator)."""


def accelerator(deploy: DeployConfig) -> Gpu | None:
    """The catalogue's row of the GPU; None without one. Raises UserError: unknown, or a TPU."""
    name, where = deploy.accelerator, "deploy.accelerator"
    if not name:
        return None
    if "tpu" in name.lower() or name.startswith("ct"):
        what = "TPUs are not supported: engine and trainer are PyTorch programs for GPUs and CPUs"
        hint = "name a GPU; MaxText (training) and Pathways (many hosts) are programs for TPUs"
        raise UserError(what, where=f"{where} = {name}", hint=hint)
    catalog = load_catalog()
    if deploy.target != "gke":
        return catalog.gpu(GKE_GPUS.get(name, name), where=where)
    if name in GKE_GPUS:
        return catalog.gpu(GKE_GPUS[name])
    alike = [gke for gke, ours in GKE_GPUS.items() if name.lower() in (ours, *catalog.gpus[ours].aliases)]
    close = f"did you mean {alike[-1]}?" if alike else did_you_mean(name, GKE_GPUS)
    hint = f"{close} known: {', '.join(GKE_GPUS)}".strip()
    raise UserError(f"GKE has no accelerator {name!r} that Tidemill knows", where=where, hint=hint)
