"""Write the memory table of docs/scaling.md: what each file in experiments/ needs on GPUs.

The shapes of the models are in this file, so that no network is needed.

    python scripts/write_memory.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import (
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
)

from tba.config.plugins import with_defaults
from tba.config.schema import Config, load
from tba.setup.machine import planned_machine
from tba.setup.memory import MemoryEstimate

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scaling.md"
MARK = "<!-- written by scripts/write_memory.py -->\n"
GPUS = "4x80"
PROMPT = 512
"""Tokens of the longest prompt."""


def pythia(hidden: int, layers: int, heads: int, vocabulary: int = 50_304) -> GPTNeoXConfig:
    """Return the config of a Pythia model."""
    return GPTNeoXConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads,
    )  # fmt: skip


def llama(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, keys: int, tied: bool
) -> LlamaConfig:
    """Return the config of a Llama."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
        tie_word_embeddings=tied,
    )  # fmt: skip


LLAMA_8B = llama(128_256, 4096, 14_336, 32, 32, 8, False)
MODELS: dict[str, PreTrainedConfig] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": llama(49_152, 576, 1536, 30, 9, 3, True),
    "realtreetune/rho-1b-sft-GSM8K": llama(32_000, 2048, 5632, 22, 32, 4, False),
    "sdobson/tinystories-llama-15m": llama(32_000, 288, 768, 6, 6, 6, True),
    "meta-llama/Llama-3.2-1B": llama(128_256, 2048, 8192, 16, 32, 8, True),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-Guard-3-8B": LLAMA_8B,
    "Qwen/Qwen2.5-7B": Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(),
    "vicgalle/gpt2-alpaca": GPT2Config(),
    "mnoukhov/pythia410m-sft-tldr": pythia(1024, 24, 16),
    "mnoukhov/pythia1b-sft-tldr": pythia(2048, 16, 8),
    "mnoukhov/pythia2.8b-sft-tldr": pythia(2560, 32, 32),
    "mnoukhov/pythia410m-rm-tldr6.9b": pythia(1024, 24, 16),
    "mnoukhov/pythia1b-rm-tldr6.9b": pythia(2048, 16, 8),
    "mnoukhov/pythia2.8b-rm-tldr6.9b": pythia(2560, 32, 32),
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": pythia(4096, 32, 32, 50_432),
    "runs/tldr_small/proxy": llama(49_152, 576, 1536, 12, 9, 3, True),
    "runs/tldr_small/gold": llama(49_152, 576, 1536, 16, 9, 3, True),
    "facebook/roberta-hate-speech-dynabench-r4-target": RobertaConfig(),
    "sentence-transformers/all-MiniLM-L6-v2": BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
}  # fmt: skip
"""Configs of the policies, and of the models of tasks."""


def table() -> str:
    """Return the table of all experiments."""
    rows = [
        "| file | GPUs of the trainer | each, GB | GPUs of searchers | each, GB | host, GB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            config.save_pretrained(Path(folder, name))
        for path in sorted((ROOT / "experiments").glob("*.toml")):
            tables = load(path).nested()
            config = with_defaults(Config(**_placed(tables, Path(folder))))
            rows.append(_row(path.name, MemoryEstimate.of(config, planned_machine(GPUS), PROMPT)))
    return "\n".join(rows) + "\n"


def _placed(value: Any, folder: Path) -> Any:
    """Return a value of a config with the folders of models in place of their names."""
    if isinstance(value, Mapping):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    return str(folder / value) if isinstance(value, str) and value in MODELS else value


def _row(name: str, needs: MemoryEstimate) -> str:
    totals: dict[int | None, float] = {}
    for process in needs.processes:
        totals[process.card] = totals.get(process.card, 0.0) + process.total
    host = totals.pop(None)
    ranks = needs.config.trainer.devices
    training = [n for card, n in totals.items() if card is not None and card < ranks]
    searching = [n for card, n in totals.items() if card is not None and card >= ranks]
    cells = [name, len(training), max(training), len(searching), max(searching, default="-"), host]
    shown = [f"{x / 1e9:.1f}" if isinstance(x, float) else str(x) for x in cells]
    assert not needs.excess(), f"{name} does not fit: {needs.advice()}"
    return f"| `{shown[0]}` | {' | '.join(shown[1:])} |"


def page(before: str) -> str:
    """Return the page with the table of today."""
    head, _, rest = before.partition(MARK)
    _, _, tail = rest.partition(MARK)
    return f"{head}{MARK}\n{table()}\n{MARK}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
