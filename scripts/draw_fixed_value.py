"""Draw docs/fixed_value.png: where a squared loss with a fixed V ends, by enumeration.

    python scripts/draw_fixed_value.py

A prompt has a right answer, with reward 1 and probability .42 under the reference, which also
samples, and a wrong one with reward 0. beta is .5. The loss is the mean of
(beta (log pi - log ref) - r + V)^2; the target is ref exp(r / beta) / Z.
"""

from __future__ import annotations

from math import comb, exp, log
from pathlib import Path

FIGURE = Path(__file__).parent.parent / "docs" / "fixed_value.png"
RIGHT = 0.42
BETA = 0.5
EXACT = BETA * log(RIGHT * exp(1 / BETA) + 1 - RIGHT)
"""beta log E exp(r / beta), the only V whose optimum is the target."""
SAMPLES = (4, 16, 64)


def optimum(value: float) -> float:
    """Return the probability of the right answer at the minimum, for this V."""
    low, high = -30.0, 30.0  # of its log-odds
    for _ in range(100):
        middle = (low + high) / 2
        p = 1 / (1 + exp(-middle))
        right = BETA * log(p / RIGHT) - 1 + value
        wrong = BETA * log((1 - p) / (1 - RIGHT)) + value
        if RIGHT * right * (1 - p) > (1 - RIGHT) * wrong * p:
            high = middle
        else:
            low = middle
    return p


def distance(value: float) -> float:
    """Return the total variation between the optimum for this V and the target."""
    return abs(optimum(value) - optimum(EXACT))


def mean_estimate(samples: int) -> float:
    """Return the mean, over groups of K samples, of V = beta log mean_j exp(r_j / beta)."""
    total = 0.0
    for right in range(samples + 1):
        chance = comb(samples, right) * RIGHT**right * (1 - RIGHT) ** (samples - right)
        total += chance * BETA * log((right * exp(1 / BETA) + samples - right) / samples)
    return total


def marked() -> dict[str, float]:
    """Return the values of V that the figure and its page name."""
    named = {
        "exact V": EXACT,
        "V = mean reward": RIGHT,
        "V = mean reward - .2": RIGHT - 0.2,
    }
    return named | {f"OAPL's V, K = {k}": mean_estimate(k) for k in SAMPLES}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    values = [EXACT + (i - 90) / 200 for i in range(131)]
    axis.plot(values, [distance(v) for v in values], color="gray", lw=1.3, label="any fixed V")
    axis.axhline(0.0, color="#1f77b4", lw=1.3, label="V from the live group (VarGrad)")
    for name, value in marked().items():
        marker = "s" if "OAPL" in name else "o"
        axis.plot([value], [distance(value)], marker, label=f"{name}: {distance(value):.3f}")
    axis.set(xlabel="V", ylabel="total variation to the target")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(FIGURE, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
