"""A config is right, or it is refused with what to write instead."""

import json
import math
import re

import pytest
import torch
from pydantic import ValidationError

from tba.config.plugins import resolve, with_defaults
from tba.config.schema import Config, load

WRONG = {
    "trainer.grop_size=4": "unknown key 'trainer.grop_size'; did you mean 'group_size'?",
    "trianer.group_size=4": "group_size is trainer.group_size here",
    "run.steps=many": "run.steps = 'many': Input should be a valid integer",
    "run.steps='3'": "run.steps = '3': Input should be a valid integer",
    "log.report_to=no": "log.report_to.0 = 'no': Input should be 'tensorboard' or 'wandb'",
    "log.wandb=true": "unknown key 'log.wandb': it was removed; use log.report_to=wandb",
    "trainer.betas=[0.9, 2]": "trainer.betas.1 = 2: Input should be less than 1",
    "trainer.betas=[0.9]": "trainer.betas.1 is missing",
    "trainer.learning_rate=inf": "trainer.learning_rate = inf: Input should be a finite number",
    "run.tml": "a config file comes first and ends in .toml",
    "run.steps=true": "run.steps = True: Input should be a valid integer",
    "runtime.lag=false": "runtime.lag = False: Input should be a valid integer",
    "trainer.weight_decay=true": "trainer.weight_decay = True: Input should be a valid number",
    "trainer.weight_decay='0.1'": "trainer.weight_decay = '0.1': Input should be a valid number",
    "trainer.betas=[0.9, true]": "trainer.betas.1 = True: Input should be a valid number",
    "eval.k=[1, true]": "eval.k.1 = True: Input should be a valid integer",
    "run.steps=2.5": "run.steps = 2.5: Input should be a valid integer",
    "policy.model=3": "policy.model = 3: Input should be a valid string",
    "sampling.temperature=0": "sampling.temperature = 0: Input should be greater than 0",
    "runtime.use=rya": "runtime.use = 'rya': Input should be 'local' or 'ray'",
    "runtime.cores=some": "runtime.cores = 'some': Input should be 'divide' or 'share'",
    "runtime.publish_every=0": (
        "runtime.publish_every = 0: Input should be greater than or equal to 1"
    ),
    "trainer.group_size=1": "trainer.group_size = 1: Input should be greater than or equal to 2",
    "trainer.batch_size=170": (
        "trainer.batch_size = 170 needs to be a multiple of group_size = 20, such as 160"
    ),
    "trainer.batch_size=3": "such as 20",
    "sampling.samples=19": ("trainer.group_size = 20 needs sampling.samples=20 or more"),
    "replay.capacity=19": "trainer.group_size = 20 needs replay.capacity=20 or more",
    "eval.k=[1, 5]": "eval.k = [1, 5] needs eval.samples=5 or more",
    "objective=3": "objective.use = 3: Input should be a valid string",
    "policy.lora.rank=8": "unknown key 'policy.lora.rank'",
    "policy.lora.form=x": "unknown key 'policy.lora.form'; did you mean 'from'?",
    "policy.lora=true": "policy.lora = True: write a table, [policy.lora], with its keys",
    "policy.lora.target_modules=[]": "Value should have at least 1 item",
    "steps=3": "'steps=3': write `table.key=value`",
    "steps=5": "did you mean `run.steps=5`?",
    "learning_rat=1e-4": "did you mean `trainer.learning_rate=1e-4`?",
    "seed=1": "did you mean `run.seed=1`?",
    "stepps": "write `table.key=value`: `trainer.learning_rate=1e-4`; a config file",
    "eval.k=[1, 2.5]": "eval.k.1 = 2.5: Input should be a valid integer",
    "trainer.lr=1e-4": "unknown key 'trainer.lr': lr is trainer.learning_rate here",
    "trainer.min_lr_ratio=0.1": "trainer.min_lr_ratio': it was removed; schedules end at 0",
    "eval.deadline=60": "'eval.deadline': it was removed; use trainer.deadline",
    "warn.equal_rewards=0.5": "unknown key 'warn.equal_rewards': it was removed; the thresholds",
    "lr=1e-4": "'lr=1e-4': write `table.key=value`: lr is trainer.learning_rate here",
    "num_generations=8": "num_generations is sampling.samples and trainer.group_size here",
    "sampling.num_generations=8": "num_generations is sampling.samples and trainer.group_size here",
    "trainer.temperature=0.7": "temperature is sampling.temperature here",
    "run.max_steps=9": "max_steps is run.steps here",
    "run.num_train_epochs=3": "num_train_epochs is run.epochs here",
    "trainer.per_device_train_batch_size=8": "is a factor of trainer.batch_size here",
    "sampling.max_completion_length=8": "max_completion_length is sampling.max_tokens here",
    "trainer.beta=0.1": "beta is objective.beta here",
    "log.logging_steps=1": "logging_steps has no counterpart here; docs/from_trl.md says more",
    "run.samples=4": "samples is sampling.samples or eval.samples here",
    "sampling.truncated=drop": "sampling.truncated = 'drop': write keep, reject, or a number",
    "sampling.truncated=true": "sampling.truncated = True: write keep, reject, or a number",
    "sampling.top_k=-1": "sampling.top_k = -1: Input should be greater than or equal to 0",
    "run.steps": "'run.steps': write `table.key=value`",
    "trainer.warmup_steps=200": "trainer.warmup_steps = 200 needs run.steps=201 or more",
    "trainer.decay_steps=5": "trainer.decay_steps needs trainer.schedule=warmup_stable_decay",
    "trainer.learning_rate=1.0": "trainer.learning_rate = 1 needs to be below 1",
    "runtime.publish_every=201": "runtime.publish_every = 201 needs run.steps=201 or more",
    "policy.reset_reference_every=300": "reset_reference_every = 300 needs run.steps=300 or more",
    "runtime.use=local runtime.address=auto": "runtime.address needs runtime.use=ray",
    "replay.first_fill=5001": "replay.first_fill = 5001 needs replay.capacity=100020 or more",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_mistake_is_told_with_what_to_write(setting):
    with pytest.raises(ValueError, match=re.escape(WRONG[setting])):
        load(None, re.split(r" (?=runtime)", setting))


def test_few_of_many_keys_are_told_and_where_all_are():
    with pytest.raises(ValueError) as error:
        load(None, ["trainer.max_grad_nrom=1"])
    assert str(error.value) == (
        "unknown key 'trainer.max_grad_nrom'; did you mean 'max_grad_norm'?"
        " `tba list trainer` lists all keys"
    )
    with pytest.raises(ValueError, match=r"known: per_prompt, capacity, first_fill, rollouts$"):
        load(None, ["replay.sizes=1"])
    with pytest.raises(ValueError) as error:
        load(None, ["trainer.warm_up_steps=1", "trainer.zzz=1"])
    first, second = str(error.value).splitlines()
    assert len(first) < 200 and "did you mean 'warmup_steps'? " in first
    assert second == "unknown key 'trainer.zzz'; `tba list trainer` lists all keys"


def test_every_mistake_is_told_at_once():
    with pytest.raises(ValueError) as error:
        load(None, ["run.stepps=3", "runtime.publish_every=0", "eval.samples=-1"])
    assert len(str(error.value).splitlines()) == 3


def test_a_table_may_have_the_name_of_an_argument():
    with pytest.raises(ValueError, match="unknown key 'self'"):
        load({"self": {}})


def test_local_without_fresh_groups_would_never_search():
    with pytest.raises(ValueError, match=r"runtime\.use = local needs runtime\.fresh=1 or more"):
        load(None, ["runtime.use=local", "runtime.fresh=0"])


def test_waiting_is_for_a_batch_on_local_and_for_nothing_on_ray():
    sizes = ["trainer.batch_size=21", "trainer.group_size=7"]
    local, ray = load(None, ["runtime.use=local", *sizes]), load(None, sizes)
    first = load(None, ["replay.first_fill=11"])
    assert (local.trainer.groups, local.fresh, ray.fresh) == (3, 3, 0)
    assert (local.first_fill, first.first_fill) == (3, 11)


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "run.toml"
    objective = '[objective]\nuse = "rloo"\nbeta = 0.2\n'
    path.write_text(f'strategy = "recent"\n[run]\nsteps = 7\nseed = 3\n{objective}')
    own = ["run.steps=9", "objective.beta=0.3", "policy.model=~/my model", "eval.k=[1, 2]"]
    config = load(path, own)
    assert (config.run.steps, config.run.seed, config.strategy.use) == (9, 3, "recent")
    assert (config.objective.use, config.objective.options) == ("rloo", {"beta": 0.3})
    assert (config.policy.model, config.eval.k) == ("~/my model", (1, 2))
    assert load(None, ["eval.k=3"]).eval.k == (3,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run\n", "run.toml: Expected ']'"),
        ("trainer = 3", "trainer = 3: write a table, [trainer], with its keys"),
        (
            "objective = 3",
            "objective = 3: write the name of a plug-in, or a table, [objective],"
            " with `use` and options",
        ),
    ],
)
def test_a_file_that_is_no_config_is_told(tmp_path, text, told):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        load(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "former", ['[objective]\nuse = "tb"\nbeta = 0.2', "[objective]\nbeta = 0.2", 'objective = "tb"']
)
@pytest.mark.parametrize(
    "shorthand", ["objective=rloo", "objective.use=rloo", 'objective.use="rloo"']
)
def test_another_plugin_does_not_inherit_options(tmp_path, former, shorthand):
    path = tmp_path / "run.toml"
    path.write_text(former)
    assert load(path, [shorthand]).objective.model_dump() == {"use": "rloo"}
    for order in (1, -1):  # which does not matter
        settings = [shorthand, "objective.beta=0.3"][::order]
        assert load(path, settings).objective.model_dump() == {"use": "rloo", "beta": 0.3}


