"""One rank of vLLM: it takes weights, and ends with its worker.

vLLM adds `Rank` to the bases of its own worker class, and calls its methods by name. The only rank of an engine is an
object of the worker's process; several are processes, which it starts.
"""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch

from tidemill.core.ipc import die_with_parent
from tidemill.core.records import WeightManifest
from tidemill.models.snapshots import joined_views
from tidemill.models.weight_stream import WeightStream
from tidemill.rollout.engines.vllm.noise import drawn_logprobs
from tidemill.weights.node_folder import SHARED_MEMORY
from tidemill.weights.snapshot import Blob
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# It warns of every layer without weights, such as rotary embeddings, at every version.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

SharedSnapshot: TypeAlias = tuple[str, WeightManifest]
"""Path and manifest of a verified snapshot in the memory of the machine; the path ends with the digest."""


class Rank:
    """vLLM's worker has the attributes; its methods must have other names than these."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_runner: Any
        device: torch.device

    def __new__(cls, *_: Any, vllm_config: VllmConfig, **__: Any) -> Self:
        """Runs before vLLM's own initialization. A rank that hangs in a collective misses every other signal.

        The kernel sends this one when the thread that started the rank ends: that of the engine's calls, which lasts as
        long as the worker's process.
        """
        parent = multiprocessing.parent_process()
        if vllm_config.parallel_config.world_size > 1 and parent is not None:
            die_with_parent(signal.SIGKILL, parent.pid)
        return super().__new__(cls)

    def unlink_shared_memory(self) -> None:
        """Remove the names of memory that ranks on CPUs share, and that all have mapped: vLLM leaves those of killed
        ranks."""
        if name := os.environ.get("VLLM_DIST_IDENT"):  # set by vLLM, on CPUs
            for path in SHARED_MEMORY.glob(f"{name}-*"):
                path.unlink(missing_ok=True)
        for each in gc.get_objects():  # vLLM has no other way to them here
            if type(each) is ShmRingBuffer:
                unlink_queue(each)

    def load_stream(self, tensors: WeightStream) -> None:
        """Load tensors of this process into the model, between two steps."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        if self.device.type == "cpu":
            # The output head computes with a packed copy of the embedding, which the reload does not replace.
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        self.model_runner.reset_lora_state()

    def load_files(self, files: Sequence[SharedSnapshot]) -> list[str]:
        """Load this rank's slices of a snapshot, or of those of all ranks of a trainer; return the digests.

        Raises:
            OSError: a file is gone.
            ValueError: it has another name or size than its manifest.
        """
        rows = [(manifest.tensors, _mapped(Path(path), manifest)) for path, manifest in files]
        self.load_stream(joined_views(rows))
        return [manifest.digest for _, manifest in files]

    def scale_logits(self, factor: float) -> None:
        """Multiply all later logits by a factor, also those of prompt tokens."""
        self.model_runner.get_model().logits_processor.scale *= factor

    def logprobs_of_last_step(self) -> dict[tuple[int, int], float]:
        """See `noise.drawn_logprobs`."""
        return drawn_logprobs


def unlink_queue(ring: ShmRingBuffer) -> None:
    """Remove the name of a queue in shared memory that its readers have mapped. It would stay if the process were
    killed together with Python's resource tracker, as Ray does."""
    if ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # it unlinks nothing when it is closed


def _mapped(path: Path, manifest: WeightManifest) -> Blob:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if path.name != manifest.digest or os.fstat(descriptor).st_size != manifest.nbytes:
            raise ValueError(f"{path} is not the snapshot {manifest.digest} of {manifest.nbytes:,} bytes")
        mapped = mmap.mmap(descriptor, manifest.nbytes, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)
