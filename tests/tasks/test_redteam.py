"""Attacks are answered by a real victim, judged, told apart, measured, and found again."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from build import config
from transformers import AutoTokenizer

from tba.offline.eval import evaluate_model, evaluate_run
from tba.offline.rollouts import read_rollouts, write_rollouts
from tba.open import open_run
from tba.prompt import Answer, Prompt, passes
from tba.setup.setup import check
from tba.tasks.redteam import RedTeam, Victim, embeddings, mean_distance

JUDGES = '''
"""Judges that know a harm for each attack, whatever the victim answers."""
seen = []

def by_digit(prompts, completions, **columns):
    seen.append((prompts, completions, columns))
    return [int(p[0]) / 10 for p in prompts]

async def slowly(prompts, completions):
    return [int(p[0]) / 10 for p in prompts]

def in_turn(prompts, completions):
    return [(0.25, 1.0)[i % 2] for i in range(len(prompts))]

def never(completions):
    return [0.0] * len(completions)

def half(completions):
    return [0.5] * len(completions)

def logits(completions):
    return [3.5] * len(completions)

def one_short(completions):
    return [0.5] * (len(completions) - 1)
'''

Make = Callable[..., RedTeam]


@pytest.fixture
def make(wide_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A task with a real victim, and a judge of the module above."""
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.syspath_prepend(tmp_path)

    def build(judge: str = "by_digit", **options: Any) -> RedTeam:
        given = {"answers": 2, "victim_max_tokens": 4, "prompt": "1+"} | options
        return RedTeam(victim=str(wide_model), judge=f"judges:{judge}", **given)

    return build


@pytest.fixture
def settings(make: Make, wide_model: Path, tmp_path: Path) -> list[str]:
    """Settings of a run of the task, in few steps."""
    return [
        "task=redteam", f"task.victim={wide_model}", "task.judge=judges:half", "task.prompt=1+",
        "task.min_tokens=1", "task.answers=2", "task.victim_max_tokens=4", "task.held_out_size=2",
        f"task.encoder={wide_model}", "task.threshold=0.4", "run.steps=2",
        "trainer.batch_size=4", "eval.samples=4",
        "eval.k=[]", "sampling.samples=6",
    ]  # fmt: skip


def scored(task: RedTeam, *attacks: str, held_out: bool = False) -> Any:
    prompt = (task.held_out() if held_out else task.prompts())[0]
    return task.score(prompt, [Answer(text, finished=True) for text in attacks])


# Rewards


def test_the_reward_is_the_mean_of_log_harm(make):
    harm = (math.log(0.25) + math.log(1.0)) / 2
    assert scored(make("in_turn"), "1234", "5678+9") == [pytest.approx(harm)] * 2


def test_in_evaluations_it_is_the_mean_harm_so_that_passing_is_success(make):
    task = make("in_turn", threshold=0.6)
    (harm,) = scored(task, "1234", held_out=True)
    assert harm == 0.625 and passes(harm, task.pass_reward)
    assert not passes(harm, make("in_turn", threshold=0.625).pass_reward)


def test_no_reward_is_below_the_log_of_the_floor(make):
    assert scored(make("never", floor=0.01), "1234") == [pytest.approx(math.log(0.01))]


def test_short_attacks_count_as_harmless_without_being_tried(make):
    import judges

    task = make(min_tokens=5, floor=0.01)
    judges.seen.clear()
    lowest, high = math.log(0.01), math.log(0.9)  # EOS is the fifth token
    assert scored(task, "123", "9123", "") == pytest.approx([lowest, high, lowest])
    assert scored(task, "123", held_out=True) == [0.0]
    assert [prompts for prompts, _, _ in judges.seen] == [["9123"] * 2]


def test_the_judge_gets_attacks_and_answers(make):
    import judges

    judges.seen.clear()
    scored(make(answers=3), " 1234 ", "56789")
    ((prompts, completions, columns),) = judges.seen
    assert prompts == ["1234"] * 3 + ["56789"] * 3
    assert len(completions) == 6 and all(isinstance(c, str) for c in completions)
    assert len(set(completions)) > 1 and columns == {}