def test_another_plugin_keeps_the_keys_of_the_table_itself(tmp_path):
    (tmp_path / "run.toml").write_text("[engine]\nmax_logp_gap = 0.5\ndtype = 'bf16'")
    engine = load(tmp_path / "run.toml", ["engine=vllm"]).engine
    assert (engine.max_logp_gap, engine.options) == (0.5, {})


@pytest.mark.parametrize("same", ["objective=tb", 'objective.use="tb"'])
def test_the_same_plugin_keeps_its_options(tmp_path, same):
    (tmp_path / "run.toml").write_text("[objective]\nbeta = 0.2")
    assert load(tmp_path / "run.toml", [same]).objective.model_dump() == {"use": "tb", "beta": 0.2}


def test_options_alone_keep_the_default_plugin():
    from_python = Config.model_validate({"objective": {"beta": 0.02}})
    for config in (load(None, ["objective.beta=0.02"]), from_python):
        assert config.objective.model_dump() == {"use": "tb", "beta": 0.02}


@pytest.mark.parametrize(
    ("settings", "prompts", "at_once"),
    [
        (["engine=transformers"], 8, 2),
        (["engine=vllm"], 1, 16),
        (["engine.use=vllm", "engine.max_num_seqs=64", "runtime.searchers=2"], 1, 16),
        (["engine=vllm", "runtime.prompts_per_task=4"], 4, 16),
        (["engine=vllm", "runtime.concurrent_searches=3"], 1, 3),
        (["engine=vllm", "runtime.use=local"], 8, 2),
    ],
)
def test_a_search_task_of_vllm_has_one_prompt(settings, prompts, at_once):
    """So that a group arrives as soon as it is complete. Local searches run one after the other."""
    runtime = with_defaults(load(None, settings)).runtime
    assert (runtime.prompts_per_task, runtime.concurrent_searches) == (prompts, at_once)


