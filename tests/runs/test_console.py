"""The console shows whatever metrics there are, and the end of a run in plain words."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as Screen

from tba.runs import console as module
from tba.runs import terminal
from tba.runs.checkpoint import newest
from tba.runs.console import Console
from tba.runs.folder import CHECKPOINTS, METRICS, check_unused
from tba.runs.summary import Summary
from tba.runs.terminal import Terminal
from tba.search.result import EvaluatedAnswer, Evaluation
from tba.stop import Stop

SCORES = {
    "sampled_pass@1": 0.5, "sampled_stderr": 0.1, "greedy_pass@1": 0.25, "greedy_stderr": 0.2,
    "pass@4": 0.75, "pass@4_stderr": 0.1, "sampled_rejected": 0.125,
}  # fmt: skip
SUMMARY = Summary(
    finished=False,
    steps=7,
    seconds=12.3,
    samples_generated=1234,
    samples_trained=560,
    trainer_wait_fraction=0.125,
    searcher_wait_fraction=0.5,
    lag_mean=1.5,
    lag_max=3.0,
    searcher_restarts=2,
    rejected={"timeout": 3},
    first={},
    last={},
    warnings=["half of the groups have equal rewards"],
)


def test_an_evaluation_is_a_line():
    lines: list[str] = []
    console = Console(9, lines.append)
    console.evaluation(Evaluation(4, SCORES, []))
    rewards = {"sampled_reward": 1.0, "sampled_reward_stderr": 0.5, "greedy_reward": 2.0}
    console.evaluation(Evaluation(5, rewards, []))
    measured = {"sampled_rejected": 0.0, "sampled_win_rate": 0.5, "sampled_win_rate_stderr": 0.25}
    rejected = {"sampled_win_rate_rejected": 0.125, "greedy_win_rate_rejected": 0.5}
    console.evaluation(Evaluation(6, rewards | measured | rejected, []))
    assert lines == [
        "evaluation at step 4: pass@1 sampled 0.500 ± 0.100  greedy 0.250 ± 0.200  pass@4 0.750"
        "  rejected 12.5%",
        "evaluation at step 5: reward sampled 1.000 ± 0.500  greedy 2.000",
        "evaluation at step 6: reward sampled 1.000 ± 0.500  greedy 2.000  win rate 0.500 ± 0.250"
        "  rejected 12.5%",
    ]


def test_the_answer_to_the_first_held_out_prompt_is_shown():
    lines: list[str] = []
    console = Console(9, lines.append)
    for version, rewards in ((0, [1.0, 0.25, None]), (3, [0.5, 0.75, 0.0])):
        pairs = zip("abc", rewards, strict=True)
        examples = [EvaluatedAnswer(prompt, f"at {version}", r) for prompt, r in pairs]
        console.evaluation(Evaluation(version, SCORES, examples))
    samples = [line for line in lines if line.startswith("sample")]
    assert samples == ["sample: 'a' -> 'at 0'  reward 1", "sample: 'a' -> 'at 3'  reward 0.5"]


def test_the_end_of_a_run_names_what_to_type_next(tmp_path):
    lines: list[str] = []
    Console(9, lines.append).end(SUMMARY, tmp_path)
    text = lines[0]
    assert "stopped after 7 steps in 12 s" in text
    assert "1,234 generated, 560 trained on; rejected: 3 timeout" in text
    assert "searchers restarted  2" in text
    assert "warning              half of the groups have equal rewards" in text
    assert f"tba train --resume {tmp_path}" in text and f"tba report {tmp_path}" in text


def test_a_command_to_type_names_a_folder_with_spaces(tmp_path):
    """`rm -r` must not name two folders."""
    folder = tmp_path / "my run"
    lines: list[str] = []
    Console(9, lines.append).end(SUMMARY, folder)
    assert f"tba train --resume '{folder}'" in lines[0] and f"tba report '{folder}'" in lines[0]
    folder.mkdir()
    (folder / METRICS).touch()
    with pytest.raises(ValueError, match=re.escape(f"(`rm -r '{folder}'`)")):
        check_unused(folder)
    with pytest.raises(ValueError, match=re.escape(f"(`rm -r '{folder}'`)")):
        newest(folder / CHECKPOINTS)


@pytest.mark.parametrize(
    "steps, shown",
    [
        ([], []),
        ([0], ["step 0"]),
        ([5], ["step 5"]),
        ([0, 1200], ["step 0", "step 1,200"]),
    ],
)
def test_the_end_of_a_run_shows_each_evaluation_once_at_its_step(tmp_path, steps, shown):
    lines: list[str] = []
    scores = [{**SCORES, "step": float(step)} for step in steps] or [{}]
    ended = replace(SUMMARY, first=scores[0], last=scores[-1])
    Console(9, lines.append).end(ended, tmp_path)
    labels = [line[:14].strip() for line in lines[0].splitlines() if "pass@1" in line]
    assert labels == shown


def test_a_sample_shows_the_end_of_its_prompt():
    lines: list[str] = []
    prompt = f"system\n{'You are helpful. ' * 20}\nuser\nWhat is 2 + 3?\nassistant\n"
    Console(9, lines.append).sample(prompt, "It is 5.", 1.0)
    assert "user What is 2 + 3? assistant' -> 'It is 5.'  reward 1" in lines[0]
    assert lines[0].startswith("sample: '…") and len(lines[0]) < 150


def test_a_sample_sends_no_escape_sequence():
    lines: list[str] = []
    Console(9, lines.append).sample("1+1=", "\x1b]0;title\x07 2\u202e", 1.0)
    assert "2" in lines[0] and lines[0].isprintable()


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_phases_are_lines_before_the_first_step_and_rare_ones_later(clock):
    """New phases are shown at once, other numbers after 10 s, and the same ones after 30 s."""
    lines: list[str] = []
    console = Console(300, lines.append)
    console.phase("loading the model")
    for second in range(100):
        clock.now = 1000.0 + second
        console.phase(f"generating {min(second // 15, 3)}/8 prompts")
    shown = [(1, 15), (2, 30), (3, 45), (3, 75)]
    later = [f"generating {count}/8 prompts, for {seconds} s" for count, seconds in shown]
    assert lines == ["loading the model", "generating 0/8 prompts", *later]
    lines.clear()
    for step in range(1, 60):  # two steps a second
        console.step(step, {"time": step / 2, "reward": 0.5})
        clock.now += 0.5
        console.phase("generating 0/8 prompts")
        console.phase("training")
    assert all(line.startswith("step ") for line in lines)
    clock.now += 40
    console.phase("training")
    assert lines[-1].startswith("training, for ")


def test_a_value_that_is_not_a_number_is_not_shown():
    lines: list[str] = []
    metrics = {"reward": 0.25, "sync/logp_gap": float("nan"), "rewards/format/mean": 0.75}
    Console(300, lines.append).step(1, {"time": 2.0, **metrics, "rewards/format/std": float("nan")})
    assert lines == ["step 1/300  2 s  reward 0.250  format 0.750"]


def test_each_reward_function_has_its_mean_and_standard_deviation():
    lines: list[str] = []
    functions = {"format": (0.75, 0.5), "kl": (-1.0, 0.25)}
    metrics = {"time": 2.0, "reward": 0.25, "reward_std": 9.0, "kl": 0.125}
    for name, (mean, std) in functions.items():
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    Console(300, lines.append).step(1, metrics)
    shown = "reward 0.250  format 0.750 (std 0.500)  kl -1.000 (std 0.250)  kl 0.1250 nats"
    assert lines == [f"step 1/300  2 s  {shown}"]


def test_a_line_has_nothing_that_a_terminal_would_obey(capsys):
    """A program may name its rewards after what the policy has written."""
    Stop().print("step 3  rewards/\x1b[2J 0.500 ± 0.1\n")
    assert capsys.readouterr().out == "step 3  rewards/\\x1b[2J 0.500 ± 0.1\n\n"


@pytest.mark.parametrize("rows, columns", [(24, 80), (40, 120)])
def test_a_terminal_has_a_table_and_one_line_of_progress(clock, monkeypatch, rows, columns):
    """No line is longer than the terminal, and the table at most 78 columns wide."""
    monkeypatch.setattr(terminal, "time", clock)
    screen = Screen(
        file=io.StringIO(), force_terminal=True, width=columns, height=rows, highlight=False
    )
    shown = Terminal(12_000, screen.print, screen)
    assert shown._line().plain == ""
    shown.phase("loading the model")
    clock.now += 3
    assert shown._line().plain == "loading the model …  3 s"
    metrics = {
        "reward": -12.3456, "kl": 1234.5, "entropy": 0.139, "completions/mean_length": 12345.0,
        "completions/clipped_ratio": 1.0, "off_policy/lag_mean": 123.4, "wait/trainer": 0.0031,
        "samples_per_second": 1853.7,
    }  # fmt: skip
    shown.evaluation(Evaluation(0, SCORES, []))
    for step in range(11_000, 11_060):
        shown.phase("training")
        shown.step(step, {"time": 2.0 * step, **metrics})
        clock.now += 2
    progress = "step 11,059/12,000  2 s/step  ETA 31 min  samples/s 1,854  lag 123.4  waits 0.3%"
    assert shown._line().plain == progress and len(progress) == 80
    for second in range(5):  # each is shorter than two seconds
        shown.phase(f"evaluating {8 * second} %")
        clock.now += 1
    assert shown._line().plain == "step 11,059/12,000  evaluating 32 % …  5 s"
    shown.step(12_000, {"time": 2.0 * 12_000, **metrics})
    shown.phase("saving")
    assert shown._line().plain == "step 12,000/12,000  saving …  0 s"
    shown.end(SUMMARY, Path("run"))
    assert shown._line().plain == "ending searchers …  0 s"
    shown.close()
    assert isinstance(screen.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    lines = [line.split("\r")[-1].rstrip() for line in plain.splitlines()]
    assert max(map(len, lines)) <= columns
    table = [line for line in lines if re.match(r" +(step|[\d,]+)  ", line)]
    assert max(map(len, table)) <= 78
    assert table[:2] == [
        "   step   reward  held out ± se       kl  entropy  length  cut off      lag",
        "      0           0.500 ± 0.100",
    ]
    row = " 11,000  -12.346                 1.2e+03    0.139  12,345   100.0%    123.4"
    assert table[2] == row
    assert len(table) == 2 + 20 + 2  # a row every 6 s, the last one, and the heading again
