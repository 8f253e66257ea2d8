"""Causal language model that answers with one of two words, such as Llama Guard."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from tba.tasks.judges import Text
from tba.tasks.judges._model import ModelJudge
from tba.types import positions


@dataclass(frozen=True)
class GuardModel(ModelJudge):
    """Scores with P(positive) for the first token of a guard model's answer.

    Each word is represented by its first token. The two probabilities are normalized to sum to 1.
    """

    auto: ClassVar[str] = "AutoModelForCausalLM"
    positive: str = "unsafe"
    """Word whose probability is the score."""
    negative: str = "safe"
    """The other word."""
    value: Literal["probability", "log_probability"] = "probability"
    """Score: the probability, or the log-probability."""
    prefix: str = ""
    """Beginning of every answer: two line breaks for a Llama Guard whose template lacks them."""

    def check(self) -> None:
        if self.template is None and self._model.tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {self.model!r} has no chat template; set template to a text"
                " with {prompt} and {completion} that asks for one of the two words"
            )
        _ = self._words
        super().check()

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        rows = self._model.encode(prompts, completions, self.template, asks=True)
        prefix = self._tokens(self.prefix) if self.prefix else []

        def forward(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
            """Return the logits of both words after each row [N 2]."""
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions(mask),
                logits_to_keep=1,
                use_cache=False,
            )
            return output.logits[:, -1, self._words].float()

        # padding is masked, so any token will do
        logits = self._model.run([row + prefix for row in rows], forward, 0, "left")
        logp = logsigmoid(logits[:, 0] - logits[:, 1])
        return (logp if self.value == "log_probability" else logp.exp()).tolist()

    @cached_property
    def _words(self) -> list[int]:
        """The first tokens of both words; ValueError if they are the same."""
        words = [self._tokens(word)[:1] for word in (self.positive, self.negative)]
        if [] in words or words[0] == words[1]:
            raise ValueError(
                f"positive = {self.positive!r} and negative = {self.negative!r} must begin with"
                f" different tokens of {self.model!r}; give other words"
            )
        return [token for word in words for token in word]

    def _tokens(self, text: str) -> list[int]:
        return self._model.tokenizer(text, add_special_tokens=False)["input_ids"]
