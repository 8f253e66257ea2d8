"""No prompt is lost, however prompts are chosen; and each selection chooses as it says."""

import json
import logging
from collections import Counter
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from build import PROMPTS, answered, config, ids, resumes_exactly, stream_of, trajectory

from tba.cli import _config
from tba.open import run
from tba.prompt import Prompt
from tba.runs import checkpoint
from tba.search.prompts import PromptStream
from tba.selections import Selection
from tba.selections.cyclic import Cyclic
from tba.selections.difficulty import Difficulty
from tba.selections.log_z import LogZ
from tba.selections.uniform import Uniform
from tba.setup.setup import check
from tba.types import Group

# The stream


def test_what_came_back_unanswered_goes_out_first():
    stream = stream_of(Cyclic)
    first, second = stream.take(2), stream.take(3)
    stream.done(second, [])
    stream.put_back(first)
    assert ids(stream.take(2)) == ids(first)


@pytest.mark.parametrize("cls", [Cyclic, Uniform, Difficulty])
def test_a_resumed_stream_goes_on_with_what_was_outstanding(cls):
    stream = stream_of(cls, seed=3)
    stream.done(prompts := stream.take(4), [answered(p, right=2, answers=3) for p in prompts])
    in_flight, unanswered = stream.take(2), stream.take(1)
    stream.put_back(unanswered)
    resumed = stream_of(cls, seed=3)
    resumed.seek(json.loads(json.dumps(stream.cursor())))
    assert sorted(ids(resumed.take(3))) == sorted(ids([*in_flight, *unanswered]))
    stream.put_back(in_flight)
    stream.take(3)
    assert [ids(resumed.take(3)) for _ in range(3)] == [ids(stream.take(3)) for _ in range(3)]


def test_a_prompt_may_be_out_several_times():
    stream = stream_of(Uniform)
    out = [p for _ in range(4) for p in stream.take(5)]  # 20 of 7
    stream.put_back(out[:5])
    stream.done(out[5:12], [])
    assert Counter(stream.cursor()["outstanding"]) == Counter(ids([*out[:5], *out[12:]]))
    again = stream.take(5)
    assert ids(again) == ids(out[:5])
    stream.done([*again, *out[12:]], [])
    assert stream.cursor()["outstanding"] == []


def test_columns_that_cannot_be_stored_are_refused():
    prompts = [Prompt("a", "1", {"n": np.int64(3)})]
    with pytest.raises(ValueError, match=r"not plain JSON .*int64"):
        PromptStream(prompts, Cyclic(prompts, 0, None)).cursor()


@pytest.mark.parametrize("chosen", [PROMPTS[:1], PROMPTS[:3], [Prompt("other", "x")] * 2])
def test_a_selection_must_choose_as_many_of_its_prompts_as_it_is_asked_for(chosen, monkeypatch):
    monkeypatch.setattr(Cyclic, "choose", lambda self, count: chosen)
    with pytest.raises(ValueError, match=rf"Cyclic: choose\(2\) returned {len(chosen)} prompts"):
        stream_of(Cyclic).take(2)


def test_the_state_of_a_selection_is_copied_as_json(monkeypatch):
    """It is written while the selection goes on, and may hold numbers of NumPy."""
    state = {"chosen": np.int64(3), "learned": []}
    monkeypatch.setattr(Cyclic, "state", lambda self: state)
    stream = stream_of(Cyclic)
    cursor = stream.cursor()
    state["learned"].append("p1")
    assert json.dumps(cursor["state"]) == '{"chosen": 3, "learned": []}'
    state["chosen"] = {1, 2}
    with pytest.raises(ValueError, match="Cyclic: its state is not plain JSON"):
        stream.cursor()


