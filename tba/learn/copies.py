"""Copies of the trainer's weights, which are published while training continues."""

import weakref
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from tba.learn.policy import Policy
from tba.learn.probe import answer
from tba.types import TokenBatch
from tba.weights import Weights, as_view, trained


class Copy:
    """Policy with weights of its own, but for frozen ones, which it shares with the trainer's.

    Only `fill` reads the trainer's weights. The rest may run in another thread.
    """

    def __init__(self, policy: Policy, bf16: bool):
        frozen = {id(p): p for p in policy.parameters() if not p.requires_grad}
        self.version = 0
        self._policy = deepcopy(policy, dict(frozen))
        self._probe: TokenBatch | None = None
        on_gpu = policy.device.type == "cuda"
        self._stream = torch.cuda.Stream(policy.device) if on_gpu else None
        self._sent: dict[str, Tensor] = {}
        dtype = torch.bfloat16 if bf16 else torch.float32
        for name, own in trained(self._policy.model).items():
            is_sent = own.dtype == dtype and own.device.type == "cpu" and own.is_contiguous()
            self._sent[name] = own.detach() if is_sent else torch.empty(own.shape, dtype=dtype)

    @torch.no_grad()
    def fill(self, policy: Policy, version: int, probe: TokenBatch | None) -> None:
        """Copy the weights of the trainer's policy, to answer this probe with them."""
        for own, newest in zip(self._policy.parameters(), policy.parameters(), strict=True):
            if newest.requires_grad:
                own.copy_(newest)
        if self._stream is not None:  # `weights` computes in a stream of its own
            torch.cuda.current_stream(policy.device).synchronize()
        self.version = version
        self._probe = probe

    @torch.no_grad()
    def weights(self, free: "list[Copy]") -> Weights:
        """Return the weights with their probe; the copy is put into the list once they are gone."""
        with torch.cuda.stream(self._stream):  # nothing changes if there is none
            probe = None if self._probe is None else answer(self._policy, self._probe)
            arrays: dict[str, np.ndarray] = {}
            for name, own in trained(self._policy.model).items():
                sent = self._sent[name]
                if sent.data_ptr() != own.data_ptr():
                    sent.copy_(own)
                arrays[name] = as_view(sent)
        weights = Weights(self.version, arrays, probe)
        weakref.finalize(weights, free.append, self)  # its memory is allocated once
        return weights
