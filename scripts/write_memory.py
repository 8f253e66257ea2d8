"""Write the memory table of docs/scaling.md: what the paper's runs need on GPUs.

The shapes of the models are in this file, so that no network is needed.

    python scripts/write_memory.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from tba.setup.sizes import ModelSizes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scaling.md"
MARK = "<!-- written by scripts/write_memory.py -->\n"
PROMPT = 512
"""Tokens of the longest prompt."""
RUNS = (
    "gsm8k_rho1b", "math_qwen7b_tba_prime", "tldr_pythia410m", "tldr_pythia1b", "tldr_pythia2.8b",
    "redteam_gpt2", "redteam_llama1b",
)  # fmt: skip
"""Files in experiments/ with the paper's runs, which are for four GPUs."""
BASELINE = "math_qwen7b_dr_grpo"
MACHINES = ("1x24", "1x80", "4x80", "8x80")
ONE_GPU = ("trainer.devices=1", "runtime.searchers=1")
LORA = ("policy.lora.r=32", "policy.lora.alpha=64", "policy.gradient_checkpointing=true")
TURNS = ("runtime.use=local", "runtime.colocate=sleep", "runtime.lag=")


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
    """Return the table of the paper's runs; all other experiments fit on four GPUs of 80 GB."""
    rows: dict[str, str] = {}
    needed: dict[str, float] = {}  # of the fullest GPU
    head = [
        f"| file | tokens of a group | {' | '.join(MACHINES)} | host, GB |",
        f"| --- | --- |{' --- |' * len(MACHINES)} --- |",
    ]
    with TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            config.save_pretrained(Path(folder, name))
        planner = Planner(Path(folder))
        for path in sorted((ROOT / "experiments").glob("*.toml")):
            planned = planner.estimate(path, "4x80")
            assert not planned.excess(), f"{path.name} does not fit: {planned.advice()}"
            needed[path.stem] = max(n for card, n in planned.needed().items() if card is not None)
            if path.stem in RUNS:
                rows[path.stem] = _row(path, planned, planner)
    assert needed[BASELINE] == needed["math_qwen7b_tba_prime"]
    others = max(n for name, n in needed.items() if name not in (*RUNS, BASELINE)) / 1e9
    rest = f"The other files in experiments/ need at most {others:.1f} GB of each GPU, except that"
    rest += f" `{BASELINE}.toml`\nneeds as much as the other MATH run.\n"
    return "\n".join([*head, *(rows[name] for name in RUNS), "", rest])


@dataclass(frozen=True)
class Planner:
    """Estimates the memory of the experiments, whose models are in `folder`."""

    folder: Path
    sizes: dict[str, ModelSizes] = field(default_factory=dict)
    """Sizes of each model; peft takes seconds to add adapters to an empty one."""

    def estimate(self, path: Path, gpus: str, settings: Sequence[str] = ()) -> MemoryEstimate:
        config = with_defaults(Config(**_placed(load(path, settings).nested(), self.folder)))
        policy = config.policy.model_dump_json(exclude={"gradient_checkpointing"})
        known = self.sizes.get(policy)
        estimate = MemoryEstimate.of(config, planned_machine(gpus), PROMPT, known)
        self.sizes[policy] = estimate.sizes
        return estimate


def _placed(value: Any, folder: Path) -> Any:
    """Return a value of a config with the folders of models in place of their names."""
    if isinstance(value, Mapping):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    return str(folder / value) if isinstance(value, str) and value in MODELS else value


def _row(path: Path, planned: MemoryEstimate, planner: Planner) -> str:
    """Return the row of a run, with its estimate for four GPUs."""
    c = planned.config
    group_tokens = PROMPT + c.trainer.group_size * c.sampling.max_tokens
    ranks = c.trainer.devices * (1 if c.trainer.devices == 1 else 2)
    all_gpus = (f"trainer.devices={ranks}", f"runtime.searchers={8 - ranks}")
    eight = planner.estimate(path, "8x80", all_gpus)
    cells = [_on_one(path, gpus, _ways(c), planner) for gpus in MACHINES[:2]]
    cells += [_cell(planned), _cell(eight)]
    host = eight.needed()[None] / 1e9
    return f"| `{path.name}` | {group_tokens:,} | {' | '.join(cells)} | {host:.1f} |"


def _on_one(path: Path, gpus: str, ways: Sequence[Sequence[str]], planner: Planner) -> str:
    """Return the cell of the first settings that fit, or what the most economical ones need."""
    for settings in ways:
        estimate = planner.estimate(path, gpus, settings)
        if not estimate.excess():
            return _cell(estimate)
    return f"no: {estimate.needed()[0] / 1e9:.1f}"


def _ways(config: Config) -> list[tuple[str, ...]]:
    """Return the settings to try on one GPU, those that change the run least first."""
    if config.policy.lora is not None:
        return [ONE_GPU]
    adapters = (*ONE_GPU, *LORA)
    return [ONE_GPU, adapters, *([(*adapters, *TURNS)] if config.engine.use == "vllm" else [])]


def _cell(estimate: MemoryEstimate) -> str:
    """Return what is trained, the tokens of a pass, and GB of the trainer and of a searcher."""
    c = estimate.config
    trainer, *_, searcher, _ = estimate.processes
    trained = "all" if c.policy.lora is None else "LoRA"
    trained += ", in turns" if c.runtime.colocate == "sleep" else ""
    separator = "+" if searcher.card == trainer.card else "/"
    used = f"{trainer.total / 1e9:.1f} {separator} {searcher.total / 1e9:.1f}"
    return f"{trained}, {c.trainer.pass_tokens:,}: {used}"


def page(before: str) -> str:
    """Return the page with the table of today."""
    head, _, rest = before.partition(MARK)
    _, _, tail = rest.partition(MARK)
    return f"{head}{MARK}\n{table()}\n{MARK}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
