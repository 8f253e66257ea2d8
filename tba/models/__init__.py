"""Models: paths, loading, LoRA, and faster passes."""

import re
from pathlib import Path
from typing import Any, Literal

from tba.config.mistakes import relative_to

BUNDLED = Path(__file__).parent
ATTENTION = {
    "attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
}  # fmt: skip
"""Types of layers that keep keys and values. Others, such as "conv", keep a state."""
FLEX = "tba_flex_attention"
"""Name in transformers of the attention in tba/models/flex.py."""
EVERYONE = -1
"""Owner of a prompt's tokens, which all responses see."""
NOBODY = -2
"""Owner of padding."""
Packing = Literal["none", "short", "any"]
"""Lengths of packed rows: dense attention computes the scores between all responses in a row."""


def model_path(name: str, key: str = "policy.model") -> str:
    """Return the path or name for `from_pretrained`; ValueError if a path has no model."""
    bundled = name.startswith("bundled:")
    path = BUNDLED / name.removeprefix("bundled:") if bundled else Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    if bundled:
        shipped = sorted(f"bundled:{p.parent.name}" for p in BUNDLED.glob("*/config.json"))
        problem = f"no such bundled model; known: {', '.join(shipped)}"
    elif path.is_dir():
        problem = "the folder has no config.json; give a folder that save_pretrained wrote"
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        problem = (
            f"no such folder{relative_to(name)}; give one that save_pretrained wrote, or a name on"
            " the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    else:
        return name
    raise ValueError(f"{key} = {name!r}: {problem}")


def tokens_in(value: Any, vocabulary: float) -> list[int]:
    """Return the ids in a config's value that are tokens; -1, for example, stands for no token."""
    ids = value if isinstance(value, list) else [value]
    numbers = [float(each) for each in ids if re.fullmatch(r"\d+(\.0)?", str(each))]
    return [int(number) for number in numbers if number < vocabulary]


def is_causal(config: Any) -> bool:
    """Return whether a config is a causal LM's with attention alone, or has its own code."""
    from transformers.models.auto import modeling_auto as known

    kind = type(config)
    plain = config.to_dict()
    classes: Any = known.MODEL_FOR_CAUSAL_LM_MAPPING
    if "AutoModelForCausalLM" in plain.get("auto_map", {}):
        return True
    if kind not in classes or config.is_encoder_decoder:
        return False
    encoder = kind in known.MODEL_FOR_MASKED_LM_MAPPING and not plain.get("is_decoder")
    types = set(plain.get("layer_types") or ())
    stateful = not types <= ATTENTION if types else classes[kind]._is_stateful
    larger = config.get_text_config() is not config
    return not (encoder or stateful or larger)
