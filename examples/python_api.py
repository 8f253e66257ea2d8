# examples/python_api.py
"""The Python door: what `tba train` does, from a script.

It needs nothing but the bundled model: `python examples/python_api.py`, with settings such as `run.steps=100` if you like.
"""

import sys

import tba
from tba.runs.summary import Summary

SETTINGS = [
    "objective=mylab.huber_tb.HuberTB",  # found because a script's own folder is on the path
    "objective.beta=0.1",
    "sampling.samples=16",
    "sampling.max_tokens=6",
    "trainer.batch_size=128",
    "trainer.group_size=16",
    "trainer.learning_rate=1e-4",
    "trainer.warmup_steps=20",
    "run.steps=200",
]


def main(settings: list[str]) -> Summary:
    config = tba.load(
        None, [*SETTINGS, *settings]
    )  # or tba.load(Path("run.toml"), settings); frozen and checked
    summary = tba.train(config)
    print(
        f"held-out reward {summary.first['sampled_reward']:.3f} -> {summary.last['sampled_reward']:.3f} in {summary.seconds:.0f} s"
    )
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
