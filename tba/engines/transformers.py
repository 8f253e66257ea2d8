"""Generation by Hugging Face transformers: any causal LM, no server, any machine."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from tba.config.plugins import GIVEN
from tba.config.tables import PolicyTable
from tba.models.pretrained import Text, load_model
from tba.types import Completion, Sampling
from tba.weights import Probe, SharedLock, Weights, load_weights


@dataclass
class Transformers:
    """Generates `batch_size` responses at once.

    `dtype` auto is bf16 where that is faster (see `policy.autocast`), and fp32 elsewhere. Calls
    from several threads take turns, batch by batch; `load_weights` goes first when a batch ends.
    """

    policy: PolicyTable = field(metadata=GIVEN)
    text: Text = field(metadata=GIVEN)
    device: str = field(metadata=GIVEN)
    bf16: bool = field(metadata=GIVEN)
    batch_size: int = 256
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        bf16 = self.bf16 if self.dtype == "auto" else self.dtype == "bf16"
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.model: Any = load_model(self.policy, dtype).to(self.device)
        self._batches = threading.Lock()  # one batch at a time: torch's random state is global
        self._weights = SharedLock()  # shared by the batch that runs; `load_weights` is alone

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        repeated = [p for p in prompts for _ in range(sampling.samples)]
        devices = [self.device] if self.device.startswith("cuda") else []
        completions: list[Completion] = []
        for start in range(0, len(repeated), self.batch_size):
            batch = repeated[start : start + self.batch_size]
            with self._batches, self._weights.shared(), torch.random.fork_rng(devices):
                torch.manual_seed(seed + start)
                completions += self._batch(batch, sampling)
        starts = range(0, len(completions), sampling.samples)
        return [completions[i : i + sampling.samples] for i in starts]

    def load_weights(self, weights: Weights) -> float | None:
        with self._weights.alone():
            load_weights(self.model, weights)
            self.version = weights.version
            return None if weights.probe is None else self._gap(weights.probe)

    @torch.inference_mode()
    def _gap(self, probe: Probe) -> float:
        """Return the mean |difference| between the model's log-probs of the probe and its own."""
        tokens = np.concatenate([probe.prompt_tokens, probe.tokens])
        ids = torch.from_numpy(tokens).long().to(self.device)
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        start = len(probe.prompt_tokens)
        logp = _logp(logits[start - 1 : -1], probe.temperature)
        chosen = logp.gather(1, ids[start:, None]).squeeze(1)
        return float(np.abs(chosen.cpu().numpy() - probe.logp).mean())

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Completion]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        width = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), width), self.text.pad_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        recorder = _Recorder(sampling.temperature or 1.0)
        out = self.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            generation_config=self._config(sampling),
            logits_processor=LogitsProcessorList([recorder.before]),
            stopping_criteria=StoppingCriteriaList([recorder.after]),
        )
        tokens = out[:, width:].cpu().numpy().astype(np.int32)
        logp = torch.stack(recorder.logp, 1).cpu().numpy()
        return [self._completion(t, lp) for t, lp in zip(tokens, logp, strict=True)]

    def _completion(self, tokens: np.ndarray, logp: np.ndarray) -> Completion:
        """Cut a row after its first EOS: what follows is padding, which may be the EOS token."""
        ends = np.flatnonzero(np.isin(tokens, list(self.text.eos_ids)))
        finished = len(ends) > 0
        length = int(ends[0]) + 1 if finished else len(tokens)
        return Completion(tokens[:length].copy(), logp[:length].copy(), finished, self.version)

    def _config(self, sampling: Sampling) -> Any:
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sorted(self.text.eos_ids),
            pad_token_id=self.text.pad_id,
        )
        if sampling.temperature > 0:
            config.do_sample, config.temperature = True, sampling.temperature
            config.top_p, config.top_k = sampling.top_p, 0
        # or the checkpoint's own top_k, repetition penalty, ... would fill the gaps
        self.model.generation_config = config
        return config


class _Recorder:
    """Log-prob of each token as it is sampled: all logits of a response never exist at once."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.every = torch.empty(0)
        self.logp: list[torch.Tensor] = []

    def before(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits processor, called before temperature and top-p."""
        self.every = _logp(logits, self.temperature)
        return logits

    def after(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Stopping criterion, called when the token has been chosen. Stops nothing."""
        self.logp.append(self.every.gather(1, ids[:, -1:]).squeeze(1))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _logp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits.float() / temperature, -1)
