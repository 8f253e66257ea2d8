"""Logged rollouts: what a run wrote is read as it was, and what is broken is named."""

import copy
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from weakref import ref

import numpy as np
import programs
import pytest
import torch
from conftest import EOS, PAD
from exact import toy_config
from safetensors.torch import load_file
from talk import dialogue_config, dialogue_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Tokenizers
from transformers import PreTrainedTokenizerFast

from tba.agents.chat import response_text
from tba.agents.endpoint import Endpoint
from tba.cli import main, rollouts
from tba.config.schema import Config, load
from tba.engines.transformers import Transformers
from tba.errors import EngineError
from tba.models.lora import load_frozen
from tba.models.pretrained import load_text
from tba.models.tokenizer import Tokenizer
from tba.offline.eval import serve
from tba.offline.rollouts import described, read_rollouts, write_rollouts
from tba.open import open_run, run
from tba.prompt import Prompt
from tba.replay.buffer import ReplayBuffer
from tba.runs.checkpoint import newest
from tba.runs.folder import CHECKPOINTS
from tba.setup.checks import stored_config
from tba.tools.check import dry_run
from tba.types import GIVEN, RESTART, SAMPLED, Completion, Group, Trajectory, marks_of

__all__ = ["dialogue_config", "dialogue_model"]  # fixtures

OFFLINE = (
    "runtime.searchers=0", "run.steps=3", "strategy=uniform", "trainer.learning_rate=2e-4",
    "objective.taper=none",  # a file has no log-probs of the policy that sampled
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
    lines = [json.dumps(row) if isinstance(row, dict | list) else row for row in rows]
    encoded = [line.encode() if isinstance(line, str) else line for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in encoded))
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
    assert response_text(text, Completion(plain.tokens, plain.ref_logp, True, 0), ()) == "No"


