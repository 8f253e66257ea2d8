"""Calls to tasks, which score answers and hold the environments of dialogues.

A scoring process answers the calls; with `reward.isolate = "none"`, the searcher itself does.
"""

import asyncio
import pickle
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from traceback import format_exception_only
from typing import Any

from tba.prompt import Answer, Prompt
from tba.scoring.verdicts import Reason, Rejection, ToolResult, parse_score, rejection, to_json
from tba.tasks import ScorerName, Task, scorer_of
from tba.tasks._calls import WrongLength, listed, within, without_surrogates

LOST = to_json(Rejection(Reason.DIED, "the process that held the environment has ended"))


def answers_of(builds: str) -> Callable[[Sequence[Any]], Any]:
    """Build the tasks of a scoring process, and return the function that answers its calls."""
    tasks = {name: build() for name, build in pickle.loads(b64decode(builds)).items()}
    return TaskCalls(tasks).answer


class TaskCalls:
    """Tasks, and the environments of dialogues that have not ended, by number."""

    def __init__(self, tasks: Mapping[str, Task]):
        self._tasks = tasks
        self._environments: dict[int, Any] = {}
        self._hanging: set[int] = set()  # they have a call that has not returned

    def answer(self, request: Sequence[Any]) -> Any:
        """Answer a call, which is a name and arguments; return JSON, or an awaitable of it.

        Errors in the user's code become rejections, or results that the policy reads.
        """
        name, *arguments = request
        if name == "score":
            return self._score(*arguments)
        return self._reset(*arguments) if name == "reset" else self._call_tools(*arguments)

    def _score(
        self, name: ScorerName, prompt: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
    ) -> list[Any] | Awaitable[list[Any]]:
        """Return a verdict on each answer to a prompt."""
        group = [Answer(**answer) for answer in answers]
        for place, answer in enumerate(group):
            if answer.environment is not None:
                if answer.environment not in self._environments:
                    return [LOST] * len(group)
                instance = self._environments[answer.environment]
                group[place] = replace(answer, environment=instance)
        try:
            scores: Any = scorer_of(self._tasks, name).score(Prompt(**prompt), group)
            is_async = isawaitable(scores)
        except Exception as error:  # untrusted
            return [to_json(rejection(error))] * len(group)
        return _awaited(scores, len(group)) if is_async else _verdicts(scores, len(group))

    async def _reset(
        self, name: str, deadline: float, prompts: Sequence[tuple[int, Mapping[str, Any]]],
        limit: int, ended: Sequence[int],
    ) -> list[Any]:  # fmt: skip
        """Reset an environment with each number; return the first `limit` characters of its text.

        Environments that have `ended` are forgotten.
        """
        for number in ended:
            self._environments.pop(number, None)
            self._hanging.discard(number)
        tools = self._tasks[name].tools
        assert tools is not None
        resets = [partial(tools.open, Prompt(**prompt)) for _, prompt in prompts]
        outcomes = await asyncio.to_thread(within, deadline, resets)
        texts: list[Any] = []
        for (number, _), outcome in zip(prompts, outcomes, strict=True):
            if outcome is None:
                told = f"reset did not return within reward.deadline = {deadline:g} s"
                texts.append(to_json(Rejection(Reason.TIMEOUT, told)))
            elif isinstance(outcome, BaseException):
                texts.append(to_json(rejection(outcome)))
            else:
                self._environments[number], text = outcome
                texts.append(text[:limit])
        return texts

    async def _call_tools(
        self, name: str, deadline: float, calls: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """Call one tool in each of several environments; see `_result` for the form of a call."""
        tools = self._tasks[name].tools
        assert tools is not None
        pending = [partial(self._result, tools.call, *call) for call in calls]
        results = await asyncio.to_thread(within, deadline, pending)
        for place, (number, *_) in enumerate(calls):
            if results[place] is None:
                self._hanging.add(number)
                told = f"Error: no result within {deadline:g} s"
                results[place] = to_json(ToolResult(told, failed=True))
        return results

    def _result(
        self, call: Callable[..., str], number: int, tool: str, arguments: Mapping[str, Any],
        mistake: str, limit: int,
    ) -> Any:  # fmt: skip
        """Return the result of a call, cut to at most `limit` characters.

        `mistake` says why the call cannot be executed; "" if it can.
        """
        if number not in self._environments:
            return LOST
        failed = False
        try:
            if mistake:
                raise ValueError(mistake)
            if number in self._hanging:
                raise RuntimeError("not tried, because an earlier call has not returned")
            text = call(self._environments[number], tool, arguments)
        except BaseException as error:  # untrusted
            failed = True
            text = f"Error: {format_exception_only(error)[-1].strip()}"
        cut = len(text) > limit
        if cut:
            text = f"{text[:limit]}\n[cut: {limit:,} of {len(text):,} characters]"
        return to_json(ToolResult(without_surrogates(text), failed, cut))


async def _awaited(scores: Awaitable[Any], count: int) -> list[Any]:
    """Return the verdicts on the scores of an async function."""
    try:
        return _verdicts(await scores, count)
    except BaseException as error:  # untrusted: even SystemExit must not end the event loop
        return [to_json(rejection(error))] * count


def _verdicts(scores: Any, count: int) -> list[Any]:
    """Return the verdicts on the scores of a group, of which there must be `count`."""
    try:
        verdicts = [to_json(parse_score(score)) for score in listed(scores)]
        if len(verdicts) != count:
            raise WrongLength(f"{len(verdicts)} rewards for {count} answers")
        return verdicts
    except Exception as error:  # untrusted: a score may be an object that raises
        return [to_json(rejection(error))] * count
