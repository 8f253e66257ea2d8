"""Builders that several tests share: configs of tiny runs, groups, engines, checks of a run."""

import asyncio
import ctypes
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
import torch
from exact import toy_config
from suite import alive
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tba.cli import _config
from tba.config.schema import Config, load
from tba.engines._batch import GenerationOutput, GenerationRequest
from tba.learn.policy import Policy
from tba.learn.trainer import SingleTrainer
from tba.models.pretrained import load_model
from tba.models.tokenizer import Tokenizer
from tba.open import open_run, run
from tba.prompt import Answer, Prompt
from tba.replay.buffer import ReplayBuffer
from tba.run import Run
from tba.runs import checkpoint
from tba.runs.checkpoint import Checkpoints, Progress
from tba.runs.folder import CHECKPOINTS, METRICS, read
from tba.runs.generations import files_of, generations
from tba.runs.summary import Summary
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.scoring.verdicts import Rejection, Verdict
from tba.search.prompts import Cursor, PromptStream, SearchState
from tba.search.result import SearchStats
from tba.selections import Selection
from tba.setup.setup import RunSetup, check
from tba.tasks import Task
from tba.tasks.custom import Custom
from tba.types import Batch, Group, Sampling, Trajectory, collate
from tba.weights import Direct, Probe, Weights, published, trained


