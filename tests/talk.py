"""Dialogues for tests: a toy that can be enumerated, and scripted turns with a desk of tools."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import EOS, PAD
from exact import Enumerated, log_probs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tba.config.schema import Config, load
from tba.engines.scripted import Scripted
from tba.learn.policy import Policy
from tba.prompt import Answer, Prompt
from tba.replay.store import key_of
from tba.search.result import SearchResult
from tba.search.searcher import Searcher
from tba.setup.setup import check
from tba.tasks import Task, Tools
from tba.tasks.custom import describe
from tba.types import RESTART, Completion, Group, Sampling, Trajectory

MAX_TOKENS, MAX_TURNS, STOP = 5, 2, "1"
SETTINGS = ("task=talk.Talk", f"sampling.max_tokens={MAX_TOKENS}", f"sampling.stop=['{STOP}']")
TEXTS = {"1": "1", "2": "2", "12": "1"}
"""Prompts, with the first word of the oracle."""
ASK = '<tool_call>{"name": "ask", "arguments": {}}</tool_call>'
VOCABULARY = ["<eos>", "1", "2", ASK]
EOS_ID, ONE, TWO, CALL = range(4)
TEMPLATE = (
    "{% if tools %}<eos>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)
"""A chat in this vocabulary: the template says that there are tools, and shows results as such."""


class Oracle:
    """Says "1" and "2" in turns, and begins with what the row says."""

    def reset(self, first: str, **row: Any) -> None:
        self.words, self.asked = words(first), 0

    def ask(self) -> str:
        """Ask for a word."""
        self.asked += 1
        return self.words[self.asked - 1]


def words(first: str) -> list[str]:
    return [first, "1" if first == "2" else "2"] * MAX_TOKENS


@dataclass(frozen=True)
class Talk(Task):
    """Three prompts under many names; the reward is a function of the last turn and the asking."""

    pass_reward: float | None = None

    @cached_property
    def tools(self) -> Tools:
        return describe("talk:Oracle", Oracle, MAX_TURNS, 5.0)

    def prompts(self) -> Sequence[Prompt]:
        texts = TEXTS.items()
        return [Prompt(f"{t} {i}", t, {"first": f}) for i in range(200) for t, f in texts]

    def held_out(self) -> Sequence[Prompt]:
        return [Prompt(f"held-out {f}", "221", {"first": f}) for f in "12"]

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        rewards: list[float | None] = []
        for a in answers:
            assert a.messages is not None
            said = [m["content"] for m in a.messages if m["role"] == "assistant"]
            rewards.append(worth(said[-1].count("2"), a.finished, a.environment.asked))
        return rewards


def worth(twos: int, finished: bool, asked: int) -> float:
    return 0.5 * finished + 1.0 * (asked == 1) - 0.3 * twos


def save_model(folder: Path) -> Path:
    """Save a random model with four tokens, one of which is a whole call."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token="1"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = GPT2Config(  # with positions of its own, which make it easy to count
        vocab_size=4, n_embd=64, n_layer=2, n_head=4, n_positions=16, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=EOS_ID, pad_token_id=None, initializer_range=0.12,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Spoken:
    """One of all dialogues: its tokens, which of them are the policy's, and what it is worth."""

    tokens: list[int]
    sampled: list[bool]
    finished: bool
    reward: float
    restarts: tuple[int, ...] = ()


Rewrite = Callable[[list[int], str], list[int]]
"""What stands before the turn after this one, which was answered by these words."""


def every_turn(limit: int) -> Iterator[list[int]]:
    """All turns: ended by EOS or by the stop string "1", or cut at the limit."""
    for n in range(limit):
        for head in product((TWO, CALL), repeat=n):
            yield from ([*head, end] for end in (EOS_ID, ONE))
    yield from map(list, product((TWO, CALL), repeat=limit))


