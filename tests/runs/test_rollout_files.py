"""Logged rollouts: what a run wrote is read as it was, and what is broken is named."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import programs
import pytest
import torch
from conftest import EOS
from exact import toy_config
from safetensors.torch import load_file
from talk import dialogue_config, dialogue_model

from tba.assemble import open_run, run
from tba.config.schema import Config, load
from tba.models.lora import load_frozen
from tba.models.pretrained import Tokenizer, load_text
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import newest
from tba.runs.checks import stored_config
from tba.runs.dry_run import dry_run
from tba.runs.log import CHECKPOINTS
from tba.runs.offline import serve
from tba.runs.rollouts import described, read_rollouts, write_rollouts
from tba.search.chat import shown
from tba.types import Completion

__all__ = ["dialogue_config", "dialogue_model"]  # fixtures

OFFLINE = (
    "runtime.searchers=0", "run.steps=3", "strategy=uniform", "trainer.learning_rate=2e-4",
    "objective.tapered=false",  # a file has no log-probs of the policy that sampled
)  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(folder / CHECKPOINTS) / "model" / "model.safetensors")


def test_rollouts_of_a_run_train_as_its_buffer_does(toy_model, tmp_path):
    """The same groups, counts and log-probs; and the same parameters after three steps."""
    first = tmp_path / "first"
    run(toy_config(toy_model, first, "run.steps=2", "checkpoint.every=2"))
    file = tmp_path / "rollouts.jsonl"
    told = write_rollouts(first, file, None)
    assert re.fullmatch(r".*: [\d,]+ responses to [\d,]+ prompts", told)
    stored = ReplayBuffer()
    stored.load(newest(first / CHECKPOINTS))

    def offline(name: str) -> Config:
        folder = tmp_path / name
        return toy_config(toy_model, folder, *OFFLINE, f"replay.rollouts={file}")

    with open_run(offline("read")) as opened:
        for a, b in zip(stored.groups(), opened.buffer.groups(), strict=True):
            assert np.array_equal(a.prompt_tokens, b.prompt_tokens)
            for t, u in zip(a.trajectories, b.trajectories, strict=True):
                assert np.array_equal(t.tokens, u.tokens) and t.reward == u.reward
                np.testing.assert_allclose(t.ref_logp, u.ref_logp, atol=1e-5)
        opened.train()
        assert opened.searchers.stats.counts["samples_generated"] == 0
    with open_run(offline("own")) as opened:
        opened.buffer = stored
        opened.train()
    own = weights(tmp_path / "own")
    for name, tensor in weights(tmp_path / "read").items():
        torch.testing.assert_close(tensor, own[name], atol=1e-5, rtol=1e-4)


def test_a_model_for_logged_rollouts_is_gone_when_gpus_get_their_memory_back(
    toy_model, tmp_path, monkeypatch
):
    """A rank may need it that is on the same GPU."""
    models = []
    left = []

    def load(*arguments: Any) -> Any:
        model = load_frozen(*arguments)
        models.append(ref(model))
        return model

    monkeypatch.setattr("tba.search.searcher.load_frozen", load)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append([m() for m in models]))
    file = rows(tmp_path, {"prompt": "1+", "completion": "2", "reward": 1.0})
    with open_run(toy_config(toy_model, tmp_path / "run", *OFFLINE, f"replay.rollouts={file}")):
        assert left == [[None]]


@pytest.fixture
def text(model: Path) -> Tokenizer:
    return load_text(load(None, [f"policy.model={model}"]).policy)


def rows(folder: Path, *rows: Any) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return file


def test_conversations_are_tokens_of_which_the_assistants_are_trained_on(text, tmp_path):
    function = {"name": "double", "arguments": '{"n": 2}'}
    called = {"id": "1", "type": "function", "function": function}
    chat = [
        programs.user("Say 4"),
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "name": "double", "content": "4"},
        {"role": "assistant", "content": "It is 4"},
    ]
    row = {"messages": chat, "tools": [programs.DOUBLE], "reward": 1.0}
    other = {"messages": [chat[0], {"role": "assistant", "content": "No"}], "reward": 0}
    groups = read_rollouts(rows(tmp_path, row, other, {**other, "reward": 0.5}), text)
    assert [len(g.trajectories) for g in groups] == [1, 2]
    (t,) = groups[0].trajectories
    decode = text.tokenizer.decode
    call = '<tool_call>\n{"name": "double", "arguments": {"n": 2}}\n</tool_call>'
    assert decode(t.tokens[t.sampled].tolist()) == f"{call}{EOS}It is 4{EOS}"
    between = decode(t.tokens[~t.sampled].tolist())
    assert between == "[user]<tool_response>\n4\n</tool_response>[assistant]"
    plain = groups[1].trajectories[0]
    assert shown(text, Completion(plain.tokens, plain.ref_logp, True, 0), ()) == "No"


def test_the_chats_of_the_page_are_trained_on(model, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    logged = page.partition("## Logged rollouts")[2]
    for kind, name in (("json", "chats.jsonl"), ("toml", "chats.toml")):
        shown = logged.partition(f"```{kind}\n")[2].partition("```")[0]
        (tmp_path / name).write_text(shown)
    small = [
        f"policy.model={model}", f"replay.rollouts={tmp_path}/chats.jsonl", "run.steps=2",
        f"run.folder={tmp_path}/run", "trainer.batch_size=2", "trainer.group_size=2",
        "log.console=off", "log.tensorboard=false",
    ]  # fmt: skip
    summary = run(load(str(tmp_path / "chats.toml"), small))
    assert summary is not None and summary.samples_trained == 4


def test_broken_rows_are_counted_and_named(text, tmp_path, caplog):
    sound = {"prompt_ids": [5, 6], "ids": [7, 1], "sampled": [1, 1], "reward": 1.0}
    thoughtful = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    broken = [
        "{", "[]", {**sound, "reward": "much"}, {**sound, "reward": float("nan")},
        {**sound, "ids": [10**6, 1]}, {**sound, "sampled": [0, 0]}, {**sound, "prompt_ids": []},
        {**sound, "sampled": [1]}, {"reward": 1.0}, {"messages": [], "reward": 1},
        {"messages": [programs.user("x")], "reward": 1},
        {"messages": [programs.user("x"), thoughtful], "reward": 1},
        {**sound, "ids": [7] * 5000, "sampled": [1] * 5000}, {**sound, "ids": [2**40, 1]},
        {**sound, "sampled": [300, 1]}, {**sound, "count": 0},
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING):
        (group,) = read_rollouts(rows(tmp_path, sound, *broken), text)
    assert len(group.trajectories) == 1
    assert f"{len(broken)} of {len(broken) + 1} rows are left out: row 2: " in caplog.text
    with pytest.raises(ValueError, match="has no sound row"):
        read_rollouts(rows(tmp_path, *broken), text)
    chat = {"messages": [programs.user("x"), thoughtful], "reward": 1}
    with pytest.raises(ValueError, match="has no sound row"):
        read_rollouts(rows(tmp_path, chat), text)
    assert "has reasoning_content; write it into content" in caplog.text


@pytest.mark.parametrize(
    "settings, why",
    [
        (["runtime.searchers=0"], "runtime.searchers = 0 needs replay.rollouts"),
        (["replay.rollouts=/no/such.jsonl"], "no such file"),
        (["replay.rollouts=x.jsonl", "objective=grpo"], "replay.rollouts does not work with"),
    ],
)
def test_wrong_settings_are_named(settings, why, toy_model, tmp_path):
    with (
        pytest.raises(ValueError, match=why),
        open_run(toy_config(toy_model, tmp_path / "run", *settings)),
    ):
        pass


def test_rollouts_are_read_once_and_those_beyond_the_limits_told(toy_model, tmp_path):
    texts = [{"prompt": "1+1=", "completion": c, "reward": 1.0} for c in "1234"]
    file = rows(tmp_path, *texts)
    given = [*OFFLINE, f"replay.rollouts={file}", "replay.per_prompt=3", "run.steps=6"]
    settings = toy_config(
        toy_model, tmp_path / "run", *given, "trainer.batch_size=6", "trainer.group_size=3",
        "sampling.samples=3", "log.console=plain",
    )  # fmt: skip
    groups = read_rollouts(file, load_text(settings.policy))
    assert described(groups, settings) == (
        "4 logged rollouts of 1 prompts; replay.per_prompt = 3 and capacity = 100000 keep 3 of 4"
        " distinct ones; each is trained on 12.0 times on average"
    )
    run(settings)
    with pytest.raises(ValueError, match=r"replay.rollouts = /no.jsonl, but the run has .*new run"):
        run(stored_config(tmp_path / "run", ["replay.rollouts=/no.jsonl"]), tmp_path / "run")


def test_a_port_that_is_taken_is_told(toy_model, tmp_path):
    with socket.socket() as taken, pytest.raises(ValueError, match=r"in use.*; choose another"):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        serve(toy_config(toy_model, tmp_path / "run"), None, None, taken.getsockname()[1])


def test_a_dry_run_holds_one_session(config, tmp_path, monkeypatch):
    given = {"reward": None, "environment": None, "tool_deadline": None}
    rollout = f"{Path(programs.__file__)}:once"
    agent = config("12", settings=["task=agent"], rollout=rollout, **given)
    _, lines = dry_run(agent)
    told = next(line for line in lines if line.startswith("one session"))
    counts = r"1 calls, 1 contexts, 3 tokens sampled and \d+ given, reward 2,"
    assert re.match(f"one session: {counts}", told)


def test_a_model_is_served_for_a_program_to_be_written_against(model):
    command = [sys.executable, "-m", "tba.cli", "serve", str(model), "sampling.max_tokens=5"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        url = served.stdout.readline().split('"')[1]
        reply = programs.ask(url, [programs.user("Say 1")])
        assert 0 < reply["usage"]["completion_tokens"] <= 5
        assert re.match(r"call 1: \d+ \+ \d+ tokens, 1 contexts", served.stdout.readline())
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
    finally:
        served.kill()
        served.wait()
        served.stdout.close()