class Steps:
    """Engine whose requests take as many steps as they have tokens; it waits for permission."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.most, self.failing, self.closed = 0, False, 0
        self.added: list[str] = []
        self.allowed = threading.Event()
        self.allowed.set()

    def add(self, key: str, request: GenerationRequest) -> None:
        if not request.prompt:
            raise ValueError("a prompt is empty")
        self.left[key] = request.sampling.max_tokens
        self.added.append(key)
        self.most = max(self.most, len(self.left))

    def step(self) -> Sequence[tuple[str, GenerationOutput]]:
        assert self.allowed.wait(30)
        if self.failing:
            raise ValueError("out of memory")
        self.left = {key: left - 1 for key, left in self.left.items()}
        ended = [key for key, left in self.left.items() if left == 0]
        for key in ended:
            del self.left[key]
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return [(key, GenerationOutput(*empty, True, 0.0, ())) for key in ended]

    def close(self) -> None:
        self.closed += 1


def requests(*lengths: int) -> list[GenerationRequest]:
    return [GenerationRequest([1], Sampling(1, 1.0, length), 0, [0]) for length in lengths]


CHECKPOINT_DEADLINE = 10.0


class FakeTokenizer:
    """Tokenizer without files."""

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


@dataclass
class Slow:
    """Trainer whose files are written when `go` is set; a save can fail."""

    go: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    state: str = "as it was"

    def step(self, batch: Batch, step: int) -> dict[str, float]:
        raise NotImplementedError

    def weights(self, version: int) -> Weights:
        raise NotImplementedError

    def save(self, folder: Path) -> Callable[[], None]:
        state = self.state

        def write() -> None:
            assert self.go.wait(CHECKPOINT_DEADLINE)
            if self.error is not None:
                raise self.error
            (folder / "state").write_text(state)

        return write

    def load(self, folder: Path) -> None:
        raise NotImplementedError


def save_checkpoint(checkpoints: Checkpoints, trainer: Slow, step: int) -> None:
    cursor = Cursor(selection="", state={}, outstanding=[], data="")
    text = Tokenizer(FakeTokenizer(), 1, frozenset({1}), 0, 32, 99)
    state = SearchState(cursor, 0, SearchStats(), None, None)
    checkpoints.save(trainer, text, ReplayBuffer(), state, Progress(step, 0, 0, {}, {}))


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def answered(prompt: Prompt, right: int, answers: int) -> Group:
    logp = -np.ones(1, np.float32)
    found = [trajectory(k, reward=float(k < right)) for k in range(answers)]
    found = [replace(t, behavior_logp=logp, ref_logp=logp) for t in found]
    return Group(prompt, np.array([1], np.int32), tuple(found))


def stopped(config: Config, step: int, resume: Path | None = None) -> Summary:
    """Carry out a session that is stopped after a step."""
    with open_run(config, resume) as run:
        original = run.logged

        @contextmanager
        def logged(*arguments: Any) -> Iterator[None]:
            with original(*arguments):
                yield
            run.stop.requested = run.step == step

        run.logged = logged  # type: ignore[method-assign]
        run.stop.requested = run.step == step
        return run.train()


def first_policy(config: Config) -> Policy:
    """Return the policy that a run began with: its reference."""
    return Policy(load_model(config.policy, torch.float32), config.sampling.temperature)


ROOT = Path(__file__).parent.parent
BENCH = ROOT / ".venv-bench" / "bin" / "python"


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "HF_HOME": str(folder / "hub"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def python_with_trl() -> str:
    if not BENCH.is_file():
        pytest.skip(f"{BENCH} does not exist: make .venv-bench/installed")
    return str(BENCH)


ISOLATION_DEADLINE = 3.0
"""Seconds for each answer."""


def guard_of(
    function: Callable[..., Any], deadline: float = ISOLATION_DEADLINE, longest: float = math.inf
) -> Scoring:
    task = partial(Custom, data="", reward="", passed=(function,))
    return Scoring({"": task()}, ScoringProcess({"": task}, 1.0), deadline, longest=longest)


def isolation_judge(guard: Scoring, *groups: Sequence[str]) -> list[list[Verdict]]:
    prompts = [Prompt(str(i), "count") for i in range(len(groups))]
    return guard(prompts, [[Answer(text, True) for text in group] for group in groups])


def isolation_reasons(verdicts: Sequence[Sequence[Verdict]]) -> list[list[str | float]]:
    return [[v.reason if isinstance(v, Rejection) else v for v in group] for group in verdicts]


def misbehaving() -> Callable[[list[str]], list[float]]:
    """Return a function that is sent by its value: it returns lengths, but not for some texts."""

    def score(completions: list[str]) -> list[float]:
        if "interpreter lock" in completions:
            ctypes.PyDLL(None).sleep(60)
        if "hang" in completions:
            time.sleep(60)
        if "exit" in completions:
            os._exit(3)
        if "abort" in completions:
            os.abort()
        if "memory" in completions:
            [bytes(10**8) for _ in range(100)]
        if "interrupt" in completions:
            raise KeyboardInterrupt
        if "prints" in completions:
            print("x" * 10**7)
        if "closed" in completions:
            sys.stdout.close()
            os.close(1)
        return [float(len(c)) for c in completions]

    return score


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read(folder / METRICS) if "loss" in row]


def goes_on(folder: Path, *settings: str) -> None:
    """Ten steps more: every prompt was answered once, or is out."""
    newest = generations(folder / CHECKPOINTS)[-1]
    step = json.loads((newest / "state.json").read_text())["progress"]["step"]
    alone = ("runtime.use=local", "runtime.searchers=1")
    run = run_and_keep(_config([f"run.steps={step + 10}", *alone, *settings], folder), folder)
    assert conserved(run.buffer)
    cursor = run.searchers.state().cursor
    held = {g.prompt.id for g in run.buffer.groups()}
    assert len(held) + len(cursor["outstanding"]) == cursor["state"]["chosen"]
    assert run.searchers.stats.counts["samples_generated"] == 4 * len(held)
    rows = steps(folder)
    assert rows == sorted(set(rows)) and {*range(1, step + 11)} - {*rows} <= {step}
    assert (folder / "summary.json").exists()


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
"""For processes of their own: with the tests' tasks on the path."""


SMALL = (
    "runtime.use=local", "sampling.max_tokens=5", "sampling.samples=4", "trainer.batch_size=12",
    "trainer.group_size=4", "trainer.warmup_steps=0", "log.console=off", "log.report_to=[]",
)  # fmt: skip
"""Settings of a quiet run of short responses."""


def config(model: Path, folder: Path, *settings: str) -> Config:
    own = [
        "run.steps=8", "trainer.learning_rate=1e-2", "task=toy.Ones", "eval.every=3",
        "eval.samples=2", "eval.k=[2]", "reward.isolate=none", "log.sample_every=2",
        "task.allow_loss=1",  # toy tokenizers do not have all digits
    ]  # fmt: skip
    others = [each for each in settings if not each.startswith("task.sources.")]
    if not any(setting.startswith("task") for setting in others):  # others may hold out fewer
        own.append("eval.prompts=5")
    return load(None, [f"policy.model={model}", f"run.folder={folder}", *SMALL, *own, *settings])


