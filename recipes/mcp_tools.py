"""Tools of an MCP server, which runs as a process on this machine and communicates through pipes.

    agents/.venv/bin/pip install 'mcp>=2.3,<3' openai

Set task.python=agents/.venv/bin/python. The environment variable SERVER has the command of the
server; the server in this file multiplies. A row has `messages` and an `answer`. The reward is 1 if
the last message contains the answer.
"""

import asyncio
import json
import os
import shlex

import mcp
import openai

TURNS = 4


class Tools:
    """A server that all sessions of this process share."""

    def __init__(self) -> None:
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[mcp.Client] | None = None

    async def rollout(self, base_url: str, row: dict) -> dict[str, float]:
        if self._serving is None or self._serving.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
        server = await asyncio.shield(self._ready)
        tools = [as_function(tool) for tool in (await server.list_tools()).tools]
        client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        messages = list(row["messages"])
        calls = 0
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools
            )
            message = reply.choices[0].message
            messages.append(message)
            if reply.choices[0].finish_reason != "tool_calls":
                break
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                result = await server.call_tool(call.function.name, arguments)
                text = "".join(part.text for part in result.content if part.type == "text")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
                calls += 1
        return {"reward": float(row["answer"] in (message.content or "")), "calls": calls}

    async def _serve(self, ready: "asyncio.Future[mcp.Client]") -> None:
        command, *arguments = shlex.split(os.environ["SERVER"])
        server = mcp.StdioServerParameters(command=command, args=arguments)
        try:
            async with mcp.Client(server) as connected:
                ready.set_result(connected)
                await asyncio.Event().wait()  # until the process ends
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)


def as_function(tool: mcp.types.Tool) -> dict:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


if __name__ == "__main__":
    from mcp.server.mcpserver import MCPServer

    calculator = MCPServer("calculator")

    @calculator.tool(structured_output=False)
    def multiply(a: int, b: int) -> str:
        """Multiply two integers."""
        return str(a * b)

    calculator.run()
