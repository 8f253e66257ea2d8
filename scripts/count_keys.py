"""Count the keys of the config, and list those that no TOML file of the repository sets.

    python scripts/count_keys.py

Keys of tables and options of plug-ins are counted apart. A key counts as set if any table of that
name sets it in `experiments/`, `recipes/`, `examples/` or `studies/`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.config.hints import inner_table
from tba.config.plugins import JUDGES, find, names, options_of
from tba.config.schema import Config
from tba.config.tables import PLUGGED, Table

ROOT = Path(__file__).parent.parent
FOLDERS = ("experiments", "recipes", "examples", "studies")


def table_keys(table: type[Table] = Config, place: str = "") -> Iterator[str]:
    """Yield every key as `table.key`, with the keys of inner tables."""
    for name, field in table.model_fields.items():
        key = f"{place}.{field.alias or name}".lstrip(".")
        inner = inner_table(field)
        if inner is not None:
            yield from table_keys(inner, key)
        elif name != "use":
            yield key


def plugin_options() -> Iterator[str]:
    """Yield every option of a plug-in as `kind.plugin.option`."""
    for kind in (*PLUGGED.values(), JUDGES):
        for name in names(kind):
            yield from (f"{kind}.{name}.{option}" for option in options_of(find(kind, name)))


def keys_in(tables: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield every key of nested tables as `table.key`."""
    for name, value in tables.items():
        yield (key := f"{place}.{name}".lstrip("."))
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                yield from keys_in(inner, key)


def keys_set() -> set[str]:
    """Return the keys that files set; a study's `"table.key"` counts as the key."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.toml")]
    return {key for path in files for key in keys_in(tomllib.loads(path.read_text("utf-8")))}


def is_set(key: str, given: set[str]) -> bool:
    return any(each == key or each.endswith(f".{key}") for each in given)


def main() -> None:
    given = keys_set()
    tables = list(table_keys())
    unset = [key for key in tables if not is_set(key, given)]
    print(f"{len(tables)} keys of tables, of which {len(unset)} are set by no file:")
    print("\n".join(unset))
    names_set = {key.rpartition(".")[2] for key in given}
    options = list(plugin_options())
    unset = [each for each in options if each.rpartition(".")[2] not in names_set]
    print(f"\n{len(options)} options of plug-ins, of which {len(unset)} are set by no file:")
    print("\n".join(unset))


if __name__ == "__main__":
    main()
