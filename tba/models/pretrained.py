"""Loading pretrained models and tokenizers, from a folder, the hub, or this package."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging import getLogger
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from tba.config.tables import PolicyTable
from tba.models import is_causal, model_path, tokens_in
from tba.models.template import variables
from tba.models.tokenizer import Tokenizer

EAGER_TOKENS = 320  # longest prompt and response for eager attention, which keeps all scores

HARMLESS = re.compile(r"(rotary_emb\.inv_freq|position_ids|masked_bias|causal_mask)$|(^|\.)mtp[._]")
"""Names of constants in older files, and of layers that only predict further tokens."""


def load_files(name: str, key: str) -> tuple[Any, Any]:
    """Load the tokenizer and the config.json of a model; ValueError, naming the key, on failure."""
    from transformers import AutoTokenizer

    path = model_path(name, key)
    named = f"{key} = {name!r}"
    if Path(path, "adapter_config.json").is_file():
        raise ValueError(
            f"{named} is an adapter: give its base model, and this folder as policy.lora.from"
        )
    with _explained(path, named):
        config = config_of(path)
    plain = config.to_dict()
    quantised = plain.get("quantization_config") or plain.get("compression_config")
    if quantised:
        method = dict(quantised).get("quant_method", "bitsandbytes")
        raise ValueError(
            f"{named} is quantised ({method}), and such weights can be neither trained nor"
            " compared; give the model in bf16 or fp32"
        )
    with _explained(path, named):
        return AutoTokenizer.from_pretrained(path, **sources(path)), config


def model_folder(path: str) -> Path:
    """Return the folder of a model, which may be in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else Path(path)
    return folder


@contextmanager
def _explained(path: str, named: str) -> Iterator[None]:
    """Turn exceptions that transformers raises for a model's files into ValueError."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:  # files may hold anything
        reason = f"{type(error).__name__}: {str(error).strip()}".replace("\n", " ")[:300]
        if isinstance(error, OSError) and _offline(path) and not Path(path).is_dir():
            reason = (
                f"no such folder, {constants.ENDPOINT} does not answer, and the model is not in"
                " the cache; give a folder, or connect to the hub once"
            )
        elif isinstance(error, SafetensorError):
            reason = f"a file of weights is damaged or cut short ({error}); download it again"
        raise ValueError(f"{named} cannot be loaded: {reason}") from error


def load_text(policy: PolicyTable) -> Tokenizer:
    """Load the tokenizer of a model; ValueError if there is no such model or tokenizer.

    Config files of the model may name more EOS tokens, and stop strings.
    """
    from transformers.utils.hub import cached_file

    tokenizer, config = load_files(policy.model, "policy.model")
    given = policy.eos_token
    eos = tokenizer.eos_token_id if given is None else tokenizer.get_vocab().get(given)
    vocabulary = config.get_text_config().to_dict().get("vocab_size") or len(tokenizer)
    if eos is None or eos >= vocabulary:
        raise ValueError(
            f"policy.model = {policy.model!r} has no EOS token that it can sample, so no response"
            f" could end: {given or tokenizer.eos_token!r} has number {eos}, and it samples from"
            f" {vocabulary} tokens; set policy.eos_token to one of its tokens that ends texts"
        )
    named: dict[str, Any] = {"policy.eos_token": given and eos, "tokenizer": tokenizer.eos_token_id}
    stop_strings: list[str] = []
    path = model_path(policy.model)
    options = {"local_files_only": _offline(path), "_raise_exceptions_for_missing_entries": False}
    for name in ("config.json", "generation_config.json"):
        with _explained(path, f"{name} of policy.model = {path!r}"):
            file = cached_file(path, name, **options)
            plain: Any = json.loads(Path(file).read_text("utf-8")) if file else {}
            nested = plain.get("text_config") or {}
            named[name] = plain.get("eos_token_id", nested.get("eos_token_id"))
            strings = np.ravel(plain.get("stop_strings"))
            stop_strings += [str(each) for each in strings if each is not None]
    ends = {source: tokens_in(value, vocabulary) for source, value in named.items()}
    for name in policy.chat_template_kwargs:
        if name not in variables(tokenizer.chat_template):  # templates ignore unknown arguments
            raise ValueError(
                f"policy.chat_template_kwargs.{name}: the chat template of {policy.model!r} has no"
                " such argument; remove it"
            )
    return Tokenizer(
        tokenizer=tokenizer,
        eos_id=eos,
        eos_ids=frozenset().union(*ends.values()),
        pad_id=(tokens_in(tokenizer.pad_token_id, vocabulary) or [eos])[0],  # any: it is masked
        context=context(config, tokenizer),
        vocabulary=vocabulary,
        template_kwargs=policy.chat_template_kwargs,
        ends={source: ids for source, ids in ends.items() if ids},
        stop_strings=stop_strings,
    )


def load_config(policy: PolicyTable) -> Any:
    return config_of(model_path(policy.model))


def config_of(path: str) -> Any:
    """Return a model's config.json, without an invalid pad id: -1 is the last embedding."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, **sources(path))
    text = config.get_text_config()
    ids = text.to_dict()
    if "pad_token_id" in ids and not tokens_in(ids["pad_token_id"], ids.get("vocab_size", inf)):
        text.pad_token_id = None
    return config