def newest_files(folder: Path) -> dict[str, bytes]:
    generation = checkpoint.newest(folder / "checkpoints")
    return {name: path.read_bytes() for name, path in files_of(generation).items()}


def replayed(folder: Path) -> list[tuple[Any, ...]]:
    """Everything in the replay buffer of a run's newest checkpoint, and its counts."""
    buffer = ReplayBuffer()
    buffer.load(checkpoint.newest(folder / "checkpoints"))
    columns = buffer.columns()
    content: list[tuple[Any, ...]] = [tuple(sorted(buffer.counts.items()))]
    for prompt, g in zip(columns.prompts, buffer.groups(), strict=True):
        content.append((g.prompt, g.reference, g.prompt_tokens.tobytes()))
        for row, t in zip(columns.rows(prompt), g.trajectories, strict=True):
            arrays = (t.tokens, t.behavior_logp, t.ref_logp, t.value, t.sampled)
            numbers = (columns.arrived[row], columns.count[row], columns.arrived_count[row])
            flat = tuple(None if a is None else a.tobytes() for a in arrays)
            content.append((*flat, t.reward, t.version, t.finished, *numbers))
    return content


def without_clock(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = ("sync/seconds", "sync/blocked", "sync/adopted", "eval/seconds", "checkpoint/")
    clock = ("time", "step_time", "wait/", "samples_per_second", "engine/", *measured)
    return [{k: v for k, v in r.items() if not k.startswith(clock)} for r in rows]


def resumes_exactly(model: Path, folder: Path, *settings: str) -> None:
    """A run that is killed after step 5 and resumed ends, bit for bit, like one without a stop.

    tests/test_loop.py shows that a checkpoint changes nothing in a run without a stop.
    """
    run(config(model, folder / "part", *settings, "checkpoint.every=5"))
    shutil.copytree(folder / "part", folder / "whole")
    for generation in checkpoint.generations(folder / "part" / "checkpoints")[1:]:
        shutil.rmtree(generation)  # as if it had been killed after step 5
    run(_config([], folder / "part"), folder / "part")
    end_alike(folder / "whole", folder / "part")


def end_alike(whole: Path, part: Path) -> None:
    """Two runs ended, bit for bit, alike: weights, optimizer, buffer, metrics and all states."""
    one, other = newest_files(whole), newest_files(part)
    weights = {name for name in one if name.startswith("model/") and "safetensors" in name}
    for name in sorted(weights | {"optimizer.safetensors", "trainer.json"}):
        assert one[name] == other[name], name
    assert replayed(whole) == replayed(part)
    assert without_clock(read(whole / METRICS)) == without_clock(read(part / METRICS))
    a, b = (json.loads(files["state.json"]) for files in (one, other))
    for state in (a, b):
        del state["stats"]["seconds"], state["stats"]["publish_seconds"]
        del state["progress"]["counts"]
    assert a == b


def as_settings(config: Config) -> list[str]:
    """The whole config as `table.key=value`."""
    tables = config.nested().items()
    return [f"{table}.{key}={json.dumps(v)}" for table, own in tables for key, v in own.items()]


RANK = 4
LORA = (f"policy.lora.r={RANK}", "policy.lora.alpha=8")
LORA_SMALL = (
    *LORA, "run.steps=4", "sampling.samples=4", "trainer.batch_size=12", "trainer.group_size=4",
    "trainer.learning_rate=3e-2",
)  # fmt: skip


def small(model: Path, folder: Path, *settings: str) -> Config:
    return toy_config(model, folder, *LORA_SMALL, *settings)


HOME = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
"""Folder of the folders of private Rays."""
WATCHER = "tba.child:clean_up_after_parent"
POLICY_SMALL = {
    "vocab_size": 14, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
WIDE = POLICY_SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GPT2 = {"vocab_size": 14, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**WIDE, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=1, eos_token_id=1)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**WIDE)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**WIDE, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)
    ),
}


