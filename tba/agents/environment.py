"""Dialogues: the policy calls the tools of an environment, and continues with their results."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count, islice
from traceback import format_exception_only
from typing import Any

import numpy as np

from tba.agents.chat import Chat, ToolCall, chat_of
from tba.engines import Engine
from tba.models.pretrained import Tokenizer
from tba.prompt import Answer, Message, Prompt
from tba.scoring.verdicts import Reason, Rejected, Responses, ToolResult, rejection
from tba.streams import Use, seed_of
from tba.tasks import Tools, within, without_surrogates
from tba.types import NO_TOKENS, NOTHING, Completion, Sampling, Turn, joined

CHARACTERS = 16
"""Characters of a tool's result that are read for each token of `sampling.max_tokens`: more than
a token contains."""
LEAST = 1000
"""Lower bound of the limit on the characters of a result."""
SHOWN = 200
"""Characters of a tool's result that an error message shows."""


@dataclass(eq=False)
class _Dialogue:
    """A dialogue up to the newest turn of the policy, which ends it unless it has calls."""

    number: int
    """Number among all dialogues of the search."""
    prompt: np.ndarray
    opening: Sequence[Message]
    """The messages of the prompt, including the environment's first observation."""
    instance: Any
    """The environment; Rejected if it could not be reset."""
    said: Completion = NOTHING
    calls: list[ToolCall] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reply: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """Tokens of the environment before the next turn."""
    hangs: bool = False
    """True if a call has not returned: the instance is no longer used."""

    @property
    def context(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.said.tokens, self.reply])

    def room(self, max_tokens: int) -> int:
        """Return the most tokens of the next turn."""
        return max_tokens - len(self.said.tokens) - len(self.reply)