def test_the_chats_of_the_page_are_trained_on(model, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    logged = page.partition("## Logged rollouts")[2]
    for kind, name in (("json", "chats.jsonl"), ("toml", "chats.toml")):
        shown = logged.partition(f"```{kind}\n")[2].partition("```")[0]
        (tmp_path / name).write_text(shown)
    small = [
        f"policy.model={model}", f"replay.rollouts={tmp_path}/chats.jsonl", "run.steps=2",
        f"run.folder={tmp_path}/run", "trainer.batch_size=2", "trainer.group_size=2",
        "log.console=off", "log.report_to=[]",
    ]  # fmt: skip
    summary = run(load(str(tmp_path / "chats.toml"), small))
    assert summary is not None and summary.samples_trained == 4


def test_broken_rows_are_counted_and_named(text, tmp_path, caplog):
    sound = {"prompt_ids": [5, 6], "ids": [7, 1], "sampled": [1, 1], "reward": 1.0}
    broken = [{**sound, "reward": "much"}, *["{", "[]"] * 3]
    with caplog.at_level(logging.WARNING):
        (group,) = read_rollouts(rows(tmp_path, sound, *broken), text)
    assert len(group.trajectories) == 1
    assert "7 of 8 rows are left out: row 2: reward: Input should be a valid number" in caplog.text
    with pytest.raises(ValueError, match="has no valid row"):
        read_rollouts(rows(tmp_path, *broken), text)


ASKED = programs.user("x")
TEXT = {"prompt": "x", "completion": "y", "reward": 1}
TOKENS = {"prompt_ids": [5, 6], "ids": [7, 1], "reward": 1}
CALL = {"function": {"name": "double", "arguments": [2]}}
TWICE = {"function": {"name": "double", "arguments": '{"n": 1, "n": 2}'}}


def chat(*messages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"messages": [ASKED, *messages], "reward": 1, **keys}


def said(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


LEFT_OUT = {
    "types": (
        {**TOKENS, "ids": [7.5]}, {**TOKENS, "ids": ["7"]}, {**TOKENS, "prompt_ids": [True]},
        {**TOKENS, "sampled": [1, 1.4]}, {**TOKENS, "sampled": [True, True]},
        {**TOKENS, "finished": "no"}, {**TEXT, "count": 1.5},
        {**TEXT, "count": "3"}, {**TEXT, "count": 0}, {**TEXT, "count": 2**63},
        {**TEXT, "group": {"a": 1}}, {**TEXT, "group": True}, {**TEXT, "columns": [1]},
        {**TEXT, "reward": True}, {**TEXT, "reward": float("nan")}, {**TEXT, "reward": 1e13},
        chat(said(5)), chat({**ASKED, "content": {"a": 1}}, said("y")), chat(said(None)),
        chat(said("", tool_calls=[CALL]), tools=[programs.DOUBLE]),
        chat(said("", tool_calls=[TWICE]), tools=[programs.DOUBLE]),
    ),
    "keys": (
        {**TEXT, "score": 1}, {"prompt": "x", "completions": "y", "reward": 1},
        {**TEXT, "finish_reason": "length"}, {**TEXT, "weight": 2}, {**TEXT, "messages": [ASKED]},
        {**TEXT, "tools": [programs.DOUBLE]}, {**TOKENS, "messages": [ASKED, said("y")]},
        {**TOKENS, "logprobs": [0, 0]}, chat(said("y"), sampled=[1]), chat(said("y"), mask=[1]),
        chat(said("y", name="Bo")), chat(said("", refusal="no")), chat(said("y", prefix=True)),
        chat(said("4", reasoning_content="2 + 2")), chat({**ASKED, "name": "Bo"}, said("y")),
        chat(said("", function_call={"name": "f"})), chat(said("a"), said("b")), {"reward": 1},
        '{"prompt": "x", "completion": "y", "reward": 1, "reward": 0}',
    ),
    "weights": (
        chat(said("y", weight=0.5)), chat(said("y", weight=0)), chat(said("y", loss_mask=0)),
        chat(said("y", train=False)), chat(said("y", training_detail=[{"train": False}])),
        chat({**ASKED, "weight": 1}, said("y")), chat(said("y"), assistant_masks=[1]),
        chat(said([{"type": "text", "text": "y", "train": False}])),
    ),
    "ends": (
        {**TEXT, "completion": f"y{EOS}{EOS}"}, {**TEXT, "completion": f"y{EOS}\n"},
        {**TEXT, "completion": f"y{EOS}", "finished": False}, chat(said(f"y{EOS}z")),
        {**TOKENS, "ids": [7, 1, 1]}, {**TEXT, "completion": "", "finished": False},
        {**TEXT, "completion": "y<pad>"},
    ),
    "encodings": (
        b'{"prompt": "x", "completion": "caf\xe9", "reward": 1}', json.dumps(TEXT).encode("utf-16"),
        {**TEXT, "columns": {"a": "\ud800"}}, {**TEXT, "completion": "caf\ufffd"},
        {**TEXT, "completion": "a\tb"}, chat(said("\ty")), {**TEXT, "completion": "caf\u00e9"},
        chat({**ASKED, "content": "\u00e9"}, said("y")),
    ),
    "tokens": (
        {**TOKENS, "prompt": "x"}, {**TOKENS, "completion": "y"}, {**TOKENS, "prompt": [ASKED]},
        {**TOKENS, "sampled": [1]}, {**TOKENS, "sampled": [0, 0]}, {**TOKENS, "sampled": [1, 3]},
        {**TOKENS, "prompt_ids": []}, {**TOKENS, "ids": [10**6]}, {**TOKENS, "ids": [-1]},
        {**TOKENS, "ids": [2**40]}, {**TOKENS, "ids": [7] * 5000}, {**TOKENS, "ids": []},
    ),
}  # fmt: skip
"""Rows that mean nothing certain."""


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_row_that_might_mean_something_else_is_left_out(kind, text, tmp_path, caplog):
    for row in LEFT_OUT[kind]:
        file = rows(tmp_path, row)
        with pytest.raises(ValueError, match="has no valid row"):
            print(row, read_rollouts(file, text))
        assert "rows are left out: row 1: " in caplog.messages[-1]


PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
BEGINS = "{% if add_generation_prompt %}[assistant]{% endif %}"
SHOWN = "{{ m.content }}"
HEAD = PLAIN.replace(SHOWN, "{% if m.role == 'assistant' %}<mark>{% endif %}{{ m.content }}")
FIRST = PLAIN.replace(SHOWN, "{{ m.content if loop.first or m.role != 'system' }}")
LATE = {"role": "system", "content": "s"}
OF_TEMPLATES = (
    (HEAD + BEGINS, chat(said("y")), None),  # as gpt-oss and Command begin a reply
    (HEAD + BEGINS, chat(said("<mark>y")), "<mark>y<eos>"),
    (PLAIN + BEGINS + "<think>\n", chat(said("y")), None),  # as DeepSeek-R1 begins a reply
    (PLAIN + BEGINS + "<think>\n", chat(said("<think>x</think>y")), None),
    (PLAIN + BEGINS + "<think>\n", {**TEXT, "prompt": [ASKED]}, None),
    (PLAIN + BEGINS + "<think>\n", chat(said("x</think>y")), "x</think>y<eos>"),
    (PLAIN + BEGINS + "<think>\n", chat(said("x"), finished=False), "x"),
    (PLAIN + BEGINS, chat(said("<think>x</think>y")), "<think>x</think>y<eos>"),
    (PLAIN + BEGINS, {**TEXT, "completion": "y<mark>"}, None),  # special, but without a role
    (FIRST + BEGINS, chat(said("y"), LATE, said("z")), None),
    (PLAIN + BEGINS, chat(said("y"), LATE, said("z")), "y<eos>z<eos>"),
)  # fmt: skip
"""A chat template, a row, and what the policy sampled of it; None if that is not certain."""


@pytest.mark.parametrize("case", range(len(OF_TEMPLATES)))
def test_a_row_that_the_template_would_write_otherwise_is_left_out(case, text, tmp_path):
    template, row, sampled = OF_TEMPLATES[case]
    own = copy.deepcopy(text.tokenizer)
    own.add_tokens([AddedToken("<mark>", special=True)])
    own.chat_template = template
    other = replace(text, tokenizer=own, vocabulary=len(own))
    if sampled is None:
        with pytest.raises(ValueError, match="has no valid row"):
            print(read_rollouts(rows(tmp_path, row), other))
        return
    ((t,),) = [group.trajectories for group in read_rollouts(rows(tmp_path, row), other)]
    assert own.decode(t.tokens[marks_of(t) == SAMPLED].tolist()) == sampled


READ = (
    (chat(said("    return x\n")), "    return x\n<eos>"),
    (chat(said([{"type": "text", "text": " a "}])), " a <eos>"),
    (chat(said("a\n"), ASKED, said("\nb"), ASKED), "a\n<eos>\nb<eos>"),
    (chat(said("bad", weight=0), ASKED, said("good", weight=1)), "good<eos>"),
    (chat(said("good"), ASKED, said("bad", weight=0), ASKED, said("fine")), "good<eos>fine<eos>"),
    (chat(said("good"), ASKED, said("bad", weight=0)), "good<eos>"),
    (chat(said("ok<eos>"), ASKED, said("ok<eos>")), "ok<eos>ok<eos>"),
    (chat(said("a"), ASKED, said("b"), finished=False), "a<eos>b"),
    (chat(said("a", refusal=None, annotations=[])), "a<eos>"),
    ({**TEXT, "completion": "y<eos>", "tools": None}, "y<eos>"),
    ({**TEXT, "completion": " y\n", "finished": False}, " y\n"),
    ({**TEXT, "completion": ""}, "<eos>"),
    ({**TOKENS, "prompt": "#$", "completion": "%"}, "%<eos>"),
)


def test_a_row_is_read_as_it_is_written(text, tmp_path):
    for row, sampled in READ:
        ((t,),) = [group.trajectories for group in read_rollouts(rows(tmp_path, row), text)]
        tokens = t.tokens if t.sampled is None else t.tokens[t.sampled]
        assert text.tokenizer.decode(tokens.tolist()) == sampled
        assert t.finished == sampled.endswith(EOS)


def test_the_space_that_a_tokenizer_puts_first_is_no_part_of_a_completion(model, tmp_path):
    spaced = Tokenizers(models.BPE({c: i for i, c in enumerate([PAD, EOS, *"\u2581x=y"])}, []))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    spaced.decoder = decoders.Metaspace()
    own = PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token=EOS)
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    own.save_pretrained(tmp_path / "model")
    text = load_text(load(None, [f"policy.model={tmp_path}/model"]).policy)
    for completion in ("y", " y"):
        row = {"prompt": "x=", "completion": completion, "reward": 1}
        (group,) = read_rollouts(rows(tmp_path, row), text)
        whole = np.concatenate([group.prompt_tokens, group.trajectories[0].tokens])
        assert own.decode(whole.tolist()) == f"x={completion}<eos>"


def random_groups(text: Tokenizer, seed: int) -> list[Group]:
    """Groups of every form, with random tokens."""
    rng = np.random.default_rng(seed)

    def some(least: int, most: int = 4) -> list[int]:
        return rng.integers(2, len(text.tokenizer), rng.integers(least, most)).tolist()

    def response(contexts: int, finished: bool, begins: int) -> Trajectory:
        tokens: list[int] = []
        marks: list[int] = []
        for context in range(contexts):
            given = some(1) if context or begins != SAMPLED else []
            kind = rng.choice([GIVEN, RESTART]) if context else begins
            turn = [*some(0), text.eos_id] if context < contexts - 1 or finished else some(1)
            tokens += [*given, *turn]
            marks += [kind, *[GIVEN] * len(given)][: len(given)] + [SAMPLED] * len(turn)
        zeros = np.zeros(len(tokens), np.float32)
        own = None if min(marks) == max(marks) else np.array(marks, np.uint8)
        reward, count = rng.normal(), int(rng.integers(1, 9))
        ids = np.array(tokens, np.int32)
        return Trajectory(ids, zeros, zeros, reward, 3, finished, marks=own, count=count)

    groups = []
    for number in range(40):
        prompt = np.array(some(1), np.int32)
        asked: Any = text.prompt(prompt)
        contexts, begins = 1, SAMPLED
        match number % 5:
            case 1:  # a dialogue, or a session
                asked = [{"role": "user", "content": asked, "name": "Bo"}]
                contexts = 2
            case 2:  # sessions that begin unlike
                prompt, contexts, begins = prompt[:0], 2, int(rng.choice([GIVEN, RESTART]))
            case 3:  # a program that writes its own prompt, or a prompt that was cut
                asked = f"row {number}"
        responses = tuple(response(contexts, bool(i % 2), begins) for i in range(4))
        groups.append(Group(Prompt(f"p{number}", asked, {"gold": number}), prompt, responses))
    return groups


def content(groups: Sequence[Group]) -> list[Any]:
    """All that rollouts have in common with the buffer that they were written from."""
    responses = []
    for group in groups:
        head = (group.prompt_tokens.tolist(), group.prompt.columns)
        for t in group.trajectories:
            own = (t.tokens.tolist(), marks_of(t).tolist(), t.reward, t.finished, t.count)
            responses.append((*head, *own))
    return responses


@pytest.fixture(scope="module")
def logged(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReplayBuffer]:
    """A run with rollouts of every form in its checkpoint, and its buffer."""
    folder = tmp_path_factory.mktemp("logged") / "run"
    with open_run(toy_config(toy_model, folder, "sampling.stop=['3', '7=']")) as opened:
        opened.buffer = ReplayBuffer()
        opened.buffer.add(random_groups(opened.parts.text, seed=0), now=0)
        opened.save()
        return folder, opened.buffer


def test_every_form_of_rollout_is_read_as_it_was_in_the_buffer(logged, toy_model, tmp_path):
    folder, buffer = logged
    write_rollouts(folder, file := tmp_path / "rows.jsonl", None)
    read = read_rollouts(file, load_text(load(None, [f"policy.model={toy_model}"]).policy))
    assert len(buffer) > 100 and content(read) == content(buffer.groups())
    again = ReplayBuffer()
    again.add(read, now=0)
    assert again.columns().count.sum() == buffer.columns().count.sum()


def test_a_count_is_a_weight(text, tmp_path, caplog):
    """It takes no memory, and all together fit the buffer's columns."""
    row = {**TEXT, "count": 10**9}
    file = rows(tmp_path, row, {**row, "completion": "z"}, {**row, "completion": "w"}, TEXT)
    (group,) = read_rollouts(file, text)
    assert [t.count for t in group.trajectories] == [10**9, 10**9, 1]
    assert "row 3: count is 1,000,000,000; all rows together may have 2,147,483,647" in caplog.text
    buffer = ReplayBuffer()
    buffer.add([group], now=0)
    assert sorted(buffer.columns().count.tolist())[-2:] == [10**9, 10**9 + 1]
    assert buffer.counts["added"] == len(buffer) + buffer.counts["duplicates"] == 2 * 10**9 + 1


def test_rollouts_of_a_run_of_others_are_written_without_running_code(logged, tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(logged[0], run)
    shutil.copytree(newest(run / CHECKPOINTS) / "model", model)
    (model / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path)!r}, 'ran').touch()"
    )
    changes = {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
    for file, keys in (
        (model / "config.json", changes),
        (run / "config.json", {"policy": {"model": str(model)}}),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    rollouts(run, tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").stat().st_size and not (tmp_path / "ran").exists()


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
    texts = [{"prompt": "1+1=", "completion": c, "reward": 1.0} for c in "1237"]
    file = rows(tmp_path, *texts)
    given = [*OFFLINE, f"replay.rollouts={file}", "replay.per_prompt=3", "run.steps=6"]
    settings = toy_config(
        toy_model, tmp_path / "run", *given, "trainer.batch_size=6", "trainer.group_size=3",
        "sampling.samples=3", "log.console=lines",
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
    given = {"reward": None, "environment": None}
    rollout = f"{Path(programs.__file__)}:once"
    agent = config("12", settings=["task=agent"], rollout=rollout, **given)
    _, lines = dry_run(agent)
    told = next(line for line in lines if line.startswith("one session"))
    counts = r"1 calls, 1 contexts, 3 tokens sampled and \d+ given, reward 2,"
    assert re.match(f"one session: {counts}", told)
    assert lines[0] == "first conversation:" and "Say" in lines[1]
    assert not any(line.startswith("first prompt") for line in lines)  # the program makes its own


def test_a_model_is_served_for_a_program_to_be_written_against(model, monkeypatch):
    source, sink = os.pipe()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["tba", "serve", str(model), "sampling.max_tokens=50"])

    def use(told: IO[str]) -> None:
        url = told.readline().split('"')[1]
        reply = programs.ask(url, [programs.user("Say 1")])
        assert 0 < reply["usage"]["completion_tokens"] <= 50
        assert re.match(r"call 1: \d+ \+ \d+ tokens, 1 contexts", told.readline())
        options = {"stream": True, "temperature": 0}
        with programs.post(url, [programs.user("Say 1")], **options) as stream:
            events = stream.read().decode().split("\n\n")[:-2]
        parts = [json.loads(event[6:])["choices"][0]["delta"] for event in events]
        whole = programs.ask(url, [programs.user("Say 1")], temperature=0)
        content = programs.said(whole)["content"]
        assert "".join(part.get("content", "") for part in parts) == content
        assert len([part for part in parts if part.get("content")]) > 1  # while it is sampled
        tokens = {"stream": True, "logprobs": True}  # in one part, and its end
        with programs.post(url, [programs.user("Say 1")], **tokens) as stream:
            assert len(stream.read().decode().split("\n\n")[:-2]) == 2

    with ThreadPoolExecutor(1) as client, os.fdopen(source) as told, os.fdopen(sink, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        used = client.submit(use, told)
        # if the command has failed, its output is closed before the client ends
        used.add_done_callback(lambda _: out.closed or os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(SystemExit) as ended:
            main()
    used.result()
    assert ended.value.code == 0


def test_serving_ends_with_the_error_of_its_engine(model, monkeypatch):
    """Also of an engine that samples in threads, as vLLM does."""

    def fail(self: Transformers, turns: Sequence[Any]) -> None:
        raise EngineError("out of memory")

    def begin_and_ask(self: Endpoint, opened: Any) -> str:
        url = begin(self, opened)
        client.submit(programs.ask, url, [programs.user("Say 1")])
        return url

    begin = Endpoint.begin
    monkeypatch.setattr(Transformers, "joins_batches", True)
    monkeypatch.setattr(Transformers, "complete", fail)
    monkeypatch.setattr(Endpoint, "begin", begin_and_ask)
    settings = Config(policy={"model": str(model)}, sampling={"max_tokens": 50})
    with ThreadPoolExecutor(1) as client, pytest.raises(EngineError, match="out of memory"):
        serve(settings, None, None, 0)