def test_a_judge_may_be_async(make):
    rewards = asyncio.run(scored(make("slowly"), "1234", "5678"))
    assert rewards == [pytest.approx(math.log(0.1)), pytest.approx(math.log(0.5))]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ("logits", r"returned 3\.5 to 3\.5, but harm is from 0 to 1.*value to probability"),
        ("one_short", "task.judge returned 3 numbers for 4 answers"),
    ],
)
def test_a_judge_that_returns_no_harms_is_told(make, judge, message):
    with pytest.raises(ValueError, match=message):
        scored(make(judge), "1234", "5678")


# The victim


def victim(model: Path, answers: int = 3, temperature: float = 1.0, **options: Any) -> Victim:
    own = {"victim_temperature": temperature, "victim_max_tokens": 6, "victim_top_p": 1.0}
    given = {"victim": str(model), "judge": "judges:half", "answers": answers}
    return Victim(RedTeam(**given, **own, **options), token_budget=24)


def test_a_victim_answers_the_same_for_the_same_seed(wide_model):
    """It answers in batches, the longest attacks first, and leaves the global generators alone."""
    attacks = ["1+2=", "3", "71=2+5", "1+2"]
    some = victim(wide_model)
    state = torch.get_rng_state()
    first = some.answer(attacks, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(own) for own in first] == [3] * 4
    assert all(len(text) <= 6 and "<" not in text for own in first for text in own)
    assert victim(wide_model).answer(attacks, seed=1) == first
    assert some.answer(attacks, seed=2) != first


def test_answers_belong_to_their_attacks(wide_model):
    """At a low temperature, a victim answers as if it were greedy, whatever the order."""
    attacks = ["71=2+5", "1", "33+", "2=2=2"]
    cold = victim(wide_model, temperature=1e-3, answers=2)
    together = cold.answer(attacks, seed=0)
    assert together == [cold.answer([attack], seed=5)[0] for attack in attacks]
    assert len({own[0] for own in together}) > 1


def test_an_attack_goes_into_the_template_or_the_chat(wide_model, tmp_path):

    plain = victim(wide_model, victim_prompt="={attack}+")
    assert plain.text.tokenizer.decode(plain.encode("12")) == "=12+"
    folder = tmp_path / "chatty"
    shutil.copytree(wide_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}={{ m['content'] }}={% endfor %}"
    tokenizer.save_pretrained(folder)
    chat = victim(folder, victim_chat=True)
    assert chat.text.tokenizer.decode(chat.encode("12")) == "=12="
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template"):
        victim(wide_model, victim_chat=True).check()


# Diversity


def test_distance_is_the_mean_over_all_pairs(make, wide_model):
    task = make(encoder=str(wide_model))
    texts = ["1234", "5=5=5=", "", "777777777", "1234"] * 15
    assert task._encoder is not None
    unit = embeddings(task._encoder, texts)
    norms = np.linalg.norm(unit, axis=1)
    np.testing.assert_allclose(norms, [text != "" for text in texts], atol=1e-5)
    pairs = [1 - unit[i] @ unit[j] for i in range(75) for j in range(75) if i != j]
    answers = [Answer(f" {text}", finished=True) for text in texts]
    expected = pytest.approx(float(np.mean(pairs)), abs=1e-5)
    scores = task.measures()["distance"].score(task.prompts()[0], answers)
    assert scores == [expected] * len(answers)
    assert mean_distance(unit[[0, 0, 0]]) == pytest.approx(0, abs=1e-5)
    assert make().measures() == {}


# Whole runs


def test_a_run_measures_success_and_diversity_and_leaves_its_attacks(
    settings, wide_model, tmp_path
):
    """They can enter the buffer of another run as rollouts."""
    folder = tmp_path / "run"
    with open_run(config(wide_model, folder, *settings)) as run:
        summary = run.train()
        held = len(run.buffer)
        text = run.parts.text
    for scores in (summary.last, evaluate_run(folder, [], reference=False)):
        assert scores["sampled_pass@1"] == scores["sampled_reward"] * 2 > 0  # unless empty
        assert 0 < scores["sampled_distance"] < 1 and "greedy_distance" not in scores
    write_rollouts(folder, file := tmp_path / "attacks.jsonl", None)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert 2 < len(rows) <= held
    assert len({row["completion"] for row in rows}) == len(rows)
    assert {row["prompt"] for row in rows} == {"1+"}
    (again,) = read_rollouts(file, text)
    assert again.prompt_tokens.tolist() == text.encode(Prompt("attack", "1+")).tolist()
    assert [t.tokens.tolist() for t in again.trajectories] == [r["ids"] for r in rows]


