"""Models from the hub, as a server on a local port plays it: present, absent, silent, cached."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig

from tba.config.tables import PolicyTable
from tba.models import pretrained, tokens_in
from tba.models.pretrained import check_kind, check_model, load_model, load_text
from tba.prompt import Prompt

COMMIT = "0123456789abcdef0123456789abcdef01234567"


IDS = {
    "config.json": [{"pad_token_id": id} for id in (-1, -100, 14, 10**6)],
    "generation_config.json": [
        {"eos_token_id": id} for id in (-1, 99, "<eos>", "", [[1]], {}, True, 1.5, [1, "x", None])
    ],
}


@pytest.mark.parametrize(("file", "ids"), [(file, ids) for file, all in IDS.items() for ids in all])
def test_ids_that_are_no_tokens_count_as_none(file, ids, make_model):
    """Else the embedding at such an index, counted from the end, would not be trained."""
    folder = make_model()
    plain = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(plain | ids))
    policy = PolicyTable(model=str(folder))
    check_model(policy)
    text = load_text(policy)
    assert (text.eos_ids, text.pad_id) == ({1}, 0)
    padding = load_model(policy, torch.float32).get_input_embeddings().padding_idx
    assert padding == (None if file == "config.json" else 0)


@pytest.mark.parametrize(("value", "tokens"), [(5, [5]), ([1, "2", 3.0], [1, 2, 3]), (None, [])])
def test_ids_that_are_tokens_are_read_in_any_form(value, tokens):
    assert tokens_in(value, 14) == tokens


@dataclass
class Hub:
    """A hub with one model, `lab/model`, whose files lie in `folder`."""

    folder: Path
    requests: list[str] = field(default_factory=list)
    silent: threading.Event = field(default_factory=threading.Event)
    """While this is set, requests are accepted and never answered."""
    closing: threading.Event = field(default_factory=threading.Event)

    def file(self, path: str) -> bytes | None:
        """Return the body for `lab/model`: a file, or an empty list."""
        if path.startswith("/api/"):
            return b"[]"  # no folders of chat templates
        file = self.folder / path.rpartition("/")[2]
        return file.read_bytes() if file.is_file() else None

    def serve(self) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                if "lab" in self.path:
                    hub.requests.append(self.path)
                if hub.silent.is_set():
                    hub.closing.wait(30)
                    self.close_connection = True
                    return
                known = self.path.removeprefix("/api/models").startswith("/lab/model/")
                body = hub.file(self.path) if known else None
                self.send_response(404 if body is None else 200)
                body = body or b""
                if known:
                    self.send_header("X-Repo-Commit", COMMIT)
                    self.send_header("X-Error-Code", "EntryNotFound")
                else:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[tuple[Hub, str]]:
    """One hub for the whole module, because transformers keeps the first endpoint it sees."""
    hub = Hub(tiny_model)
    server = hub.serve()
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    hub.closing.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(server: tuple[Hub, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that HF_ENDPOINT names, with an empty cache."""
    from transformers.utils import hub as transformers_hub

    hub, endpoint = server
    hub.requests.clear()
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    pretrained._offline.cache_clear()
    yield hub
    hub.silent.clear()
    pretrained._offline.cache_clear()


def test_a_model_comes_from_the_port_that_the_endpoint_names(hub, tiny_model):
    text = load_text(PolicyTable(model="lab/model"))
    local = load_text(PolicyTable(model=str(tiny_model)))
    assert (text.eos_ids, text.pad_id, text.context) == (local.eos_ids, local.pad_id, local.context)
    assert "/lab/model/resolve/main/config.json" in hub.requests


def test_a_cached_model_is_loaded_without_the_hub(hub):
    policy = PolicyTable(model="lab/model")
    before = load_text(policy)
    pretrained._offline.cache_clear()
    hub.silent.set()
    hub.requests.clear()
    assert load_text(policy).eos_ids == before.eos_ids
    assert len(hub.requests) == 1  # only the one that decides


def test_a_model_that_the_hub_does_not_have_is_refused(hub):
    told = r"policy\.model = 'lab/none' cannot be loaded: .*lab/none"
    with pytest.raises(ValueError, match=told):
        load_text(PolicyTable(model="lab/none"))
    assert len(hub.requests) < 10  # without retries


def test_a_hub_that_never_answers_is_given_up_after_one_timeout(hub):
    hub.silent.set()
    started = time.monotonic()
    with pytest.raises(ValueError, match=rf"no such folder, {constants.ENDPOINT} does not answer"):
        load_text(PolicyTable(model="lab/model"))
    assert time.monotonic() - started < 20  # retries would take most of a minute
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mamba", None),
        ("lfm2", ["conv", "full_attention"]),
        ("granitemoehybrid", ["mamba", "attention"]),
    ],
)
def test_a_model_with_a_recurrent_state_is_refused(tmp_path, name, layers):
    types = {} if layers is None else {"layer_types": layers, "num_hidden_layers": len(layers)}
    AutoConfig.for_model(name, **types).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="with attention alone"):
        check_kind(PolicyTable(model=str(tmp_path)))


def test_a_model_that_could_have_a_state_and_has_none_is_accepted(tmp_path):
    """Granite 4 has sizes with attention alone."""
    layers = {"layer_types": ["attention"] * 2, "num_hidden_layers": 2}
    AutoConfig.for_model("granitemoehybrid", **layers).save_pretrained(tmp_path)
    check_kind(PolicyTable(model=str(tmp_path)))


REFUSING = {
    "{{ raise_exception('System role not supported') }}": ": System role not supported",
    "{% for i in range(10**12) %}{% endfor %}": "",
}


@pytest.mark.parametrize("template", REFUSING)
def test_a_chat_that_the_template_refuses_is_told(make_model, template):
    model = make_model()
    (model / "chat_template.jinja").write_text(template)
    text = load_text(PolicyTable(model=str(model)))
    told = f"prompt 'a': the tokenizer's chat template refuses it{REFUSING[template]}"
    with pytest.raises(ValueError, match=told):
        text.encode(Prompt("a", [{"role": "system", "content": "1+1="}]))


@pytest.mark.parametrize(("major", "expected"), [(7, False), (8, True)])
def test_a_gpu_that_only_emulates_bf16_computes_in_fp32(major, expected, monkeypatch):
    card = SimpleNamespace(major=major, minor=5)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    policy = PolicyTable(model="bundled:arithmetic")
    assert pretrained.computes_in_bf16(policy, "cuda:0") is expected
