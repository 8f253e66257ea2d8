"""Studies as files: the runs they describe, and mistakes that are reported before any run."""

import json
from pathlib import Path

import pytest
from toy import Ones

from tba.config import mistakes
from tba.prompt import Prompt
from tba.runs.folder import DIGESTS, SUMMARY
from tba.setup.checks import placed
from tba.setup.setup import check
from tba.tools.study import FAILED, check_study, read_study, standing, write_failed

BASE = """
[base]
task = "toy.Ones"
policy = {{ model = "{model}" }}
runtime = {{ use = "local" }}
run = {{ steps = 3 }}
sampling = {{ samples = 4, max_tokens = 3 }}
trainer = {{ batch_size = 8, group_size = 4, learning_rate = 1e-3 }}
eval = {{ prompts = 4, samples = 2, k = [1] }}
checkpoint = {{ every = 0 }}
[base.objective]
use = "tb"
beta = 0.1
"""
GRIDS = """
[[grid]]
name = "rates"
"objective.use" = ["tb", "rloo"]
"trainer.learning_rate" = [1e-3, 1e-2]
"run.seed" = [0]
[[grid]]
name = "often"
objective.use = ["tb", "rloo"]
"runtime.publish_every" = [1, 2]
"run.seed" = 1
"""

READ = Ones.prompts


def write(folder: Path, model: Path, grids: str = GRIDS, table: str = "") -> Path:
    path = folder / "pairs.toml"
    study = f'[study]\nfolder = "{folder / "runs"}"\n{table}\n'
    path.write_text(study + BASE.format(model=model) + grids)
    return path


def test_the_runs_are_all_combinations(tmp_path, tiny_model):
    study = read_study(write(tmp_path, tiny_model))
    expected = []
    for grid in ("rates/use={},learning_rate={},seed=0", "often/use={},publish_every={}"):
        values = ("0.001", "0.01") if "rate=" in grid else (1, 2)
        expected += [grid.format(use, value) for use in ("tb", "rloo") for value in values]
    assert [t.folder for t in study.trials] == expected
    configs = check_study(study)
    assert [c.run.seed for c in configs] == [0] * 4 + [1] * 4
    # another objective drops the options of the one before
    options = {c.objective.use: c.objective.options for c in configs}
    assert options == {"tb": {"beta": 0.1}, "rloo": {}}


def test_a_setting_that_every_grid_overrides_is_refused(tmp_path, tiny_model):
    path = write(tmp_path, tiny_model)
    causes = dict.fromkeys(("run.seed=7", "objective=ppo"), "the grids")
    for setting, cause in (causes | {"run.folder=x": "study.folder"}).items():
        told = f"would change nothing: no run has it, because of {cause}; change it there"
        with pytest.raises(ValueError, match=f"'{setting}' {told}"):
            read_study(path, [setting])
    study = read_study(path, ["trainer.learning_rate=1e-4"])  # `often` does not set it
    assert study.base["trainer"]["learning_rate"] == 1e-4
    tables = '{ label = "short", "run.steps" = 2 }, { label = "usual" }'
    path = write(tmp_path, tiny_model, f'[[grid]]\nname = "x"\nvariants = [{tables}]\n')
    assert [c.run.steps for c in check_study(read_study(path, ["run.steps=5"]))] == [2, 5]


def test_an_option_that_other_plugins_drop_is_refused_or_told(tmp_path, tiny_model, caplog):
    grid = '[[grid]]\nname = "g"\n"objective.use" = ["{}", "rloo"]\n'
    path = write(tmp_path, tiny_model, grid.format("grpo"))
    told = r"'objective.beta=0.3' would change nothing: no run has it"
    with pytest.raises(ValueError, match=told):
        read_study(path, ["objective.beta=0.3"])
    read_study(path)
    assert "no run has [base] objective.beta: every grid names another plug-in" in caplog.text
    caplog.clear()
    path = write(tmp_path, tiny_model, grid.format("tb"))
    read_study(path, ["run.steps=4"])
    assert not caplog.text
    read_study(path, ["objective.beta=0.3"])
    assert (
        "'objective.beta=0.3' applies to only 1 of 2 runs: grids override or drop it" in caplog.text
    )


