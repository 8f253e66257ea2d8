"""The toy, whose answers can all be enumerated: its optimum, and the distance of a policy."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from torch import Tensor
from toy import TEXTS, Toy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tba.config.schema import Config, load
from tba.learn.policy import Policy
from tba.models.tokenizer import Tokenizer
from tba.prompt import Answer, Prompt
from tba.strategies import Columns, by_count
from tba.types import Completion, Group, Trajectory, collate

MAX_TOKENS = 2

BETA = 0.5


@dataclass(frozen=True)
class Delayed:
    """The newest of the prompts that arrived at least `age` steps ago; until then, the oldest."""

    age: int = 8

    def draw(
        self, columns: Columns, groups: int, size: int, now: int, rng: np.random.Generator
    ) -> np.ndarray:
        prompts = columns.prompts
        old = prompts[columns.latest[prompts] <= now - self.age][-groups:]
        drawn = []
        for prompt in old if len(old) == groups else prompts[:groups]:
            rows = columns.latest_rows(prompt)
            drawn.append(rows[by_count(columns.arrived_count[rows], 1, size, rng)[0]])
        return np.array(drawn)


def toy_config(model: Path, folder: Path, *settings: str) -> Config:
    """A local run on the toy."""
    own = [
        f"policy.model={model}", f"run.folder={folder}", "run.steps=250", "runtime.use=local",
        "runtime.prompts_per_task=3", "task=toy.Toy", f"sampling.max_tokens={MAX_TOKENS}",
        "sampling.samples=64", "trainer.batch_size=192", "trainer.group_size=64",
        "trainer.learning_rate=2e-3", "trainer.schedule=linear", "trainer.warmup_steps=0",
        "eval.prompts=0",
        "checkpoint.every=0", "log.console=off", "reward.isolate=none", "log.report_to=[]",
        "task.allow_loss=1",  # the toy does not have all digits
    ]  # fmt: skip
    return load(None, [*own, *settings])


def completed(*responses: list[int]) -> list[Completion]:
    """Completions with these tokens, of version 0."""
    tokens = [np.array(r, np.int32) for r in responses]
    return [Completion(t, np.zeros(len(t), np.float32), True, 0) for t in tokens]


def every_answer(text: Tokenizer, max_tokens: int = MAX_TOKENS) -> list[np.ndarray]:
    """All token sequences an engine can return: ended by EOS, or cut at `max_tokens`."""
    vocabulary = range(len(text.tokenizer))
    (eos,) = text.eos_ids
    others = [v for v in vocabulary if v != eos]
    finished = [[*head, eos] for n in range(max_tokens) for head in product(others, repeat=n)]
    cut = [list(head) for head in product(others, repeat=max_tokens)]
    return [np.array(a, np.int32) for a in [*finished, *cut]]


def group_of_all(
    text: Tokenizer, prompt: Prompt, reference: Policy, max_tokens: int = MAX_TOKENS
) -> Group:
    """Every answer to the prompt as a trajectory, with its reward and the reference's log-probs."""
    answers = every_answer(text, max_tokens)
    finished = [a[-1] in text.eos_ids for a in answers]
    shown = [Answer(text.decode(a), f) for a, f in zip(answers, finished, strict=True)]
    rewards = Toy().score(prompt, shown)
    zeros = [np.zeros(len(a), np.float32) for a in answers]
    blank = [
        Trajectory(a, z, z, float(r or 0), 0, f)
        for a, z, r, f in zip(answers, zeros, rewards, finished, strict=True)
    ]
    group = Group(prompt, text.encode(prompt), tuple(blank))
    logp = log_probs(reference, group)
    pairs = zip(blank, logp, strict=True)
    own = [(t, row[: len(t.tokens)].numpy()) for t, row in pairs]
    whole = [replace(t, ref_logp=logp, behavior_logp=logp) for t, logp in own]
    return replace(group, trajectories=tuple(whole))


@torch.no_grad()
def log_probs(policy: Policy, group: Group) -> Tensor:
    return policy.logp(collate([group]))[0]


@dataclass(frozen=True)
class Enumerated:
    """A prompt with the probabilities of all its answers, under the policy and the reference."""

    policy: Tensor
    reference: Tensor
    reward: Tensor

    @property
    def expected_reward(self) -> float:
        return (self.policy * self.reward).sum().item()

    def target(self, beta: float) -> Tensor:
        """ref(y) exp(r(y) / beta) / Z."""
        return torch.softmax(self.reference.log() + self.reward / beta, 0)

    def distance(self, other: Tensor) -> float:
        """Total variation between the policy and another distribution."""
        return 0.5 * (self.policy - other).abs().sum().item()


def enumerate_answers(
    policy: Policy, reference: Policy, text: Tokenizer, max_tokens: int = MAX_TOKENS
) -> list[Enumerated]:
    """For each of the toy's prompts."""
    found = []
    for prompt in Toy().prompts()[: len(TEXTS)]:
        group = group_of_all(text, prompt, reference, max_tokens)
        batch = collate([group])
        chances = log_probs(policy, group).sum(-1).exp()
        one = Enumerated(chances, batch.ref_logp[0].sum(-1).exp(), batch.reward[0])
        # the enumeration is complete
        torch.testing.assert_close(one.policy.sum(), torch.tensor(1.0), atol=1e-4, rtol=0)
        found.append(one)
    return found


def total_variation(policy: Policy, reference: Policy, text: Tokenizer, beta: float) -> float:
    """Largest over the prompts: distance of the policy from ref(y) exp(r(y) / beta) / Z."""
    return max(one.distance(one.target(beta)) for one in enumerate_answers(policy, reference, text))


def save_model(folder: Path, layers: int = 2) -> Path:
    """Save a random model over eight characters that can represent any distribution of answers."""
    vocabulary = ["<pad>", "<eos>", *"1237+="]
    ids = {c: i for i, c in enumerate(vocabulary)}
    characters = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=16, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.12,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
