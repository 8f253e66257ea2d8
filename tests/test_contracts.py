"""Contracts that every plug-in keeps, and the plug-ins in examples/ with them.

A new file in a plug-in folder is tested here on arrival.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import isawaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import answered, pack
from conftest import VOCABULARY

from tba.config.plugins import names, resolve
from tba.config.tables import PolicyTable, TaskTable
from tba.engines import Engine
from tba.engines.scripted import Scripted
from tba.engines.transformers import Transformers
from tba.learn.policy import Policy
from tba.models.pretrained import load_model, load_text
from tba.models.tokenizer import Tokenizer
from tba.objectives import Loss
from tba.prompt import Answer, Prompt
from tba.replay.buffer import ReplayBuffer
from tba.selections import Selection
from tba.strategies import Strategy
from tba.tasks import Task
from tba.tasks._memory import build_task
from tba.types import Batch, Completion, Group, Sampling, Trajectory, collate_tokens
from tba.weights import Weights

GROUPS, SIZE = 5, 3
EXAMPLES = Path(__file__).parents[1] / "examples"

EXTRAS = ("reasoning_gym",)
"""Tasks that need a package of the same name."""


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let configs name the plug-ins of examples/."""
    monkeypatch.syspath_prepend(EXAMPLES)


def identity(drawn: list[Group]) -> list[tuple[str, list[bytes]]]:
    return [(g.prompt.id, [t.tokens.tobytes() for t in g.trajectories]) for g in drawn]


# Tasks: options that make each small, from files where it needs data.


@pytest.fixture
def options(tmp_path: Path, wide_model: Path) -> dict[str, dict[str, Any]]:
    rows = ""
    for i in range(7):
        row = {"answer": f"Add.\n#### {2 * i}", "prompt": f"{i}+{i}=", "summary": "A number."}
        row |= dict.fromkeys(("question", "problem", "post"), f"{i} + {i}?")
        rows += json.dumps(row) + "\n"
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows)
    (tmp_path / "length.py").write_text(
        "def length(prompts, completions, **columns):\n"
        "    return [float(len(c)) for c in completions]\n"
        "def half(completions):\n    return [0.5] * len(completions)\n"
    )
    data, length = str(tmp_path), f"{tmp_path}/length.py:length"
    sums = {"train_size": 7, "held_out_size": 2}
    custom = {"data": data, "reward": length, "held_out_size": 2}
    words = {"use": "gsm8k", "data": data, "weight": 2}
    sources = {"sums": {"use": "arithmetic", "weight": 1, **sums}, "words": words}
    return {
        "arithmetic": sums,
        "gsm8k": {"data": data},
        "math": {"data": data},
        "custom": custom,
        "agent": {**custom, "rollout": length},
        "tldr": {"data": data, "held_out_data": f"{data}/test.jsonl", "proxy": length},
        "mixture": {"sources": sources},
        "reasoning_gym": {"generator": "chain_sum", "size": 12, "held_out_size": 2},
        "mylab.countdown_task.Countdown": {"train_size": 20, "held_out_size": 5},
        "redteam": {"victim": str(wide_model), "judge": f"{data}/length.py:half", "answers": 2},
    }


@pytest.fixture(params=[*names("tasks"), "mylab.countdown_task.Countdown"])
def task(request: pytest.FixtureRequest, options: dict[str, dict[str, Any]]) -> Task:
    if request.param in EXTRAS:
        pytest.importorskip(request.param, reason=f"needs the extra {request.param}")
    return build_task(TaskTable(use=request.param, **options.get(request.param, {})), None)


def score(task: Task, prompt: Prompt, answers: Sequence[Answer]) -> Sequence[float | None]:
    scores = task.score(prompt, answers)
    return asyncio.run(finished(scores)) if isawaitable(scores) else scores


async def finished(scores: Awaitable[Sequence[float | None]]) -> Sequence[float | None]:
    return await scores


def test_task_prompts_have_unique_ids_that_stay(task):
    prompts, held_out = task.prompts(), task.held_out()
    ids = [p.id for p in (*prompts, *held_out)]
    assert prompts and held_out
    assert len(set(ids)) == len(ids)  # unique, and held out is disjoint from training
    assert [p.id for p in (*task.prompts(), *task.held_out())] == ids
    assert all(p.text for p in (*prompts, *held_out))


