"""Generation by Hugging Face transformers: any causal LM, no server, any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from tba.config.plugins import GIVEN
from tba.config.tables import PolicyTable
from tba.models.pretrained import Text, load_model
from tba.types import Completion, Sampling
from tba.weights import Weights, load_weights


@dataclass
class Transformers:
    """`batch_size` responses are generated at once; `dtype` auto is bf16 where that is faster (see policy.autocast), else fp32."""

    policy: PolicyTable = field(metadata=GIVEN)
    text: Text = field(metadata=GIVEN)
    device: str = field(metadata=GIVEN)
    bf16: bool = field(metadata=GIVEN)
    batch_size: int = 256
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        bf16 = self.bf16 if self.dtype == "auto" else self.dtype == "bf16"
        self.model: Any = load_model(self.policy, torch.bfloat16 if bf16 else torch.float32).to(
            self.device
        )

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """`sampling.samples` completions of each prompt's tokens; temperature 0 is greedy. The same seed gives the same answers."""
        flat = [p for p in prompts for _ in range(sampling.samples)]
        found: list[Completion] = []
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.startswith("cuda") else []),
            torch.inference_mode(),
        ):
            torch.manual_seed(seed)
            for start in range(0, len(flat), self.batch_size):
                found += self._batch(flat[start : start + self.batch_size], sampling)
        return [found[i : i + sampling.samples] for i in range(0, len(found), sampling.samples)]

    def load_weights(self, weights: Weights) -> float | None:
        """Takes the weights whole; returns the mean |difference| between its own log-probs of the probe and the trainer's."""
        load_weights(self.model, weights)
        self.version = weights.version
        if weights.probe is None:
            return None
        ids = np.concatenate([weights.probe.prompt_tokens, weights.probe.tokens])
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.from_numpy(ids).long()[None].to(self.device), use_cache=False
            ).logits[0]
        own = _logp(logits[len(weights.probe.prompt_tokens) - 1 : -1], weights.probe.temperature)
        taken = own.gather(
            1, torch.from_numpy(weights.probe.tokens).long().to(self.device)[:, None]
        ).squeeze(1)
        return float((taken.cpu() - torch.from_numpy(weights.probe.logp.copy())).abs().mean())

    def _batch(self, prompts: Sequence[np.ndarray], sampling: Sampling) -> list[Completion]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        width = max(len(p) for p in prompts)
        ids = np.stack(
            [np.pad(p, (width - len(p), 0), constant_values=self.text.pad_id) for p in prompts]
        )
        mask = np.stack([np.pad(np.ones(len(p), np.int64), (width - len(p), 0)) for p in prompts])
        taken = _Recorder(sampling.temperature or 1.0)
        out = self.model.generate(
            input_ids=torch.from_numpy(ids).long().to(self.device),
            attention_mask=torch.from_numpy(mask).to(self.device),
            generation_config=self._config(sampling),
            logits_processor=LogitsProcessorList([taken.before]),
            stopping_criteria=StoppingCriteriaList([taken.after]),
        )
        tokens, logp = (
            out[:, width:].cpu().numpy().astype(np.int32),
            torch.stack(taken.logp, 1).cpu().numpy(),
        )
        return [self._completion(t, lp) for t, lp in zip(tokens, logp, strict=True)]

    def _completion(self, tokens: np.ndarray, logp: np.ndarray) -> Completion:
        """Cut after the first EOS: what follows is padding, which may be the EOS token again."""
        ends = np.flatnonzero(np.isin(tokens, list(self.text.eos_ids)))
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        return Completion(
            tokens[:length].copy(), logp[:length].copy(), bool(len(ends)), self.version
        )

    def _config(self, sampling: Sampling) -> Any:
        from transformers import GenerationConfig

        greedy = sampling.temperature == 0
        choice: dict[str, Any] = (
            {}
            if greedy
            else {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        )
        config = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=sorted(self.text.eos_ids),
            pad_token_id=self.text.pad_id,
            **choice,
        )
        self.model.generation_config = (
            config  # or the checkpoint's own top_k, repetition penalty, ... would fill the gaps
        )
        return config


class _Recorder:
    """The log-prob of each token as it is sampled, so that the logits of a whole response never exist at once."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.every = torch.empty(0)
        self.logp: list[torch.Tensor] = []

    def before(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """As a logits processor, before temperature and top-p."""
        self.every = _logp(logits, self.temperature)
        return logits

    def after(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """As a stopping criterion, when the token has been chosen. Stops nothing."""
        self.logp.append(self.every.gather(1, ids[:, -1:]).squeeze(1))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _logp(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits.float() / temperature, -1)
