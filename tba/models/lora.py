"""Low-rank adapters (LoRA) with PEFT: a frozen model, and small matrices that are trained.

The matrices are the only parameters that require a gradient, and so the only ones that are trained,
published and saved. The reference is a second, frozen adapter, or the model without any.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tba.config.errors import choices
from tba.config.tables import LoraTable, PolicyTable
from tba.models.pretrained import load_empty_model, load_model
from tba.weights import Weights, as_tensor, check_same_model, trained

ADAPTER, SETTINGS = "adapter_model.safetensors", "adapter_config.json"  # files of a PEFT adapter
TRAINED, REFERENCE = "default", "reference"  # names of the trained adapter and the frozen one
WHOLE = f".modules_to_save.{TRAINED}."  # in names of modules that are trained whole
PREFIX = "base_model.model."  # of names in PEFT's files, which leave out that of the adapter
ALL = ("all-linear",)
UNSUPPORTED = (
    "alora_invocation_tokens", "alpha_pattern", "layer_replication", "use_bdlora", "use_dora",
    "use_qalora",
)  # fmt: skip
"""Settings of PEFT that change what the tensors of an adapter compute."""
STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of PEFT's `init_lora_weights` that leave the model's own weights as they are."""


def load_placed(
    policy: PolicyTable, device: str, bf16: bool, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """Load the model on its device, with its adapter if any, and the attention that is fastest.

    What is trained is in `dtype`.
    """
    if policy.lora is None:
        model = load_model(policy, dtype)
    else:
        model = load_adapted(policy, bf16, seed, dtype)
    attention = "eager" if (policy.attention, device) == ("auto", "cpu") else policy.attention
    if attention != "auto":
        model.set_attn_implementation(attention)
    return model.to(device)


def load_adapted(
    policy: PolicyTable, bf16: bool, seed: int = 0, adapters: torch.dtype = torch.float32
) -> Any:
    """Load the model with an adapter, whose dtype is `adapters`.

    With `bf16`, the model is for use under autocast, and its frozen linear layers are in bf16.
    Results are the same bit for bit, because autocast would convert them at every use. The adapter
    is that of `policy.lora.from`, with a frozen copy. Without one, it is initialised from `seed`
    and adds 0 to the outputs.
    """
    assert policy.lora is not None
    model = load_model(policy, torch.float32)
    _inject(model, _settings(policy, model), TRAINED, seed)
    for parameter in trained(model).values():
        parameter.data = parameter.data.to(adapters)
    if bf16:
        _round_frozen(model)
    if policy.lora.start is not None:
        start = read_adapter(Path(policy.lora.start).expanduser())
        model.load_state_dict(start, strict=False)
        _load_frozen(model, start)
    return model


def empty_adapted(policy: PolicyTable) -> Any:
    """Return the model with an adapter, but without weights: names and shapes only."""
    model = load_empty_model(policy)
    _inject(model, _settings(policy, model), TRAINED)
    return model


def is_adapted(model: Any) -> bool:
    return any(".lora_A." in name for name, _ in model.named_parameters())


@contextmanager
def reference_weights(model: Any) -> Iterator[None]:
    """Compute with the frozen adapter, or without any. No other thread may use the model then."""
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
    """Put these weights into the frozen adapter, or raise ValueError and change nothing."""
    check_same_model(model, weights.arrays, "the weights are of")
    _load_frozen(model, {name: as_tensor(array) for name, array in weights.arrays.items()})


def save_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors of the model's trained adapter as a folder that PEFT loads."""
    _write(tensors, model.peft_config[TRAINED], folder)


def write_adapter(weights: Weights, policy: PolicyTable, folder: Path) -> None:
    """Write published weights as a folder that PEFT and vLLM load."""
    assert policy.lora is not None
    tensors = {name: as_tensor(array) for name, array in weights.arrays.items()}
    settings = _settings(policy)
    if policy.lora.target_modules == ALL:
        layers = [name.partition(".lora_")[0] for name in tensors]
        settings.target_modules = {layer.rpartition(".")[2] for layer in layers}
    _write(tensors, settings, folder)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in a model."""
    return {_own_name(name): tensor for name, tensor in load_file(folder / ADAPTER).items()}


def merged(policy: PolicyTable, folder: Path) -> Any:
    """Return the model in fp32 with the adapter in `folder` added to its weights."""
    from peft import PeftModel

    model = load_model(policy, torch.float32)
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def check_adapter(policy: PolicyTable) -> str:
    """Return what is adapted and what is not.

    ValueError without PEFT, if layers are missing, or if the first adapter is wrong.
    """
    assert policy.lora is not None
    if find_spec("peft") is None:
        raise ValueError(
            "policy.lora needs PEFT: pip install peft, or remove the table to train all weights"
        )
    model = load_empty_model(policy)
    _check_targets(model, policy.lora)
    _check_whole(model, policy.lora)
    folder = None if policy.lora.start is None else Path(policy.lora.start).expanduser()
    if folder is not None:
        _check_settings(folder, policy.lora)
    _inject(model, _settings(policy, model), TRAINED)
    if folder is not None:
        _check_tensors(model, folder, policy.lora)
    adapted, left = set(), set()
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".base_layer." in name:
            adapted.add(re.split(r"\.lora_|\.base_layer", name)[0].rpartition(".")[2])
        elif parameter.ndim > 1 and not parameter.requires_grad:
            left.add(".".join(name.replace(".original_module", "").split(".")[-2:]))
    left -= {f"{name.rpartition('.')[2]}.weight" for name in policy.lora.modules_to_save}
    return (
        f"LoRA adapts {', '.join(sorted(adapted))}"
        + (f", and trains {', '.join(w)} whole" if (w := policy.lora.modules_to_save) else "")
        + f"; it leaves as they are: {', '.join(sorted(left)) or 'no matrices'}"
    )


def _settings(policy: PolicyTable, model: Any = None) -> Any:
    """Return PEFT's settings. Those of GPT-2's layers depend on the model."""
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    assert policy.lora is not None
    targets = policy.lora.target_modules
    return LoraConfig(
        r=policy.lora.r,
        lora_alpha=policy.lora.alpha,
        target_modules=ALL[0] if targets == ALL else list(targets),
        modules_to_save=list(policy.lora.modules_to_save) or None,
        use_rslora=policy.lora.use_rslora,
        task_type="CAUSAL_LM",
        fan_in_fan_out=model is not None and any(isinstance(m, Conv1D) for m in model.modules()),
        base_model_name_or_path=policy.model,
    )


def _inject(model: Any, settings: Any, name: str, seed: int = 0) -> None:
    """Put an adapter into the model and freeze everything but the one that is trained."""
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.default_generator.manual_seed(seed)
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter
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
    """Return all linear layers by name, those within adapters aside."""
    from transformers.pytorch_utils import Conv1D

    own = (".lora_", WHOLE)
    named = model.named_modules()
    modules = {n: module for n, module in named if not any(part in f"{n}." for part in own)}
    return {name: m for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D)}


def _round_frozen(model: Any) -> None:
    """Store the linear layers in bf16, and with them the LM head, apart from the embeddings."""
    head = model.get_output_embeddings()
    if not head.weight.requires_grad:  # it may be tied to the embeddings
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for module in _linear(model).values():
        module.to(torch.bfloat16)
    for layer in _layers(model):
        layer.cast_input_dtype_enabled = False  # PEFT's conversion, which autocast would undo


@torch.no_grad()
def _load_frozen(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of a trained adapter into the frozen one, which is added if there is none."""
    if REFERENCE not in model.peft_config:
        _inject(model, copy(model.peft_config[TRAINED]), REFERENCE)
    for name, tensor in tensors.items():
        frozen = name.replace(f".{TRAINED}.", f".{REFERENCE}.")
        model.get_parameter(frozen).copy_(tensor)


def _write(tensors: Mapping[str, Tensor], settings: Any, folder: Path) -> None:
    ordered = copy(settings)  # PEFT writes sets in an order that differs between processes
    sets = {name: value for name, value in vars(settings).items() if isinstance(value, set)}
    vars(ordered).update({name: sorted(value) for name, value in sets.items()})
    ordered.save_pretrained(str(folder))
    plain = {n.replace(WHOLE, ".").replace(f".{TRAINED}.", "."): t for n, t in tensors.items()}
    save_file({PREFIX + name: tensor for name, tensor in plain.items()}, folder / ADAPTER)


def _own_name(name: str) -> str:
    """Return the name in a model of a tensor in PEFT's file."""
    name = name.removeprefix(PREFIX)
    if ".lora_" not in name:
        module, _, parameter = name.rpartition(".")
        return f"{module}{WHOLE}{parameter}"
    return re.sub(r"\.(lora_[AB])\.", rf".\1.{TRAINED}.", name)


def _check_targets(model: Any, lora: LoraTable) -> None:
    """Raise ValueError unless each target is the name of a linear layer, or the end of one."""
    head = model.get_output_embeddings()
    names = [name for name, module in _linear(model).items() if module is not head]
    for target in lora.target_modules if lora.target_modules != ALL else ():
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"policy.lora.target_modules: no linear layer is called {target!r}"
                f"{choices(target, known)}; or leave it out for all of them"
            )