def test_difficulty_learns_from_tasks_in_flight_that_have_prompts_in_common():
    """Few prompts, several tasks in flight, answered in another order; then a resume."""
    prompts = PROMPTS[:3]
    stream = PromptStream(prompts, Difficulty(prompts, 0, 1.0))
    tasks = [stream.take(2) for _ in range(4)]
    outstanding = stream.cursor()["outstanding"]
    assert len(outstanding) == 8 > len(set(outstanding))
    for task in (tasks[2], tasks[0], tasks[1]):
        stream.done(task, [answered(p, right=1, answers=4) for p in task])
    cursor = stream.cursor()
    answers = Counter(ids([*tasks[0], *tasks[1], *tasks[2]]))
    assert cursor["outstanding"] == ids(tasks[3])
    assert cursor["state"]["posterior"].keys() == answers.keys()
    resumed = PromptStream(prompts, Difficulty(prompts, 0, 1.0))
    resumed.seek(json.loads(json.dumps(cursor)))
    assert ids(resumed.take(2)) == ids(tasks[3])
    assert resumed.cursor()["state"] == cursor["state"]


def test_another_data_set_is_noticed():
    stream = stream_of(Cyclic)
    stream.take(7)
    reworded = [replace(PROMPTS[0], text="y"), *PROMPTS[1:]]  # rows keep their numbers as ids
    told = "training prompts have changed since the run began; resume with the data it was"
    for other in (PROMPTS[:3], reworded, PROMPTS[::-1]):
        with pytest.raises(ValueError, match=f"{told} started with"):
            PromptStream(other, Cyclic(other, 0, None)).seek(stream.cursor())


def test_another_selection_starts_from_its_initial_state_with_a_warning(caplog):
    before, after = stream_of(Difficulty), stream_of(Cyclic)
    before.done(before.take(3), [])
    out = before.take(2)
    after.seek(before.cursor())
    assert "selection was tba.selections.difficulty.Difficulty; it is now tba" in caplog.text
    assert "tba.selections.cyclic.Cyclic, which starts from its initial state" in caplog.text
    assert ids(after.take(2)) == ids(out)  # what is out is not forgotten
    assert ids(after.take(7)) == ids(stream_of(Cyclic).take(7))


def test_the_same_selection_with_other_options_goes_on(caplog):
    before, after = stream_of(Difficulty), stream_of(Difficulty, target=0.3)
    before.done(prompts := before.take(2), [answered(p, 1, 4) for p in prompts])
    after.seek(before.cursor())
    assert after.cursor()["state"] == before.cursor()["state"]
    assert not caplog.records


# The selections