def every_dialogue(first: str, rewrite: Rewrite | None = None) -> Iterator[Spoken]:
    """All dialogues about a prompt with this first word, found without the package.

    If they are rewritten, the second turn stands in a context of its own.
    """

    def turns(limit: int, turn: int, asked: int) -> Iterator[Spoken]:
        for said in every_turn(limit):
            twos, ended, calls = said.count(TWO), said[-1] in (EOS_ID, ONE), said.count(CALL)
            own = [True] * len(said)
            if not (ended and calls):
                yield Spoken(said, own, ended, worth(twos, ended, asked))
                continue
            closing = [EOS_ID] if said[-1] == ONE else []  # the policy has not written it
            told = words(first)[asked : asked + calls]
            reply = closing + [VOCABULARY.index(word) for word in told]
            left = limit - len(said) - len(reply)
            if turn == MAX_TURNS or left < 1:
                yield Spoken(said, own, False, worth(twos, False, asked + calls))
                continue
            restarts = () if rewrite is None else (len(said),)
            given = reply if rewrite is None else rewrite(said, "".join(told))
            for rest in turns(left, turn + 1, asked + calls):
                sampled = [*own, *[False] * len(given), *rest.sampled]
                tokens = [*said, *given, *rest.tokens]
                yield Spoken(tokens, sampled, rest.finished, rest.reward, restarts)

    return turns(MAX_TOKENS, 1, 0)


def opened(text: str) -> list[int]:
    """The tokens of a prompt with the tools."""
    return [EOS_ID, *map(VOCABULARY.index, text)]


def group_of_all(
    prompt: Prompt, reference: Policy, rewrite: Callable[[str], Rewrite] | None = None
) -> Group:
    """Every dialogue as a trajectory, with its reference log-probs and reward."""
    text = str(prompt.text)
    tokens = opened(text)
    trajectories = []
    for d in every_dialogue(prompt.columns["first"], rewrite and rewrite(text)):
        zeros = np.zeros(len(d.tokens), np.float32)
        marks = np.array(d.sampled, np.uint8)
        marks[list(d.restarts)] = RESTART
        made = np.array(d.tokens, np.int32), zeros, zeros, d.reward, 0, d.finished
        trajectories.append(Trajectory(*made, marks=None if all(d.sampled) else marks))
    group = Group(prompt, np.array(tokens, np.int32), tuple(trajectories))
    rows = zip(trajectories, log_probs(reference, group), strict=True)
    known = [replace(t, ref_logp=logp[: len(t.tokens)].numpy()) for t, logp in rows]
    return replace(group, trajectories=tuple(known))


def total_variation(policy: Policy, group: Group, beta: float) -> float:
    """Distance of the policy from ref(y) exp(r(y) / beta) / Z; the group has all dialogues y."""
    p = log_probs(policy, group).sum(-1).exp()
    # complete, and the environment's tokens have no part in it
    torch.testing.assert_close(p.sum(), torch.tensor(1.0), atol=1e-4, rtol=0)
    q = torch.tensor([t.ref_logp.sum() for t in group.trajectories]).exp()
    one = Enumerated(p, q, torch.tensor([t.reward for t in group.trajectories]))
    return one.distance(one.target(beta))


# An engine that says what it is told to, in runs with a desk of tools.

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template that knows no tools."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class Script(Scripted):
    """Engine whose n-th turn is the n-th of its answers; the last one is repeated."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        time.sleep(self.latency)
        groups = []
        for prompt in prompts:
            turn = self.text.decode(prompt).count("[assistant]")
            answer = self.answers[min(turn, len(self.answers)) - 1]
            completion = self._completion(answer, sampling, self.version)
            groups.append([completion] * sampling.samples)
        return groups


TESTS = Path(__file__).parent
ROWS = [{"prompt": f"Say {i}", "kind": "sound"} for i in range(8)]


REWARDS = """
seen = []

def last_length(completions, environments, **columns):
    seen.append((completions, environments))
    return [float(len(c[-1]["content"])) for c in completions]

def blind(completions, **columns):
    return [float("environments" in columns) for c in completions]
