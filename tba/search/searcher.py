"""Search: from prompts to groups that any objective can learn from."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from tba.agents.endpoint import Agents
from tba.agents.environment import Dialogues
from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.engines import Engine, logp_gap_limit
from tba.errors import SearchError
from tba.learn.policy import Policy
from tba.models.lora import load_frozen
from tba.models.pretrained import load_text
from tba.models.tokenizer import Tokenizer
from tba.objectives import ValueRollouts
from tba.prompt import Prompt
from tba.scoring.scoring import Scoring, ScoringProcess
from tba.scoring.verdicts import Reason, Rejection, Responses, Verdict, settle_truncated
from tba.search.reference import EngineReference, Reference
from tba.search.result import SearchResult, SearchStats, timed
from tba.search.values import Rollouts
from tba.streams import Use, generator, seed_of
from tba.tasks import ItemizedReward
from tba.tasks._memory import Functions, build_task
from tba.types import Group, Sampling
from tba.weights import Weights

LONGEST_CALL = 0.25
"""Share of `runtime.task_deadline` that a call of a scoring function may take.

After two calls in a row that hang, the others are not tried, so that a search ends in time.
"""

MOST_OF_TASK = 0.9
"""Share of `runtime.task_deadline` after which the sessions of a search end.

The greedy and the sampled sessions of a piece of an evaluation each get half of it.
"""

EXPLORING = 0.5
"""With `sampling.explore`, the share of search tasks that draw a random temperature."""


@dataclass(frozen=True)
class SearchSetup:
    """Settings from which any process builds the same searcher."""

    config: Config
    sampling: Sampling
    """How a search samples if it does not explore."""
    held_out: tuple[Prompt, ...]
    value_rollouts: ValueRollouts | None
    """Value estimates that the objective needs from searches; None if it needs none."""
    reward_functions: Functions | bytes | None
    """Functions passed from Python, pickled for other processes; None if the config names them."""
    evaluated: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)
    """Prompts of the sources that are only evaluated, by name."""
    needs_behavior: bool = False
    """Whether the objective needs the exact log-probs of the sampling policy."""

    def build(self, device: str, bf16: bool, lent: Any = None) -> "Searcher":
        """Load the engine, the reference model, and the models that score.

        `bf16` is the trainer's choice: reference and policy must compute in the same way, or their
        difference is noise. A trainer in this process may lend its model as `lent`.
        """
        scoring = self.scoring(device)  # first: on a CPU, its process starts while the models load
        c = self.config
        text = load_text(c.policy).within(c.engine.options.get("max_model_len"))
        plugin = resolve("engines", "engine", c.engine.use, c.engine.options)
        if c.runtime.colocate == "sleep":
            plugin = replace(plugin, options={**plugin.options, "sleeps": True})
        if device != "cpu":  # vLLM counts GPU memory that judges take during its start as its own
            scoring.wait_until_ready()
        engine: Engine = plugin.build(c.policy, text, device, bf16, self.sampling)
        model = lent if engine.model is None else engine.model
        reference: Reference
        if engine.own_reference:
            reference = EngineReference()
        elif c.policy.lora is None or model is None:
            reference = self.reference(device, bf16)
        else:  # without its adapter, the model of the engine or the trainer is the reference
            exclusive = None if engine.model is None else engine.lend
            policy = self._policy(model, bf16)
            reference = Reference(policy, c.trainer.reference_tokens, exclusive)
        scoring.wait_until_ready()  # so that the searcher does not start if a model cannot load
        fixed = ""
        if self.needs_behavior:
            fixed = "the objective needs log-probs at the config's values; objective=tb does not"
        memory = c.reward.max_memory
        start = c.runtime.start_deadline
        agents = {}
        dialogues = {}
        for name, task in scoring.tasks.items():
            if task.program is not None:
                agents[name] = Agents(engine, text, task.program, fixed, memory, start)
            if task.tools is not None:
                dialogues[name] = Dialogues(engine, text, scoring, name, task.tools)
        gap = logp_gap_limit(c.engine, bf16)
        return Searcher(engine, reference, text, scoring, self, gap, agents, dialogues)

    def scoring(self, device: str) -> Scoring:
        """Build the scoring of the run's task and of the sources that are only evaluated."""
        reward = self.config.reward
        task = self.config.task
        deadlines = self.config.runtime
        functions = self.reward_functions
        if isinstance(functions, bytes):  # pickled with this object, never read from a file
            functions = pickle.loads(functions)
        isolated = reward.isolate == "process"
        builds = {}
        tasks = {}
        tables = {"": task, **{name: task.source(name) for name in self.evaluated}}
        for name, table in tables.items():
            builds[name] = partial(build_task, table, functions, device)
            tasks[name] = build_task(table, functions, None if isolated else device)
        process = None
        if isolated:
            process = ScoringProcess(builds, reward.max_memory, deadlines.start_deadline)
        return Scoring(
            tasks=tasks,
            process=process,
            deadline=reward.deadline,
            longest=LONGEST_CALL * deadlines.task_deadline,
            steps=self.config.run.steps,
        )

    def _policy(self, model: Any, bf16: bool) -> Policy:
        """Return a policy of the model that computes in the same way as the trainer's."""
        c = self.config
        if bf16 and c.trainer.devices > 1:  # FSDP gathers all parameters in bf16
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return Policy(model, self.sampling.temperature, bf16, c.policy.share_prompt)

    def reference(self, device: str, bf16: bool) -> Reference:
        """Load the reference as a separate model."""
        c = self.config
        dtype = torch.bfloat16 if c.trainer.weights == "bf16" else torch.float32
        model = load_frozen(c.policy, device, bf16, dtype)
        return Reference(self._policy(model, bf16), c.trainer.reference_tokens)


