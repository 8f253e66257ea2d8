"""The model that red-teaming attacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tba.config.tables import PolicyTable
from tba.models.pretrained import Tokenizer, load_text
from tba.prompt import Message, Prompt
from tba.tasks.judges._model import JudgeModel


@dataclass
class Victim:
    """Any causal LM, which answers attacks. It is loaded when it answers for the first time."""

    model: str
    template: str
    """Text with `{attack}`."""
    chat: bool
    """Whether that text is a user's message, for the tokenizer's chat template."""
    answers: int
    """Answers to each attack."""
    max_tokens: int
    temperature: float
    top_p: float
    token_budget: int = 8192
    """Tokens of prompts for which answers are generated at a time."""

    @cached_property
    def text(self) -> Tokenizer:
        """The tokenizer; ValueError if there is no such model, or no chat template."""
        try:
            text = load_text(PolicyTable(model=self.model))
        except ValueError as error:
            raise ValueError(str(error).replace("policy.model", "task.victim")) from error
        if self.chat and text.tokenizer.chat_template is None:
            raise ValueError(
                f"task.victim_chat = true, but the tokenizer of {self.model!r} has no chat"
                " template; remove the key, and write task.victim_prompt around {attack}"
            )
        return text

    def check(self) -> None:
        _ = self.text
        self._model.check()

    def load(self, device: str) -> None:
        self._model.load(device)

    def length(self, attack: str) -> int:
        """Return the number of tokens of an attack, with EOS."""
        return len(self.text.tokenizer(attack, add_special_tokens=False)["input_ids"]) + 1

    def answer(self, attacks: Sequence[str], seed: int) -> list[list[str]]:
        """Return the answers to each attack, the same for the same attacks and seed."""
        rows = [self._encode(attack) for attack in attacks]
        # transformers draws from the global generators, which others use too
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            tokens = self._model.run(rows, self._generate, self.text.pad_id, "left")
        decode = self.text.tokenizer.batch_decode
        return [decode(own, skip_special_tokens=True) for own in tokens]

    @cached_property
    def _model(self) -> JudgeModel:
        from transformers import AutoModelForCausalLM

        budget = self.token_budget // self.answers
        return JudgeModel(self.model, AutoModelForCausalLM, "auto", budget, "task.victim")

    def _encode(self, attack: str) -> list[int]:
        shown: str | list[Message] = self.template.replace("{attack}", attack)
        if self.chat:
            shown = [{"role": "user", "content": shown}]
        return self.text.encode(Prompt("attack", shown)).tolist()

    def _generate(self, model: Any, prompts: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens of the answers to each prompt [N A T], padded to `max_tokens`."""
        output = model.generate(
            input_ids=prompts,
            attention_mask=mask,
            do_sample=True,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0,
            max_new_tokens=self.max_tokens,
            num_return_sequences=self.answers,
            eos_token_id=sorted(self.text.eos_ids),
            pad_token_id=self.text.pad_id,
        )
        tokens = output[:, prompts.shape[1] :]
        missing = self.max_tokens - tokens.shape[1]
        padded = torch.nn.functional.pad(tokens, (0, missing), value=self.text.pad_id)
        return padded.view(len(prompts), self.answers, self.max_tokens)
