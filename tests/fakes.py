"""Engines with faults, a trainer that only publishes, and a server of a judge."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from tba.engines.scripted import Scripted
from tba.types import Completion, Sampling
from tba.weights import Direct, Publication, Weights


@dataclass
class Given:
    """Trainer without weights; it may wait before it gives them, or fail."""

    ready: threading.Event | None = None
    error: str = ""

    def copy(self, version: int) -> Callable[[], Publication]:
        def send() -> Publication:
            assert self.ready is None or self.ready.wait(60)
            if self.error:
                raise OSError(self.error)
            return Direct().send(version, (), None)

        return send


@dataclass
class Wrong(Scripted):
    """Engine with a gap after every weight update but some; it counts them."""

    folder: str = ""
    right: tuple[int, ...] = ()
    gap: float = 1.0

    def load_weights(self, weights: Weights) -> float | None:
        super().load_weights(weights)
        number = count(Path(self.folder))
        if weights.probe is None:
            return None
        return 0.001 if number in self.right else self.gap


def count(folder: Path) -> int:
    """Return how often this has been called with the folder before, by any process."""
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    (folder / str(number)).touch()
    return number


@dataclass
class Switched(Scripted):
    """Engine whose first response to each prompt comes from two versions of the weights."""

    in_flight: bool = True

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        groups = super().generate(prompts, sampling, seed)
        return [[replace(group[0], switches=((1, 5),)), *group[1:]] for group in groups]


@dataclass(frozen=True)
class Reply:
    """What a judge's server does with a request; without a body, it answers as vLLM does."""

    status: int = 200
    body: str | bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    """Close the connection instead of answering."""
    echo: bool = False
    """Answer with the request's headers."""
    again: float | None = None
    """Seconds after which the body is sent again, without an end."""


@dataclass
class Judge:
    """A server whose next replies are in `script`; after these, `always`."""

    script: deque[Reply] = field(default_factory=deque)
    always: Reply = Reply()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    inside: int = 0
    most: int = 0
    """Requests at the same time."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    @contextmanager
    def serving(self) -> "Iterator[Judge]":
        running = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        running.daemon_threads = True
        self.url = f"http://127.0.0.1:{running.server_address[1]}"
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield self
        running.shutdown()
        running.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections stay open

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    judge.times.append(time.monotonic())
                    judge.bodies.append(body)
                    judge.keys.append(self.headers["Authorization"])
                    reply = judge.script.popleft() if judge.script else judge.always
                    judge.inside += 1
                    judge.most = max(judge.most, judge.inside)
                time.sleep(reply.delay)
                with judge.lock:
                    judge.inside -= 1
                if reply.drop:
                    self.close_connection = True
                    return
                text = vllm(body) if reply.body is None else reply.body
                text = str(self.headers) if reply.echo else text
                content = text.encode() if isinstance(text, str) else text
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if reply.again is None:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                while reply.again is not None:
                    time.sleep(reply.again)
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with suppress(OSError):  # the client has given up
                    super().handle()

        return Handler


def share(text: str) -> float:
    """What the server thinks of a text: between 0 and 1."""
    return (1 + len(text)) / 100


def vllm(body: dict[str, Any]) -> str:
    """Answer as vLLM does."""
    texts = body.get("input") or ["|".join(m["content"] for m in body["messages"])]
    factor = 100 if body.get("use_activation") is False else 1
    rows = [[factor * share(t)] for t in texts]
    data = [{"index": i, "label": "x", "probs": p, "num_classes": 1} for i, p in enumerate(rows)]
    return json.dumps({"id": "1", "model": body["model"], "data": data[::-1], "usage": {}})
