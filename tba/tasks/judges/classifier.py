"""A sequence-classification model, such as a reward model, in the searcher's process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from tba.config.errors import choices
from tba.tasks.judges import Text
from tba.tasks.judges._model import ModelJudge


@dataclass(frozen=True)
class Classifier(ModelJudge):
    """Scores a prompt with its completion by any of transformers' sequence classifiers.

    It may be a reward model, which has one label, or have several labels, of which one is scored.
    Without `template` and without a chat template, it reads prompt and completion in turn.
    """

    auto: ClassVar[str] = "AutoModelForSequenceClassification"
    label: str | int | None = None
    """Name or number of the label to score; needed if there are several."""
    value: Literal["logit", "probability", "log_probability"] = "logit"
    """What the score is: the logit of the label, its probability, or the logarithm of that."""

    def check(self) -> None:
        _ = self._model.tokenizer
        architectures = self._model.config.architectures or []
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ValueError(
                f"model = {self.model!r} is a {', '.join(architectures) or 'model of no kind'};"
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
        # a decoder's head takes the last token that is not this one; without it, rows run alone
        pad = self._model.config.get_text_config().pad_token_id
        logits = self._model.run(rows, _logits, pad, "right")
        if self.value == "logit":
            return logits[:, self._index].tolist()
        config = self._model.config
        one_of_many = config.num_labels > 1 and config.problem_type != "multi_label_classification"
        logp = log_softmax(logits, -1) if one_of_many else logsigmoid(logits)
        chosen = logp[:, self._index]
        return (chosen if self.value == "log_probability" else chosen.exp()).tolist()

    @cached_property
    def _index(self) -> int:
        """The number of the label; ValueError if there is no such label."""
        names = self._model.config.id2label
        if self.label is None and len(names) == 1:
            return 0
        for number, name in names.items():
            if self.label in (number, name):
                return number
        known = choices(str(self.label), names.values())
        raise ValueError(f"label = {self.label!r} is no label of {self.model!r}{known}")


def _logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=mask).logits.float()
