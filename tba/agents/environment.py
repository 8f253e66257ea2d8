"""Dialogues: the policy calls the tools of an environment, and continues with their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count, islice

import numpy as np

from tba.agents.chat import Chat, ToolCall, chat_of
from tba.agents.session import Session
from tba.engines import Engine
from tba.models.tokenizer import Tokenizer
from tba.prompt import Answer, Message, Prompt
from tba.scoring.scoring import Environment, Scoring
from tba.scoring.verdicts import Reason, Rejection, Responses, ToolResult, Verdict
from tba.streams import Use, seed_of
from tba.tasks import Task, Tools
from tba.tasks._calls import without_surrogates
from tba.types import Sampling, Turn

CHARACTERS = 16
"""Characters of a tool's result that are read for each token of `sampling.max_tokens`: more than
a token contains."""
LEAST = 1000
"""Lower bound of the limit on the characters of a result."""
SHOWN = 200
"""Characters of a tool's result that an error message shows."""


@dataclass(eq=False)
class _Dialogue:
    """A session of the policy with an environment, until a turn without calls ends it."""

    number: int
    """Number among all dialogues of the search."""
    prompt: np.ndarray
    opening: Sequence[Message]
    """The messages of the prompt, including the environment's first observation."""
    environment: Environment | Rejection
    """The environment; a rejection if it could not be reset, or is lost."""
    session: Session = field(default_factory=lambda: Session("append"))
    finished: bool = False
    calls: list[ToolCall] = field(default_factory=list)
    """Calls of the newest turn."""
    results: list[Message] = field(default_factory=list)
    """Results of these calls."""
    messages: list[Message] = field(default_factory=list)
    """All messages after the prompt, as rewards see them."""


