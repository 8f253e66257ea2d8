"""Products of two numbers, for a model that may use a calculator: two programs of up to two turns.

`with_tool` offers the calculator as a tool; `with_text` looks for `CALC: a * b` in the model's
text. The reward is 1 if the last message contains the product. Needs `pip install openai`.
"""

import itertools
import json
import re

import openai

FACTOR = {"type": "integer", "description": "A factor."}
FACTORS = {"a": FACTOR, "b": FACTOR}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {"type": "object", "properties": FACTORS, "required": ["a", "b"]},
    },
}
TURNS = 2
CALCULATION = re.compile(r"CALC: *(\d{1,9}) *\* *(\d{1,9})")


async def with_tool(client: openai.AsyncOpenAI, row: dict) -> dict[str, float]:
    """Offer the calculator as a tool of the API."""
    shown = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
    messages = ask(row, shown)
    calls = 0
    for _ in range(TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[MULTIPLY]
        )
        message = reply.choices[0].message
        messages.append(message)
        if reply.choices[0].finish_reason != "tool_calls":
            break
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            calls += 1
    return judge(row, message.content or "", calls)


async def with_text(client: openai.AsyncOpenAI, row: dict) -> dict[str, float]:
    """Send the result of a calculation in the text as a user message."""
    messages = ask(row, "CALC: 12 * 34", "12 * 34 = 408", "408")
    calls = 0
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        calculation = CALCULATION.search(message.content)
        if calculation is None:
            break
        a, b = map(int, calculation.groups())
        messages += [message, {"role": "user", "content": f"{a} * {b} = {a * b}"}]
        calls += 1
    return judge(row, message.content, calls)


def ask(row: dict, *shot: str) -> list:
    """Return the messages of an example, and the question."""
    texts = ["What is 12 * 34?", *shot, f"What is {row['a']} * {row['b']}?"]
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for text, role in zip(texts, roles, strict=False)]


def multiply(arguments: str) -> str:
    try:
        factors = json.loads(arguments)
        return str(int(factors["a"]) * int(factors["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"


def judge(row: dict, last: str, calls: int) -> dict[str, float]:
    return {"reward": float(str(row["a"] * row["b"]) in last), "calls": calls}