def make(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[family]().eval()


PROMPTS = [Prompt(f"p{i}", "x") for i in range(7)]


def stream_of(cls: Callable[..., Selection], seed: int = 0, **options: Any) -> PromptStream:
    return PromptStream(PROMPTS, cls(PROMPTS, seed, 1.0, **options))


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


def ray_config(model: Path, folder: Path, *settings: str) -> Config:
    small = (
        "run.steps=40", "runtime.use=ray", "runtime.prompts_per_task=3", "runtime.publish_every=2",
        "trainer.learning_rate=1e-5", "eval.prompts=4", "eval.every=15", "eval.samples=1",
        "eval.k=[]",
    )  # fmt: skip
    return config(model, folder, *small, *settings)


def run_and_keep(
    ray_config: Config, resume: Path | None = None, meanwhile: Callable[[Run], None] | None = None
) -> Run:
    """Carry out a run and return it, closed; `meanwhile` runs in a thread beside it."""
    with open_run(ray_config, resume) as run:
        thread = threading.Thread(target=meanwhile, args=(run,), daemon=True) if meanwhile else None
        if thread is not None:
            thread.start()
        run.train()
        if thread is not None:
            thread.join(timeout=60)
    return run


def copies() -> int:
    """Return how many copies of weights this process keeps."""
    files = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it
            if str(link.readlink()).startswith("/memfd:weights"):
                files.add(link.stat().st_ino)
    return len(files)


def pack(model: Any, version: int, bf16: bool, probe: Probe | None = None) -> Weights:
    """Return a copy of a model's trained parameters."""
    sent = Direct().send(version, published(trained(model), bf16), probe)
    weights: Weights = sent.payload
    return weights


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()


@contextmanager
def nothing_is_left() -> Iterator[list[psutil.Process]]:
    """After the block, no process that it lists and no shared memory of it exists for long."""
    shared, processes = Path("/dev/shm"), []
    before = set(shared.iterdir())
    yield processes
    assert processes
    assert wait_until(lambda: not alive(processes), 10), alive(processes)
    # other programs may make files meanwhile, which they remove soon
    assert wait_until(lambda: {*shared.iterdir()} <= before, 60), {*shared.iterdir()} - before


def children(pid: int | None = None) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def trajectory(*tokens: int, reward: float = 0.0, version: int = 0) -> Trajectory:
    zeros = np.zeros(len(tokens), np.float32)
    return Trajectory(np.array(tokens, np.int32), zeros, zeros, reward, version, True)


def group(name: str, *trajectories: Trajectory, reference: int = 0) -> Group:
    prompt = Prompt(name, name, {"answer": "1"})
    return Group(prompt, np.array([1, 2], np.int32), trajectories, reference)


def random_groups(
    rng: np.random.Generator, count: int, prompts: int = 7, samples: int = 6, reference: int = 0
) -> list[Group]:
    def one() -> Trajectory:
        tokens = rng.integers(3, size=rng.integers(1, 4)).tolist()
        return trajectory(*tokens, reward=float(rng.normal()), version=int(rng.integers(9)))

    groups = []
    for _ in range(count):
        some = [one() for _ in range(samples)]
        groups.append(group(f"p{rng.integers(prompts)}", *some, reference=reference))
    return groups


def random_batch(seed: int, groups: int, samples: int, longest: int) -> Batch:
    """Groups of responses of 1 to `longest` tokens, some of which are alike."""
    rng = np.random.default_rng(seed)
    made = []
    for b in range(groups):
        trajectories = []
        for _ in range(samples):
            n = int(rng.integers(1, longest + 1))
            logps = -rng.random((2, n), np.float32)
            tokens = rng.integers(2, 14, n).astype(np.int32)
            trajectories.append(Trajectory(tokens, *logps, float(rng.random()), 0, True))
        trajectories[-1] = trajectories[0]
        prompt = rng.integers(2, 14, int(rng.integers(1, 9))).astype(np.int32)
        made.append(Group(Prompt(str(b), "?"), prompt, tuple(trajectories)))
    return collate(made)


def first_tokens(group: Group) -> list[int]:
    return [int(t.tokens[0]) for t in group.trajectories]


LOST = ("evicted_per_prompt", "evicted_capacity", "evicted_reference", "dropped")


def conserved(buffer: ReplayBuffer) -> bool:
    c = buffer.counts
    return c["added"] == len(buffer) + c["duplicates"] + sum(c[name] for name in LOST)


def data(html: str) -> list[dict[str, Any]]:
    """The runs as the script of the page reads them."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(text)["runs"]


ANSWERS = ("one", "two", "three", "four", "five")
Score = Callable[[list[str]], Any]
"""Rewards of a group, from its texts."""


@dataclass(frozen=True)
class Scored(Task):
    """A task whose scoring is the given function of a group's texts."""

    function: Score
    pass_reward: float | None = None

    def prompts(self) -> Sequence[Prompt]:
        return [Prompt("0", "count")]

    def held_out(self) -> Sequence[Prompt]:
        return []

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        return self.function([a.text for a in answers])


class Asynchronous(Scored):
    """The same with `async def`; the function may return an awaitable."""

    async def score(self, prompt: Prompt, answers: Sequence[Answer]) -> Any:
        await asyncio.sleep(0)
        scores = self.function([a.text for a in answers])
        return await scores if isinstance(scores, Awaitable) else scores


def judge_all(task: Scored, groups: Sequence[Sequence[str]]) -> list[list[Verdict]]:
    prompts = [Prompt(str(i), "count") for i in range(len(groups))]
    answers = [[Answer(a, finished=True) for a in group] for group in groups]
    return Scoring({"": task})(prompts, answers)


def rewards_judge(
    function: Score, answers: Sequence[str] = ANSWERS, kind: type[Scored] = Scored
) -> list[Verdict]:
    (verdicts,) = judge_all(kind(function), [answers])
    return verdicts


def rewards_reasons(verdicts: Sequence[Verdict]) -> list[str | float]:
    return [v.reason if isinstance(v, Rejection) else v for v in verdicts]


def setup_of(model: Path | str, *settings: str) -> RunSetup:
    own = [f"policy.model={model}", "task=toy.Ones", "sampling.max_tokens=6", "task.allow_loss=1"]
    own += ["trainer.learning_rate=1e-2", "trainer.batch_size=12", "trainer.group_size=4"]
    own += ["trainer.warmup_steps=0"]
    return check(load(None, [*own, *settings]))


def trainer(model: Path, *settings: str) -> SingleTrainer:
    return setup_of(model, *settings).trainer("cpu")


@contextmanager
def gradients_of(own: SingleTrainer) -> Iterator[dict[str, Tensor]]:
    """Keep the gradients of the last step inside the block, by the names of the parameters."""
    kept: dict[str, Tensor] = {}

    def keep(*given: Any) -> None:
        named = own.policy.named_parameters()
        kept.update({name: p.grad for name, p in named if p.grad is not None})

    hook = own.optimizer.register_step_pre_hook(keep)
    yield kept
    hook.remove()


def parameters(t: SingleTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.policy.model.parameters()]


def counted(counts: list[int], logits: Tensor, ref: Tensor, reward: Tensor) -> tuple[Tensor, Batch]:
    """Return a group that has each answer, of one token, so often.

    Means over it are expectations under the policy that samples so often.
    """
    answers = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None]
    sampled = (torch.tensor(counts, dtype=torch.float64) / sum(counts)).log()[answers][..., None]
    return grouped(answers, logits, ref, reward, sampled)


