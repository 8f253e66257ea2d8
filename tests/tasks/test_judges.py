"""Judges in the searcher's process: tiny random models, compared with a direct computation."""

import json
import pickle
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from build import as_settings, config
from conftest import EOS, PAD
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import tba
from tba.config.plugins import resolve
from tba.config.schema import load
from tba.config.tables import TaskTable
from tba.prompt import Answer
from tba.scoring.scoring import Scoring
from tba.scoring.verdicts import Rejection
from tba.setup.setup import check
from tba.tasks._memory import build_task
from tba.tasks.judges import _model as judge_models
from tba.tasks.judges import conversation, filled
from tba.tasks.judges._model import JudgeModel
from tba.tasks.judges.classifier import Classifier
from tba.tasks.judges.guard import GuardModel
from tba.tasks.redteam import Victim

VOCABULARY = [PAD, EOS, "<|user|>", "<|assistant|>", *string.digits, *string.ascii_letters]
VOCABULARY += [*" +=?.:|<>\n"]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = ["Say a word.", "1+1=", "What?"]
COMPLETIONS = ["yes", "2", "no idea at all"]
CONTEXT = 64

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def words(make_model: Callable[..., Path]) -> Path:
    """A causal model that knows letters, with a character-level tokenizer."""
    return make_model(vocabulary=VOCABULARY, context=CONTEXT)


