"""Measure what needs a GPU: engine, training step, weight update, asynchronous training.

Called by `benchmarks/gpu.sh`. The models have random weights and the shapes of Qwen2.5-0.5B and
1.5B; the tokenizer is that of the bundled model, filled up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import _measure
import _ranks
from _fit import Role, Skipped, fitting, print_plan
from _profile import write_profile
from _synthetic import step_flops, sums

HERE = Path(__file__).parent
Part = tuple[str, tuple[str, ...], Callable[[], list[_measure.Row]]]
"""Its name, the packages that it needs, and what measures it."""
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
LONG = ("runtime.use=local", "sampling.max_tokens=256")
"""Settings of the training steps."""
ENGINE_BATCH = "engine.batch_size=1024"
GENERATED = (16, 16, 64)
"""Prompts, samples of each, and tokens of a sample that the engine part generates."""
GENERATION = (
    "runtime.use=local", ENGINE_BATCH, f"runtime.prompts_per_task={GENERATED[0]}",
    f"sampling.samples={GENERATED[1]}", f"sampling.max_tokens={GENERATED[2]}",
)  # fmt: skip
"""Settings with which a run would generate that."""
BESIDE_VLLM = ("runtime.use=local", "engine=vllm", "engine.kv_cache_gib=1")
"""Settings of each of the two engines in vllm_engine.py."""
STEPS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "full": (None, ()),
    "LoRA": ("peft", ("policy.lora.r=16", "policy.lora.alpha=32")),
    "compiled": (None, ("trainer.compile=true",)),
    "FlexAttention": (None, ("policy.attention=flex",)),
}
"""Training steps to measure: the package that each needs, and its settings."""
PEAKS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312,
    "L40": 181, "L4": 121, "4090": 165, "A10": 125,
}  # fmt: skip
"""Dense bf16 TFLOP/s of cards; the first name that is part of a card's counts."""


def arguments() -> argparse.ArgumentParser:
    """Return a parser of the options."""
    parser = _measure.arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no part after so long")
    parser.add_argument("--parts", nargs="+", help="measure parts whose names have one of these")
    parser.add_argument("--profile", type=Path, help="file of the profile of a first step")
    parser.add_argument("--plan", nargs="+", type=float, help="only print what fits so many GB")
    return parser


def main() -> None:
    options = arguments().parse_args()
    missing = [name for name in ("torch", "transformers", "tba") if find_spec(name) is None]
    if missing:
        print(f"skipped everything: cannot import {', '.join(missing)}")
        return
    import torch

    if options.plan:
        options.device = "cpu"
        print_plan(Bench(options).planned(), options.plan)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped all measurements: there is no GPU; tiny models on the CPU try the script")
        options.device = "cpu"
        options.tiny = True
    bench = Bench(options)
    for name, needs, part in bench.chosen():
        absent = [module for module in needs if find_spec(module) is None]
        if absent:
            print(f"skipped {name}: cannot import {', '.join(absent)}", flush=True)
        elif bench.seconds() > 60 * options.minutes:
            print(f"skipped {name}: {options.minutes:g} minutes are over", flush=True)
        elif rows := bench.measured(name, part):
            _measure.record("gpu.sh", rows, options, part=True)  # a later part may not end


@dataclass(frozen=True)
class Steps:
    """Seconds of training steps, and the answers that go with a step."""

    seconds: list[float]
    trained: int
    generated: float

    def note(self) -> str:
        return f"a step has {self.trained} answers trained and {self.generated:.0f} generated"


