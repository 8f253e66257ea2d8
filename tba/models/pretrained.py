"""Hugging Face models and tokenizers from a folder, the hub, or this package; and how text becomes prompt tokens."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import torch

from tba.config.tables import PolicyTable
from tba.types import Answer, Completion, Prompt

BUNDLED = Path(__file__).parent


@dataclass(frozen=True)
class Text:
    """A tokenizer with what a run asks of it: the tokens that end a response, and the one that pads."""

    tokenizer: Any
    eos_ids: frozenset[int]
    pad_id: int
    context: int
    """The most tokens that prompt and response may have together."""

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Prompt tokens; chat messages go through the tokenizer's chat template. ValueError when there is nothing to condition on."""
        if isinstance(prompt.text, str):
            ids = self.tokenizer(prompt.text)["input_ids"]
        elif self.tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.id!r} is chat messages, but the tokenizer has no chat template; give text, or a model that has one"
            )
        else:
            ids = self.tokenizer.apply_chat_template(
                list(prompt.text), add_generation_prompt=True, return_dict=True
            )["input_ids"]
        if not ids or not prompt.text:
            raise ValueError(
                f"prompt {prompt.id!r} is empty; a prompt needs at least one token: remove the row, or give it text"
            )
        return np.asarray(ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def answer(self, completion: Completion) -> Answer:
        return Answer(self.decode(completion.tokens), completion.finished)

    def check_all(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """ValueError for a prompt that is empty, shares its id, or leaves no room for `max_tokens` of response."""
        lengths = {p.id: len(self.encode(p)) for p in prompts}
        if len(lengths) != len(prompts):
            raise ValueError("two prompts share an id; ids must be unique")
        room = self.context - max_tokens
        if long := {i: n for i, n in lengths.items() if n > room}:
            worst = max(long, key=long.__getitem__)
            raise ValueError(
                f"{len(long)} of {len(prompts)} prompts do not fit the model's context of {self.context} tokens beside {max_tokens} of response"
                f" (the longest is {worst!r} with {long[worst]}); lower sampling.max_tokens, shorten or remove them"
            )


def model_path(name: str) -> str:
    """What `from_pretrained` takes; ValueError when it looks like a folder and is none."""
    if name.startswith("bundled:"):
        folder = BUNDLED / name.removeprefix("bundled:")
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"policy.model = {name!r}: bundled models are {', '.join(f'bundled:{p.parent.name}' for p in sorted(BUNDLED.glob('*/config.json')))}"
            )
        return str(folder)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"policy.model = {name!r}: that folder has no config.json; give a folder that save_pretrained wrote"
            )
        return str(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"policy.model = {name!r}: no such folder; give one that save_pretrained wrote, or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return name


def load_text(policy: PolicyTable) -> Text:
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoTokenizer, GenerationConfig

    path = model_path(policy.model)
    if (
        not Path(path).is_dir()
        and not _hub_answers(path)
        and not isinstance(try_to_load_from_cache(path, "config.json"), str)
    ):
        raise ValueError(
            f"policy.model = {policy.model!r}: there is no folder of that name, the hub does not answer, and nothing of it was fetched before"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **_how(policy))
        config = load_config(policy)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.model = {policy.model!r} cannot be loaded: {str(error).partition(chr(10))[0]}"
        ) from error
    eos = _token(tokenizer, policy.eos_token, "eos")
    eos = tokenizer.eos_token_id if eos is None else eos
    try:
        declared = GenerationConfig.from_pretrained(
            path, local_files_only=_how(policy)["local_files_only"]
        ).eos_token_id
    except OSError:  # a model without generation_config.json
        declared = config.eos_token_id
    eos_ids = {eos} | set(declared if isinstance(declared, list) else [declared])
    if eos is None:
        raise ValueError(
            f"the tokenizer of {policy.model!r} has no EOS token, so that no response could end; set policy.eos_token='</s>', or the token that ends its texts"
        )
    pad = _token(tokenizer, policy.pad_token, "pad")
    pad = tokenizer.pad_token_id if pad is None else pad
    return Text(
        tokenizer,
        eos_ids=frozenset(i for i in eos_ids if i is not None),
        pad_id=eos if pad is None else pad,
        context=_context(config, tokenizer),
    )


def load_config(policy: PolicyTable) -> Any:
    """The model's own config.json."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path(policy.model), **_how(policy))


def _how(policy: PolicyTable) -> dict[str, bool]:
    """How every file of a model is asked for."""
    return {
        "trust_remote_code": policy.trust_remote_code,
        "local_files_only": not _hub_answers(model_path(policy.model)),
    }


@cache
def _hub_answers(path: str) -> bool:
    """Whether it is worth asking the hub: without a network its client tries for most of a minute. Files it has cached are found anyway."""
    from huggingface_hub import constants

    if Path(path).is_dir() or constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    answered = threading.Event()

    def ask() -> None:
        with (
            suppress(OSError),
            socket.create_connection((urlsplit(constants.ENDPOINT).hostname, 443), timeout=3),
        ):
            answered.set()

    threading.Thread(
        target=ask, daemon=True
    ).start()  # in a thread, because looking up a name knows no deadline
    return answered.wait(timeout=3)


def _context(config: Any, tokenizer: Any) -> int:
    """Of the model; of the tokenizer where the model itself has no limit."""
    try:
        return int(config.get_text_config().max_position_embeddings)
    except AttributeError:
        return int(tokenizer.model_max_length)


def _token(tokenizer: Any, token: str | None, role: str) -> int | None:
    if token is None:
        return None
    if token not in tokenizer.get_vocab():
        raise ValueError(f"policy.{role}_token = {token!r} is not in the tokenizer's vocabulary")
    return int(tokenizer.convert_tokens_to_ids(token))


def load_model(policy: PolicyTable, dtype: Any) -> Any:
    """The causal LM in `dtype`, without dropout: log-probabilities must be those of the policy that samples."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be drawn across the console, at every checkpoint again
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path(policy.model), dtype=dtype, use_safetensors=True, **_how(policy)
        )
    except OSError as error:
        raise ValueError(
            f"policy.model = {policy.model!r} has no weights in safetensors, and no others are loaded: {error}"
        ) from error
    return model.eval()


def computes_in_bf16(policy: PolicyTable, device: str) -> bool:
    """Return whether to compute in bf16 over fp32 weights: as `policy.autocast` says, or where it is faster."""
    if policy.autocast != "auto":
        return policy.autocast == "bf16"
    return gains_from_bf16(device, load_config(policy).get_text_config().hidden_size)


def gains_from_bf16(device: str, hidden_size: int) -> bool:
    """Whether bf16 autocast is faster there: on GPUs that have it, and for wide enough models on CPUs that have it."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() and hidden_size >= 256


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass, without dropout: only the layers, none of their parts, are in training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    with warnings.catch_warnings():  # deprecated late in transformers 5, and all that early 5 has
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
