"""HTTP server of the endpoint. Other users of the machine can reach its port, but no session."""

import resource
import socket
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tba.agents.wire import RefusedError

SECONDS = 10.0
"""Seconds to receive a request, from the opening of the connection or from its last reply."""


class Listener(socket.socket):
    """Socket with a long queue; few of its connections are accepted at once."""

    def listen(self, backlog: int = 0) -> None:
        super().listen(2048)


def _protocol(sessions: Mapping[str, Any], most: int) -> Any:
    """Return the class of connections, which close unless they request an open session in time.

    If there are more than `most`, the one that has waited longest for a request is closed.
    """
    waiting: OrderedDict[Any, Any] = OrderedDict()

    class EndpointProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(2**30)  # a session does not wait for its reader
            self.watch()
            if len(self.connections) > most:
                waiting.popitem(last=False)[0].abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.watch()

        def watch(self) -> None:
            """Run the deadline, except while a complete request for a session is being answered."""
            cycle = self.cycle
            answers = cycle is not None and not (cycle.more_body or cycle.response_complete)
            if not answers or sessions.keys().isdisjoint(self.scope["path"].split("/")):
                if self.transport not in waiting:
                    end = self.loop.call_later(SECONDS, self.transport.abort)
                    waiting[self.transport] = end
            elif self.transport in waiting:
                waiting.pop(self.transport).cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self.transport, None)
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            self.transport.abort()  # a reply may have begun: uvicorn would fail, and log that

    return EndpointProtocol


def server(sessions: Mapping[str, Any], chat: Any, models: Any) -> Any:
    """Return a server of sessions, whose connections use at most half of the free descriptors."""
    routes = [
        Route("/s/{session}/v1/chat/completions", chat, methods=["POST"]),
        Route("/s/{session}/v1/models", models, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _not_served, 405: _not_served})
    app.router.redirect_slashes = False
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - psutil.Process().num_fds()
    config = uvicorn.Config(
        app,
        http=_protocol(sessions, min(4096, free // 2)),
        ws="none",
        backlog=max(1, min(128, free // 8)),  # accepted at once, before any can be closed
        access_log=False,  # paths are secrets
        log_config=None,
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


async def _not_served(request: Any, error: Any) -> Any:
    """Refuse a request to another path, such as /responses, or with another method."""
    told = (
        "only POST {base_url}/chat/completions and GET {base_url}/models are served; set your"
        " client to chat completions"
    )
    return RefusedError(error.status_code, told).reply()