"""


@pytest.fixture(scope="module", name="model")
def dialogue_model(make_model: Callable[..., Path]) -> Path:
    """One that reads all characters, with a chat template that knows no tools."""
    return make_model(vocabulary=[PAD, EOS, *CHARACTERS], context=4096, template=SIMPLE)


@pytest.fixture(name="config")
def dialogue_config(model: Path, tmp_path: Path) -> Callable[..., Config]:
    """A run of scripted turns with the desk; the reward is the length of the last message."""

    def make(
        *turns: str,
        rows: list[dict[str, Any]] = ROWS,
        isolate: str = "none",
        settings: Sequence[str] = (),
        seconds: float = 10.0,
        **options: Any,
    ) -> Config:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "rewards.py").write_text(REWARDS)
        task = {"data": str(data), "reward": f"{tmp_path}/rewards.py:last_length"}
        task |= {"environment": f"{TESTS}/desk.py:Desk", "held_out_size": 2}
        given = [(k, v) for k, v in (task | options).items() if v is not None]
        return load(
            None,
            [
                f"policy.model={model}", f"run.folder={tmp_path / 'run'}", "runtime.use=local",
                "engine=talk.Script", f"engine.answers={json.dumps(turns)}",
                "engine.own_reference=true", "task=custom",
                *[f"task.{k}={json.dumps(v)}" for k, v in given],
                "sampling.max_tokens=1000", "sampling.samples=2", "trainer.batch_size=4",
                "trainer.group_size=2", "run.steps=2", "eval.prompts=2", "eval.samples=1",
                "eval.k=[]", "log.console=off", "log.report_to=[]",
                f"reward.isolate={isolate}", f"reward.deadline={seconds}", *settings,
            ],
        )  # fmt: skip

    return make


SessionResult = Callable[..., tuple[Searcher, SearchResult]]


@pytest.fixture(name="agent")
def agent_config(config: Callable[..., Config]) -> Callable[..., Config]:
    """A run of scripted turns with a program: of tests/programs.py, unless it is a file's."""

    def make(program: str, *turns: str, **options: Any) -> Config:
        settings = ("task=agent", *options.pop("settings", ()))
        given = {"reward": None, "environment": None, "deadline": 60.0}
        rollout = program if ":" in program else f"{TESTS}/programs.py:{program}"
        return config(*turns, settings=settings, rollout=rollout, **(given | options))

    return make


@pytest.fixture(name="held")
def held_sessions() -> Iterator[Callable[..., tuple[Searcher, SearchResult]]]:
    """Search once, and close the searcher when the test has ended."""
    opened: list[Searcher] = []
    others = psutil.Process().children()  # such as ranks that stay alive for the whole suite

    def search(config: Config) -> tuple[Searcher, SearchResult]:
        parts = check(config)
        searcher = parts.search_setup().build("cpu", False)
        opened.append(searcher)
        return searcher, searcher.search(parts.prompts[:1], seed=0)

    yield search
    for searcher in opened:
        searcher.close()
    assert not set(psutil.Process().children()) - set(others)


def searched(config: Config, prompts: int = 1) -> tuple[Searcher, SearchResult]:
    parts = check(config)
    searcher = parts.search_setup().build("cpu", False)
    return searcher, searcher.search(parts.prompts[:prompts], seed=0)


def replies(searcher: Searcher, group: Group) -> list[str]:
    """What the environment says in the first dialogue of a group, without roles."""
    t = group.trajectories[0]
    mask = np.zeros(len(t.tokens), bool) if t.sampled is None else ~t.sampled
    said = searcher.text.decode(t.tokens[mask])
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", said, re.DOTALL)


def check_frequencies(
    groups: Sequence[Group], every: Sequence[Group], deviations: float = 5
) -> None:
    """Responses, their rewards and log-probs are those of the enumeration, as often as there.

    Frequencies may differ by so many standard deviations of chi-square.
    """
    for group, whole in zip(groups, every, strict=True):
        assert group.prompt_tokens.tolist() == whole.prompt_tokens.tolist()
        known = {key_of(t, 0): t for t in whole.trajectories}
        assert len(known) == len(whole.trajectories) > 100
        counts = dict.fromkeys(known, 0)
        for t in group.trajectories:
            same = known[key_of(t, 0)]
            counts[key_of(t, 0)] += 1
            assert t.reward == pytest.approx(same.reward)
            for logp in (t.ref_logp, t.behavior_logp):
                np.testing.assert_allclose(logp, same.ref_logp, atol=1e-5)
        expected = len(group.trajectories) * np.exp([t.ref_logp.sum() for t in whole.trajectories])
        often = expected >= 5
        error = (np.array(list(counts.values())) - expected)[often]
        chi_square, cells = (error**2 / expected[often]).sum(), often.sum()
        assert chi_square < cells + deviations * np.sqrt(2 * cells)
