# examples/python_api.py
"""Train the bundled model from Python, with rows and a reward function in memory.

Settings are optional: `python examples/python_api.py run.steps=100`.
"""

import sys

import tba
from tba.offline.eval import Result

SETTINGS = [
    "policy.model=bundled:arithmetic",
    "objective=mylab.huber_tb.HuberTB",  # found because the script's folder is on the path
    "objective.beta=0.1",
    "sampling.samples=16",
    "sampling.max_tokens=6",
    "trainer.batch_size=128",
    "trainer.group_size=16",
    "trainer.learning_rate=1e-4",
    "run.steps=200",
]


def sums() -> list[dict[str, str]]:
    """Return a thousand rows: a `prompt`, and a column for the reward function."""
    rows = []
    for i in range(1000):
        a = 100 + 7919 * i % 900
        b = 100 + 104729 * i % 899
        rows.append({"prompt": f"{a}+{b}=", "total": str(a + b)})
    return rows


def right(completions: list[str], total: list[str]) -> list[float]:
    """Return 1 for each correct sum, else 0."""
    return [float(text == wanted) for text, wanted in zip(completions, total, strict=True)]


def main(settings: list[str]) -> Result:
    config = tba.load(None, [*SETTINGS, *settings])  # or tba.load("run.toml", settings)
    result = tba.train(config, data=sums(), reward=right)
    first = result.summary.first
    last = result.summary.last
    print(f"held-out reward {first['sampled_reward']:.3f} -> {last['sampled_reward']:.3f}")
    print(result.metrics()[["step", "loss", "reward"]].tail())
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