def grouped(
    answers: Tensor, logits: Tensor, ref: Tensor, reward: Tensor, behavior_logp: Tensor
) -> tuple[Tensor, Batch]:
    """Return groups [B K] of answers of one token each, and their log-probs."""
    index = answers[..., None]
    ones = torch.ones(len(answers), 1)
    marks = torch.ones_like(index).bool(), torch.zeros_like(index).bool()
    of_rows = behavior_logp, ref.log()[index], reward[answers], torch.zeros(index.shape)
    batch = Batch(ones.long(), ones.bool(), index, *marks, *of_rows)
    return logits.log_softmax(0)[index], batch


SPOKEN = ("The capital is Paris", "any anyway User: Q: caf ... </answer>x ```py }} a b ok")
"""Text that tokenizers are trained on; what else a text has, they write as bytes."""


def train_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer: "byte level", or "byte fallback" as Llama 2 has it."""
    special = ["<unk>", "<s>", "</s>", "<think>"]
    if kind == "byte level":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    else:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        space = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        trainer = BpeTrainer(special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SPOKEN * 9, trainer)
    saved = json.loads(tokenizer.to_str())  # bytes are ordinary tokens
    saved["added_tokens"] = [t for t in saved["added_tokens"] if "<0x" not in t["content"]]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(saved))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