def _check_whole(model: Any, lora: LoraTable) -> None:
    """Raise ValueError unless each module to train whole is a single one, not tied or adapted."""
    modules = dict(model.named_modules())
    single = {name for name, module in modules.items() if not list(module.children())}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    ends = lora.target_modules
    adapted = [name for name in _linear(model) if ends == ALL or name.endswith(ends)]
    if ends == ALL:
        adapted = [n for n in adapted if modules[n] is not model.get_output_embeddings()]
    for target in lora.modules_to_save:
        names = {name for name in modules if name.endswith(target)}
        problem = ""
        if not names or names - single:
            known = sorted({name.rpartition(".")[2] for name in single})
            problem = f"no single module with weights{choices(target, known)}"
        elif any(uses[id(p)] > 1 for name in names for p in modules[name].parameters()):
            problem = "tied to another module, as an LM head is to the embeddings; leave it out"
        elif names & set(adapted):
            problem = "adapted as well; name other layers in policy.lora.target_modules"
        if problem:
            raise ValueError(f"policy.lora.modules_to_save: {target!r} is {problem}")


def _check_settings(folder: Path, lora: LoraTable) -> None:
    """Raise ValueError unless the folder has an adapter with the settings of `policy.lora`."""
    for file in (SETTINGS, ADAPTER):
        if not (folder / file).is_file():
            raise ValueError(
                f"policy.lora.from = {lora.start!r}: the folder has no {file};"
                " give one that PEFT's save_pretrained or `tba export --adapter` wrote"
            )
    settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    for key, name in (("r", "r"), ("alpha", "lora_alpha"), ("use_rslora", "use_rslora")):
        value, given = lora.model_dump()[key], settings.get(name, False)
        if given != value:
            raise ValueError(
                f"policy.lora.{key} = {value}, but the adapter in {lora.start} has"
                f" {name} = {given}; set policy.lora.{key}={str(given).lower()}"
            )
    problems = [name for name in UNSUPPORTED if settings.get(name)]
    for name, known in (("peft_type", ("LORA",)), ("init_lora_weights", STARTS)):
        if settings.get(name, known[0]) not in known:
            problems.append(f"{name} = {settings[name]!r}")
    if problems:
        raise ValueError(
            f"policy.lora.from = {lora.start!r}: not a plain LoRA adapter"
            f" ({', '.join(problems)}); give another one"
        )


def _check_tensors(model: Any, folder: Path, lora: LoraTable) -> None:
    """Raise ValueError unless the adapter has the layers and shapes of the one in the model."""
    try:
        with safe_open(folder / ADAPTER, "pt") as file:
            named = {_own_name(n): file.get_slice(n) for n in file.keys()}  # noqa: SIM118
            shapes = {name: tensor.get_shape() for name, tensor in named.items()}
    except SafetensorError as error:
        raise ValueError(f"policy.lora.from = {lora.start!r} is damaged: {error}") from error
    own = {n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    differing = sorted(n for n in own.keys() | shapes.keys() if own.get(n) != shapes.get(n))
    if differing:
        names = {name.partition(".lora_")[0].rpartition(".")[2] for name in shapes}
        raise ValueError(
            f"policy.lora.from = {lora.start!r} does not fit policy.model with"
            f" policy.lora.target_modules = {list(lora.target_modules)}: {differing[:3]} differ;"
            f" the adapter has the layers {sorted(names)}"
        )
