"""Search: from prompts to groups that any objective can learn from."""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import Lock

import numpy as np

from tba.config import tables
from tba.config.plugins import resolve
from tba.engines import Engine, SearchError, logp_gap_limit
from tba.learn.policy import Policy
from tba.models.lora import load_placed
from tba.models.pretrained import Tokenizer, load_text
from tba.objectives import ValueRollouts
from tba.prompt import Answer, Prompt
from tba.search.dialogue import Dialogues, Responses
from tba.search.isolation import InProcess
from tba.search.quarantine import ended_process
from tba.search.reference import AdapterReference, EngineReference, Reference
from tba.search.result import Rejected, SearchResult, SearchStats, Verdict
from tba.search.rewards import Guard
from tba.search.rollouts import Rollouts
from tba.search.verdicts import judged_before
from tba.streams import Use, generator, seed_of
from tba.tasks import Answered, Itemized, Task
from tba.tasks._memory import Functions, build_task
from tba.types import Completion, Group, Sampling, Trajectory
from tba.weights import Weights

LONGEST_CALL = 0.25
"""Share of `runtime.task_deadline` that a call of a scoring function may take.

A search that hangs in two calls, after which the others are not tried, then keeps its searcher.
"""


class LogpGapError(SearchError):
    """After a weight update, an engine's log-probs differ too much from the trainer's.

    It ends the run: an engine that loads or caches weights wrongly does so again.
    """


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts that are evaluated beside the held-out ones, and the task that scores them."""

    task: tables.Use
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class SearchSetup:
    """Settings from which any process builds the same searcher."""

    policy: tables.PolicyTable
    task: tables.Use
    engine: tables.EngineTable
    sampling: Sampling
    reward: tables.RewardTable
    evaluation: tables.EvalTable
    runtime: tables.RuntimeTable
    held_out: tuple[Prompt, ...]
    token_budget: int
    """Tokens, padding included, in one forward pass of the reference."""
    value_rollouts: ValueRollouts | None
    """Value estimates that the objective needs from search, if any."""
    reward_functions: Functions | bytes | None
    """Functions passed from Python, pickled for another process; None if the config names them."""
    sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    """Further evaluation sets, by name."""
    explore: tuple[float, float] | None = None
    """Least and highest temperature at which a search may choose tokens, drawn for each."""
    explore_share: float = 1.0
    """Share of the searches for which it is drawn."""
    steps: int = 0
    """`run.steps`, which reward functions may ask for."""

    def build(self, device: str, bf16: bool) -> "Searcher":
        """Load the engine, the reference model, and the models that score.

        `bf16` is the trainer's choice: reference and policy must compute alike, or their
        difference is noise.
        """
        guard = self.guard(device)  # first: its process starts while the models load
        context = self.engine.options.get("max_model_len")
        text = replace(load_text(self.policy).within(context), steps=self.steps)
        plugin = resolve("engines", "engine", self.engine.use, self.engine.options)
        engine: Engine = plugin.build(self.policy, text, device, bf16, self.sampling)
        reference = self._reference(engine, device, bf16)
        limit = logp_gap_limit(self.engine, bf16)
        guard.wait_until_ready()  # so that what cannot be loaded ends the start of the searcher
        return Searcher(engine, reference, text, guard, self, limit)

    def guard(self, device: str) -> Guard:
        """Return what scores, for the task of the run and for those of all evaluation sets."""
        functions, reward = self.reward_functions, self.reward
        if isinstance(functions, bytes):  # they came with this object, never from a file
            functions = pickle.loads(functions)
        named = {"": self.task, **{name: one.task for name, one in self.sets.items()}}
        plugins = {n: resolve("tasks", "task", t.use, t.options) for n, t in named.items()}

        def builds(device: str | None) -> dict[str, Callable[[], Task]]:
            return {
                n: partial(build_task, plugin, functions, device) for n, plugin in plugins.items()
            }

        process: InProcess | None = None
        if reward.isolate == "process":
            start = self.runtime.start_deadline
            process = InProcess(builds(device), reward.max_memory, start)
        here = builds(None if process else device)
        tasks = {name: build() for name, build in here.items()}
        longest = LONGEST_CALL * self.runtime.task_deadline
        return Guard(tasks, reward.deadline, reward.concurrency, process, longest)

    def _reference(self, engine: Engine, device: str, bf16: bool) -> Reference:
        """Return the reference. With LoRA, it has the engine's model, if the engine lends it."""
        if engine.own_reference:
            return EngineReference()
        temperature, budget = self.sampling.temperature, self.token_budget
        if self.policy.lora is not None and engine.model is not None:
            return AdapterReference(Policy(engine.model, temperature, bf16), budget, engine.lend)
        policy = Policy(load_placed(self.policy, device, bf16), temperature, bf16)
        if self.policy.lora is None:
            return Reference(policy, budget)
        lock = Lock()
        return AdapterReference(policy, budget, lambda: lock)


