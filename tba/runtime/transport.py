"""Weights in Ray's object store: one copy on each node, which all its searchers read."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from tba.weights import Sent, Weights


@dataclass(frozen=True)
class ObjectStore:
    """Transport through Ray's object store, which keeps weights as long as their parcel exists."""

    deadline: float
    """Seconds that weights may take to arrive."""

    def send(self, weights: Weights) -> Sent:
        # inside a tuple Ray passes the reference on; alone it would fetch the weights first
        return Sent(weights.version, (ray.put(weights),))

    def receive(self, sent: Sent) -> Weights:
        (reference,) = sent.parcel
        weights: Weights = ray.get(reference, timeout=self.deadline)
        return weights