MISTAKES = {
    "an unknown key": (
        ('"run.seed" = 1', '"run.sed" = 1'),
        r"grid 'often', use=tb,publish_every=1: unknown key 'run.sed'; did you mean 'seed'\?",
    ),
    "an unknown option": (
        ('"run.seed" = 1', '"objective.bta" = 1'),
        r"grid 'often', use=tb,.*: objective.bta: 'tb' has no such option; did you mean 'beta'\?",
    ),
    "a value that an option cannot have": (
        ('"runtime.publish_every" = [1, 2]', '"strategy.recent" = [0.5, 1.5]'),
        "grid 'often', use=tb,recent=1.5: .*1.5",
    ),
    "a name twice": (
        ('name = "often"', 'name = "rates"'),
        "two grids are called 'rates'; rename one of them",
    ),
    "no values": (
        ('"run.seed" = [0]', '"run.seed" = []'),
        r"grid 'rates': 'run.seed' = \[\] has no values; write one",
    ),
    "a value twice": (
        ('"run.seed" = [0]', '"run.seed" = [0, 0]'),
        "use=tb,learning_rate=0.001,seed=0: two runs have this name; remove the repeated value",
    ),
    "values that are alike in the name of a run": (
        ('"run.seed" = [0]', '"run.seed" = [0]\n"objective.beta" = [[1, 2], "1-2"]'),
        "two runs have this name; remove .*, or write both values as variants, each with a label",
    ),
    "a name that is too long": (
        ('"run.seed" = 1', f'"task.prompt" = ["{"1" * 230}"]'),
        "publish_every=1,prompt=1*: this name is too long for a folder; write .* with a label",
    ),
    "no setting": (
        ('"run.seed" = 1', "seed = 1"),
        """'seed' is not a setting; write "table.key" = """,
    ),
    "a folder": (('"run.seed" = 1', '"run.folder" = "x"'), "remove 'run.folder'"),
    "variants of which some have no name": (
        ('"run.seed" = 1', 'variants = [{ label = "x", "run.seed" = 2 }, { "run.seed" = 3 }]'),
        'give each variant a label = "...", or have all of them set the same keys',
    ),
    "a variant that repeats": (
        ('"run.seed" = 1', '"run.seed" = 1\nvariants = [{ "run.seed" = 2 }]'),
        "'run.seed' is in the grid and in a variant",
    ),
    "an unknown table": (
        ('[[grid]]\nname = "often"', '[[grids]]\nname = "often"'),
        "unknown key 'grids'; did you mean 'grid'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_before_anything_starts(tmp_path, tiny_model, mistake):
    (right, wrong), message = MISTAKES[mistake]
    assert right in GRIDS
    path = write(tmp_path, tiny_model, GRIDS.replace(right, wrong))
    with pytest.raises(ValueError, match=message) as caught:
        check_study(read_study(path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_no_grid_and_no_file(tmp_path, tiny_model):
    with pytest.raises(ValueError, match="grid is missing"):
        read_study(write(tmp_path, tiny_model, ""))
    (tmp_path / "numbers.toml").write_text("grid = [1]\n")
    with pytest.raises(ValueError, match=r"grid\.0 = 1: write a table"):
        read_study(tmp_path / "numbers.toml")
    with pytest.raises(ValueError, match=r"no such study file: .*nowhere.toml"):
        read_study(tmp_path / "nowhere.toml")


def test_a_base_file_below_the_base_table_below_the_command_line(tmp_path, tiny_model):
    (tmp_path / "base.toml").write_text(
        '[objective]\nuse = "rloo"\n[run]\nsteps = 7\nseed = 5\n[trainer]\nlearning_rate = 0.5\n'
    )
    path = write(tmp_path, tiny_model, '[[grid]]\nname = "one"\n', 'base = "base.toml"')
    study = read_study(path, ["run.seed=9", "study.folder=elsewhere"])
    (config,) = check_study(study)
    assert (config.run.steps, config.run.seed, config.trainer.learning_rate) == (3, 9, 1e-3)
    assert config.objective.use == "tb" and config.objective.options == {"beta": 0.1}
    assert config.run.folder == str(Path("elsewhere/one/run").absolute())
    assert config.log.console == "off" and not config.log.report_to


def test_a_study_without_a_folder_is_called_after_its_file(tmp_path):
    for name, expected in (("lags.toml", "runs/lags"), ("study.toml", f"runs/{tmp_path.name}")):
        (tmp_path / name).write_text('[[grid]]\nname = "one"\n')
        assert read_study(tmp_path / name).folder == Path(expected)


def test_variants_are_bundles_and_lists_of_lists_are_lists(tmp_path):
    (tmp_path / "s.toml").write_text(
        """
        [[grid]]
        name = "schedules"
        "eval.k" = [[1, 2], [4]]
        variants = [
            { "objective.beta" = { start = 0.2, end = 0.1, steps = 9 }, label = "falling" },
            { "objective.use" = "rloo", "strategy.use" = "recent", label = "$ rloo" },
        ]
        [[grid]]
        name = "sizes"
        variants = [
            { "trainer.group_size" = 2, "sampling.samples" = 4 },
            { "trainer.group_size" = 4, "sampling.samples" = 4 },
        ]
        """
    )
    first, second, third, _, *sizes = read_study(tmp_path / "s.toml").trials
    names = ["falling,k=1-2", "-rloo,k=1-2", "falling,k=4"]
    assert [t.folder for t in (first, second, third)] == [f"schedules/{name}" for name in names]
    beta = {"start": 0.2, "end": 0.1, "steps": 9}
    assert first.settings == {"eval.k": [1, 2], "objective.beta": beta}
    assert third.settings["eval.k"] == [4]
    assert (first.axes["variant"], second.label) == ("falling", "$ rloo, k [1, 2]")
    assert [t.folder for t in sizes] == [f"sizes/group_size={n},samples=4" for n in (2, 4)]
    assert sizes[0].axes == {"trainer.group_size": 2, "sampling.samples": 4}


@pytest.mark.parametrize("label", ["", ".", ".."])
def test_no_label_is_the_folder_of_others(label, tmp_path):
    """It would be removed before the run starts."""
    variants = f'[{{ label = "{label}", "run.seed" = 1 }}]'
    (tmp_path / "s.toml").write_text(f'[[grid]]\nname = "g"\nvariants = {variants}\n')
    assert [t.folder for t in read_study(tmp_path / "s.toml").trials] == ["g/-"]


AXES = {
    '"objective.use" = ["tb", "grpo"]': "use=grpo,seed=0: sampling.top_p does not work with",
    '"runtime.colocate" = ["share", "sleep"]': "colocate=sleep,seed=0: .*cannot give up its memory",
    '"trainer.optimizer" = ["adamw", "adamw_8bit"]': "optimizer=adamw_8bit,seed=0: .* bitsandbytes",
}


@pytest.mark.parametrize("axis", AXES)
def test_every_run_is_checked_and_its_data_are_read_once(axis, tmp_path, tiny_model, monkeypatch):
    reads = []

    def prompts(self: Ones) -> list[Prompt]:
        reads.append(self)
        return READ(self)

    monkeypatch.setattr(Ones, "prompts", prompts)
    monkeypatch.setattr("tba.setup.setup.find_spec", lambda package: None)
    grid = f'[[grid]]\nname = "g"\n{axis}\n"run.seed" = [0, 1]\n'
    study = read_study(write(tmp_path, tiny_model, grid), ["sampling.top_p=0.9"])
    with pytest.raises(ValueError, match=rf"^grid 'g', {AXES[axis]}"):
        check_study(study)
    assert len(reads) == 1


def test_the_error_of_a_run_has_no_secret_and_nothing_that_a_terminal_would_obey(
    tmp_path, monkeypatch
):
    """A reward may quote what the policy has written, and a client its key."""
    monkeypatch.setattr(mistakes, "KNOWN", {"CANARY"})
    write_failed(tmp_path, "E: CANARY \x1b[2J", "Traceback: E: CANARY")
    assert "CANARY" not in (tmp_path / FAILED).read_text()
    assert standing(tmp_path) == ("failed", "E: *** \\x1b[2J")


def test_runs_that_finished_with_other_rewards_are_refused_or_told(tmp_path, tiny_model, caplog):
    """Also runs of an earlier version, which have kept no digests."""
    study = read_study(write(tmp_path, tiny_model))
    first = study.path(study.trials[0])
    first.mkdir(parents=True)
    (first / SUMMARY).write_text('{"finished": true}')
    check_study(study)
    assert f"{first} is from an earlier version: changes to its data and rewards" in caplog.text
    digests = check(placed(study.config(study.trials[0]))).digests
    (first / DIGESTS).write_text(json.dumps(digests))
    check_study(study)
    (first / DIGESTS).write_text(json.dumps({**digests, "task.reward": "1"}))
    with pytest.raises(ValueError, match=r"since then these have changed: task\.reward; remove"):
        check_study(study)
