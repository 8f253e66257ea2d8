"""Evaluations are divided into pieces: done anywhere, in any order, they give the same scores."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from exact import toy_config

from tba.runtime.pool import Evaluations
from tba.search.evaluate import evaluate_held_out, evaluate_piece, pieces_of
from tba.search.result import Evaluation
from tba.search.searcher import Searcher
from tba.setup.setup import RunSetup, check
from tba.weights import Publication

PIECES = 4
SETTINGS = ("task=toy.Ones", "eval.prompts=10", "eval.prompts_per_task=3", "eval.samples=5")


@pytest.fixture
def parts(toy_model: Path, tmp_path: Path) -> RunSetup:
    return check(toy_config(toy_model, tmp_path, *SETTINGS, "eval.k=[1,5]"))


@pytest.fixture
def searchers(parts: RunSetup) -> list[Searcher]:
    return [parts.search_setup().build("cpu", False) for _ in range(2)]


def scores(evaluation: Evaluation) -> dict[str, float]:
    return {name: value for name, value in evaluation.scores.items() if name != "seconds"}


def test_scores_do_not_depend_on_who_does_which_piece(parts, searchers):
    """One is put back, and two evaluations are under way at once."""
    setup = parts.search_setup()
    assert len(pieces_of(setup)) == PIECES
    whole = evaluate_held_out(searchers[0])
    assert len(whole.examples) == 8
    evaluations = Evaluations(setup)
    evaluations.request(Publication(7, None), 8)
    evaluations.request(Publication(9, None), 10)
    taken = []
    while piece := evaluations.take():
        taken.append(piece)
    assert [(p.evaluation.weights.version, p.number) for p in taken] == [
        (version, number) for version in (7, 9) for number in range(PIECES)
    ]
    evaluations.put_back(taken.pop(2))
    taken = [*reversed(taken), evaluations.take()]
    for i, piece in enumerate(taken):
        assert len(evaluations.open) == (2 if i < PIECES else 1)
        evaluations.done(piece, evaluate_piece(searchers[i % 2], piece.number))
    newer, older = evaluations.collect()
    assert (newer.version, older.version) == (9, 7)
    assert (newer.requested, older.requested) == (10, 8)
    assert scores(newer) == scores(older) == scores(whole)
    assert newer.examples == older.examples == whole.examples
    assert (evaluations.open, evaluations.take(), evaluations.collect()) == ([], None, [])


def test_a_newer_evaluation_replaces_one_that_has_not_begun(parts):
    """However many are requested, three keep their weights, and each one ends."""
    evaluations = Evaluations(parts.search_setup())

    def request(versions: range) -> list[int]:
        for version in versions:
            evaluations.request(Publication(version, None), version)
        return [evaluation.weights.version for evaluation in evaluations.open]

    assert request(range(1, 6)) == [1, 5]
    taken = [evaluations.take() for _ in range(2 * PIECES)]
    assert [p.evaluation.weights.version for p in taken if p] == [1] * PIECES + [5] * PIECES
    assert request(range(6, 10)) == [1, 5, 9]
    assert evaluations.take() is None  # two are under way
    left_out = evaluations.collect()
    assert [e.version for e in left_out] == [2, 3, 4, 6, 7, 8]
    assert all(not e.scores for e in left_out) and evaluations.left_out == 6
    assert len(evaluations.open) == 3


def test_evaluations_of_one_version_know_the_steps_at_which_they_were_requested(parts, searchers):
    """The first and the third are done, in reverse, and the second is left out before both."""
    evaluations = Evaluations(parts.search_setup())
    for step in (2, 4, 6):
        evaluations.request(Publication(0, None), step)
    taken = [evaluations.take() for _ in range(2 * PIECES)]
    for piece in reversed(taken):
        assert piece is not None
        evaluations.done(piece, evaluate_piece(searchers[0], piece.number))
    ended = [(e.requested, bool(e.scores)) for e in evaluations.collect()]
    assert ended == [(4, False), (6, True), (2, True)]


def test_pieces_have_random_numbers_of_their_own(parts, searchers):
    """Prompts at the same place of two pieces are not sampled with the same numbers."""
    setup = parts.search_setup()
    first = setup.held_out[0]
    same = replace(searchers[0], setup=replace(setup, held_out=(first,) * 6))
    one, other = (evaluate_piece(same, number) for number in (0, 1))
    assert one.tables["greedy"]["length"].tolist() == other.tables["greedy"]["length"].tolist()
    ratios = [piece.tables["sampled"]["log_ratio"].tolist() for piece in (one, other)]
    assert ratios[0] != ratios[1]


def test_the_kl_is_left_out_if_the_reference_changed_between_pieces(parts, searchers):
    trainer = parts.trainer("cpu")
    searchers[1].reference.load_weights(trainer.send(version=3).payload)
    evaluations = Evaluations(parts.search_setup())
    evaluations.request(Publication(7, None), 7)
    while piece := evaluations.take():
        evaluations.done(piece, evaluate_piece(searchers[piece.number == 2], piece.number))
    (evaluation,) = evaluations.collect()
    expected = scores(evaluate_held_out(searchers[0]))
    assert not math.isnan(expected.pop("sampled_log_ratio"))
    assert scores(evaluation) == expected


def test_pieces_of_several_sets_are_joined_by_source(toy_model, tmp_path):
    """In any order; a set has the scores that its task has alone, and other sets do not matter."""
    mixed = (
        "task=mixture", "task.sources.ones={use='toy.Ones',weight=9}",
        "task.sources.toy={use='toy.Toy',weight=1}",
        "eval.prompts=10", "eval.prompts_per_task=3", "eval.k=[1,4]",
    )  # fmt: skip
    more = ("task.sources.more={use='toy.Ones',weight=0,held_out_size=4}",)
    setup = check(toy_config(toy_model, tmp_path, *mixed, *more)).search_setup()
    searcher, evaluations = setup.build("cpu", False), Evaluations(setup)
    assert [(name, first, len(prompts)) for name, first, prompts in pieces_of(setup)] == [
        ("", 0, 3), ("", 3, 3), ("", 6, 3), ("", 9, 1), ("more", 0, 3), ("more", 3, 1),
    ]  # fmt: skip
    evaluations.request(Publication(7, None), 7)
    taken = [evaluations.take() for _ in range(6)]
    for piece in reversed(taken):
        assert piece is not None
        evaluations.done(piece, evaluate_piece(searcher, piece.number))
    (evaluation,) = evaluations.collect()
    assert scores(evaluation) == scores(evaluate_held_out(searcher))
    sets = evaluation.by_set()
    assert list(sets) == ["", "ones", "toy", "more"]
    passes = {name: {"sampled_pass@1", "pass@4"} <= own.keys() for name, own in sets.items()}
    assert passes == {"": False, "ones": True, "toy": False, "more": True}
    whole, ones, toy = (sets[name]["sampled_reward"] for name in ("", "ones", "toy"))
    assert whole == pytest.approx((9 * ones + toy) / 10)
    assert ones != toy
    settings = ("task=toy.Ones", "eval.prompts=4", "eval.k=[1,4]")
    alone = check(toy_config(toy_model, tmp_path, *settings))
    expected = evaluate_held_out(alone.search_setup().build("cpu", False)).scores
    for name in ("greedy_reward", "greedy_pass@1", "greedy_stderr", "greedy_length"):
        assert sets["more"][name] == expected[name]
