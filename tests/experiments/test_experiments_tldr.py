"""The TL;DR experiments: the paper's settings, and that they run, on local stand-ins."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import module_at

import tba
from tba.cli import main
from tba.config.plugins import resolve
from tba.config.schema import Config, load
from tba.tools.study import check_study, read_study

ROOT = Path(__file__).parents[2]
EXPERIMENTS, STUDIES = ROOT / "experiments", ROOT / "studies" / "tldr"
COMPARISONS = ROOT.parent / "shared" / "data" / "tldr" / "tldr_ai_comparisons.jsonl"
GOLD = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
SIZES = {"410m": 256, "1b": 425, "2.8b": 825}
"""Steps of each size; the paper says 256, and 425 to 825 for the larger ones."""


@pytest.fixture
def fakes(letters_model: Path, make_classifier: Callable[..., Path], tmp_path: Path) -> list[str]:
    """Settings that replace model, judges and data by small local ones of the same kind."""
    for split, posts in (("train", 100), ("validation", 4)):
        rows = [
            {
                "subreddit": "a",
                "title": f"{split} {i}",
                "post": "b" * (1 + i % 7),
                "summary": "c" * (1 + i % 7),
            }
            for i in range(1, posts + 1)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    judge = make_classifier(letters_model)
    return [
        f"policy.model={letters_model}", f"task.data={tmp_path}", f"task.proxy.model={judge}",
        f"task.gold.model={judge}", "eval.prompts=4",
        "task.allow_loss=1",  # the tokenizer has no capitals
    ]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_the_settings_are_the_papers(size):
    c = load(EXPERIMENTS / f"tldr_pythia{size}.toml")
    assert c.run.steps == SIZES[size]
    assert c.policy.model == f"mnoukhov/pythia{size}-sft-tldr"
    assert c.task.options == {
        "data": "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144",
        "proxy": {"use": "classifier", "model": f"mnoukhov/pythia{size}-rm-tldr6.9b"},
        "gold": {"use": "classifier", "model": GOLD},
        "eos": "<|endoftext|>",
        "missing_eos_reward": -1.0,
    }
    s, t, r = c.sampling, c.trainer, c.replay
    assert (s.samples, s.temperature, s.top_p, s.max_tokens) == (20, 0.7, 1.0, 128)
    assert (t.batch_size, t.group_size, t.groups) == (8 * 20, 20, 8)
    assert (t.learning_rate, t.schedule, t.warmup_steps) == (3e-6, "linear", 0)
    assert (t.betas, t.weight_decay, t.max_grad_norm) == ((0.9, 0.999), 0.0, float("inf"))
    assert (c.runtime.publish_every, c.runtime.searchers, c.runtime.lag) == (10, 3, None)
    assert c.runtime.max_reuse == float("inf")
    assert (r.per_prompt, r.first_fill * s.samples) == (100, 10_000)
    strategy = {"use": "mixture", "recent": 0.5, "reward": 1.0, "temperature": 1.0, "window": 10}
    assert c.strategy.model_dump() == strategy
    e = c.eval
    assert (e.samples, e.temperature, e.prompts) == (1, 0.01, 6447)


@pytest.mark.parametrize("size", SIZES)
def test_beta_is_cut_at_the_32nd_step(size):
    objective = load(EXPERIMENTS / f"tldr_pythia{size}.toml").objective
    plugin = resolve("objectives", "objective", objective.use, objective.options)
    betas = [plugin.at(step).beta for step in range(256)]
    assert (objective.use, betas[0], set(betas[31:])) == ("tb", 1.0, {0.05})
    assert betas[1] == pytest.approx(1.0 - 0.95 / 128)
    assert betas[30] == pytest.approx(0.7773, abs=1e-4)


@pytest.mark.parametrize("name", [*(f"tldr_pythia{size}" for size in SIZES), "tldr_small"])
def test_the_experiment_passes_a_dry_run(name, fakes, monkeypatch, capsys):
    """tools/test_dry_run.py loads a judge in a process of its own, which imports torch."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = [*fakes, "--dry-run", "reward.isolate=none"]
    monkeypatch.setattr(sys, "argv", ["tba", "train", str(EXPERIMENTS / f"{name}.toml"), *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    out, _ = capsys.readouterr()
    assert ended.value.code == 0
    assert out.endswith(
        "config OK (dry run): 100 training prompts, evaluating 4 of 4 held-out prompts\n"
    )


def test_the_study_compares_the_papers_objectives(fakes):
    """On the settings of each size; the baselines on policy and at a lag of 15."""
    for size in SIZES:
        base = f"study.base=../../experiments/tldr_pythia{size}.toml"
        study = read_study(STUDIES / "study.toml", [base, *fakes])
        runs = [_run(config) for config in check_study(study)]
        betas = {"online_dpo": 0.1, "ppo": 0.05, "rloo": 0.05}
        late = [(use, b, lag, 1, "recent", 0) for lag in (0, 15) for use, b in betas.items()]
        cut = {"start": 1.0, "end": 0.05, "steps": 128, "cut_step": 31, "cut_to": 0.05}
        assert runs == [("tb", cut, None, 10, "mixture", 500), *late]
        assert study.table.metric == "sampled_win_rate"


def _run(c: Config) -> tuple[Any, ...]:
    assert (c.trainer.batch_size, c.sampling.samples, c.trainer.learning_rate) == (160, 20, 3e-6)
    r, o = c.runtime, c.objective
    return o.use, o.options["beta"], r.lag, r.publish_every, c.strategy.use, c.replay.first_fill


def test_the_small_study_has_two_points(fakes):
    configs = check_study(read_study(STUDIES / "small.toml", fakes))
    assert [c.objective.use for c in configs] == ["online_dpo", "tb"]


@pytest.mark.parametrize("objective", ["tb", "online_dpo"])
def test_the_small_variant_runs(objective, fakes, tmp_path):
    settings = [
        *fakes, f"objective={objective}", f"run.folder={tmp_path / 'run'}", "run.steps=2",
        "runtime.use=local", "reward.isolate=none", "trainer.batch_size=8",
        "trainer.group_size=4", "sampling.samples=4", "sampling.max_tokens=6",
        "trainer.warmup_steps=0", "log.console=off", "log.report_to=[]",
    ]  # fmt: skip
    summary = tba.train(load(EXPERIMENTS / "tldr_small.toml", settings)).summary
    assert (summary.finished, summary.steps, summary.rejected) == (True, 2, {})
    for scores in (summary.first, summary.last):
        for mode in ("greedy", "sampled"):
            assert 0 <= scores[f"{mode}_win_rate"] <= 1 and scores[f"{mode}_win_rate_rejected"] == 0
            assert scores[f"{mode}_perplexity"] > scores[f"{mode}_perplexity_with_prompt"] > 1
        # of a cut summary: -1; the logits of a random judge are small
        assert -1 <= scores["sampled_reward"] < -0.5
    assert summary.first["sampled_finished"] < 1  # a random model seldom ends in six tokens


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_at(ROOT / "scripts" / "train_judges.py")


def comparison(i: int, winner: str) -> dict[str, Any]:
    texts = {"subreddit": "a", "title": "b", "post": f"post {i}"}
    return {"id": f"t{i}", **texts, "reference": " ours ", "response": "theirs", "winner": winner}


def test_posts_are_divided_and_ties_are_dropped(script):
    winners = ("reference", "response", "tie")
    rows = [comparison(i // 2, winners[i % 3]) for i in range(1000)]  # two of each post
    parts = script.divide(rows, seed=0)
    posts = {name: {row["id"] for row in own} for name, own in parts.items()}
    assert {name: len(own) for name, own in posts.items()} == script.PARTS
    assert len(set.union(*posts.values())) == 500  # no post is in two parts
    assert sum(map(len, parts.values())) == 1000
    assert script.divide(rows, seed=0) == parts != script.divide(rows, seed=1)
    assert len(script.posts_of(parts["train"])) == 150
    query = "SUBREDDIT: r/a\n\nTITLE: b\n\nPOST: post 7\n\nTL;DR:"
    first = {"chosen": f"{query} ours", "rejected": f"{query} theirs"}
    second = {"chosen": f"{query} theirs", "rejected": f"{query} ours"}
    assert script.pairs([comparison(7, winner) for winner in winners]) == [first, second]
    with pytest.raises(ValueError, match="499 posts are too few: 500 are needed"):
        script.divide(rows[:998], seed=0)


@pytest.mark.skipif(
    not COMPARISONS.is_file(), reason="needs the comparisons in ../shared/data/tldr"
)
def test_the_comparisons_at_hand_can_be_divided(script):
    rows = [json.loads(line) for line in COMPARISONS.read_text().split("\n") if line]
    parts = script.divide(rows, seed=0)
    assert {name: len(own) for name, own in parts.items()} == script.PARTS
    assert sum(len(script.pairs(own)) for own in parts.values()) == 354