def sources(path: str) -> dict[str, bool]:
    """Return the options of `from_pretrained` that say where files come from."""
    # not None, by which transformers would ask on the terminal whether to run a model's code
    return {"trust_remote_code": False, "local_files_only": _offline(path)}


@cache
def _offline(path: str) -> bool:
    """Return whether to use local files only: for a folder, or if the hub does not answer."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if Path(path).is_dir():
        return True
    try:  # one request decides: without a network, each download would be retried for a minute
        url = hf_hub_url(path, "config.json")
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError as error:  # 404 and 401 are answers, and from_pretrained explains them
        return error.response.status_code == 429 or error.response.status_code >= 500
    except Exception:  # no connection, a timeout, or offline mode; the class depends on the version
        return True
    return False


def context(config: Any, tokenizer: Any) -> int:
    """Return the context of the model, or of the tokenizer if the model has no limit."""
    try:
        return int(config.get_text_config().max_position_embeddings)
    except AttributeError:
        return int(tokenizer.model_max_length)


def check_kind(policy: PolicyTable) -> None:
    """Raise ValueError unless config.json describes a causal LM with attention alone."""
    config = load_config(policy)
    if not is_causal(config):
        raise ValueError(
            f"policy.model = {policy.model!r} is a {config.model_type!r}, by its config.json: an"
            " encoder, a model with a recurrent state, or a part of a larger model; give a causal"
            " language model with attention alone"
        )


def check_model(policy: PolicyTable) -> None:
    """Raise ValueError unless the model can be trained and its files match; reads no weights."""
    from transformers import AutoModelForCausalLM

    check_kind(policy)
    with _explained(policy.model, f"policy.model = {policy.model!r}"):
        model = load_empty_model(policy)  # a config may not match its model's code
    if policy.attention == "sdpa" and not model._supports_sdpa:
        raise ValueError(
            f"policy.attention = 'sdpa': transformers has no SDPA for a {type(model).__name__};"
            " set policy.attention=eager, or remove it"
        )
    if policy.attention == "flex" and not model._supports_flex_attn:
        raise ValueError(
            f"policy.attention = 'flex': transformers has no FlexAttention for a"
            f" {type(model).__name__}; set policy.attention=sdpa, or remove it"
        )
    check_files(AutoModelForCausalLM, policy.model, "policy.model")


def load_model(
    policy: PolicyTable, dtype: Any, quantised: Any = None, device: str | None = None
) -> Any:
    """Load the causal LM in `dtype`, without dropout, which would change the log-probs.

    `quantised` are settings of transformers by which to quantise its linear layers; None: no.
    """
    from transformers import AutoModelForCausalLM

    given = policy.model, "policy.model"
    return load_weighted(AutoModelForCausalLM, dtype, *given, device, quantised)


def check_files(auto: Any, name: str, key: str) -> None:
    """Raise ValueError unless a model's files match; files not yet downloaded are not checked."""
    from huggingface_hub import try_to_load_from_cache

    path = model_path(name, key)
    file = try_to_load_from_cache(path, "model.safetensors") if not Path(path).is_dir() else path
    if isinstance(file, str):
        load_weighted(auto, torch.float32, name, key, "meta")


def load_weighted(
    auto: Any, dtype: Any, name: str, key: str, device: str | None = None, quantised: Any = None
) -> Any:
    """Load a model with a class of transformers. On "meta", only file headers are read.

    ValueError, naming the key, if weights are missing, unexpected, or of another shape. An encoder
    is used without its pooler, and without any heads in its files.
    """
    from transformers import logging

    getLogger("bitsandbytes").setLevel("ERROR")  # hides hints about optional kernels
    logging.disable_progress_bar()  # it would be drawn across the console, at every checkpoint
    path = model_path(name, key)
    named = f"{key} = {name!r}"
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the error below says what is missing
    try:
        with _explained(path, named):
            model, report = auto.from_pretrained(
                path,
                config=config_of(path),
                dtype=dtype,
                device_map=device,
                quantization_config=quantised,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **sources(path),
            )
    finally:
        logging.set_verbosity(verbosity)
    bare = model.base_model is model
    missing = [n for n in sorted(report["missing_keys"]) if not (bare and n.startswith("pooler."))]
    excess = [n for n in sorted(report["unexpected_keys"]) if not (bare or HARMLESS.search(n))]
    shapes = [f"{n} {list(a)} for {list(b)}" for n, a, b in sorted(report["mismatched_keys"])]
    lists = {"missing": missing, "unexpected": excess, "of another shape": shapes}
    problems = []
    for what, names in lists.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            problems.append(f"{what}: {', '.join(names[:3])}{more}")
    if problems:
        raise ValueError(
            f"{named}: the weights in its files do not match a {type(model).__name__} with this"
            f" config.json ({'; '.join(problems)}); give a model that was saved whole, with its own"
            " config and without a wrapper around it"
        )
    return model.eval()


def load_empty_model(policy: PolicyTable) -> Any:
    """Return the causal LM without its weights: only names, shapes, and which ones are tied."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_config(policy), trust_remote_code=False)


def computes_in_bf16(policy: PolicyTable, device: str) -> bool:
    """Return whether to compute in bf16 over fp32 weights: by `policy.autocast`, or if faster."""
    if policy.autocast != "auto":
        return policy.autocast == "bf16"
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    wide = load_config(policy).get_text_config().hidden_size >= 256
    return wide and torch.cpu._is_avx512_bf16_supported()