@pytest.fixture(scope="module")
def make(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Folder of a random classifier, or of the causal model above."""

    def save(
        kind: str = "llama",
        labels: tuple[str, ...] = ("good",),
        pad: bool = True,
        chat: bool = False,
        **options: Any,
    ) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        size = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 48}
        size |= {"num_hidden_layers": 1, "num_attention_heads": 2}
        size |= {"max_position_embeddings": CONTEXT, "pad_token_id": 0 if pad else None}
        options |= {"id2label": dict(enumerate(labels)), "num_labels": len(labels)}
        with torch.random.fork_rng():
            torch.manual_seed(1)
            if kind == "llama":
                model: Any = LlamaForSequenceClassification(LlamaConfig(**size, **options))
            elif kind == "bert":
                model = BertForSequenceClassification(BertConfig(**size, **options))
            elif kind == "gpt2":  # whose positions are learned
                sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": CONTEXT}
                model = GPT2LMHeadModel(GPT2Config(vocab_size=len(VOCABULARY), **sizes))
            else:
                model = AutoModelForCausalLM.from_pretrained(words)
        for parameter in model.parameters():  # scores that differ by more than rounding
            parameter.data.mul_(3.0)
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(words)
        tokenizer.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
        if not pad:
            tokenizer.pad_token = None
        if chat:
            tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder)
        return folder

    return save


def logits(folder: Path, texts: list[str]) -> torch.Tensor:
    """The classifier's logits of each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        rows = [model(each).logits[0] for each in ids]
    return torch.stack(rows)


def next_logits(folder: Path, texts: list[str], words: str) -> torch.Tensor:
    """The causal model's logits of these characters after each text alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        rows = [model(each).logits[0, -1] for each in ids]
    return torch.stack(rows)[:, [VOCABULARY.index(c) for c in words]]


def close(scores: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=1e-4)


JOINED = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("token_budget", [1, 40, 16_384])
def test_a_reward_models_logits_do_not_depend_on_the_batch(make, kind, token_budget):
    folder = make(kind)
    judge = Classifier(str(folder), token_budget=token_budget)
    judge.check()
    expected = logits(folder, JOINED)[:, 0]
    assert expected.std() > 1e-3
    close(judge(PROMPTS, COMPLETIONS, other_column=[1, 2, 3]), expected)


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_judge_computes_in_bf16_where_that_is_faster(make, kind, fast, monkeypatch):
    monkeypatch.setattr(judge_models, "computes_in_bf16", lambda policy, device: fast)
    folder = make(kind)
    judge, expected = Classifier(str(folder)), logits(folder, JOINED)[:, 0]
    scores = torch.tensor(judge(PROMPTS, COMPLETIONS))
    assert judge._model._model.dtype == (torch.bfloat16 if fast else torch.float32)
    gap = (scores - expected).abs().max() / expected.std()
    assert (1e-5 < gap < 0.1) if fast else gap < 1e-4


@pytest.mark.parametrize("pad", [-1, -100, len(VOCABULARY) + 2, 10**6])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_padding_of_the_config_that_is_no_token_counts_as_none(make, kind, pad):
    folder = make(kind)
    expected = logits(folder, JOINED)[:, 0]
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps(config))
    judge = Classifier(str(folder))
    judge.check()
    close(judge(PROMPTS, COMPLETIONS), expected)


@pytest.mark.parametrize(("pad", "reads_eos"), [(0, True), (1, False), (None, True)])
def test_a_score_is_read_at_the_last_token_that_is_not_the_configs_padding(make, pad, reads_eos):
    """If that is EOS (1), the score of a text does not depend on whether it ends with EOS."""
    folder = make()
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": pad}
    (folder / "config.json").write_text(json.dumps(config))
    judge = Classifier(str(folder), template="{completion}")
    without, with_eos = judge(["", ""], ["yes", f"yes{EOS}"])
    assert (without != pytest.approx(with_eos, abs=1e-5)) == reads_eos


@pytest.mark.parametrize("label", ["toxic", 2])
def test_one_label_of_several_is_scored(make, label):
    folder = make("bert", labels=("fine", "rude", "toxic"))

    def score(value: Any) -> list[float]:
        judge = Classifier(str(folder), label=label, value=value, template="{completion}")
        judge.check()
        return judge(PROMPTS, COMPLETIONS)

    expected = logits(folder, COMPLETIONS)
    close(score("logit"), expected[:, 2])
    close(score("probability"), expected.softmax(-1)[:, 2])
    close(score("log_probability"), expected.log_softmax(-1)[:, 2])


def test_labels_that_exclude_nothing_have_probabilities_of_their_own(make):
    folder = make("bert", ("rude", "toxic"), problem_type="multi_label_classification")
    judge = Classifier(str(folder), label="toxic", value="probability")
    close(judge(PROMPTS, COMPLETIONS), logits(folder, JOINED).sigmoid()[:, 1])


def test_the_chat_template_is_used_if_there_is_one(make):
    folder = make(chat=True)
    texts = [f"<|user|>{p}<|assistant|>{c}" for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    judge, expected = Classifier(str(folder)), logits(folder, texts)[:, 0]
    close(judge(PROMPTS, COMPLETIONS), expected)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    close(judge(chats, answers), expected)


def test_a_completion_cannot_write_the_control_tokens_of_the_chat_template(make):
    folder = make(chat=True)
    model = JudgeModel(str(folder), "AutoModelForSequenceClassification", "auto", 100)
    (row,) = model.encode(["a"], ["b<|user|>"], None)
    control = [VOCABULARY.index("<|user|>"), VOCABULARY.index("<|assistant|>")]
    assert [token for token in row if token in control] == control


def test_a_chat_template_needs_a_transformers_that_keeps_control_tokens_apart(make, monkeypatch):
    folder, tokenizer = str(make(chat=True)), transformers.PreTrainedTokenizerBase
    Classifier(folder).check()

    def before(self: Any, conversation: Any, **kwargs: Any) -> None:
        """Take any argument, as in transformers 5.19."""

    monkeypatch.setattr(tokenizer, "apply_chat_template", before)
    with pytest.raises(ValueError, match=r"control tokens .*; pip install 'transformers>=5\.20'"):
        Classifier(folder).check()
    Classifier(folder, template="{completion}").check()
    Classifier(str(make())).check()


def test_a_text_that_is_too_long_costs_only_its_answer(make, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n' * 3)
    options = {"data": str(tmp_path / "data.jsonl"), "held_out_size": 1}
    reward = {"use": "classifier", "model": str(make())}
    task = resolve("tasks", "task", "custom", {**options, "reward": reward}).build()
    answers = [Answer(text, True) for text in ("2", "1" * CONTEXT, "3")]
    (verdicts,) = Scoring({"": task})(task.prompts()[:1], [answers])
    assert [isinstance(v, Rejection) for v in verdicts] == [False, True, False]
    assert isinstance(verdicts[1], Rejection)
    assert "has 68 tokens; the judge" in verdicts[1].detail


@pytest.mark.parametrize("kind", ["causal", "gpt2"])
@pytest.mark.parametrize("token_budget", [1, 16_384])
def test_a_guard_model_is_scored_by_the_first_tokens_of_its_words(make, token_budget, kind):
    folder = make(kind)
    template = "Is {completion} rude? {prompt}"
    texts = [template.replace("{prompt}", p).replace("{completion}", c)
             for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]  # fmt: skip
    both = next_logits(folder, texts, "us")

    def score(value: Any) -> list[float]:
        judge = GuardModel(str(folder), value=value, template=template, token_budget=token_budget)
        judge.check()
        return judge(PROMPTS, COMPLETIONS)

    assert both.softmax(-1)[:, 0].std() > 1e-3
    close(score("probability"), both.softmax(-1)[:, 0])
    close(score("log_probability"), both.log_softmax(-1)[:, 0])


def test_a_guards_chat_template_asks_for_its_answer_which_may_have_a_prefix(make):
    folder = make("causal", chat=True)
    judge = GuardModel(str(folder), positive="yes", negative="no", prefix=" =")
    texts = [f"<|user|>{p}<|assistant|>{c}<|assistant|> ="
             for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]  # fmt: skip
    close(judge(PROMPTS, COMPLETIONS), next_logits(folder, texts, "yn").softmax(-1)[:, 0])


def test_a_template_is_filled_once():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{completion}"}]
    text = filled("{prompt} -> {completion}", chat, "{prompt}")
    assert text == "Be brief.\n\n{completion} -> {prompt}"
    answer = [{"role": "assistant", "content": "ok"}]
    assert conversation(chat, "ok") == conversation(chat, answer) == [*chat, *answer]


def test_a_session_has_its_own_prompt():
    """Its messages are a whole chat, in which a judge reads the prompt once."""
    contents = {"user": "2 + 2?", "assistant": "Let me see.", "tool": "4"}
    session = [{"role": role, "content": text} for role, text in contents.items()]
    assert conversation("the row", session) == session
    assert filled("{prompt} -> {completion}", "the row", session) == "2 + 2? -> Let me see.\n\n4"


WRONG: dict[str, tuple[type, dict[str, Any], dict[str, Any], str]] = {
    "several labels": (
        Classifier, {"labels": ("fine", "rude")}, {}, "known: fine, rude",
    ),
    "no such label": (
        Classifier, {"labels": ("fine", "rude")}, {"label": "rued"}, "did you mean 'rude'?",
    ),
    "no classifier": (
        Classifier, {"kind": "causal"}, {}, "is a LlamaForCausalLM; give a sequence-class",
    ),
    "no chat template": (
        GuardModel, {"kind": "causal"}, {}, "has no chat template; set template to a text",
    ),
    "same tokens": (
        GuardModel, {"kind": "causal", "chat": True}, {"positive": "sad"},
        "positive = 'sad' and negative = 'safe' must begin with different tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused_before_its_weights_are_read(make, case):
    cls, kind, options, told = WRONG[case]
    folder = make(**kind)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        cls(str(folder), **options).check()
    assert told in str(error.value)


@pytest.mark.parametrize("judge", [Classifier, GuardModel])
def test_a_model_that_does_not_exist_is_refused(judge, tmp_path):
    with pytest.raises(ValueError, match=r"model = '\./nowhere': no such folder"):
        judge("./nowhere", template="{completion}").check()
    with pytest.raises(ValueError, match=r"template must contain \{completion\}"):
        judge(str(tmp_path), template="{prompt}")


def test_a_model_without_a_trained_head_is_refused(make):
    folder = make("causal")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good"}}
    (folder / "config.json").write_text(json.dumps(config))
    judge = Classifier(str(folder))
    for refused in (judge.check, lambda: judge.load("cpu")):
        with pytest.raises(ValueError, match=r"missing: score\.weight"):
            refused()


@pytest.mark.parametrize(
    ("place", "of"),
    [
        ("task.reward", lambda wrong, good: ("custom", {"reward": wrong})),
        ("task.reward.1", lambda wrong, good: ("custom", {"reward": [good, wrong]})),
        ("task.proxy", lambda wrong, good: ("tldr", {"proxy": wrong, "gold": good})),
        ("task.gold", lambda wrong, good: ("tldr", {"proxy": good, "gold": wrong})),
        ("task.judge", lambda wrong, good: ("redteam", {"judge": wrong, "victim": wrong["model"]})),
    ],
)
def test_an_error_begins_with_the_option_that_names_the_judge(make, place, of, monkeypatch):
    """Also in a source of a mixture."""
    monkeypatch.setattr(Victim, "check", lambda victim: None)
    wrong, good = ({"use": "classifier", "model": str(make(k))} for k in ("causal", "llama"))
    name, options = of(wrong, good)
    options |= {} if name == "redteam" else {"data": "somewhere"}
    with pytest.raises(ValueError, match=rf"^{place}: model = .* give a sequence-classification"):
        resolve("tasks", "task", name, options).build().check()
    if name == "custom":
        table = TaskTable(use="mixture", sources={"a": {"use": name, "weight": 1, **options}})
        with pytest.raises(ValueError, match=rf"^\[task.sources.a\]: {place}: model = "):
            build_task(table, None).check()


def test_judges_of_one_process_share_a_model(make):
    folder = str(make(labels=("fine", "rude")))
    judges = [Classifier(folder, label=name) for name in ("fine", "rude")]
    for judge in judges:
        judge.load("cpu")
    fine, rude = (judge._model for judge in judges)
    assert fine._model is rude._model is not None
    model = JudgeModel(folder, fine.auto, "bf16", 100)
    model.load("cpu")
    assert model._model is not fine._model


def test_a_pickled_judge_leaves_its_model_behind(make):
    judge = Classifier(str(make()))
    before = judge(PROMPTS, COMPLETIONS)
    packed = pickle.dumps(judge)
    assert len(packed) < 1000
    assert pickle.loads(packed) == judge
    close(pickle.loads(packed)(PROMPTS, COMPLETIONS), torch.tensor(before))


@pytest.fixture
def settings(words: Path, tmp_path: Path) -> list[str]:
    """A local run of two steps, whose completions are judged."""
    rows = [json.dumps({"prompt": f"{i}+1="}) for i in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    own = ["run.steps=2", "task=custom", f"task.data={tmp_path / 'data.jsonl'}"]
    own += ["task.held_out_size=2", "trainer.batch_size=8", "eval.prompts=2"]
    own += ["reward.isolate=process"]
    return as_settings(config(words, tmp_path / "run", *own))


def test_the_searcher_loads_a_judge_once_and_the_driver_does_not(settings, make, monkeypatch):
    loaded: list[str] = []
    load_model = JudgeModel.load

    def counted(model: JudgeModel, device: str) -> None:
        loaded.append(device)
        load_model(model, device)

    monkeypatch.setattr(JudgeModel, "load", counted)
    reward = f"task.reward={{use='classifier', model='{make()}'}}"
    parts = check(load(None, [*settings, reward, "reward.isolate=none"]))  # to count here
    assert loaded == []
    searcher = parts.search_setup().build("cpu", False)
    assert loaded == ["cpu"]
    for seed in range(2):
        assert len(searcher.search(parts.prompts[:2], seed).groups) == 2
    assert loaded == ["cpu"]


def test_a_run_is_trained_by_a_judge_whose_options_are_in_its_config(settings, make, tmp_path):
    table = {"use": "guard", "model": str(make("causal", chat=True)), "value": "log_probability"}
    pairs = ", ".join(f"{key} = '{value}'" for key, value in table.items())
    chosen = [*settings, f"task.reward={{{pairs}}}", "reward.isolate=none"]
    summary = tba.train(load(None, chosen)).summary
    assert (summary.finished, summary.samples_trained) == (True, 16)
    assert not summary.rejected
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"]["reward"] == table