@dataclass(frozen=True)
class Searcher:
    """Turns prompts into scored groups with reference log-probs: the trainer holds one model."""

    engine: Engine
    reference: Reference
    text: Tokenizer
    guard: Guard
    setup: SearchSetup
    max_logp_gap: float
    """Largest log-prob gap, in nats, that a weight update may leave."""

    def load_weights(self, weights: Weights) -> float | None:
        """Load weights into the engine and return its log-prob gap, if there is a probe.

        LogpGapError if the gap is too large. The weights are then loaded nevertheless.
        """
        gap = self.engine.load_weights(weights)
        if gap is not None and not gap <= self.max_logp_gap:  # NaN is too large, too
            raise LogpGapError(
                f"engine {self.setup.engine.use!r}: after the weight update to version"
                f" {weights.version}, its log-probs differ from the trainer's by {gap:.3g} nats on"
                f" average, more than engine.max_logp_gap = {self.max_logp_gap:g}; if this is the"
                " engine's precision, set engine.dtype=fp32, or engine.max_logp_gap above it."
                " Otherwise the engine loads or caches weights wrongly: report it, with its version"
            )
        return gap

    def close(self) -> None:
        """End the engine, and the processes that score."""
        self.guard.close()
        self.engine.close()

    def search(self, prompts: Sequence[Prompt], seed: int) -> SearchResult:
        """Sample and score S responses of each prompt; no group if all were rejected.

        Answers that are given are scored in place of sampled ones.
        """
        times = [time.perf_counter()]
        responses = self.answer(self.guard.tasks[""], prompts, self._sampling(seed), seed)
        times.append(time.perf_counter())
        answers: list[Sequence[Answer | Verdict]] = []
        for prompt, group in zip(prompts, responses.answers, strict=True):
            rule: str | float = self.setup.sampling.truncated
            if isinstance(prompt, Answered):
                rule = "keep"
            answers.append(judged_before(group, rule))
        verdicts = self.guard(prompts, answers)
        times.append(time.perf_counter())
        groups = self._groups(prompts, responses, verdicts)
        times.append(time.perf_counter())
        rollouts: list[Verdict] = []
        request = self.setup.value_rollouts
        if request is not None:
            values = Rollouts(self.engine, self.text, self.guard, self.setup.sampling, request)
            groups, rollouts = values.estimate(groups, seed)
        times.append(time.perf_counter())
        stats = SearchStats(samples=sum(map(len, verdicts)), rollouts=len(rollouts))
        stats.switched = sum(len(c.switches) > 0 for c in chain(*responses.completions))
        stats.tool_calls = len(responses.results)
        stats.tool_failures = sum(result.failed for result in responses.results)
        stats.tool_cuts = sum(result.cut for result in responses.results)
        for verdict in chain(*verdicts):
            if isinstance(verdict, Itemized):
                stats.itemize(verdict)
        stats.reject(chain(*verdicts, rollouts))
        stages = ("generate", "reward", "reference", "rollouts")
        stats.seconds.update(zip(stages, np.diff(times).tolist(), strict=True))
        stats.rates.append(stats.samples / max(1e-9, stats.seconds["generate"]))
        return SearchResult(groups, stats, ended_process(prompts, verdicts))

    def answer(
        self, task: Task, prompts: Sequence[Prompt], sampling: Sampling, seed: int
    ) -> Responses:
        """Sample responses of each prompt but those whose answers are given.

        They are dialogues if the task has tools.
        """
        if task.tools is not None:
            return Dialogues(self.engine, self.text, task.tools).hold(prompts, sampling, seed)
        tokens = [self.text.encode(p) for p in prompts]
        pairs = zip(prompts, tokens, strict=True)
        asked = [own for prompt, own in pairs if not isinstance(prompt, Answered)]
        own = seed_of(seed, Use.GENERATION, 0)
        sampled = iter(self.engine.generate(asked, sampling, own) if asked else [])
        completions, answers, stop = [], [], sampling.stop
        for p in prompts:
            group = self._given(p) if isinstance(p, Answered) else next(sampled)
            completions.append(group)
            answers.append([self.text.answer(c.tokens, c.finished, stop, c.version) for c in group])
        return Responses(tokens, completions, answers)

    def _sampling(self, seed: int) -> Sampling:
        """Return how a search samples; its seed decides at which temperature, if it explores."""
        setup = self.setup
        rng = generator(seed, Use.EXPLORATION)
        if setup.explore is None or rng.random() >= setup.explore_share:
            return setup.sampling
        low, high = setup.explore
        return replace(setup.sampling, explore=low + (high - low) * rng.random())

    def _given(self, prompt: Answered) -> list[Completion]:
        """Return given answers, which end with a stop string, or with EOS if there is none."""
        sampling, completions = self.setup.sampling, []
        eos = [] if sampling.stop else [self.text.eos_id]
        for answer in prompt.answers:
            ids = self.text.tokenizer(answer + "".join(sampling.stop[:1]), add_special_tokens=False)
            whole = np.asarray([*ids["input_ids"], *eos], np.int32)
            tokens, finished = whole[: sampling.max_tokens], len(whole) <= sampling.max_tokens
            completions.append(Completion(tokens, np.zeros(len(tokens), np.float32), finished, 0))
        return completions

    def _groups(
        self,
        prompts: Sequence[Prompt],
        responses: Responses,
        verdicts: Sequence[Sequence[Verdict]],
    ) -> list[Group]:
        """Return the samples that have a reward, by prompt, with the reference's log-probs.

        For given answers, the reference stands for the policy that sampled them.
        """
        rewarded, tokens = [], responses.prompts
        for group, judged in zip(responses.completions, verdicts, strict=True):
            pairs = zip(group, judged, strict=True)
            rewarded.append([(c, v) for c, v in pairs if not isinstance(v, Rejected)])
        kept = [i for i, samples in enumerate(rewarded) if samples]
        scored = [[c for c, _ in rewarded[i]] for i in kept]
        logp, version = self.reference.logp([tokens[i] for i in kept], scored)
        groups = []
        for i, rows in zip(kept, logp, strict=True):
            prompt, trajectories = prompts[i], []
            given = prompt if isinstance(prompt, Answered) else None
            for (c, reward), ref_logp in zip(rewarded[i], rows, strict=True):
                own = c.logp if given is None else ref_logp
                trajectories.append(
                    Trajectory(
                        tokens=c.tokens,
                        behavior_logp=own,
                        ref_logp=ref_logp,
                        reward=float(reward),
                        version=c.version,
                        finished=c.finished,
                        sampled=c.sampled,
                        switches=c.switches,
                    )
                )
            owner = prompt if given is None else given.of
            groups.append(Group(owner, tokens[i], tuple(trajectories), version))
        return groups