def test_task_prompts_are_plain_json(task):
    """They are stored with the replay buffer."""
    for prompt in (*task.prompts(), *task.held_out()):
        plain = {"id": prompt.id, "text": prompt.text, "columns": dict(prompt.columns)}
        assert Prompt(**json.loads(json.dumps(plain))) == prompt


def test_task_gives_every_answer_a_score(task):
    prompt = task.prompts()[-1]
    texts = ("", "7", "14", "no idea", "é\n#### 6")
    answers = [Answer(text, finished=i % 2 == 0) for i, text in enumerate(texts)]
    together = score(task, prompt, answers)
    assert len(together) == 5
    assert all(s is None or np.isfinite(s) for s in together)
    # a group that raises is scored answer by answer: none of these depends on the others
    assert together == [score(task, prompt, [a])[0] for a in answers]
    assert task.pass_reward is None or isinstance(task.pass_reward, float)


@dataclass(frozen=True)
class NoTask:
    """A class that does not inherit from Task."""


def test_a_task_must_inherit():
    with pytest.raises(ValueError, match=r"^NoTask must inherit .*; write: class NoTask\(Task\)$"):
        build_task(TaskTable(use="test_contracts.NoTask"), None)


# Strategies


@pytest.fixture(params=[*names("strategies"), "mylab.shortest_first.ShortestFirst"])
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return resolve("strategies", "strategy", request.param, {}).build()


