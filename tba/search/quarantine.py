"""Quarantine: prompts that end the processes which score or search them are left out."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten

from tba.prompt import Prompt
from tba.search.verdicts import DIED, Rejected, Verdict

log = logging.getLogger(__name__)


class Quarantine:
    """Prompts by id that have caused `limit` deaths in a row; none if it is 0.

    A death is the end of the scoring process or of the searcher. Which prompt has ended a searcher
    is not known if there were several. All of them are then suspects, and searched alone.
    """

    def __init__(self, limit: int, deaths: Mapping[str, int] | None = None):
        self.limit, self.deaths = limit, dict(deaths or {})
        self.suspects: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return 0 < self.limit <= self.deaths.get(name, 0)

    def blame(self, prompt: Prompt) -> int:
        """Count a death that this prompt has caused; return 1 if it is quarantined now, else 0."""
        deaths = self.deaths[prompt.id] = self.deaths.get(prompt.id, 0) + 1
        if deaths != self.limit:
            return 0
        self.suspects.discard(prompt.id)
        log.warning(
            "prompt %r (%s) is no longer searched: what scored or searched it ended %d times in a"
            " row; to search it again, resume with reward.quarantine=0",
            prompt.id,
            shorten(str(prompt.text), 80),
            deaths,
        )
        return 1

    def suspect(self, prompts: Iterable[Prompt]) -> int:
        """Count a death that one of these has caused; return how many are quarantined by it."""
        named = {p.id: p for p in prompts if p.id not in self}
        if not self.limit:
            return 0
        self.suspects |= named.keys()
        if len(named) == 1:
            return sum(map(self.blame, named.values()))
        for name in named:
            before = self.deaths.get(name, 0)
            self.deaths[name] = max(before, min(before + 1, self.limit - 1))
        return 0

    def clear(self, prompt: Prompt) -> None:
        """Forget the deaths of a prompt that has been searched, unless it is quarantined."""
        if prompt.id not in self:
            self.deaths.pop(prompt.id, None)
            self.suspects.discard(prompt.id)


def ended_process(
    prompts: Sequence[Prompt], verdicts: Sequence[Sequence[Verdict]]
) -> frozenset[str]:
    """Return the ids of the prompts whose answers have ended the scoring process."""
    ended = set()
    for prompt, judged in zip(prompts, verdicts, strict=True):
        if any(isinstance(v, Rejected) and v.reason == DIED for v in judged):
            ended.add(prompt.id)
    return frozenset(ended)