class Bench:
    """The parts, and the models that they measure."""

    def __init__(self, options: argparse.Namespace):
        import psutil
        import torch

        self.options = options
        self.device = options.device
        self.tiny = options.tiny
        self.started = time.perf_counter()
        self.folder = Path(tempfile.mkdtemp(prefix="tba-gpu-"))
        self.shapes = ["tiny"] if self.tiny else ["0.5B", "1.5B"]
        cuda = self.device == "cuda"
        self.card = torch.cuda.get_device_name() if cuda else "CPU"
        self.peak = next((p for name, p in PEAKS.items() if name in self.card), None)
        if self.peak is None:
            print(f"skipped MFU: the peak of {self.card} is not listed in PEAKS", flush=True)
        properties = torch.cuda.get_device_properties(0) if cuda else None
        self.memory = (
            psutil.virtual_memory().total if properties is None else properties.total_memory
        )
        self.needed: float | None = None  # bytes of the part that runs, as calculated
        self.repeats = 5
        self.in_turns: Steps | None = None  # of synchronous training, once it has been measured
        print(f"{self.card}; torch {torch.__version__}", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def parts(self) -> list[Part]:
        """Return all parts, the most important ones first."""
        first = self.shapes[0]
        parts = [self.step(shape, "full") for shape in self.shapes]
        parts += [(f"engine, {s}", (), partial(self.engine, s)) for s in self.shapes]
        parts += [(f"weight update, {s}", (), partial(self.update, s)) for s in self.shapes]
        parts += [
            (f"checkpoint, {first}", (), lambda: self.checkpoint(first)),
            (f"synchronous training, {first}", (), lambda: self.synchronous(first)),
            (f"asynchronous training, {first}", ("ray",), lambda: self.asynchronous(first)),
            (f"vLLM engine, {first}", ("vllm",), lambda: self.vllm(first)),
        ]
        parts += [self.step(shape, "LoRA") for shape in self.shapes]
        *ranks, largest = _ranks.parts(self)
        others = [self.step(first, kind) for kind in ("compiled", "FlexAttention")]
        return [*parts, *ranks, *others, largest]

    def chosen(self) -> list[Part]:
        """Return the parts that were asked for, in the order of the options."""
        if not self.options.parts:
            return self.parts()
        chosen: dict[str, Part] = {}
        for text in self.options.parts:
            chosen |= {part[0]: part for part in self.parts() if text in part[0]}
        return list(chosen.values())

    def planned(self) -> dict[str, tuple[Role, Callable[..., Any]]]:
        """Return the parts that hold a model on the card, with their configs."""
        planned: dict[str, tuple[Role, Callable[..., Any]]] = {}
        for shape in ("0.5B", "1.5B", "7B"):
            for kind in ("LoRA",) if shape == "7B" else ("full", "LoRA"):
                settings = (*STEPS[kind][1], *LONG)
                name = f"{kind} training step, {shape}"
                planned[name] = "step", partial(self.config, shape, *settings)
        for use in ("local", "ray"):
            settings = (f"runtime.use={use}", ENGINE_BATCH)
            name = f"training with runtime.use={use}, 0.5B"
            planned[name] = "run", partial(self.config, "0.5B", *settings)
        for shape in ("0.5B", "1.5B"):
            planned[f"engine, {shape}"] = "engine", partial(self.config, shape, *GENERATION)
        planned["vLLM engine, 0.5B"] = "two engines", partial(self.config, "0.5B", *BESIDE_VLLM)
        for count in (2, 4):
            name = f"step on {count} devices, 0.5B"
            planned[name] = "step", _ranks.divided(self, "0.5B", count)
        return planned

    def fitted(self, role: Role, configure: Callable[..., Any]) -> Any:
        """Return the config that fits this card; raise Skipped if none does."""
        fit = fitting(configure, role, self.memory)
        self.needed = fit.needed
        print(f"  {fit}", flush=True)
        return fit.config

    def step(self, shape: str, kind: str) -> Part:
        """Return the part that measures such training steps."""
        package = STEPS[kind][0]
        needs = () if package is None else (package,)
        return f"{kind} training step, {shape}", needs, partial(self.training, shape, kind)

    def measured(self, name: str, part: Callable[[], list[_measure.Row]]) -> list[_measure.Row]:
        """Return the rows of a part; a part that fails does not stop the others."""
        import torch

        print(f"{name} ...", flush=True)
        started = time.perf_counter()
        self.needed = None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            rows = part()
        except Skipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
            return []
        except Exception as error:  # memory, a driver, an API: the next part may still work
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            return []
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()
        print(f"  {time.perf_counter() - started:.0f} s{self.peaks()}", flush=True)
        return rows

    def peaks(self) -> str:
        """Return the calculated memory of a part beside the measured peak of this process."""
        import torch

        if self.needed is None or self.device != "cuda":
            return ""
        peak = torch.cuda.max_memory_allocated()
        ratio = f"{peak / self.needed:.2f} of the calculated {self.needed / 1e9:.1f}"
        return f"; peak memory {peak / 1e9:.1f} GB, {ratio}"

    def model(self, shape: str) -> Path:
        """Save a model of this shape with random weights, once, and return its folder."""
        import torch
        from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

        from tba.models import model_path

        path = self.folder / shape
        if path.exists():
            return path
        tokenizer = AutoTokenizer.from_pretrained(model_path("bundled:arithmetic"))
        config = Qwen2Config(
            **SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        if self.options.plan:
            config.save_pretrained(path)
        else:
            with torch.device(self.device):
                Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        tokenizer.save_pretrained(path)
        file = path / "tokenizer.json"  # with a token for each id; Qwen2's tokenizer adds the last
        plain = json.loads(file.read_text())
        vocabulary = plain["model"]["vocab"]
        last = SHAPES[shape]["vocab_size"] - 1
        vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), last)}
        file.write_text(json.dumps(plain))
        (path / "rows.jsonl").write_text("\n".join(map(json.dumps, sums(2000, 120))) + "\n")
        return path

    def config(self, shape: str, *settings: str) -> Any:
        from tba.config.schema import load

        path = self.model(shape)
        k = 4 if self.tiny else 16
        return load(
            None,
            [
                f"policy.model={path}", "task.use=custom", f"task.data={path / 'rows.jsonl'}",
                f"task.reward={HERE / '_sums.py'}:exact", "task.held_out_size=8",
                f"run.folder={self.folder / f'run-{time.monotonic_ns()}'}",
                f"sampling.samples={k}", f"sampling.max_tokens={16 if self.tiny else 128}",
                f"trainer.batch_size={4 * k if self.tiny else 8 * k}", f"trainer.group_size={k}",
                "policy.autocast=bf16", "eval.prompts=0",
                "checkpoint.every=0", "log.console=off", "log.report_to=[]",
                "log.sample_every=0", "run.steps=100000", *settings,
            ],
        )  # fmt: skip

    def training(self, shape: str, kind: str) -> list[_measure.Row]:
        """Measure training steps on full-length random answers."""
        import torch

        from tba.setup.setup import check

        if kind == "FlexAttention" and self.device == "cpu":
            raise Skipped("it needs a GPU")
        settings = (*STEPS[kind][1], *(() if self.tiny else LONG))
        parts = check(self.fitted("step", partial(self.config, shape, *settings)))
        trainer = parts.trainer(self.device)
        batch = _ranks.batch_of(self)
        prompt = batch.prompt_tokens.shape[1]
        answer = batch.tokens.shape[2]
        steps = iter(range(100))
        seconds = _measure.alternate(
            {"step": lambda: trainer.step(batch, next(steps))}, self.repeats, warmup=2
        )["step"]
        if self.options.profile and kind == "full" and shape == self.shapes[0]:
            step = partial(trainer.step, batch, 99)
            write_profile(self.options.profile, step, f"{kind} training step, {shape}")
        tokens = batch.mask.numel()
        what = f"{kind} training step, Qwen2.5-{shape} shape on {self.card}"
        note = f"{len(batch)} x {batch.samples} x {answer} tokens, prompts of {prompt}"
        note += f"; {_ranks.passes(parts.config)}"
        rows = [_measure.row(what, [tokens / s for s in seconds], "answer tokens/s", note=note)]
        if self.peak is not None and kind != "LoRA":
            flops = step_flops(trainer.policy.model, batch)
            shares = [flops / s / (self.peak * 1e12) for s in seconds]
            rows.append(_measure.row(f"{what}: MFU, attention not counted", shares, "of the peak"))
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 1e9
            needed = (self.needed or 0.0) / 1e9
            name = f"{what}: peak memory"
            rows.append(_measure.row(name, peak, "GB", needed, peer_is="calculated"))
        return rows

    def engine(self, shape: str) -> list[_measure.Row]:
        """Measure the transformers engine beside plain generate."""
        import numpy as np
        import torch
        from transformers import GenerationConfig

        from tba.config.tables import PolicyTable
        from tba.engines.transformers import Transformers
        from tba.models.pretrained import load_text
        from tba.types import Sampling

        policy = PolicyTable(model=str(self.model(shape)))
        text = load_text(policy)
        self.fitted("engine", partial(self.config, shape, *GENERATION))
        b, s, t = (2, 3, 6) if self.tiny else GENERATED
        p = 8 if self.tiny else 100
        sampling = Sampling(s, 1.0, t)
        engine = Transformers(policy, text, self.device, True, sampling, batch_size=1024)
        ids = np.random.default_rng(0).integers(3, 15, (b, p)).astype(np.int32)

        def ours() -> None:
            engine.generate(list(ids), sampling, 0)

        @torch.inference_mode()
        def plain() -> None:
            repeated = torch.from_numpy(ids).long().repeat_interleave(s, 0).to(self.device)
            config = GenerationConfig(
                max_new_tokens=t, do_sample=True, top_k=0, pad_token_id=text.pad_id,
                eos_token_id=sorted(text.eos_ids),
            )  # fmt: skip
            engine.model.generate(
                input_ids=repeated, attention_mask=torch.ones_like(repeated),
                generation_config=config,
            )  # fmt: skip

        seconds = _measure.alternate({"ours": ours, "generate": plain}, self.repeats)
        name = f"transformers engine, {b} x {s} x {t} tokens, Qwen2.5-{shape} shape on {self.card}"
        own, peer = ([b * s * t / x for x in seconds[side]] for side in ("ours", "generate"))
        row = _measure.row(
            name, own, "tokens/s", peer, peer_is="generate", ratio_is="ours / peer",
            note=f"prompts of {p} tokens; few answers end early",
        )  # fmt: skip
        return [row]

    def update(self, shape: str) -> list[_measure.Row]:
        """Measure a weight update: trainer blocked, and until an engine beside it has loaded it."""
        from tba.config.tables import PolicyTable
        from tba.engines.transformers import Transformers
        from tba.models.pretrained import load_text
        from tba.setup.setup import check

        parts = check(self.fitted("run", partial(self.config, shape)))
        trainer = parts.trainer(self.device)
        sampling = parts.search_setup().sampling
        policy = PolicyTable(model=str(self.model(shape)))
        engine = Transformers(policy, load_text(policy), self.device, True, sampling)
        blocked = []
        versions = iter(range(1, 100))

        def update() -> None:
            started = time.perf_counter()
            copy = trainer.copy(version=next(versions))
            blocked.append(time.perf_counter() - started)
            engine.load_weights(copy().payload)

        whole = _measure.alternate({"update": update}, self.repeats)["update"]
        name = f"weight update, Qwen2.5-{shape} shape on {self.card}"
        return [
            _measure.row(f"{name}: trainer blocked", blocked[1:], "s"),
            _measure.row(f"{name}: copied, converted and loaded in one process", whole, "s"),
        ]

    def checkpoint(self, shape: str) -> list[_measure.Row]:
        """Measure a checkpoint of a trainer: copied to the host, and until it is on the disk."""
        from tba.learn import checkpoint_size
        from tba.setup.setup import check

        settings = () if self.tiny else LONG
        parts = check(self.fitted("step", partial(self.config, shape, *settings)))
        trainer = parts.trainer(self.device)
        trainer.step(_ranks.batch_of(self), 0)  # the first step makes the moments
        folder = self.folder / "checkpoint"
        blocked = []

        def save() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            started = time.perf_counter()
            write = trainer.save(folder)
            blocked.append(time.perf_counter() - started)
            write()

        whole = _measure.alternate({"save": save}, self.repeats)["save"]
        on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
        shutil.rmtree(folder)
        # without the weights of the searcher, which a run on Ray does not save
        calculated = checkpoint_size(self.config(shape, "runtime.use=ray"), trainer.sizes) / 1e9
        name = f"checkpoint, Qwen2.5-{shape} shape on {self.card}"
        return [
            _measure.row(f"{name}: trainer blocked", blocked[1:], "s"),
            _measure.row(f"{name}: copied and written", whole, "s"),
            _measure.row(f"{name}: size", on_disk, "GB", calculated, peer_is="calculated"),
        ]

    def vllm(self, shape: str) -> list[_measure.Row]:
        """Run the script of the vLLM engine, which keeps its rows, apart from those of a CPU."""
        self.fitted("two engines", partial(self.config, shape, *BESIDE_VLLM))
        self.needed = None  # the script has the memory, not this process
        command = [sys.executable, str(HERE / "vllm_engine.py"), "--model", str(self.model(shape))]
        command += ["--parts", "raw", "gap", "--rows-of", "gpu_vllm", "--device", self.device]
        command += ["--results", str(self.options.results)]
        command += ["--tiny"] if self.tiny else []
        left = 60 * self.options.minutes + 60 - self.seconds()
        subprocess.run(command, check=True, timeout=min(300.0, left))
        return []

    def synchronous(self, shape: str) -> list[_measure.Row]:
        """Measure whole steps in which search and training take turns."""
        self.in_turns = steps = self.steps(shape, "local")
        name = f"synchronous training on one {self.card}, Qwen2.5-{shape} shape: seconds a step"
        return [_measure.row(name, steps.seconds, "s", note=steps.note())]

    def asynchronous(self, shape: str) -> list[_measure.Row]:
        """Measure whole steps beside which a searcher works on the same card."""
        steps = self.steps(shape, "ray")
        peer = self.in_turns
        name = f"asynchronous training on one {self.card}, Qwen2.5-{shape} shape: seconds a step"
        if peer is None:
            return [_measure.row(name, steps.seconds, "s", note=steps.note())]
        note = f"{steps.note()}; synchronous: {peer.note()}"
        given = (name, steps.seconds, "s", peer.seconds)
        return [_measure.row(*given, peer_is="synchronous", note=note)]

    def steps(self, shape: str, use: str) -> Steps:
        """Train, synchronously (local) or asynchronously (ray)."""
        from tba.open import open_run
        from tba.run import train

        marks: list[float] = []
        generated: list[int] = []
        # without a limit, an asynchronous trainer never waits
        settings = (f"runtime.use={use}", "runtime.max_reuse=inf", ENGINE_BATCH)
        with open_run(self.fitted("run", partial(self.config, shape, *settings))) as opened:

            def recorded(metrics: dict[str, float], groups: list[Any]) -> None:
                marks.append(time.perf_counter())
                generated.append(opened.searchers.stats.counts["samples_generated"])
                if len(marks) == 3 + self.repeats or self.seconds() > 60 * (
                    self.options.minutes + 1
                ):
                    opened.stop.requested = True

            opened.log_step = recorded
            with opened.tracker.clock():
                train(opened)
        seconds = [b - a for a, b in pairwise(marks[2:])]
        if not seconds:
            raise Skipped("too few steps before the time was over")
        print(f"  median step: {median(seconds):.3f} s")
        each = (generated[-1] - generated[2]) / len(seconds)
        return Steps(seconds, opened.config.trainer.batch_size, each)


if __name__ == "__main__":
    main()
