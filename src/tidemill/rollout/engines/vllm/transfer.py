"""Loads tensors of this process into vLLM's model, between two steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tidemill.models.weight_stream import WeightStream
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# It warns of every layer without weights, such as rotary embeddings, at every version.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

BACKEND = "tidemill"
waiting: dict[str, WeightStream] = {}
"""The tensors that the next update loads, by a name."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    name: str = ""


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(waiting[update_info.name])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # The output head computes with a packed copy of the embedding, which the reload does not replace.
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        waiting.clear()