@dataclass(frozen=True)
class Dialogues:
    """Runs the dialogues of a search with environments of the task `name`, turn by turn.

    A dialogue consists of the tokens that the policy sampled and, between two turns, the tokens of
    the environment, which also count towards `sampling.max_tokens`.
    """

    engine: Engine
    text: Tokenizer
    scoring: Scoring
    name: str
    tools: Tools

    @cached_property
    def chat(self) -> Chat:
        return chat_of(self.text, self.tools)

    def run_dialogues(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Responses:
        """Answer each prompt in `sampling.samples` dialogues."""
        groups = self._open(prompts, sampling)
        everyone = list(chain(*groups))
        self._sample(everyone, sampling, seed, turn=0)
        results: list[ToolResult] = []
        for turn in range(1, self.tools.max_turns + 1):
            waiting = [d for d in everyone if d.calls]
            results += self._call_tools(waiting, sampling.max_tokens)
            if turn < self.tools.max_turns:
                unfinished = [d for d in waiting if isinstance(d.environment, Environment)]
                self._sample(unfinished, sampling, seed, turn)
        completions = []
        answers = []
        for group in groups:
            said = [d.session.completion(len(d.prompt), d.finished) for d in group]
            completions.append(said)
            shown: list[Answer | Verdict] = []
            for d, own in zip(group, said, strict=True):
                if isinstance(d.environment, Rejection):
                    shown.append(d.environment)
                    continue
                answer = self.text.answer(own.tokens, own.finished, (), own.version)
                judged = d.environment if self.tools.judged else None
                shown.append(replace(answer, messages=d.messages, environment=judged))
            answers.append(shown)
        return Responses([group[0].prompt for group in groups], completions, answers, results)

    def _open(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[_Dialogue]]:
        """Return the dialogues of each prompt, which all begin with the same tokens."""
        copies = [prompt for prompt in prompts for _ in range(sampling.samples)]
        longest = self.text.context - sampling.max_tokens
        limit = CHARACTERS * longest
        opened = iter(self.scoring.reset(self.name, copies, limit + 1))
        groups: list[list[_Dialogue]] = []
        for prompt in prompts:
            own = list(islice(opened, sampling.samples))
            begin = next((each[1] for each in own if not isinstance(each, Rejection)), "")
            problem = ""
            tokens = self.chat.encode(prompt, begin[:limit])
            if len(tokens) > longest or len(begin) > limit:
                problem = (
                    f"prompt {prompt.id!r} has {len(tokens)} tokens with the text from reset; the"
                    f" model's context has room for {longest}; lower sampling.max_tokens"
                )
                tokens = self.chat.encode(prompt)
            opening = self.chat.opening(prompt, begin)
            numbers = count(len(groups) * sampling.samples)
            group = []
            for number, each in zip(numbers, own, strict=False):
                environment = _alike(each, begin, problem)
                group.append(_Dialogue(number, tokens, opening, environment))
            groups.append(group)
        return groups

    def _sample(
        self, waiting: Sequence[_Dialogue], sampling: Sampling, seed: int, turn: int
    ) -> None:
        """Sample the policy's next turn in these dialogues, unless they have no room for it.

        The calls of a turn that the limit truncated are not executed.
        """
        asked = []
        turns = []
        for d in waiting:
            exchanges = d.session.exchanges
            before = exchanges[-1].messages if exchanges else d.opening
            context = d.session.ask([*before, *d.results], self.chat, d.prompt)
            d.results = []
            room = len(d.prompt) + sampling.max_tokens - len(context.context)
            if room > 0:
                own = replace(sampling, samples=1, max_tokens=room)
                asked.append((d, context))
                turns.append(Turn(context.context, own, seed_of(seed, Use.TURN, d.number, turn)))
        for (d, context), said in zip(asked, self.engine.complete(turns), strict=True):
            message, calls = self.chat.read(context.context, said.tokens, sampling.stop)
            # without calls in the session, because the template may be unable to write some of them
            plain = {"role": "assistant", "content": message["content"]}
            d.session.add(context, said, plain)
            d.messages.append(message)
            can_go_on = said.finished and isinstance(d.environment, Environment)
            d.calls = calls if can_go_on else []
            d.finished = said.finished and not d.calls

    def _call_tools(self, waiting: Sequence[_Dialogue], max_tokens: int) -> list[ToolResult]:
        """Execute the calls of the newest turns, and return their results."""
        results = []
        for place in range(max((len(d.calls) for d in waiting), default=0)):
            calling = [d for d in waiting if place < len(d.calls)]
            sent = []
            for d in calling:
                assert isinstance(d.environment, Environment)
                call = d.calls[place]
                mistake = call.error
                if not mistake and call.name not in self.tools.schemas:
                    known = ", ".join(self.tools.schemas)
                    mistake = f"there is no tool {call.name!r}, only {known}"
                limit = max(LEAST, CHARACTERS * max_tokens // len(d.calls))
                sent.append((d.environment, call.name, call.arguments, mistake, limit))
            for d, result in zip(calling, self.scoring.call_tools(self.name, sent), strict=True):
                if isinstance(result, Rejection):
                    d.environment = result
                    d.calls = []
                    continue
                results.append(result)
                name = without_surrogates(d.calls[place].name)
                d.results.append({"role": "tool", "name": name, "content": result.content})
        for d in waiting:
            d.messages += d.results
            d.calls = []
        return results


def check_tools(task: Task, prompt: Prompt) -> None:
    """Raise ValueError if a dialogue cannot begin."""
    (opened,) = Scoring({"": task}).reset("", [prompt], limit=0)
    if isinstance(opened, Rejection):
        raise ValueError(f"task.environment cannot be reset: {opened.detail}")


def _alike(
    opened: tuple[Environment, str] | Rejection, begin: str, problem: str
) -> Environment | Rejection:
    """Return an environment, or a rejection if it begins differently from others of its group."""
    if isinstance(opened, Rejection):
        return opened
    environment, text = opened
    if text != begin:
        problem = (
            f"reset returned {text[:SHOWN]!r} and {begin[:SHOWN]!r} for the same row, but the"
            " samples of a prompt must have the same beginning; derive anything random from the row"
        )
    return Rejection(Reason.RAISED, f"task.environment: {problem}") if problem else environment
