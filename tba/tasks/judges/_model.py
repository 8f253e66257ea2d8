"""Models that score or answer: checked before a run starts, loaded by each searcher."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tba.config.tables import PolicyTable
from tba.models import model_path
from tba.models.pretrained import check_files, computes_in_bf16, context, load_files, load_weighted
from tba.tasks.judges import Judge, Text, conversation, filled

Dtype = Literal["auto", "fp32", "bf16"]
Side = Literal["left", "right"]

LOADED: WeakValueDictionary[Any, Any] = WeakValueDictionary()
"""Models in use by judges of this process, so that each is loaded only once."""


@dataclass(frozen=True, kw_only=True)
class ModelJudge(Judge):
    """A judge whose model is loaded by each searcher."""

    auto: ClassVar[str]
    """Name of the transformers class that loads the model."""
    model: str = field(kw_only=False)
    """Folder, or Hugging Face name."""
    dtype: Dtype = "auto"
    """auto: bf16 where that is faster (GPUs and some CPUs), else fp32."""
    token_budget: int = 16_384
    """Maximum number of tokens in one forward pass, including padding."""

    def check(self) -> None:
        self._model.check()
        if self.template is None and self._model.tokenizer.chat_template is not None:
            encode = self._model.tokenizer.apply_chat_template
            if "sanitize_control_tokens" not in inspect.signature(encode).parameters:
                raise ValueError(
                    f"model = {self.model!r}: a policy could write the control tokens of its chat"
                    " template; pip install 'transformers>=5.20', which vLLM 0.33 allows, or set"
                    " template to a text without such tokens"
                )

    def load(self, device: str) -> None:
        self._model.load(device)

    @cached_property
    def _model(self) -> "JudgeModel":
        return JudgeModel(self.model, self.auto, self.dtype, self.token_budget)


@dataclass
class JudgeModel:
    """A tokenizer and a model."""

    name: str
    auto: str
    """Name of the transformers class that loads the model."""
    dtype: Dtype
    token_budget: int
    """Maximum number of tokens in one forward pass, including padding."""
    key: str = "model"
    """Config key that names the model."""
    _model: Any = field(default=None, init=False)

    @property
    def tokenizer(self) -> Any:
        return self._files[0]

    @property
    def config(self) -> Any:
        return self._files[1]

    @property
    def _class(self) -> Any:
        import transformers

        return getattr(transformers, self.auto)

    @cached_property
    def _files(self) -> tuple[Any, Any]:
        """The tokenizer and config; ValueError if the model does not exist."""
        return load_files(self.name, self.key)

    def check(self) -> None:
        """Raise ValueError if the model does not exist, or its files lack weights."""
        _ = self._files
        check_files(self._class, self.name, self.key)

    def load(self, device: str) -> None:
        """Load the weights to a device, or share what another judge in this process has loaded."""
        is_faster = self.dtype == "auto" and computes_in_bf16(PolicyTable(model=self.name), device)
        dtype = torch.bfloat16 if is_faster or self.dtype == "bf16" else torch.float32
        key = (model_path(self.name, self.key), self.auto, dtype, device)
        self._model = LOADED.get(key)
        if self._model is None:
            model = load_weighted(self._class, dtype, self.name, self.key)
            self._model = LOADED[key] = model.to(device)

    def encode(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        template: str | None,
        asks: bool = False,
    ) -> list[list[int]]:
        """Return the tokens of each prompt with its completion.

        Uses `template`, or else the chat template, which prompts for an answer if `asks`. Raises
        ValueError for a length that the model does not support.
        """
        pairs = list(zip(prompts, completions, strict=True))
        if template is not None:
            rows = self.tokenizer([filled(template, *pair) for pair in pairs])["input_ids"]
        else:
            rows = self.tokenizer.apply_chat_template(
                [conversation(*pair) for pair in pairs],
                add_generation_prompt=asks,
                sanitize_control_tokens=True,  # a policy could write such tokens
                return_dict=True,
            )["input_ids"]
        longest = min(context(self.config, self.tokenizer), self.tokenizer.model_max_length)
        for row in rows:
            if not 1 <= len(row) <= longest:
                raise ValueError(
                    f"a prompt with its completion has {len(row)} tokens; the judge {self.name!r}"
                    f" reads 1 to {longest}"
                )
        return rows

    @torch.no_grad()
    def run(
        self,
        rows: Sequence[Sequence[int]],
        forward: Callable[[Any, Tensor, Tensor], Tensor],
        pad: int | None,
        side: Side,
    ) -> Tensor:
        """Return `forward(model, ids, mask)` of each row [N ...], batching rows of similar length.

        With pad = None, rows are run one by one.
        """
        if self._model is None:  # called outside of a run
            self.load("cuda" if torch.cuda.is_available() else "cpu")
        results: dict[int, Tensor] = {}
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        while order:
            longest = max(1, len(rows[order[0]]))
            count = 1 if pad is None else max(1, self.token_budget // longest)
            places = order[:count]
            order = order[count:]
            ids = [torch.tensor(rows[place], dtype=torch.long) for place in places]
            mask = [torch.ones_like(row) for row in ids]
            padded = pad_sequence(ids, batch_first=True, padding_value=pad or 0, padding_side=side)
            masked = pad_sequence(mask, batch_first=True, padding_side=side)
            device = self._model.device
            outputs = forward(self._model, padded.to(device), masked.to(device)).cpu()
            results |= dict(zip(places, outputs, strict=True))
        return torch.stack([results[place] for place in range(len(rows))])
