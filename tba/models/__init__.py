"""Models: their places, loading, LoRA, and what makes them faster."""

from pathlib import Path

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
