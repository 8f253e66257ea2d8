"""Sequence-classification model, such as a reward model, in the searcher's process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from tba.config.mistakes import choices
from tba.tasks.judges import Text
from tba.tasks.judges._model import ModelJudge


@dataclass(frozen=True)
class Classifier(ModelJudge):
    """Scores a prompt with its completion with any sequence classifier of transformers.

    The model may be a reward model with one label, or have several labels, of which one is scored.
    Without `template` and chat template, the input is the prompt followed by the completion.
    """

    auto: ClassVar[str] = "AutoModelForSequenceClassification"
    label: str | int | None = None
    """Name or number of the label to score; required if the model has several."""
    value: Literal["logit", "probability", "log_probability"] = "logit"
    """Score: the logit of the label, its probability, or its log-probability."""

    def check(self) -> None:
        _ = self._model.tokenizer
        architectures = self._model.config.architectures or []
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ValueError(
                f"model = {self.model!r} is a"
                f" {', '.join(architectures) or 'model of unknown type'};"
                " give a sequence-classification model"
            )
        _ = self._index
        super().check()

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
    ) -> list[float]:
        template = self.template
        if template is None and self._model.tokenizer.chat_template is None:
            template = "{prompt}{completion}"
        rows = self._model.encode(prompts, completions, template)
        # a decoder's head reads the last token other than `pad`; without `pad`, rows run alone
        pad = self._model.config.get_text_config().pad_token_id

        def forward(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
            return model(input_ids=ids, attention_mask=mask).logits.float()

        logits = self._model.run(rows, forward, pad, "right")
        if self.value == "logit":
            return logits[:, self._index].tolist()
        config = self._model.config
        one_of_many = config.num_labels > 1 and config.problem_type != "multi_label_classification"
        logp = log_softmax(logits, -1) if one_of_many else logsigmoid(logits)
        chosen = logp[:, self._index]
        return (chosen if self.value == "log_probability" else chosen.exp()).tolist()

    @cached_property
    def _index(self) -> int:
        """The index of the label; ValueError if it does not exist."""
        names = self._model.config.id2label
        if self.label is None and len(names) == 1:
            return 0
        for number, name in names.items():
            if self.label in (number, name):
                return number
        known = choices(str(self.label), names.values())
        raise ValueError(f"label = {self.label!r} is not a label of {self.model!r}{known}")
