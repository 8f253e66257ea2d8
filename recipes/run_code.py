"""Reward from running code: the policy writes a Python program, which hidden tests check.

The program runs without a network, in a separate process with limits on memory, time and files.
Linux must allow user namespaces (`unshare --user true`); otherwise nothing is run.
"""

import asyncio
import re
import secrets
import subprocess
import tempfile
from pathlib import Path

import openai

LIMITS = ["--as=536870912", "--cpu=5", "--nofile=64", "--fsize=1048576", "--nproc=64"]
# no network, no view of other processes, and everything ends with the first process
ALONE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
]
SECONDS = 10.0
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def run_alone(source: str) -> bool:
    """Return whether a program reaches its end, which is after the tests, without an error.

    Raises RuntimeError if this machine cannot isolate it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "main.py")
        reached = Path(folder, secrets.token_hex(16))
        file.write_text(f"{source}\nopen({str(reached)!r}, 'w')", "utf-8")
        command = [*ALONE, "prlimit", *LIMITS, "python3", "-I", str(file)]
        try:
            ended = subprocess.run(
                command,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
        passed = ended.returncode == 0 and reached.exists()
    if ended.stderr.startswith((b"unshare:", b"prlimit:")):
        told = ended.stderr.decode().strip()
        raise RuntimeError(f"code cannot run without a network here: {told}")
    return passed


async def rollout(client: openai.AsyncOpenAI, row: dict) -> dict:
    """Ask for a function, and once more if its tests fail; the reward is 1 if they pass."""
    messages = [{"role": "user", "content": f"{row['question']}\nWrite Python in a ``` block."}]
    for attempt in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        found = BLOCK.findall(message.content or "")
        if found and await asyncio.to_thread(run_alone, f"{found[-1]}\n{row['tests']}"):
            return {"reward": 1.0, "first_try": float(attempt == 0)}
        messages += [message, {"role": "user", "content": "The tests fail. Correct the function."}]
    return {"reward": 0.0, "first_try": 0.0}
