"""Generated questions: held-out ones are never trained on, and two kinds of scorers."""

import json
import time
from ast import literal_eval
from typing import Any

import pytest
from build import config

from tba.config.plugins import resolve
from tba.config.schema import Config
from tba.prompt import Answer, Prompt
from tba.runs.summary import Tracker
from tba.search.result import SearchStats
from tba.setup.setup import check
from tba.tasks.reasoning_gym import ReasoningGym

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
SMALL: dict[str, Any] = {"generator": "chain_sum", "options": TWO_TERMS, "size": 200}


@pytest.fixture(autouse=True)
def needs_reasoning_gym(request: pytest.FixtureRequest) -> None:
    if "without_it" not in request.node.name:
        pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


def task(**options: Any) -> ReasoningGym:
    built: ReasoningGym = resolve(
        "tasks", "task", "reasoning_gym", {**SMALL, "held_out_size": 40, **options}
    ).build()
    return built


def answer_of(prompt: Prompt) -> str:
    answer: str = literal_eval(prompt.columns["entry"])["answer"]
    return answer


def rewards(gym: ReasoningGym, prompt: Prompt, *texts: str) -> list[float | None]:
    return gym.score(prompt, [Answer(text, finished=True) for text in texts])


def test_held_out_questions_are_not_trained_on(caplog):
    """Half of all questions have one digit, of which there are 200: some are left out."""
    task = {"use": "reasoning_gym", **SMALL, "size": 1000, "held_out_size": 40, "allow_loss": 1}
    sampling = {"samples": 20, "max_tokens": 8}
    data = check(Config(task=task, sampling=sampling, policy={"model": "bundled:arithmetic"}))
    assert "training prompts are also held out, and not trained on" in caplog.text
    held_out = [p.text for p in data.held_out]
    train = [p.text for p in data.prompts]
    assert len(held_out) == 40
    assert not set(held_out) & set(train)
    assert 850 < len(train) < 960
    assert len(set(train)) < len(train)  # as often as the generator makes them


def test_an_answer_may_be_exact_or_scored_by_the_generator():
    own, exact = task(), task(scoring="exact")
    prompt = own.prompts()[0]
    right = answer_of(prompt)
    texts = (right, f" {right}.", f"{right}\nor 3", f"so {right}", f"{right}0", f"\n{right}", "")
    assert rewards(exact, prompt, *texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [s == 1.0 for s in rewards(own, prompt, *texts)] == [
        True,
        True,
        *[False] * 3,
        True,
        False,
    ]
    assert own.pass_reward == 1.0


def test_only_what_is_tagged_is_scored():
    gym = task(answer_tag="answer")
    prompt = gym.prompts()[0]
    right = answer_of(prompt)
    texts = (f"9 <answer> {right}\n</answer>", f"<answer>x</answer><answer>{right}</answer>", right)
    assert rewards(gym, prompt, *texts) == [1.0, 1.0, 0.0]
    began = time.process_time()
    texts = (f"<answer>no, <answer>{right}</answer>", "<answer>" * 20_000)
    assert rewards(gym, prompt, *texts) == [1.0, 0.0]
    assert time.process_time() - began < 5


@pytest.mark.parametrize("options", [{}, {"answer_tag": "answer"}, {"scoring": "exact"}])
def test_the_generators_own_answer_is_right(options):
    gym = task(**options)
    prompt = gym.prompts()[0]
    right = gym.right_answer(prompt)
    assert right is not None and rewards(gym, prompt, right) == [1.0]


@pytest.mark.parametrize(
    ("generator", "unreadable"),
    [
        ("prime_factorization", "It is 2."), ("prime_factorization", "9" * 5000),
        ("game_of_life", "{}"), ("boxnet", "[1]"), ("boxnet", "null"), ("coin_flip", "1e999"),
    ],
)  # fmt: skip
def test_what_a_scorer_cannot_read_is_wrong_and_counted(generator, unreadable):
    gym = task(generator=generator, options={}, held_out_size=1, size=3)
    (prompt,) = gym.held_out()
    right = gym.right_answer(prompt) or "[]"
    stats = SearchStats()
    stats.itemize(scores := gym.score(prompt, [Answer(t, True) for t in (unreadable, right)]))
    assert scores[0] == 0.0 < scores[1]
    assert Tracker().scored(stats) == {"scorer/unreadable": 0.5}


@pytest.mark.parametrize("generator", ["gcd", "syllogism", "binary_matrix", "zebra_puzzles"])
def test_an_answer_is_stripped_as_its_scorer_expects(generator):
    """Without a tag, too, where most answers begin with a space."""
    gym = task(generator=generator, options={}, held_out_size=1, size=3)
    (prompt,) = gym.held_out()
    assert rewards(gym, prompt, f" {answer_of(prompt)}\n") == [1.0]


@pytest.mark.parametrize("generator", ["rearc", "list_functions", "word_ladder", "knights_knaves"])
def test_a_prompt_brings_what_its_scorer_needs(generator):
    """Tuples, numpy scalars, and questions that another process would make differently."""
    gym = task(generator=generator, options={}, held_out_size=1, size=3)
    other = task(generator=generator, options={}, held_out_size=1, size=3, seed=5)
    (prompt,) = gym.held_out()
    as_stored = Prompt(**json.loads(json.dumps(vars(prompt))))
    assert rewards(other, as_stored, answer_of(prompt)) == [1.0]


def test_an_exact_answer_has_all_lines():
    gym = task(generator="rotate_matrix", options={}, held_out_size=1, size=3, scoring="exact")
    prompt = gym.prompts()[0]
    right = answer_of(prompt)
    first, _, rest = right.partition("\n")
    assert rest
    assert rewards(gym, prompt, f"{right}\nThat is all.", first, f"{first}\n9") == [1.0, 0.0, 0.0]


def test_the_task_runs(letters_model, tmp_path):
    from tba.open import run

    settings = ["task=reasoning_gym", "task.generator=chain_sum", "task.size=60", "run.steps=2"]
    settings += ["task.options.max_terms=2", "task.held_out_size=5", "task.scoring=exact"]
    summary = run(config(letters_model, tmp_path, *settings))
    assert summary.finished and not summary.rejected
    assert "greedy_pass@1" in summary.last


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "generator": (
        {"generator": "chain_sums"},
        "task.generator = 'chain_sums' with task.options = {",
    ),
    "option": ({"options": {"max_digit": 2}}, "TypeError("),
    "value": (
        {"options": {"min_digits": 3, "max_digits": 2}},
        "task.options = {'min_digits': 3, 'max_digits': 2}: AssertionError(",
    ),
    "type": ({"options": {"max_digits": "two"}}, "task.options = {'max_digits': 'two'}: "),
    "size": ({"options": {"size": 9}}, "multiple values for keyword argument 'size'"),
    "template": ({"prompt": "Solve this:"}, "task.prompt = 'Solve this:' must contain a column"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_at_once(case):
    options, told = WRONG[case]
    with pytest.raises(ValueError) as error:
        task(**options).prompts()
    assert told in str(error.value)


def test_questions_without_one_right_answer_are_not_exact():
    options = {"options": {}, "scoring": "exact", "size": 5, "held_out_size": 1}
    with pytest.raises(ValueError, match="has questions without a single right answer"):
        task(generator="graph_color", **options).prompts()


def test_without_it_the_pip_command_is_told(monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr("tba.tasks.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Reasoning Gym: pip install reasoning-gym"):
        check(config(tiny_model, tmp_path, "task=reasoning_gym", "task.generator=chain_sum"))
