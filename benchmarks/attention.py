"""Measure the attention implementations: forward and backward passes of one group.

    python benchmarks/attention.py --model FOLDER

`policy.attention = "auto"` follows these rows: on a CPU, eager is faster at every length, but it
keeps all scores, so that it is chosen up to EAGER_TOKENS; on a GPU, sdpa is.
"""

from __future__ import annotations

import _measure
import _shapes
import numpy as np
import torch

from tba.config.tables import PolicyTable
from tba.learn.policy import Policy
from tba.models.lora import load_placed
from tba.models.pretrained import computes_in_bf16
from tba.runtime.placement import reuse_memory
from tba.types import TokenBatch, collate_tokens

SHAPES = ((18, 32, 8), (100, 8, 64), (128, 4, 128), (256, 2, 256))
"""Tokens of the prompt, responses, and tokens of each."""
KINDS = ("eager", "sdpa")


def main() -> None:
    parser = _measure.arguments(__doc__)
    options = parser.parse_args()
    model = _shapes.model_of(options)
    reuse_memory()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    policies = {kind: load(model, kind, device) for kind in KINDS}
    rows = []
    for prompt, samples, tokens in SHAPES:
        batch = random_batch(prompt, samples, tokens)
        sides = {kind: lambda p=p, b=batch: run(p, b) for kind, p in policies.items()}
        seconds = _measure.alternate(sides, options.repeats)
        kept = {kind: run(policy, batch) / 2**20 for kind, policy in policies.items()}
        name = f"attention on {device.split(':')[0]}, {prompt} + {samples} x {tokens} tokens"
        note = f"kept for the backward pass: eager {kept['eager']:.0f}, sdpa {kept['sdpa']:.0f} MiB"
        eager, sdpa = seconds["eager"], seconds["sdpa"]
        rows.append(
            _measure.row(name, eager, "s", sdpa, peer_is="sdpa", note=note, fewer=options.tiny)
        )
    _measure.record(__file__, rows, options)


def load(model: str, kind: str, device: str) -> Policy:
    table = PolicyTable.model_validate({"model": model, "attention": kind})
    loaded = load_placed(table, device, bf16=False)
    return Policy(loaded, 1.0, computes_in_bf16(table, device))


def random_batch(prompt: int, samples: int, tokens: int) -> TokenBatch:
    rng = np.random.default_rng(0)
    responses = [rng.integers(10, 500, tokens).astype(np.int32) for _ in range(samples)]
    return collate_tokens([rng.integers(10, 500, prompt).astype(np.int32)], [responses])


def run(policy: Policy, batch: TokenBatch) -> int:
    """Run forward and backward, and return the bytes that were kept between them."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    policy.zero_grad()
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp = policy.logp(batch)
    logp.sum().backward()
    return sum(size for storage, size in kept.items() if storage not in own)


if __name__ == "__main__":
    main()
