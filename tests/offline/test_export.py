"""Exported models have a card."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from build import config, make, resumes_exactly
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tba
from tba.cli import app
from tba.offline.eval import Result, _model_name, evaluate_run, export
from tba.open import run
from tba.runs.checkpoint import newest
from tba.runs.folder import METRICS, read, read_evaluations
from tba.runs.generations import MANIFEST, files_of, sha256_of
from tba.setup.checks import stored_config


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share") / "run"
    more = ("eval.every=4", "checkpoint.every=2", "task.sources.more={use='toy.Ones',weight=0}")
    run(config(tiny_model, folder, *more, "checkpoint.keep=4", "objective.beta=0.3"))
    return folder


def test_an_exported_model_has_a_card(ended, tmp_path):
    """With reference, objective, data, the scores before and after with their errors."""
    out = tmp_path / "out"
    assert export(ended, out) == out
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("1+2=")["input_ids"]
    card = ModelCard.load(out / "README.md")
    text = " ".join(card.text.split())
    assert "after 8 of 8 steps" in text and f"by tba {tba.__version__}" in text
    assert "**Reference:** the model before training." in text
    assert "**Objective:** `tb` {" in text and '"beta": 0.3' in text
    assert "**Task:** `toy.Ones`" in text
    rows = [row for row in read(ended / METRICS) if "eval/sampled_reward" in row]
    scores = [[row[f"eval/sampled_{name}"] for name in ("pass@1", "stderr")] for row in rows]
    before, after = ("{:.3f} ± {:.3f}".format(*scores[place]) for place in (0, -1))
    assert f"| `sampled_pass@1` | {before} | {after} |" in text
    shown = set(re.findall(r"\| `(\S+)` \| [-\d.]+ ± [\d.]+ \|", text))
    assert {"more/greedy_reward", "more/greedy_pass@1", "avg@2"} <= shown
    assert not [name for name in shown if "stderr" in name or "seconds" in name]
    assert "96 trained on" in text
    assert card.data.library_name == "transformers" and card.data.base_model is None


def test_export_and_eval_say_what_they_did_in_one_line(ended, tmp_path):
    """The line of `eval` is on the standard error, since its scores are JSON for programs."""
    out = tmp_path / "out"
    exported = CliRunner().invoke(app, ["export", str(ended), str(out), "--step", "6"])
    assert exported.output == f"exported the model of {ended} to {out}\n"
    evaluated = CliRunner().invoke(app, ["eval", str(ended), "eval.prompts=3"])
    scores = json.loads(evaluated.stdout)
    told = f"evaluated {scores['model']} on 3 held-out prompts: pass@1 sampled"
    assert evaluated.stderr.splitlines()[-1].startswith(told)
    assert evaluated.stderr.count(f"{scores['sampled_pass@1']:.3f} ± ") == 1


def test_a_checkpoint_that_was_not_evaluated_says_so(ended, tmp_path):
    export(ended, tmp_path / "out", step="6")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "after 6 of 8 steps" in text and "was not evaluated during training" in text
    assert "72 trained on" in text


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


def test_exported_files_are_readable_by_others_and_name_no_place(ended, tmp_path, monkeypatch):
    """Also those in a folder, where tokenizers write further chat templates."""
    shutil.copytree(ended, tmp_path / "run")
    generation = newest(tmp_path / "run" / "checkpoints")
    (generation / "model" / "templates").mkdir()
    (generation / "model" / "templates" / "tools.jinja").write_text("")
    (generation / MANIFEST).unlink()
    digests = {name: sha256_of(path) for name, path in files_of(generation).items()}
    (generation / MANIFEST).write_text(json.dumps(digests))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    mask = os.umask(0o077)
    try:
        export(tmp_path / "run", Path())
    finally:
        os.umask(mask)
    folder = tmp_path / "out" / "templates"
    assert folder.stat().st_mode & 0o777 == 0o755
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644} and len(files) > 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card and str(ended.parent) not in card
    assert 'from_pretrained("out")' in card


def test_what_a_planted_link_leads_to_is_not_exported(ended, tmp_path):
    """A run may come from somebody else, and what is exported goes to the hub."""
    shutil.copytree(ended, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "key").write_text("mine")
    for generation in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (generation / "model" / "more").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixture_of_experts_is_resumed_and_evaluated_and_exported(tiny_model, tmp_path):
    """The model holds the experts of a layer in one tensor; published files have them apart."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    make("mixtral").save_pretrained(model)
    resumes_exactly(model, tmp_path)
    part = tmp_path / "part"
    (*_, last) = read_evaluations(part)
    again = evaluate_run(part, [], reference=False)
    assert again["sampled_reward"] == pytest.approx(last["sampled_reward"], abs=1e-6)
    trained = Result(part).model()
    reloaded = AutoModelForCausalLM.from_pretrained(export(part, tmp_path / "out"))
    pairs = zip(trained.parameters(), reloaded.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    files = [load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out")]
    assert files[0].keys() == files[1].keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # in PEFT
@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
@pytest.mark.parametrize("is_set", [False, True])
def test_every_export_says_how_the_run_generated(tiny_model, tmp_path, kind, is_set):
    """Nothing of the settings that come with the model is left, which the run did not use."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    own = {"eos_token_id": [0, 1], "repetition_penalty": 1.3, "top_k": 7, "num_beams": 2}
    (model / "generation_config.json").write_text(json.dumps(own))
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    ones = "def ones(completions, **row): return [text.count('1') for text in completions]"
    (tmp_path / "reward.py").write_text(ones)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    given = ("temperature=0.7", "top_p=0.9", "top_k=5", "stop=['2', '3']") if is_set else ()
    more = [f"sampling.{each}" for each in given]
    more += ["policy.lora.r=2"] * (kind != "full") + [f"task.reward={tmp_path}/reward.py:ones"]
    more += [
        "task=custom",
        f"task.data={tmp_path}/rows.jsonl",
        "task.held_out_size=0",
        "run.steps=1",
    ]
    run(config(model, tmp_path / "run", *more))
    out = export(tmp_path / "run", tmp_path / "out", kind == "adapter")
    settings = json.loads((out / "generation_config.json").read_text())
    settings = {name: each for name, each in settings.items() if each is not None}
    del settings["transformers_version"]
    values = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop_strings": ["2", "3"]}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    always = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": [0, 1], "pad_token_id": 0}
    assert settings == {**(values if is_set else plain), **always}
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "apache-2.0" and "**Licence:** apache-2.0" in card.text
    assert "**Task:** `custom` on `./rows.jsonl`" in card.text
    assert ("tokenizer=tokenizer" in card.text) == is_set
    loads = 'GenerationConfig.from_pretrained("out")' in card.text
    assert loads == (kind == "adapter")


def test_an_earlier_step_is_exported_with_the_settings_of_its_session(ended, tmp_path):
    shutil.copytree(ended, tmp_path / "run")
    later = ("sampling.top_k=3", "run.steps=10")
    run(stored_config(tmp_path / "run", later), tmp_path / "run")
    for step, top_k in (("8", 0), ("10", 3)):
        out = export(tmp_path / "run", tmp_path / step, step=step)
        assert json.loads((out / "generation_config.json").read_text())["top_k"] == top_k


def test_arguments_of_the_chat_template_that_others_leave_out_are_defaults(tiny_model, tmp_path):
    """`tools` and `documents` are there, and None, if nobody gives them."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    template = "{{ messages[0].content }}{% if tools %} T{% endif %}{% if x %}{{ x }}{% endif %}="
    (model / "chat_template.jinja").write_text(template)
    kwargs = "{tools=[{name='f', description='d'}], x=\"a'%}b\"}"
    more = ("eval.prompts=0", "run.steps=1", f"policy.chat_template_kwargs={kwargs}")
    run(config(model, tmp_path / "run", *more))
    tokenizer = AutoTokenizer.from_pretrained(export(tmp_path / "run", tmp_path / "out"))
    chat = [{"role": "user", "content": "1"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1 Ta'%}b="
    assert tokenizer.apply_chat_template(chat, tokenize=False, x=False) == "1 T="
