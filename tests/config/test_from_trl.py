"""The script of docs/from_trl.md and its counterpart: both run, with the same reward functions."""

import json
import re
import subprocess
from statistics import fmean

import pytest
from build import ROOT, environment, python_with_trl

from tba.config.hints import NEAREST, NONE, PLACES, counterpart, inner_table
from tba.config.plugins import find, names, options_of, resolved
from tba.config.schema import Config, load
from tba.config.tables import PLUGGED, LoraTable
from tba.runs.folder import METRICS, read

NAME = re.compile(r"`(?:[\w.]+\()?(\w+).*?`")  # model in `GRPOTrainer(model=…)`
NAMES = ("right", "soft_overlong_punishment_reward")


def table() -> list[tuple[list[str], str]]:
    """Each row of the page's table: the names of TRL, and the second column without its marks."""
    page = (ROOT / "docs" / "from_trl.md").read_text()
    lines = page.partition("| TRL | here | difference |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines]
    return [(NAME.findall(theirs), ours.replace("`", "")) for theirs, ours in cells]


def test_the_page_and_the_answers_to_unknown_keys_have_one_table():
    """A name without a counterpart has an empty cell in the page."""
    rows = table()
    assert len(rows) > 40
    for theirs, ours in rows:
        places = dict.fromkeys(counterpart(name) or "" for name in theirs)
        assert ", ".join("" if place.startswith(NONE) else place for place in places) == ours
    once = [name for names in PLACES.values() for name in names]
    assert len(once) == len(set(once))


@pytest.mark.parametrize(
    ("setting", "told"),
    {
        "policy.lora.lora_dropout=0.1": "because engine and trainer must agree on every log-prob",
        "lora_dropout=0.1": "because engine and trainer must agree on every log-prob",
        "trainer.deepspeed=x": "deepspeed is trainer.devices here",
        "data.train_files=x": "unknown key 'data.train_files': train_files is task.data here",
        "actor_rollout_ref.actor.optim.lr=1e-6": "lr is trainer.learning_rate here",
        "algorithm.adv_estimator=grpo": "adv_estimator is objective.use here",
        "trainer.total_epochs=3": "total_epochs is run.epochs here",
        "trainer.dataloader_num_workers=3": "dataloader_num_workers has no counterpart here",
    }.items(),
)
def test_a_setting_of_another_package_is_named(setting, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        load(None, [setting])


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_to_an_objective_of_another_package_can_be_typed(name):
    told = f"no objective called '{re.escape(name)}'; the nearest is"
    with pytest.raises(ValueError, match=told):
        resolved(load(None, [f"objective={name}"]))
    resolved(load(None, NEAREST[name].split()))


def test_every_counterpart_is_a_key():
    """Of a table, or an option of one of its plug-ins."""
    keys = {f"{table}.use" for table in PLUGGED}
    for table_name, kind in PLUGGED.items():
        options = [options_of(find(kind, name)) for name in names(kind)]
        keys |= {f"{table_name}.{option}" for own in options for option in own}
    for table_name, holder in Config.model_fields.items():
        inner = inner_table(holder)
        assert inner is not None
        keys |= {f"{table_name}.{key}" for key in inner.model_fields}
    keys |= {f"policy.lora.{key}" for key in LoraTable.model_fields}
    for place in PLACES:
        for key in re.findall(r"(?<![\w.])[a-z]+(?:\.[a-z_0-9]+)+", place):
            assert key in keys, place


@pytest.mark.slow
def test_the_names_are_those_of_trl(tmp_path):
    """Arguments of GRPOConfig and of GRPOTrainer, which the page names."""
    code = (
        "import inspect, json, trl\n"
        "given = [inspect.signature(f).parameters for f in (trl.GRPOConfig, trl.GRPOTrainer)]\n"
        "print(json.dumps([name for each in given for name in each]))"
    )
    command = [python_with_trl(), "-c", code]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    known = {*json.loads(done.stdout.splitlines()[-1]), "resume_from_checkpoint"}
    assert [name for theirs, _ in table() for name in theirs if name not in known] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_and_its_counterpart_train_on_the_same_rewards(tmp_path):
    python = python_with_trl()
    for name in ("examples", "tba"):  # where the paths of both lead; runs/ is a folder of the test
        (tmp_path / name).symlink_to(ROOT / name)
    trl = [python, "examples/from_trl.py"]
    ours = [python, "-m", "tba.cli", "train", "examples/from_trl.toml", "log.console=off"]
    for command in (trl, ours):
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), check=True, timeout=420)
    state = tmp_path / "runs" / "from_trl_by_trl" / "checkpoint-100" / "trainer_state.json"
    theirs = [row for row in json.loads(state.read_text())["log_history"] if "reward" in row]
    own = [row for row in read(tmp_path / "runs" / "from_trl" / METRICS) if "loss" in row]
    assert len(theirs) == len(own) == 100
    for rows in (theirs, own):
        for name in NAMES:
            scored = [row for row in rows if f"rewards/{name}/mean" in row]
            assert all(f"rewards/{name}/std" in row for row in scored)
        right = [row["rewards/right/mean"] for row in rows if "rewards/right/mean" in row]
        assert fmean(right[-20:]) > fmean(right[:20])
    for row in theirs:
        right, overlong = (row[f"rewards/{name}/mean"] for name in NAMES)
        assert row["reward"] == pytest.approx(right + 0.5 * overlong, abs=1e-5)
