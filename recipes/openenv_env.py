"""An OpenEnv environment on a server on this machine, without containers.

    agents/.venv/bin/pip install 'openenv>=0.10,<0.11' openai
    agents/.venv/bin/python recipes/openenv_env.py 8000    # the server of this file, until Ctrl-C

Set task.python=agents/.venv/bin/python. The environment variable OPENENV has the address of the
server. A row is passed to `reset`. The text of each observation is a user message, and each reply
of the policy is an action. The reward is the sum of the rewards of all steps.
"""

import os
import random
import sys

import openai
import uvicorn
from openenv.core import Action, Environment, GenericEnvClient, Observation, State, create_app

STEPS = 4


async def rollout(client: openai.AsyncOpenAI, row: dict) -> dict[str, float]:
    total, steps = 0.0, 0
    async with GenericEnvClient(base_url=os.environ["OPENENV"]) as environment:
        result = await environment.reset(**{k: v for k, v in row.items() if k != "prompt"})
        messages: list = []
        while not result.done and steps < STEPS:
            messages.append({"role": "user", "content": result.observation["text"]})
            reply = await client.chat.completions.create(model="policy", messages=messages)
            message = reply.choices[0].message
            messages.append(message)
            result = await environment.step({"text": message.content})
            total += result.reward or 0.0
            steps += 1
    return {"reward": total, "steps": steps}


class Words(Action):
    text: str


class Told(Observation):
    text: str


class Guess(Environment):
    """Guess a number from 0 to 9 in few steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, number=None, **row) -> Told:
        self.number = random.Random(seed).randrange(10) if number is None else number
        return Told(text="Guess my number from 0 to 9. Answer with one digit.")

    def step(self, action: Words, timeout_s=None, **options) -> Told:
        guess = next((int(c) for c in action.text if c.isdigit()), None)
        if guess == self.number:
            return Told(text="Right.", reward=1.0, done=True)
        if guess is None:
            return Told(text="Answer with one digit.", reward=-0.2)
        return Told(text="Higher." if guess < self.number else "Lower.", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    server = create_app(Guess, Words, Told, max_concurrent_envs=1024)
    uvicorn.run(server, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
