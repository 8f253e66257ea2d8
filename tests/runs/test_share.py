"""Exported models have a card, and are uploaded to a hub, here a server on this machine."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from build import config, small
from huggingface_hub import ModelCard, constants
from transformers import AutoModelForCausalLM, AutoTokenizer

import tba
from tba.assemble import run
from tba.runs.checkpoint import generations
from tba.runs.log import METRICS, read
from tba.runs.offline import _model_name, _without_places, share

TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """The parts of the hub's API that an upload needs; it keeps what it was sent."""

    address: str = ""
    private: bool = False
    created: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)

    def answer(self, method: str, path: str, token: str | None, body: bytes) -> tuple[int, Any]:
        self.tokens.add(token)
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return 200, {"url": f"{self.address}/{self.created['organization'] or 'me'}/mine"}
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            assert isinstance(yaml.safe_load(text.split("---\n")[1]), dict)
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/mine/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            kind = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": name, **kind} for name in names]}
        if path == "/api/models/me/mine/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = f"{self.address}/me/mine/commit/abc"
            return 200, {"success": True, "commitOid": "abc", "commitUrl": commit}
        if (method, path) == ("GET", "/api/models/me/mine"):
            return 200, {"id": "me/mine", "private": self.private}
        return 404, {"error": f"{method} {path}"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on loopback."""
    ours = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            path = self.path.partition("?")[0]
            status, answer = ours.answer(self.command, path, self.headers["Authorization"], body)
            self.send_response(status)
            text = json.dumps(answer).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ours.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield ours
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def logged_in(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub, in this process, for a user with a token."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share") / "run"
    more = ("eval.every=4", "checkpoint.every=2", "eval.sets.more.use=toy.Ones")
    run(config(tiny_model, folder, *more, "checkpoint.keep=4", "objective.beta=0.3"))
    return folder


def test_an_exported_model_has_a_card(ended, tmp_path):
    """With reference, objective, data, the scores before and after with their errors."""
    out = tmp_path / "out"
    assert share(ended, out) == str(out)
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("1+2=")["input_ids"]
    card = ModelCard.load(out / "README.md")
    text = " ".join(card.text.split())
    assert "after 8 of 8 steps" in text and f"by tba {tba.__version__}" in text
    assert "**Reference:** the model before training." in text
    assert '"use": "tb", "beta": 0.3' in text and '**Data and reward:** `{"use": "toy.Ones"' in text
    rows = [row for row in read(ended / METRICS) if "eval/sampled_reward" in row]
    before, after = (
        f"{row['eval/sampled_pass@1']:.3f} ± {row['eval/sampled_stderr']:.3f}"
        for row in (rows[0], rows[-1])
    )
    assert f"| `sampled_pass@1` | {before} | {after} |" in text
    shown = set(re.findall(r"\| `(\S+)` \| [-\d.]+ ± [\d.]+ \|", text))
    assert {"more/greedy_reward", "more/greedy_pass@1", "avg@2"} <= shown
    assert not [name for name in shown if "stderr" in name or "seconds" in name]
    assert "96 trained on" in text
    assert card.data.library_name == "transformers" and card.data.base_model is None


def test_a_checkpoint_that_was_not_evaluated_says_so(ended, tmp_path):
    share(ended, tmp_path / "out", step="6")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "after 6 of 8 steps" in text and "was not evaluated while it was trained" in text
    assert "72 trained on" in text


def test_the_command_uploads_to_the_hub(ended, hub, tmp_path):
    """`tba export RUN --push-to-hub NAME`, with the hub's own settings in the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
    command = [Path(sys.executable).with_name("tba"), "export", ended, "--push-to-hub", "mine"]
    before = set(ended.iterdir())
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, f"{hub.address}/me/mine\n"), done.stderr
    newest = generations(ended / "checkpoints")[-1] / "model"
    own = {path.name: path.read_bytes() for path in newest.iterdir()}
    assert own.items() <= hub.files.items()
    assert hub.files.keys() - own.keys() == {"README.md"}
    assert 'from_pretrained("me/mine")' in hub.files["README.md"].decode()
    assert set(ended.iterdir()) == before
    assert "private" not in str(hub.created)


def test_an_adapter_is_uploaded_alone(toy_model, logged_in, tmp_path):
    folder = tmp_path / "run"
    run(small(toy_model, folder, "run.steps=2"))
    logged_in.private = True
    url = share(folder, tmp_path / "out", adapter=True, name="me/mine", private=True)
    assert url == f"{logged_in.address}/me/mine"
    assert (logged_in.created["organization"], logged_in.created["visibility"]) == ("me", "private")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= logged_in.files.keys()
    assert "model.safetensors" not in logged_in.files
    card = ModelCard(logged_in.files["README.md"].decode())
    assert card.data.library_name == "peft"
    assert "a LoRA adapter, which is all that this folder has" in card.text
    assert (tmp_path / "out" / "README.md").read_bytes() == logged_in.files["README.md"]


def test_nothing_is_uploaded_without_a_login(ended, logged_in, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match=r"--push-to-hub needs a token .* type `hf auth login`"):
        share(ended, None, name="me/mine")
    assert not logged_in.tokens
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match=r"refuses 'me/mine': Invalid credentials.*type `hf auth"):
        share(ended, None, name="me/mine")
    assert not logged_in.files


def test_what_the_hub_refuses_is_told(ended, logged_in, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="mine exists and is public; make it private"):
        share(ended, out, name="me/mine", private=True)
    with pytest.raises(ValueError, match="Repo id must use alphanumeric chars"):
        share(ended, out, name="me/my model")
    with pytest.raises(ValueError, match=r"give a new folder, `tba export .* FOLDER`, or"):
        share(ended, None)
    with pytest.raises(ValueError, match="--private is for --push-to-hub NAME"):
        share(ended, out, private=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9 refuses 'me/mine': "):
        share(ended, out, name="me/mine")
    assert not out.exists()


@pytest.mark.parametrize(
    ("model", "name"),
    {
        "HuggingFaceTB/SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
        "bundled:arithmetic": "bundled:arithmetic",
        "/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/1a": "HuggingFaceTB/SmolLM2-135M",
        "~/hub/models--gpt2/snapshots/12ab": "gpt2",
        "FOLDER/mine": "./mine",
    }.items(),
)
def test_a_card_names_the_base_model_and_no_place(model, name, tmp_path):
    (tmp_path / "mine").mkdir()
    assert _model_name(model.replace("FOLDER", str(tmp_path))) == name


def test_settings_in_a_card_name_files_and_not_where_they_are():
    home = {"data": "~/own/rows.jsonl", "reward": ["/home/me/score.py:f", "score.py:g"]}
    given = {**home, "seeds": "../seeds.jsonl", "prompt": "/think {x}/{y}", "size": 3, "lora": None}
    assert _without_places(given) == {
        "data": "rows.jsonl", "reward": ["score.py:f", "score.py:g"], "seeds": "seeds.jsonl",
        "prompt": "/think {x}/{y}", "size": 3, "lora": None,
    }  # fmt: skip


def test_exported_files_are_readable_by_others_and_name_no_place(ended, tmp_path):
    mask = os.umask(0o077)
    try:
        share(ended, tmp_path / "out")
    finally:
        os.umask(mask)
    files = list((tmp_path / "out").iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644} and len(files) > 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card and str(ended.parent) not in card
    assert 'from_pretrained("out")' in card
