"""Models: their places, loading, LoRA, and what makes them faster."""

import re
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent


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
            "no such folder; give one that save_pretrained wrote, or a name on the hub, such as"
            " HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    else:
        return name
    raise ValueError(f"{key} = {name!r}: {problem}")


def tokens_in(value: Any, vocabulary: float) -> list[int]:
    """Return the ids in a config's value that are tokens; -1, for one, means that there is none."""
    ids = value if isinstance(value, list) else [value]
    numbers = [float(each) for each in ids if re.fullmatch(r"\d+(\.0)?", str(each))]
    return [int(number) for number in numbers if number < vocabulary]