def buffer_of(prompts: int, responses: int, reward: Callable[[int], float] = float) -> ReplayBuffer:
    """Prompt b arrived at step b // 2, with responses k = 0, 1, ... and reward(k)."""
    buffer = ReplayBuffer()
    for b in range(prompts):
        logps = [-np.ones(k + 1, np.float32) for k in range(responses)]
        found = [
            Trajectory(np.full(k + 1, b, np.int32), logp, logp, reward(k), b // 2, finished=True)
            for k, logp in enumerate(logps)
        ]
        group = Group(Prompt(f"prompt-{b}", "?"), np.array([b], np.int32), (*found,))
        buffer.add([group], now=b // 2)
    return buffer


def draw(
    strategy: Strategy, buffer: ReplayBuffer, seed: int = 0, groups: int = GROUPS
) -> list[Group]:
    return buffer.sample(groups, SIZE, strategy, now=4, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("prompts", [1, 4, 5, 7])
@pytest.mark.parametrize("responses", [1, 2, 3, 4, 11])
def test_strategy_gives_exactly_so_many_groups_of_such_size(strategy, prompts, responses):
    """Also with a single prompt, and where a prompt has fewer responses than a group needs."""
    buffer = buffer_of(prompts, responses)
    held = dict(identity(buffer.groups()))
    for seed in range(10):
        drawn = draw(strategy, buffer, seed)
        assert [len(g.trajectories) for g in drawn] == [SIZE] * GROUPS
        for prompt, tokens in identity(drawn):
            assert set(tokens) <= set(held[prompt])  # of that prompt
            assert len(set(tokens)) == min(SIZE, responses)  # none twice, unless all are there


def test_strategy_gives_every_prompt_its_turn(strategy):
    buffer = buffer_of(2, 4)  # all of the latest step
    seen = {prompt for seed in range(20) for prompt, _ in identity(draw(strategy, buffer, seed))}
    assert seen == {"prompt-0", "prompt-1"}


@pytest.mark.parametrize("spread", [1e3, 1e6, 1e30])
def test_strategy_survives_rewards_whose_softmax_underflows(strategy, spread):
    buffer = buffer_of(7, 4, reward=lambda k: (-1) ** k * k * spread)
    for seed in range(10):
        for group in draw(strategy, buffer, seed):
            assert len({t.tokens.tobytes() for t in group.trajectories}) == SIZE


def test_strategy_is_decided_by_the_random_generator(strategy):
    buffer = buffer_of(7, 11)
    drawn = [identity(draw(strategy, buffer, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


# Selections

PROMPTS = [Prompt(f"prompt-{i}", "?") for i in range(7)]


@pytest.fixture(params=[*names("selections"), "mylab.short_prompts_first.ShortPromptsFirst"])
def make_selection(request: pytest.FixtureRequest) -> Callable[[int], Selection]:
    """Of seven prompts, for a seed."""
    options = {"over": 50} if "." in request.param else {}
    plugin = resolve("selections", "selection", request.param, options)
    return lambda seed: plugin.build(PROMPTS, seed, 1.0)


def choices(selection: Selection, counts: Sequence[int]) -> list[str]:
    """Ids of the chosen prompts; prompt i is answered right in i of 6 cases before the next."""
    chosen = []
    for count in counts:
        prompts = selection.choose(count)
        assert len(prompts) == count
        chosen += [p.id for p in prompts]
        for p in prompts:
            selection.learn(answered(p, right=PROMPTS.index(p), answers=6))
    return chosen


def test_selection_chooses_without_end(make_selection):
    """Also more at once than there are; and each prompt has a chance."""
    assert set(choices(make_selection(0), [1, 3, 20, 7, 0, *[1] * 200])) == {p.id for p in PROMPTS}


def test_selection_is_decided_by_its_seed(make_selection):
    torch.rand(1), np.random.rand()
    chosen = [choices(make_selection(seed), [3, 4, 5]) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize("before", [[], [1], [3, 5], [4] * 10])
def test_a_restored_selection_goes_on_as_it_would_have(make_selection, before):
    whole, restored = make_selection(3), make_selection(3)
    choices(whole, before)
    state = whole.state()
    written = json.dumps(state)
    restored.restore(json.loads(written))
    assert choices(whole, [2, 3, 4] * 5) == choices(restored, [2, 3, 4] * 5)
    assert whole.state() == restored.state()
    assert json.dumps(state) == written  # it does not change afterwards: it is written later


# Objectives


@pytest.fixture(params=[*names("objectives"), "mylab.huber_tb.HuberTB"])
def objective(request: pytest.FixtureRequest) -> Any:
    return resolve("objectives", "objective", request.param, {}).at(0)


@pytest.fixture
def head(objective: Any, batch: Batch) -> torch.Tensor | None:
    """Output of the objective's own head, if it has one: [B K T], 0 at padding, or [B]."""
    if objective.head is None:
        return None
    generator = torch.Generator().manual_seed(2)
    if objective.head.on == "prompt":
        return torch.randn(len(batch), generator=generator).requires_grad_()
    return (torch.randn(batch.mask.shape, generator=generator) * batch.mask).requires_grad_()


def call(objective: Any, logp: torch.Tensor, batch: Batch, head: torch.Tensor | None) -> Loss:
    found: Loss = objective(logp, batch) if head is None else objective(logp, batch, head)
    return found


def of_groups(head: torch.Tensor | None, groups: list[int], tokens: int) -> torch.Tensor | None:
    """What the head says of these groups alone."""
    return head if head is None else head[groups] if head.ndim == 1 else head[groups, :, :tokens]


def gradients(
    loss: torch.Tensor, logp: torch.Tensor, head: torch.Tensor | None
) -> list[torch.Tensor]:
    """Of log-probs and of the head, if there is one; each must have one."""
    inputs = [logp] if head is None else [logp, head]
    return list(torch.autograd.grad(loss, inputs, retain_graph=True))


def test_an_underscore_hides_what_is_no_plugin():
    assert not [name for name in names("objectives") if name.startswith("_")]
    with pytest.raises(ValueError, match="no objectives called '_terms'"):
        resolve("objectives", "objective", "_terms", {})


def test_objective_gives_a_finite_loss_for_each_group(objective, batch, logp, head):
    loss, metrics = call(objective, logp, batch, head)
    assert loss.shape == (3,) and loss.isfinite().all()
    for gradient in gradients(loss.sum(), logp, head):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0
    for values in metrics.values():
        assert values.shape == (3,) and values.isfinite().all() and not values.requires_grad


def test_objective_gives_padding_no_gradient_and_no_say(objective, batch, logp, head):
    loss, _ = call(objective, logp, batch, head)
    for gradient in gradients(loss.sum(), logp, head):
        assert gradient.ndim == 1 or not gradient[~batch.mask].any()
    rubbish = torch.where(batch.mask, 0.0, -7.0)
    dirty = replace(batch, ref_logp=batch.ref_logp - 2 * rubbish, value=batch.value + 4 * rubbish)
    dirty = replace(dirty, behavior_logp=batch.behavior_logp + 3 * rubbish)
    own = head if head is None or head.ndim == 1 else head - 5 * rubbish
    other, _ = call(objective, logp + rubbish, dirty, own)
    torch.testing.assert_close(other, loss)


def test_objective_does_not_look_at_other_groups(objective, batch, logp, head):
    loss, metrics = call(objective, logp, batch, head)
    for b in range(3):
        alone = batch.groups([b])  # its padding trimmed to what it needs
        tokens = alone.tokens.shape[2]
        its_head = of_groups(head, [b], tokens)
        own, own_metrics = call(objective, logp[[b], :, :tokens], alone, its_head)
        torch.testing.assert_close(own, loss[[b]])
        expected = {name: values[[b]] for name, values in metrics.items()}
        torch.testing.assert_close(own_metrics, expected)
        for gradient in gradients(loss[b], logp, head):
            assert not gradient[[i for i in range(3) if i != b]].any()


def test_objective_survives_equal_rewards(objective, batch, logp, head):
    """Where a baseline leaves nothing, and a division by the rewards' spread would be one by 0."""
    loss, _ = call(objective, logp, replace(batch, reward=torch.ones_like(batch.reward)), head)
    assert all(tensor.isfinite().all() for tensor in (loss, *gradients(loss.sum(), logp, head)))


WITHOUT_KL = [(name, {"beta": 0.0}) for name in ("grpo", "ppo", "proximal_rloo", "rloo", "vineppo")]


@pytest.mark.parametrize(
    ("name", "options"), [*((n, {}) for n in names("objectives")), *WITHOUT_KL]
)
def test_objective_states_whether_it_learns_from_equal_rewards(name, options, batch, logp):
    """A KL as a separate loss aside, which has a gradient wherever pi is not the reference."""
    if name == "grpo" and not options:
        return
    objective: Any = resolve("objectives", "objective", name, options).at(0)
    half = torch.full_like(logp, 0.5).detach()  # a value is an estimate: not exactly the reward
    equal = replace(batch, reward=torch.ones_like(batch.reward), value=half)
    head = torch.zeros(len(batch)) if name == "tb_learned_z" else half
    loss, _ = call(objective, logp, equal, head if objective.head else None)
    learns = gradients(loss.sum(), logp, None)[0].abs().max() > 1e-9
    assert objective.learns_from_equal_rewards == learns


OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("tb", {"importance_cap": 2.0}), ("tb", {"taper": "none"}),
    ("tb", {"taper": "reward"}), ("tb_learned_z", {"taper": "none"}),
    ("tba_prime", {"importance": "none"}), ("rloo", {"beta": 0.0}),
    ("rloo", {"beta": 0.0, "importance": "token"}), ("proximal_rloo", {"beta": 0.0}),
]  # fmt: skip
"""Options with which an objective needs other log-probs than by default."""


@pytest.mark.parametrize(
    ("name", "options"), [*((n, {}) for n in names("objectives")), *OTHER_OPTIONS]
)
def test_objective_states_whether_it_uses_the_log_probs_of_the_sampling_policy(
    name, options, batch, logp
):
    objective: Any = resolve("objectives", "objective", name, options).at(0)
    head = torch.zeros(len(batch)) if name == "tb_learned_z" else torch.zeros_like(logp)
    noise = torch.randn(logp.shape, generator=torch.Generator().manual_seed(3)) * batch.mask
    near = replace(batch, behavior_logp=logp.detach() + 0.05 * noise)  # inside of any clip
    far = replace(batch, behavior_logp=logp.detach() + noise)
    results = []
    for one in (near, far):
        loss, _ = call(objective, logp, one, head if objective.head else None)
        results.append((loss.detach(), gradients(loss.sum(), logp, None)[0]))
    changes = not all(torch.equal(*pair) for pair in zip(*results, strict=True))
    how = {"tb": "tapers_by", "tb_learned_z": "taper"}.get(name)
    tapers = how is not None and getattr(objective, how) != "none"  # the optimum is the same
    assert (objective.needs_behavior or tapers) == changes


@pytest.mark.parametrize("distance", [-90.0, 90.0])
@pytest.mark.parametrize("other", ["behavior_logp", "ref_logp"])
def test_objective_survives_a_policy_far_away(objective, batch, logp, head, other, distance):
    """e^90 at each token, from the behaviour policy or the reference: more than a float32 holds."""
    far = replace(batch, **{other: getattr(batch, other) + distance * batch.mask})
    loss, metrics = call(objective, logp, far, head)
    tensors = (loss, *gradients(loss.sum(), logp, head), *metrics.values())
    assert all(tensor.isfinite().all() for tensor in tensors)


# Engines


def test_a_completion_has_a_log_prob_for_each_token():
    """The buffer would read the reference's log-probs from where more were written."""
    with pytest.raises(ValueError, match="3 tokens and 4 log-probs"):
        Completion(np.zeros(3, np.int32), np.zeros(4, np.float32), True, 0)


@pytest.fixture(scope="module")
def text(wide_model: Path) -> Tokenizer:
    return load_text(PolicyTable(model=str(wide_model)))


ENGINE_OPTIONS = {
    "transformers": {"batch_size": 3},
    "scripted": {"latency": 0.02, "answers": ["0", "1", "6=12", "3=1+4="]},
    "vllm": {"max_num_seqs": 3, "kv_cache_gib": 0.05},
}
"""Options that divide the work of a call, or make it last."""


@pytest.fixture(params=[*names("engines"), "mylab.recording_engine.Recording"])
def engine_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Engine]:
    """The engine of a model's folder."""
    record = {"file": str(tmp_path / "completions.jsonl")}
    if request.param == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm runs this in another environment")
    plugin = resolve("engines", "engine", request.param, ENGINE_OPTIONS.get(request.param, record))

    def build(model: Path) -> Engine:
        policy = PolicyTable(model=str(model))
        return plugin.build(policy, load_text(policy), "cpu", False, SAMPLING)

    return build


@pytest.fixture
def make_engine(engine_of: Callable[[Path], Engine], wide_model: Path) -> Callable[[], Engine]:
    return lambda: engine_of(wide_model)


@pytest.fixture
def engine(make_engine: Callable[[], Engine]) -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def newer(wide_model: Path) -> Weights:
    """Weights of version 4, far from those that an engine starts with."""
    model = load_model(PolicyTable(model=str(wide_model)), torch.float32)
    packed = pack(model, version=4, bf16=False)
    rng = np.random.default_rng(0)
    moved = {name: array + rng.normal(0, 0.3, array.shape) for name, array in packed.arrays.items()}
    return replace(packed, arrays={n: array.astype(np.float32) for n, array in moved.items()})


TEXTS = ("1+", "22+33=", "7")
SAMPLING = Sampling(7, 1.0, 6)


def ask(
    engine: Engine, text: Tokenizer, seed: int, max_tokens: int = 6, temperature: float = 1.0
) -> list[list[Completion]]:
    """Seven answers to each of three prompts of different lengths."""
    prompts = [text.encode(Prompt(t, t)) for t in TEXTS]
    return engine.generate(prompts, Sampling(7, temperature, max_tokens), seed)


def tokens(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.tokens.tolist() for c in cs] for cs in answers]


def test_engine_gives_the_same_answers_for_the_same_seed(engine, text):
    first = ask(engine, text, seed=1)
    torch.rand(3)  # what else is random in the process does not matter
    state = torch.get_rng_state()
    same, other = ask(engine, text, seed=1), ask(engine, text, seed=2)
    assert torch.equal(torch.get_rng_state(), state)  # and is not disturbed
    assert tokens(first) == tokens(same) != tokens(other)
    logps = [[[c.logp.tolist() for c in cs] for cs in answers] for answers in (first, same)]
    assert logps[0] == logps[1]


@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_engine_ends_answers_with_eos_or_at_the_limit(engine, text, max_tokens):
    answers = [ask(engine, text, seed, max_tokens) for seed in range(5)]
    assert [[len(cs) for cs in found] for found in answers] == [[7, 7, 7]] * 5
    for c in (c for found in answers for cs in found for c in cs):
        assert 1 <= len(c.tokens) <= max_tokens
        assert c.finished == (c.tokens[-1] in text.eos_ids)  # EOS is part of the tokens
        assert c.finished or len(c.tokens) == max_tokens
        assert not set(c.tokens[:-1].tolist()) & text.eos_ids
        assert len(c.logp) == len(c.tokens) and np.isfinite(c.logp).all() and (c.logp <= 0).all()


@pytest.fixture(scope="module")
def wordy_model(make_model: Callable[..., Path]) -> Path:
    """Model with tokens of several characters."""
    return make_model(vocabulary=[*VOCABULARY, "+4=", "56", "6="], hidden_size=64, context=256)


@pytest.mark.parametrize("stop", [("4",), ("1+",), ("6=", "=1")])
def test_engine_ends_answers_with_a_stop_string(engine_of, wordy_model, stop):
    """A response ends with the token that completes one, whole, and nothing else changes.

    "4" is a token, and a part of one; "1+" always spans two tokens; "6=" may be one token or two.
    """
    engine, text = engine_of(wordy_model), load_text(PolicyTable(model=str(wordy_model)))
    prompts = [text.encode(Prompt(t, t)) for t in ("1+", "56=", "1")]  # they do not count
    sampling, stopped, spoken = Sampling(24, 1.0, 9), 0, []
    whole = engine.generate(prompts, sampling, seed=1)
    ended = engine.generate(prompts, replace(sampling, stop=stop), seed=1)
    for before, after in zip(itertools.chain(*whole), itertools.chain(*ended), strict=True):
        lengths = range(1, len(before.tokens) + 1)
        texts = [text.decode(before.tokens[:n]) for n in lengths]
        ends = [n for n, t in zip(lengths, texts, strict=True) if any(s in t for s in stop)]
        end = ends[0] if ends else len(before.tokens)
        assert after.tokens.tolist() == before.tokens[:end].tolist()
        np.testing.assert_allclose(after.logp, before.logp[:end], atol=1e-5)
        assert after.finished == (bool(ends) or before.finished)
        answer = text.answer(after.tokens, after.finished, stop)
        assert answer.text == min((texts[-1].partition(s)[0] for s in stop), key=len)
        assert answer.finished == after.finished
        stopped += bool(ends)
        spoken.append(text.decode(after.tokens))
    assert stopped
    if stop == ("4",) and not isinstance(engine, Scripted):
        assert any(s.endswith("+4=") for s in spoken)  # what follows in the token is kept


def test_engine_is_greedy_at_temperature_0(engine, text):
    greedy, again = (tokens(ask(engine, text, seed, temperature=0.0)) for seed in (1, 2))
    assert greedy == again
    for first, *others in greedy:
        assert all(other == first for other in others)


def test_engine_gives_two_threads_what_it_gives_one(engine, text):
    alone = [tokens(ask(engine, text, seed)) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda seed: tokens(ask(engine, text, seed)), range(4)))
    assert together == alone


def test_engine_loads_weights_while_it_generates(make_engine, newer, text):
    """A completion has the version that began it; later ones are those of the newer weights."""
    engine, other = make_engine(), make_engine()
    with ThreadPoolExecutor(2) as threads:
        generating = threads.submit(ask, engine, text, 1)
        threads.submit(engine.load_weights, newer).result(timeout=60)
        versions = [[c.version for c in row] for row in generating.result(timeout=60)]
    for row in versions:
        assert row == sorted(row)
        assert set(row) <= {0, 4}
    after = ask(engine, text, seed=2)
    assert {c.version for row in after for c in row} == {4} == {engine.version}
    other.load_weights(newer)
    assert tokens(after) == tokens(ask(other, text, seed=2))


def test_transformers_loads_weights_between_two_batches(wide_model, text, newer, monkeypatch):
    """A load waits for the batch that runs and goes before the next; random numbers continue."""
    policy = PolicyTable(model=str(wide_model))
    engine = Transformers(policy, text, "cpu", False, SAMPLING, batch_size=3)
    whole = tokens(ask(engine, text, seed=1))
    generate, calls = engine._batch, itertools.count()
    loaders = ThreadPoolExecutor(1)

    def loading_in_the_third_batch(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            loaders.submit(engine.load_weights, newer)
            while not engine._weights._entrance.locked():
                time.sleep(0.001)
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine, "_batch", loading_in_the_third_batch)
    answers = ask(engine, text, seed=1)
    loaders.shutdown()
    # the shortest prompt comes first: its seven answers take three batches
    assert [[c.version for c in row] for row in answers] == [[4] * 7, [4] * 7, [0] * 7]
    assert tokens(answers)[2] == whole[2]


def test_transformers_samples_do_not_depend_on_the_batch(wide_model, text):
    """The same numbers choose the same tokens, whatever else runs; log-probs are the model's."""
    policy = PolicyTable(model=str(wide_model))
    given = (policy, text, "cpu", False, SAMPLING)
    engines = [Transformers(*given, batch_size=n) for n in (1, 3, 14, 256)]
    first, *others = [ask(engine, text, seed=1) for engine in engines]
    for other in others:
        assert tokens(other) == tokens(first)
    reference = Policy(engines[0].model, 1.0)
    prompts = [text.encode(Prompt(t, t)) for t in TEXTS]
    for prompt, completions in zip(prompts, first, strict=True):
        logp = reference.logp(collate_tokens([prompt], [[c.tokens for c in completions]]))[0]
        for row, c in zip(logp, completions, strict=True):
            torch.testing.assert_close(row[: len(c.logp)], torch.tensor(c.logp), atol=1e-5, rtol=0)