def test_each_epoch_has_every_prompt_once_in_its_own_order():
    stream = stream_of(Cyclic)
    chosen = [p for count in (2, 5, 3, 4, 7) for p in ids(stream.take(count))]
    epochs = [chosen[:7], chosen[7:14], chosen[14:]]
    assert all(sorted(e) == sorted(ids(PROMPTS)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_uniform_is_uniform():
    """Single prompts and pairs in a row are uniform, within five standard errors."""
    selection = Uniform(PROMPTS, 0, None)
    chosen = [p for _ in range(2500) for p in ids(selection.choose(4))]
    pairs = Counter(zip(chosen[::2], chosen[1::2], strict=True))
    for counts, cells in ((Counter(chosen), 7), (pairs, 49)):
        total = counts.total()
        assert len(counts) == cells
        assert all(abs(n - total / cells) < 5 * np.sqrt(total / cells) for n in counts.values())


def explore(selection: Selection, rates: dict[str, float], rounds: int) -> Counter[str]:
    """What is chosen, 4 at a time, when each prompt is answered 8 times at its rate."""
    rng, chosen = np.random.default_rng(0), Counter[str]()
    for _ in range(rounds):
        prompts = selection.choose(4)
        chosen.update(ids(prompts))
        for p in prompts:
            selection.learn(answered(p, int(rng.binomial(8, rates[p.id])), 8))
    return chosen


MANY = [Prompt(f"m{i}", "x") for i in range(90)]


def rates(hard: int, middle: int) -> dict[str, float]:
    """The first prompts are never answered, the next half the time, the others always."""
    return {
        p.id: 0.0 if i < hard else 0.5 if i < hard + middle else 1.0 for i, p in enumerate(MANY)
    }


def share(chosen: Counter[str], rate: dict[str, float]) -> float:
    return sum(n for p, n in chosen.items() if rate[p] == 0.5) / chosen.total()


def test_difficulty_finds_the_prompts_in_the_middle():
    """A third of the prompts: by chance they would be a third of the choices."""
    selection, rate = Difficulty(MANY, 0, 1.0), rates(hard=30, middle=30)
    explore(selection, rate, rounds=60)  # to know them
    assert share(explore(selection, rate, rounds=100), rate) > 0.9


@pytest.mark.parametrize(
    ("cls", "options", "target"),
    [(Difficulty, {"forgetting": 0.9}, t) for t in (0.2, 0.8)]
    + [(LogZ, {"width": 0.1}, t) for t in (0.3, 0.7)],
)
def test_a_selection_aims_at_its_target(cls, options, target):
    rate = {p.id: i / 89 for i, p in enumerate(MANY)}
    selection = cls(MANY, 0, 1.0, target=target, **options)
    explore(selection, rate, rounds=200)
    chosen = explore(selection, rate, rounds=100)
    mean_rate = sum(rate[p] * n for p, n in chosen.items()) / chosen.total()
    assert mean_rate == pytest.approx(target, abs=0.07)


def test_difficulty_follows_a_policy_that_learns_because_it_forgets():
    """Hard prompts become half right and those become easy; without forgetting it is too slow."""
    before, after = rates(hard=45, middle=45), rates(hard=0, middle=45)
    found = {}
    for forgetting in (0.5, 1.0):
        selection = Difficulty(MANY, 0, 1.0, forgetting=forgetting)
        explore(selection, before, rounds=400)
        explore(selection, after, rounds=100)
        found[forgetting] = share(explore(selection, after, rounds=50), after)
    assert found[0.5] > 0.9
    assert found[1.0] < 0.5


def test_difficulty_is_the_papers_update():
    selection = Difficulty(PROMPTS, 0, 0.5, forgetting=0.75)
    selection.learn(answered(PROMPTS[1], right=3, answers=5))
    selection.learn(answered(PROMPTS[1], right=1, answers=5))
    first = (1 + 3, 1 + 2)
    posterior = [0.75 * first[0] + 0.25 + 1, 0.75 * first[1] + 0.25 + 4]
    assert selection.state()["posterior"] == {"p1": posterior}  # and no other


def test_difficulty_takes_none_twice_unless_there_are_too_few():
    selection = Difficulty(PROMPTS, 0, 1.0)
    for _ in range(50):
        assert len(set(ids(selection.choose(6)))) == 6
        assert set(Counter(ids(selection.choose(14))).values()) == {2}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["task=toy.Toy"], "the task has no pass_reward"),
        (["selection.target=1.5"], "selection.target = 1.5: Input should be less"),
        (["selection.forgetting=-1"], "selection.forgetting = -1: Input should be"),
        (["selection.candidates=4"], "no such option: it was removed; the pool is 8 times"),
        (["selection.pass_reward=1"], "no such option"),
    ],
)
def test_difficulty_that_cannot_work_is_told_before_anything_starts(
    tiny_model, tmp_path, settings, told
):
    with pytest.raises(ValueError, match=told):
        check(config(tiny_model, tmp_path, "selection=difficulty", *settings))


def with_logp(group: Group, behavior: float, ref: float) -> Group:
    """The same group with log-probs of the policy that sampled and of the reference."""
    logps = {"behavior_logp": np.float32([behavior]), "ref_logp": np.float32([ref])}
    return replace(group, trajectories=tuple(replace(t, **logps) for t in group.trajectories))


