"""The sums of the study with rewards that are wrong on purpose, in training only.

task.use = "studies.off_policy.wrong_rewards.WrongSums"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from tba.prompt import Answer, Prompt
from tba.tasks.arithmetic import Arithmetic, is_held_out


@dataclass(frozen=True)
class WrongSums(Arithmetic):
    """Sums of which a share of the answers gets a wrong reward.

    The prompt, the tokens of the answer and `fault_seed` decide which: an answer that is sampled
    again has the same reward again, and a larger share has the same wrong rewards and more. Answers
    to held-out prompts are never affected. Value rollouts are, like any other answer in training.
    """

    kind: Literal["flip", "plant"] = "flip"
    """flip: 1 - reward; plant: 1, whatever the answer."""
    share: float = 0.0
    """Share of the answers with a wrong reward."""
    fault_seed: int = 0

    def score(self, prompt: Prompt, answers: Sequence[Answer]) -> list[float | None]:
        rewards = super().score(prompt, answers)
        a, _, b = prompt.id.partition("+")
        if is_held_out(int(a), int(b)):
            return rewards
        return [
            self._wrong(reward) if self._chance(prompt, answer) < self.share else reward
            for reward, answer in zip(rewards, answers, strict=True)
        ]

    def _wrong(self, reward: float | None) -> float | None:
        if reward is None:
            return None
        return 1.0 - reward if self.kind == "flip" else 1.0

    def _chance(self, prompt: Prompt, answer: Answer) -> float:
        """Return a number in [0, 1) for an answer."""
        said = repr((self.fault_seed, prompt.id, answer.tokens, answer.text)).encode()
        return int.from_bytes(blake2b(said, digest_size=8).digest()) / 2**64
