"""Low-rank adapters (LoRA) with PEFT: a frozen model, and small matrices that are trained.

The matrices are the only parameters that require a gradient, and so the only ones that are trained,
published and saved. The reference is a second, frozen adapter, or the model without an adapter.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tba.config.mistakes import choices
from tba.config.tables import PolicyTable
from tba.models import FLEX, model_path
from tba.models.pretrained import load_empty_model, load_model
from tba.weights import Weights, as_tensor, check_same_model, trained

ADAPTER = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
TRAINED = "default"  # name of the adapter that is trained
REFERENCE = "reference"  # name of the frozen one
WHOLE = f".modules_to_save.{TRAINED}."  # in names of modules that are trained whole
PREFIX = "base_model.model."  # of names in PEFT's files, which leave out the adapter's name
ALL = ("all-linear",)
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight, with its share of the scales."""
SCALES = ("r", "lora_alpha", "use_rslora", "use_dora", "alpha_pattern", "alora_invocation_tokens")
"""Settings of PEFT that change what the tensors of an adapter compute."""
STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that leave the model's own weights as they are."""


def load_placed(
    policy: PolicyTable, device: str, bf16: bool, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Load the model on its device, with the adapter of `policy`, and with the fastest attention.

    Trained weights are in `dtype`. ValueError for a device that is neither cpu nor cuda.
    """
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"models run only on cpu and cuda, not on {device!r}; give one of them")
    if policy.lora is None:
        model = load_model(policy, dtype)
    else:
        model = load_adapted(policy, bf16, seed, dtype)
    set_attention(model, policy, device)
    return model.to(device)


def load_frozen(
    policy: PolicyTable, device: str, bf16: bool, dtype: torch.dtype = torch.float32
) -> Any:
    """Load the model for log-probs only; if it computes in bf16, linear layers are in bf16."""
    if policy.lora is not None:
        return load_placed(policy, device, bf16, dtype)
    model = load_model(policy, dtype)
    if bf16:
        round_linear(model)
    set_attention(model, policy, device)
    return model.to(device)


def set_attention(model: Any, policy: PolicyTable, device: str) -> None:
    """Set the fastest attention for a device, unless the policy names one."""
    attention = "eager" if (policy.attention, device) == ("auto", "cpu") else policy.attention
    if attention == "flex":
        from tba.models.flex import register

        register()
        model.set_attn_implementation(FLEX)
    elif attention != "auto":
        model.set_attn_implementation(attention)


def load_adapted(
    policy: PolicyTable, bf16: bool, seed: int = 0, adapters: torch.dtype = torch.float32
) -> Any:
    """Load the model with an adapter, whose dtype is `adapters`.

    With `bf16`, the model is for use under autocast, and its frozen linear layers are in bf16.
    Results are bit-identical, because autocast would convert them at every use. The adapter is read
    from `policy.lora.from`, with a frozen copy. By default, it is initialised from `seed` and adds
    0 to the outputs. With `load_in_4bit`, frozen linear layers except the LM head are in 4 bits.
    """
    from transformers import BitsAndBytesConfig

    assert policy.lora is not None
    compute = torch.bfloat16 if bf16 else torch.float32
    quantised = None
    if policy.lora.load_in_4bit:  # QLoRA: NF4, with quantised scales
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    model = load_model(policy, torch.float32, quantised)
    _inject(model, _settings(policy, model), TRAINED, seed)
    for parameter in trained(model).values():
        parameter.data = parameter.data.to(adapters)
    if bf16:
        _round_frozen(model)
    if quantised is not None:
        from bitsandbytes.nn import Linear4bit

        # in eval mode, bitsandbytes repacks them on some CPUs, with other results and without
        # gradients
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.train()
    if policy.lora.start is not None:
        start = read_adapter(Path(policy.lora.start).expanduser())
        model.load_state_dict(start, strict=False)
        _load_frozen(model, start)
    return model


def empty_adapted(policy: PolicyTable, bf16: bool = False) -> Any:
    """Return the model with an adapter, as `load_adapted` does, but without weights."""
    model = load_empty_model(policy)
    _inject(model, _settings(policy, model), TRAINED)
    if bf16:
        _round_frozen(model)
    return model


def frozen_bytes(policy: PolicyTable, model: Any) -> float:
    """Return the bytes of the weights that are not trained."""
    total = sum(float(p.nbytes) for p in model.parameters() if not p.requires_grad)
    if policy.lora is None or not policy.lora.load_in_4bit:
        return total
    head = model.get_output_embeddings()
    linear = [m.get_parameter("weight") for m in _linear(model).values() if m is not head]
    return total + sum(FOUR_BITS * weight.numel() - weight.nbytes for weight in linear)


def is_adapted(model: Any) -> bool:
    return any(".lora_A." in name for name, _ in model.named_parameters())


@contextmanager
def reference_weights(model: Any) -> Iterator[None]:
    """Compute with the frozen adapter, or with none. No other thread may then use the model."""
    layers = _layers(model)
    frozen = REFERENCE in model.peft_config
    try:
        for layer in layers:
            if frozen:
                layer.set_adapter(REFERENCE, inference_mode=True)
            else:
                layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.set_adapter(TRAINED)
            layer.enable_adapters(True)


def load_reference(model: Any, weights: Weights) -> None:
    """Copy weights into the frozen adapter; ValueError, and no change, if they do not match."""
    check_same_model(model, weights.arrays, "the weights are of")
    _load_frozen(model, {name: as_tensor(array) for name, array in weights.arrays.items()})


def save_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors of the model's trained adapter to a folder that PEFT and vLLM can load."""
    settings = copy(model.peft_config[TRAINED])
    for name, value in vars(settings).items():
        if isinstance(value, set):  # which PEFT writes in an order that differs between processes
            setattr(settings, name, sorted(value))
    settings.save_pretrained(str(folder))
    plain = {}
    for name, tensor in tensors.items():
        plain[PREFIX + name.replace(WHOLE, ".").replace(f".{TRAINED}.", ".")] = tensor
    save_file(plain, folder / ADAPTER)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in a model."""
    return {own_name(name): tensor for name, tensor in load_file(folder / ADAPTER).items()}


def merged(policy: PolicyTable, folder: Path) -> Any:
    """Return the model in fp32 with the adapter in `folder` added to its weights."""
    model = load_model(policy, torch.float32)
    from peft import PeftModel  # after `load_model`, which silences bitsandbytes

    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def check_adapter(policy: PolicyTable) -> str:
    """Return a message that says which layers are adapted and which are not.

    ValueError without PEFT, if layers are missing, or if the adapter to start from is wrong.
    """
    assert policy.lora is not None
    if find_spec("peft") is None:
        raise ValueError(
            "policy.lora needs PEFT: pip install peft, or remove the table to train all weights"
        )
    model = load_empty_model(policy)
    # PEFT skips names that it does not find
    head = model.get_output_embeddings()
    linear = [name for name, module in _linear(model).items() if module is not head]
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    single = []
    for name, module in model.named_modules():
        if not list(module.children()) and all(uses[id(p)] == 1 for p in module.parameters()):
            single.append(name)
    if policy.lora.target_modules != ALL:
        _check_ends("target_modules", policy.lora.target_modules, linear, "linear layer")
    whole = policy.lora.modules_to_save
    _check_ends("modules_to_save", whole, single, "untied module without submodules")
    _inject(model, _settings(policy, model), TRAINED)
    if policy.lora.start is not None:
        _check_start(model, policy.lora.start)
    adapted = set()
    left = set()
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".base_layer." in name:
            adapted.add(re.split(r"\.lora_|\.base_layer", name)[0].rpartition(".")[2])
        elif parameter.ndim > 1 and not parameter.requires_grad:
            left.add(".".join(name.replace(".original_module", "").split(".")[-2:]))
    left -= {f"{name.rpartition('.')[2]}.weight" for name in whole}
    trains = f", and trains {', '.join(whole)} in full" if whole else ""
    leaves = ", ".join(sorted(left)) or "no matrices"
    return f"LoRA adapts {', '.join(sorted(adapted))}{trains}; unchanged: {leaves}"


def _settings(policy: PolicyTable, model: Any) -> Any:
    """Return PEFT's settings for the model."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    assert policy.lora is not None
    targets = policy.lora.target_modules
    return LoraConfig(
        r=policy.lora.r,
        lora_alpha=policy.lora.alpha,
        target_modules=ALL[0] if targets == ALL else list(targets),
        modules_to_save=list(policy.lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2's layers
        base_model_name_or_path=model_path(policy.model),
    )


def _inject(model: Any, settings: Any, name: str, seed: int = 0) -> None:
    """Add an adapter to the model, and freeze everything except the trained adapter."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.default_generator.manual_seed(seed)
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")  # experts' do
        inject_adapter_in_model(settings, model, name)
    for layer in _layers(model):
        layer.set_adapter(TRAINED)


def _layers(model: Any) -> list[Any]:
    """Return the layers with adapters, and the modules that are trained whole."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    kinds = LoraLayer | ModulesToSaveWrapper
    return [module for module in model.modules() if isinstance(module, kinds)]


def _linear(model: Any) -> dict[str, nn.Module]:
    """Return all linear layers by name, except the ones within adapters."""
    from transformers.pytorch_utils import Conv1D

    own = (".lora_", WHOLE)
    named = model.named_modules()
    modules = {n: module for n, module in named if not any(part in f"{n}." for part in own)}
    return {name: m for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D)}


def round_linear(model: Any) -> None:
    """Store the linear layers in bf16, for use under autocast, which would convert them each time.

    Results are bit-identical. A head that is tied to the embeddings does not change, nor do custom
    layers: Falcon's add the bias without autocast.
    """

    for module in _roundable(model):
        module.to(torch.bfloat16)


def rounded(model: Any) -> dict[int, nn.Parameter]:
    """Return the trained weights that `round_linear` would convert, in bf16, by id."""
    weights = [p for module in _roundable(model) for p in module.parameters() if p.requires_grad]
    return {id(p): nn.Parameter(p.detach().to(torch.bfloat16, copy=True)) for p in weights}


def _roundable(model: Any) -> list[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    embeddings = model.get_input_embeddings().weight
    return [
        module
        for module in _linear(model).values()
        if module.weight is not embeddings and type(module) in (nn.Linear, Conv1D)
    ]


def _round_frozen(model: Any) -> None:
    """Store the linear layers in bf16, including the LM head, which is untied from embeddings."""
    head = model.get_output_embeddings()
    if not head.weight.requires_grad:  # it may be tied to the embeddings
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    round_linear(model)
    for layer in _layers(model):
        layer.cast_input_dtype_enabled = False  # PEFT's conversion, which autocast would undo


@torch.no_grad()
def _load_frozen(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors of a trained adapter into the frozen one, which is added if it is missing."""
    if REFERENCE not in model.peft_config:
        _inject(model, copy(model.peft_config[TRAINED]), REFERENCE)
    for name, tensor in tensors.items():
        frozen = name.replace(f".{TRAINED}.", f".{REFERENCE}.")
        model.get_parameter(frozen).copy_(tensor)


def own_name(name: str) -> str:
    """Return the name in the model of a tensor in PEFT's file."""
    name = name.removeprefix(PREFIX)
    if ".lora_" not in name:
        module, _, parameter = name.rpartition(".")
        return f"{module}{WHOLE}{parameter}"
    return re.sub(r"\.(lora_[AB])\.", rf".\1.{TRAINED}.", name)


def _check_ends(key: str, ends: Sequence[str], names: Sequence[str], kind: str) -> None:
    """Raise ValueError unless each of `ends` is the end of a name."""
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(f"policy.lora.{key}: no {kind} is called {end!r}{choices(end, known)}")


def _check_start(model: Any, start: str) -> None:
    """Raise ValueError unless the folder has an adapter that computes the same as the model's."""
    named = f"policy.lora.from = {start!r}"
    folder = Path(start).expanduser()
    try:
        settings = json.loads((folder / SETTINGS).read_text("utf-8"))
        tensors = read_adapter(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{named} cannot be read: {error}; give a folder that PEFT's save_pretrained or"
            " `tba export --adapter` wrote"
        ) from error
    ours = vars(model.peft_config[TRAINED])  # PEFT adds some for a mixture of experts
    differing = [f"{n} = {settings[n]}" for n in SCALES if settings.get(n, ours[n]) != ours[n]]
    begun = settings.get("init_lora_weights", True)
    if begun not in STARTS:
        differing.append(f"init_lora_weights = {begun!r}")
    if differing:
        raise ValueError(
            f"{named}: the adapter has {', '.join(differing)}; set r and alpha in policy.lora"
            " to its values, or give a plain LoRA adapter"
        )
    check_same_model(model, tensors, f"{named} is of")