@dataclass(frozen=True)
class Searcher:
    """Turns prompts into scored groups with reference log-probs, so the trainer needs one model."""

    engine: Engine
    reference: Reference
    text: Tokenizer
    scoring: Scoring
    setup: SearchSetup
    max_logp_gap: float
    """Largest log-prob gap, in nats, that a weight update may leave; see `Probe.rounding`."""
    agents: Mapping[str, Agents] = field(default_factory=dict)
    """Session runners of the user's programs, by the name of the task."""
    dialogues: Mapping[str, Dialogues] = field(default_factory=dict)
    """Dialogue runners of the environments, by the name of the task."""

    def load_weights(self, weights: Weights) -> float | None:
        """Load weights into the engine; return its log-prob gap, or None without a probe.

        Raises SearchError, and keeps the new weights, if the gap is too large: a retry would not
        help, because a wrong engine stays wrong.
        """
        gap = self.engine.load_weights(weights)
        if gap is None or weights.probe is None:
            return gap
        limit = self.max_logp_gap * weights.probe.rounding
        if not gap <= limit:  # also true for NaN
            raise SearchError(
                f"engine {self.setup.config.engine.use!r}: after the weight update to version"
                f" {weights.version}, its log-probs differ from the trainer's by {gap:.3g} nats on"
                f" average, more than {limit:.2g} (engine.max_logp_gap). If this is rounding, set"
                " engine.dtype=fp32 and policy.autocast=off, or a higher limit. Otherwise the"
                " engine loads or caches weights wrongly: report it, with its version"
            )
        return gap

    def close(self) -> None:
        """Stop the engine, the scoring processes and the agent programs."""
        for agents in self.agents.values():
            agents.close()
        self.scoring.close()
        self.engine.close()

    def search(self, prompts: Sequence[Prompt], seed: int) -> SearchResult:
        """Sample and score S responses to each prompt; no group if all are rejected."""
        stats = SearchStats()
        with timed("generate", stats.seconds):
            responses = self.answer("", prompts, self._sampling(seed), seed)
        with timed("reward", stats.seconds):
            rule = self.setup.sampling.truncated
            settled = [settle_truncated(group, rule) for group in responses.answers]
            verdicts = responses.rewarded(self.scoring(prompts, settled), settled)
        with timed("reference", stats.seconds):
            groups = self._groups(prompts, responses, verdicts)
        rollouts: list[Verdict] = []
        request = self.setup.value_rollouts
        if request is not None:
            with timed("rollouts", stats.seconds):
                sampling = self.setup.sampling
                values = Rollouts(self.engine, self.text, self.scoring, sampling, request)
                groups, rollouts = values.estimate(groups, seed)
        samples = sum(map(len, verdicts))
        stats.counts.update(
            {
                "samples_generated": samples,
                "rollouts_generated": len(rollouts),
                "samples_switched": sum(len(c.switches) > 0 for c in chain(*responses.completions)),
                "tools/calls": len(responses.results),
                "tools/failures": sum(result.failed for result in responses.results),
                "tools/cut": sum(result.cut for result in responses.results),
            }
        )
        for agents in self.agents.values():
            stats.counts.update(agents.counts())
        stats.reject(chain(*verdicts, rollouts))
        stats.rates.append(samples / max(1e-9, stats.seconds["generate"]))
        died = set()
        for prompt, judged in zip(prompts, verdicts, strict=True):
            stats.itemize(judged)
            if any(isinstance(v, Rejection) and v.reason == Reason.DIED for v in judged):
                died.add(prompt.id)
        return SearchResult(groups, stats, died)

    def answer(
        self,
        name: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        share: float = MOST_OF_TASK,
    ) -> Responses:
        """Sample responses to each prompt of the task `name`.

        They are dialogues if the task has tools, and sessions if it has a program. Sessions end
        after `share` of `runtime.task_deadline`.
        """
        if name in self.agents:
            seconds = share * self.setup.config.runtime.task_deadline
            return self.agents[name].run_sessions(prompts, sampling, seed, seconds)
        if name in self.dialogues:
            return self.dialogues[name].run_dialogues(prompts, sampling, seed)
        tokens = [self.text.encode(p) for p in prompts]
        completions = self.engine.generate(tokens, sampling, seed_of(seed, Use.GENERATION, 0))
        answers = []
        for group in completions:
            answers.append(
                [self.text.answer(c.tokens, c.finished, sampling.stop, c.version) for c in group]
            )
        return Responses(tokens, completions, answers)

    def _sampling(self, seed: int) -> Sampling:
        """Return how a search samples; if it explores, its seed determines the temperature."""
        sampling = self.setup.sampling
        settings = self.setup.config.sampling
        rng = generator(seed, Use.EXPLORATION)
        if settings.explore is None or rng.random() >= EXPLORING:
            return sampling
        low, high = settings.explore
        return replace(sampling, explore=low + (high - low) * rng.random())

    def _groups(
        self,
        prompts: Sequence[Prompt],
        responses: Responses,
        verdicts: Sequence[Sequence[Verdict]],
    ) -> list[Group]:
        """Group the samples that have a reward by prompt, with the reference's log-probs."""
        rewarded = {}
        for i, (group, judged) in enumerate(zip(responses.completions, verdicts, strict=True)):
            pairs = zip(group, judged, strict=True)
            samples = [(c, v) for c, v in pairs if not isinstance(v, Rejection)]
            if samples:
                rewarded[i] = samples
        tokens = [responses.prompts[i] for i in rewarded]
        completions = [[c for c, _ in samples] for samples in rewarded.values()]
        logp, version = self.reference.logp(tokens, completions)
        groups = []
        for (i, samples), rows in zip(rewarded.items(), logp, strict=True):
            referred = zip(samples, rows, strict=True)
            own = []
            for (completion, verdict), ref_logp in referred:
                trajectory = completion.rewarded(float(verdict), ref_logp)
                items = verdict.items if isinstance(verdict, ItemizedReward) else {}
                own.append(replace(trajectory, items=items))
            groups.append(Group(prompts[i], responses.prompts[i], tuple(own), version))
        return groups