@pytest.mark.parametrize(
    ("settings", "at_once", "slots"),
    [
        ([], 39, 512),
        (["engine.max_num_seqs=64"], 16, 64),
        (["sampling.samples=50"], 16, 512),
        (["runtime.use=local"], 2, 512),
    ],
)
def test_vllm_has_other_defaults_on_a_gpu(settings, at_once, slots, monkeypatch):
    """Searches fill its batch of responses one and a half times; a cold start takes minutes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = with_defaults(load(None, ["engine.use=vllm", *settings]))
    options = config.engine.options
    found = config.runtime.concurrent_searches, options["max_num_seqs"]
    assert (*found, config.runtime.start_deadline) == (at_once, slots, 1800)
    given = load(None, ["engine.use=vllm", "runtime.start_deadline=60"])
    assert with_defaults(given).runtime.start_deadline == 60


@pytest.mark.parametrize(
    ("settings", "in_flight"),
    [
        ([], True),
        (["runtime.lag=1"], False),
        (["runtime.use=local"], False),
        (["objective=vineppo"], False),
        (["engine.in_flight=false"], False),
    ],
)
def test_vllm_loads_weights_in_the_middle_of_responses(settings, in_flight):
    """Unless they must come from one version."""
    options = with_defaults(load(None, ["engine.use=vllm", *settings])).engine.options
    assert options["in_flight"] is in_flight


def test_a_schedule_is_a_table(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[objective.beta]\nstart = 0.014\nend = 0.004\nsteps = 500\n")
    config = load(path, ["objective.beta.end=0.006"])
    assert config.objective.options == {"beta": {"start": 0.014, "end": 0.006, "steps": 500}}
    objective = resolve("objectives", "objective", config.objective.use, config.objective.options)
    betas = [objective.at(step).beta for step in (0, 250, 500, 900)]
    assert betas == pytest.approx([0.014, 0.010, 0.006, 0.006])
    with pytest.raises(ValueError, match="beta is a value, not a table"):
        load(None, ["objective.beta=0.1", "objective.beta.end=0.006"])
    with pytest.raises(ValueError, match="pair is a value, not a table"):
        load(None, ["objective=online_dpo", "objective.pair=best_worst", "objective.pair.end=1"])


def test_a_config_is_frozen():
    config = load()
    of_tables = {"run": config, "steps": config.run}
    for key, table in (of_tables | dict.fromkeys(("use", "beta"), config.objective)).items():
        with pytest.raises(ValidationError, match="frozen"):
            setattr(table, key, 1)


def test_what_is_written_reads_back_the_same():
    settings = [
        "objective.beta={start=1, end=0, steps=9}", "runtime.fresh=3", "runtime.max_reuse=0.01",
        "trainer.max_grad_norm=inf",
        "eval.k=[1, 2]", "policy.eos_token=</s>",
    ]  # fmt: skip
    config = load(None, settings)
    assert config.trainer.max_grad_norm == math.inf
    assert Config(**json.loads(json.dumps(config.nested()))) == config


def test_an_empty_value_takes_a_key_out(tmp_path):
    """Of a table, of a plug-in, and a table itself; `null` is text."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[runtime]\nlag = 2\n[policy]\neos_token = "</s>"\n[policy.lora]\nr = 8\n'
        '[task]\nuse = "gsm8k"\ntrain_size = 3\n[run]\nsteps = 3\n'
    )
    keys = ("runtime.lag", "policy.lora", "policy.eos_token", "task.train_size", "run.steps")
    config = load(path, [f"{key}=" for key in keys])
    assert (config.runtime.lag, config.policy.lora, config.policy.eos_token) == (None, None, None)
    assert (config.task.options, config.run.steps) == ({}, 200)
    assert load(path, ["policy.eos_token=null"]).policy.eos_token == "null"
    (tmp_path / "run.json").write_text(json.dumps({"policy": {"lora": None}}))
    lora = load(tmp_path / "run.json", ["policy.lora.r=4"]).policy.lora
    assert lora is not None and lora.r == 4


@pytest.mark.parametrize(
    ("text", "value"), [("keep", "keep"), ("reject", "reject"), ("-1", -1.0), ("0", 0.0)]
)
def test_what_becomes_of_truncated_responses(text, value):
    truncated = load(None, [f"sampling.truncated={text}"]).sampling.truncated
    assert (truncated, type(truncated)) == (value, type(value))