@dataclass(frozen=True)
class Dialogues:
    """Runs dialogues with instances of an environment. A search runs its dialogues in lockstep.

    A dialogue consists of the tokens that the policy sampled and, between two turns, the tokens of
    the environment, which also count towards `sampling.max_tokens`.
    """

    engine: Engine
    text: Tokenizer
    tools: Tools

    @cached_property
    def chat(self) -> Chat:
        return chat_of(self.text, self.tools)

    def hold(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Responses:
        """Answer each prompt in `sampling.samples` dialogues."""
        groups = self._open(prompts, sampling)
        everyone = list(chain(*groups))
        tokens = [group[0].prompt for group in groups]
        self._go_on(everyone, sampling, seed, turn=0)
        results: list[ToolResult] = []
        for turn in range(1, self.tools.max_turns + 1):
            waiting = [d for d in everyone if d.calls]
            results += self._call_tools(waiting, sampling.max_tokens)
            if turn < self.tools.max_turns:
                self._go_on(waiting, sampling, seed, turn)
        completions = [[d.said for d in group] for group in groups]
        answers = [[self._answer(d) for d in group] for group in groups]
        return Responses(tokens, completions, answers, results)

    def _open(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[_Dialogue]]:
        """Return the dialogues of each prompt, which all begin with the same tokens."""
        copies = [prompt for prompt in prompts for _ in range(sampling.samples)]
        instances = iter(open_all(self.tools, copies))
        longest = self.text.context - sampling.max_tokens
        groups: list[list[_Dialogue]] = []
        for prompt in prompts:
            own = list(islice(instances, sampling.samples))
            begin = next((text for each, text in own if not isinstance(each, Rejected)), "")
            problem = ""
            tokens = self.chat.encode(prompt, begin[: CHARACTERS * longest])
            if len(tokens) > longest or len(begin) > CHARACTERS * longest:
                problem = (
                    f"prompt {prompt.id!r} has {len(tokens)} tokens with what reset returned; the"
                    f" model's context has room for {longest}; lower sampling.max_tokens"
                )
                tokens = self.chat.encode(prompt)
            opening = self.chat.opening(prompt, begin)
            alike = [_alike(*each, begin, problem) for each in own]
            numbers = count(len(groups) * sampling.samples)
            pairs = zip(numbers, alike, strict=False)
            groups.append([_Dialogue(n, tokens, opening, each) for n, each in pairs])
        return groups

    def _hear(self, dialogue: _Dialogue, turn: Completion, stop: Sequence[str]) -> None:
        """Append a turn of the policy. If the limit truncated it, its calls are not executed."""
        message, calls = self.chat.read(dialogue.context, turn.tokens, stop)
        dialogue.messages.append(message)
        goes_on = bool(calls) and turn.finished and not isinstance(dialogue.instance, Rejected)
        turn = replace(turn, finished=turn.finished and not goes_on)
        dialogue.said = joined(dialogue.said, dialogue.reply, turn)
        dialogue.calls = calls if goes_on else []
        dialogue.reply = NO_TOKENS

    def _call_tools(self, waiting: Sequence[_Dialogue], max_tokens: int) -> list[ToolResult]:
        """Execute the calls of the newest turns, and return their results."""
        results = []
        deadline = self.tools.deadline
        for number in range(max((len(d.calls) for d in waiting), default=0)):
            calling = [d for d in waiting if number < len(d.calls)]
            limits = [max(LEAST, CHARACTERS * max_tokens // len(d.calls)) for d in calling]
            each = zip(calling, limits, strict=True)
            calls = [partial(self._result, d, d.calls[number], limit) for d, limit in each]
            for d, result in zip(calling, within(deadline, calls), strict=True):
                if result is None:
                    d.hangs = True
                    result = ToolResult(f"Error: no result within {deadline:g} s", failed=True)
                results.append(result)
                name = without_surrogates(d.calls[number].name)
                d.messages.append({"role": "tool", "name": name, "content": result.content})
        for d in waiting:
            new = len(d.calls)
            before = [*d.opening, *d.messages[: -new - 1]]
            d.reply = self.chat.reply(int(d.said.tokens[-1]), d.messages[-new:], before)
            d.calls = []
        return results

    def _result(self, dialogue: _Dialogue, call: ToolCall, limit: int) -> ToolResult:
        """Return the result of a call, cut to at most `limit` characters."""
        failed = False
        try:
            text = self._called(dialogue, call)
        except BaseException as error:  # untrusted
            failed = True
            text = f"Error: {format_exception_only(error)[-1].strip()}"
        cut = len(text) > limit
        if cut:
            text = f"{text[:limit]}\n[cut: {limit:,} of {len(text):,} characters]"
        return ToolResult(without_surrogates(text), failed, cut)

    def _called(self, dialogue: _Dialogue, call: ToolCall) -> str:
        """Return the result of a call as text. May raise anything."""
        if call.error:
            raise ValueError(call.error)
        if dialogue.hangs:
            raise RuntimeError("not tried, because an earlier call has not returned")
        if call.name not in self.tools.schemas:
            known = ", ".join(self.tools.schemas)
            raise ValueError(f"there is no tool {call.name!r}, only {known}")
        return self.tools.call(dialogue.instance, call.name, call.arguments)

    def _go_on(
        self, waiting: Sequence[_Dialogue], sampling: Sampling, seed: int, turn: int
    ) -> None:
        """Sample the policy's next turn in these dialogues."""
        waiting = [d for d in waiting if d.room(sampling.max_tokens) > 0]
        turns = []
        for d in waiting:
            own = replace(sampling, samples=1, max_tokens=d.room(sampling.max_tokens))
            turns.append(Turn(d.context, own, seed_of(seed, Use.TURN, d.number, turn)))
        for d, said in zip(waiting, self.engine.complete(turns), strict=True):
            self._hear(d, said, sampling.stop)

    def _answer(self, dialogue: _Dialogue) -> Answer | Rejected:
        if isinstance(dialogue.instance, Rejected):
            return dialogue.instance
        said = dialogue.said
        answer = self.text.answer(said.tokens, said.finished, (), said.version)
        environment = dialogue.instance if self.tools.judged else None
        return replace(answer, messages=dialogue.messages, environment=environment)


def check_tools(tools: Tools, prompt: Prompt, isolate: str) -> None:
    """Raise ValueError if a dialogue cannot begin, or its environment cannot be sent to rewards."""
    ((instance, _),) = open_all(tools, [prompt])
    if isinstance(instance, Rejected):
        raise ValueError(f"task.environment cannot be reset: {instance.detail}")
    if tools.judged and isolate == "process":
        try:
            pickle.dumps(instance)
        except Exception as error:  # the instance's objects may raise anything
            raise ValueError(
                f"task.environment: {type(instance).__name__} cannot be sent to the process that"
                f" scores, where a reward takes `environments`: {error}; set reward.isolate=none"
            ) from error


def open_all(tools: Tools, prompts: Sequence[Prompt]) -> list[tuple[Any, str]]:
    """Return for each prompt an instance, or a rejection, and the text that it begins with."""
    instances: list[tuple[Any, str]] = []
    for outcome in within(tools.deadline, [partial(tools.open, p) for p in prompts]):
        if outcome is None:
            limit = f"task.tool_deadline = {tools.deadline:g} s"
            outcome = Rejected(Reason.TIMEOUT, f"reset did not return within {limit}"), ""
        elif isinstance(outcome, BaseException):
            outcome = rejection(outcome), ""
        instances.append(outcome)
    return instances


def _alike(instance: Any, text: str, begin: str, problem: str) -> Any:
    """Return an instance, or a rejection if it begins differently from others of its group."""
    if isinstance(instance, Rejected):
        return instance
    if text != begin:
        problem = (
            f"reset returned {text[:SHOWN]!r} and {begin[:SHOWN]!r} for the same row, but the"
            " samples of a prompt must have the same beginning; take what is random from the row"
        )
    return Rejected(Reason.RAISED, f"task.environment: {problem}") if problem else instance
