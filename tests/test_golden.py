"""Curves of twelve steps of every objective and taper, compared with recorded numbers.

Search is scripted, so that responses are the same on every machine. What can differ between CPUs
or releases of PyTorch is the rounding of float32 products, about 1e-7 each. The test allows 1e-3 of
each number or 1e-4 of its curve's largest. Changing every weight by 1e-6 of itself changes a number
by less than a quarter of that; a changed constant, mask or mean changes the first step by 1e-2 or
more. GRPO's later steps are allowed 3e-2: some of its gradients are so small that rounding decides
Adam's first step. After an intended change, `TBA_GOLDEN=write pytest tests/test_golden.py` writes
new files: read their diff.
"""

import json
import os
from pathlib import Path

import pytest
from exact import toy_config

import tba.open
from tba.config.plugins import names
from tba.runs.folder import METRICS, read

GOLDEN = Path(__file__).parent / "golden"
STEPS = 12
CURVES = ("loss", "grad_norm", "reward", "log_ratio")
SETTINGS = (
    "engine=scripted", "engine.answers=['1', '1', '', '27', '1+1', '371']", "sampling.max_tokens=4",
    "sampling.samples=8", "trainer.batch_size=18", "trainer.group_size=6", f"run.steps={STEPS}",
    "strategy=uniform", "trainer.learning_rate=1e-3", "log.sample_every=0",
)  # fmt: skip
"""Six answers, one of them twice, and a buffer that keeps all: ratios pi / mu are far from 1."""
LATER = {"grpo": 3e-2}
"""Tolerance of the steps after the first, where it is not 1e-3."""
OPTIONS = {
    "tb": ("objective.taper=none",),
    "tb_learned_z": ("objective.taper=none",),
    "vineppo": ("objective.step_tokens=2",),
    "ppo": ("objective.value_coefficient=0.5",),
}
CASES = {
    **{name: (f"objective={name}", *OPTIONS.get(name, ())) for name in names("objectives")},
    "tb_residual": ("objective=tb", "objective.taper=residual"),
    "tb_reward": ("objective=tb", "objective.taper=reward"),
    "tb_shift": ("objective=tb", "objective.taper=reward", "objective.shift=0.5"),
    "tb_learned_z_residual": ("objective=tb_learned_z", "objective.taper=residual"),
}


@pytest.mark.parametrize("case", CASES)
def test_curves_are_as_they_were(case, toy_model, tmp_path):
    own = CASES[case]
    tba.open.run(toy_config(toy_model, tmp_path / "run", *SETTINGS, *own))
    rows = read(tmp_path / "run" / METRICS)
    found = {name: [float(f"{row[name]:.7g}") for row in rows] for name in CURVES}
    assert all(len(curve) == STEPS for curve in found.values())
    file = GOLDEN / f"{case}.json"
    if os.environ.get("TBA_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    if not file.is_file():
        pytest.fail(
            f"{file} does not exist; write the curves of a new one by"
            " TBA_GOLDEN=write pytest tests/test_golden.py"
        )
    golden = json.loads(file.read_text())
    assert found.keys() == golden.keys()
    later = LATER.get(case, 1e-3)
    for name, curve in golden.items():
        largest = max(map(abs, curve))
        assert found[name][0] == pytest.approx(curve[0], rel=1e-3, abs=1e-4 * largest), name
        assert found[name] == pytest.approx(curve, rel=later, abs=later / 10 * largest), name


def test_every_golden_file_is_of_a_case():
    assert {file.stem for file in GOLDEN.glob("*.json")} == set(CASES)