def test_prompts_that_are_equally_far_from_the_target_are_drawn_alike():
    selection = LogZ(PROMPTS, 0, None)
    for prompt in PROMPTS:
        selection.learn(replace(answered(prompt, 0, 1), trajectories=(trajectory(1, reward=1e12),)))
    assert len(set(ids([selection.choose(1)[0] for _ in range(100)]))) == len(PROMPTS)


def test_log_z_is_the_mean_reward_less_the_price_of_the_divergence():
    """.4, and then .8 - .5 (3 - 2), of which each counts half; no other prompt is known."""
    selection = LogZ(PROMPTS, 0, None, beta=0.5)
    selection.learn(answered(PROMPTS[1], right=2, answers=5))
    assert selection.state()["estimates"] == {"p1": pytest.approx(0.4)}
    selection.learn(with_logp(answered(PROMPTS[1], right=4, answers=5), -2.0, -3.0))
    assert selection.state()["estimates"] == {"p1": pytest.approx((0.4 + 0.3) / 2)}


@pytest.mark.parametrize("wrong", [nan, inf, -inf])
def test_log_z_forgets_an_estimate_that_is_not_finite(wrong):
    """A reference in bf16 may give -inf: its group is dropped later, and the prompt stays known."""
    selection = LogZ(PROMPTS, 0, None)
    selection.learn(answered(PROMPTS[1], right=2, answers=5))
    selection.learn(with_logp(answered(PROMPTS[1], right=2, answers=5), -2.0, wrong))
    assert selection.state()["estimates"] == {"p1": pytest.approx(0.4)}


def test_log_z_has_no_noise_at_the_target_of_trajectory_balance():
    """log mu = log ref + r / beta - log Z: any group gives beta log Z, however lucky it was."""
    beta, log_z = 0.5, 1.25
    for right in range(5):
        group = answered(PROMPTS[1], right, answers=4)
        moves = [np.float32(t.reward / beta - log_z) for t in group.trajectories]
        pairs = zip(group.trajectories, moves, strict=True)
        at_target = tuple(replace(t, behavior_logp=t.ref_logp + move) for t, move in pairs)
        selection = LogZ(PROMPTS, 0, None, beta=beta)
        selection.learn(replace(group, trajectories=at_target))
        assert selection.state()["estimates"]["p1"] == pytest.approx(beta * log_z)


def test_log_z_finds_the_prompts_in_the_middle():
    """A third of the prompts are most of the choices, and the others still have a chance."""
    selection, rate = LogZ(MANY, 0, 1.0), rates(hard=30, middle=30)
    explore(selection, rate, rounds=60)
    chosen = explore(selection, rate, rounds=200)
    assert share(chosen, rate) > 0.65
    assert len(chosen) > 80


# In a run


@pytest.mark.parametrize("selection", ["difficulty", "log_z"])
def test_a_resumed_run_goes_on_choosing_as_it_would_have(tiny_model, tmp_path, selection):
    resumes_exactly(tiny_model, tmp_path, f"selection={selection}", "task.size=40")
    newest = checkpoint.newest(tmp_path / "part" / "checkpoints")
    state = json.loads((newest / "state.json").read_text())["cursor"]["state"]
    assert state["chosen"] == 9 * 3  # first fill and after each step
    known = state["estimates" if selection == "log_z" else "posterior"]
    assert 0 < len(known) <= 27
    if selection == "difficulty":  # prior and four answers
        assert all(alpha + beta >= 2 + 4 for alpha, beta in known.values())


def test_the_selection_can_be_changed_on_resuming(tiny_model, tmp_path, caplog):
    run(config(tiny_model, folder := tmp_path / "run", "run.steps=2"))
    with caplog.at_level(logging.WARNING):
        changed = _config(["selection=difficulty", "run.steps=4"], folder)
        assert run(changed, folder).steps == 4
    assert "starts from its initial state" in caplog.text