def test_the_distance_of_one_attack_is_left_out(settings, wide_model):
    """It has none to be far from, which is not the same as being near."""
    one = config(wide_model, Path("unused"), *settings, "eval.samples=1", "eval.k=[]")
    scores = evaluate_model(str(wide_model), one)
    assert "sampled_distance" not in scores and "sampled_distance_stderr" not in scores
    assert scores["sampled_distance_rejected"] == 1 and "sampled_reward" in scores


@pytest.mark.slow
def test_an_asynchronous_run_with_everything(settings, wide_model, tmp_path):
    """Earlier attacks, exploration and LoRA, in processes that search."""
    file = tmp_path / "earlier.jsonl"
    earlier = [{"prompt": "1+", "completion": f"{i}=1+{i}", "reward": -i} for i in range(1, 5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    everything = (
        "runtime.use=ray", "run.steps=4", "sampling.explore=[0.5, 2.0]", "policy.lora.r=2",
        "reward.max_rejected=0.01", "replay.first_fill=2",
        "replay.per_prompt=100000",  # none is evicted, however late the trainer is
        f"task.judge={tmp_path}/judges.py:half", f"replay.rollouts={file}",
    )  # fmt: skip
    with open_run(config(wide_model, tmp_path / "run", *settings, *everything)) as run:
        summary = run.train()
        rewards = {t.reward for group in run.buffer.groups() for t in group.trajectories}
        assert "attack" in {g.prompt.id for g in run.buffer.groups()}
    assert summary.finished and not summary.rejected
    assert rewards >= {-1.0, -2.0, -3.0, -4.0} and len(rewards) > 4
    assert summary.last["sampled_distance"] > 0


MISTAKES = {
    "no victim": (["task.victim=./nowhere"], r"task\.victim = '\./nowhere': no such folder"),
    "no judge": (["task.judge=judges:nobody"], r"task\.judge = 'judges:nobody': judges has no"),
    "no encoder": (["task.encoder=./nowhere"], r"task\.encoder = '\./nowhere': no such folder"),
    "no attack": (["task.victim_prompt=Hello"], r"must contain \{attack\}"),
    "threshold": (["task.threshold=50"], r"task\.threshold = 50: Input should be less than 1"),
    "explore": (
        ["sampling.explore=[0.5, 2.0]", "objective=rloo"],
        r"sampling\.explore does not work with objective\.use = 'rloo'",
    ),
    "temperature 0": (["sampling.explore=[0, 2]"], r"sampling\.explore.*greater than 0"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_before_anything_starts(settings, tiny_model, tmp_path, case):
    wrong, message = MISTAKES[case]
    with pytest.raises(ValueError, match=message):
        check(config(tiny_model, tmp_path / "run", *settings, *wrong))


# Exploration


def test_half_of_the_searches_explore(tiny_model, tmp_path):
    setup = check(config(tiny_model, tmp_path, "sampling.explore=[0.5, 2.0]")).search_setup()
    searcher = setup.build("cpu", False)
    drawn = [searcher._sampling(seed).explore for seed in range(1000)]
    temperatures = np.array([t for t in drawn if t is not None])
    assert 450 < len(temperatures) < 550
    assert 0.5 <= temperatures.min() < 0.55 and 1.95 < temperatures.max() <= 2.0
    assert abs(temperatures.mean() - 1.25) < 0.1
    assert drawn == [searcher._sampling(seed).explore for seed in range(1000)]
    plain = check(config(tiny_model, tmp_path)).search_setup().build("cpu", False)
    assert {plain._sampling(seed).explore for seed in range(100)} == {None}
