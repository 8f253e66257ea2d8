"""vLLM 0.26 to 0.32: the only file that imports it, and the place of what differs between versions.

The environment variables of `environment` must be set before this file is imported.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.inputs import TokensPrompt
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tba.engines._batch import Output, Request
from tba.weights import as_tensor

BACKEND = "tba"


class InProcess(UniProcExecutor):
    """Runs the model in this process, without a socket that listens on the network."""

    device_index = 0

    def _distributed_args(self) -> tuple[str, int, int]:
        handle, path = tempfile.mkstemp(prefix="tba_vllm_")
        del handle
        return f"file://{path}", 0, self.device_index


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing: the arrays come with the update."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Arrays of `tba.weights.Weights`, by the names of the checkpoint."""

    arrays: Mapping[str, np.ndarray]


class ArraysEngine(WeightTransferEngine[Init, Update]):
    """Receives weights as arrays, which vLLM loads like a checkpoint."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the inherited method waits for an accelerator, which a CPU does not have
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        self.model.load_weights(_tensors(update_info.arrays))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError  # abstract in 0.26 and 0.27


WeightTransferEngineFactory.register_engine(BACKEND, ArraysEngine)


class Worker:
    """Extension of vLLM's worker. Naming it makes worker processes import this file."""


def _tensors(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in arrays.items():
        yield name, as_tensor(array)
