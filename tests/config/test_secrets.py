"""Secrets in options of user code: named by a variable, and written nowhere."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from build import config
from toy import Ones

from tba.config.plugins import options_of, resolve, with_defaults
from tba.config.schema import Config, load
from tba.config.secrets import is_secret
from tba.config.tables import PluginTable
from tba.offline.eval import export
from tba.open import run
from tba.scoring.process import environment
from tba.scoring.verdicts import rejection
from tba.tasks.custom import reward_function
from tba.tools.report import report

CANARY = "canary-4711"

FACTORY = """
def make(api_key="", headers=None, keys=()):
    assert api_key == "canary-4711", api_key
    def score(completions, **columns):
        return [float(len(text)) for text in completions]
    return score

def loud(token):
    raise ValueError(f"no such token: {token}")

def raises(token):
    def score(completions, **columns):
        raise ValueError(f"no such token: {token}")
    return score
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "factory.py").write_text(FACTORY)
    monkeypatch.setenv("CANARY", CANARY)
    return f"{tmp_path}/factory.py"


SECRETS = """key api_key apiKey APIKey api-key API_KEY apikey hfToken db.password clientSecret
judge.api_key PASSWD x-authorization credentials api_key2 credential PGPASSWORD NGROK_AUTHTOKEN
secretkey dbpassword passphrase api_keys pwd auth bearer pat set-cookie client_secret_value jwtKey
GH_PAT DB_PASS PASS_DB MYSQL_PWD OPENAI_API_KEYS HF_TOKENS SECRET_X KEY_OPENAI OPENAI_KEY_PROD
PRIVATE_KEY_B64 DOCKER_AUTH_CONFIG NEW_RELIC_LICENSE_KEY AWS_ACCESS_KEY_ID creds passwords oauth"""
OTHERS = """max_tokens eos_token policy.eos_token padToken tokenizer key_column
monkey turkeys secretary passwords_file 7 sort_keys pass_reward pass_at_k bypass compass author
token_budget step_tokens stop_tokens special_tokens tokens keys PWD OLDPWD PATH token_url keyword"""
PASSWORDS = """postgres://user:hunter2@host/db redis://:hunter2@h:6379 a=https://u:hunter2@h
https://host/x?a=1&api_key=hunter2 mongodb+srv://u:hunter2%40@h"""
PLAIN = "http://h:80/a@b ssh://git@h/x s3://bucket/a:b@c http://h/x?keys=1 user:word@host {a}://b"


def test_a_name_says_that_a_value_is_secret():
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in ["", *OTHERS.split()] if is_secret(name)] == []
    assert [text for text in PASSWORDS.split() if not is_secret("x", text)] == []
    assert [text for text in PLAIN.split() if is_secret("x", text)] == []


def test_a_program_inherits_no_variable_that_is_secret_by_its_name_or_its_value(monkeypatch):
    monkeypatch.setenv("DATABASE", "postgres://user:hunter2@host/db")
    monkeypatch.setenv("KEY_OPENAI", "hunter2")
    inherited = environment(sys.executable)
    assert "PATH" in inherited and "hunter2" not in str(inherited)


SETTINGS = [
    ["task.reward={use='f.py:make',api_key='CANARY'}"],
    ["task.reward.api_key=CANARY", "task.reward.use=f.py:make"],
    ["task.reward=[{use='f.py:make',headers={authorization='CANARY'}}]"],
    ["task.reward=['f.py:f',{use='f.py:make',auth={tokens=[{token='CANARY'}]}}]"],
    ["task.reward={use='f.py:make',credentials=['env:X','CANARY']}"],
    ["task.reward={use='f.py:make',secret={value='CANARY'}}"],
    ["task.reward={use='http',apiKey='CANARY'}"],
    [
        "task=mixture",
        "task.sources.a={weight=1,use='custom',reward={use='f.py:make',password='CANARY'}}",
    ],
    ["objective=mine.Objective", "objective.private-key=CANARY"],
    ["engine.token=CANARY"],
    ["task.sources.a={weight=0,use='custom',reward={use='f.py:make',hfToken='CANARY'}}"],
    ["api_key=CANARY"],
    ["task=[{api_key='CANARY'}]"],
    ["task.reward.api_key='env: CANARY'"],
    ["task.reward={use='f.py:make',passphrase='CANARY'}"],
    ["task.reward={use='f.py:make',api_keys=['CANARY']}"],
    ["task.reward={use='f.py:make',database_url='postgres://u:CANARY@host/db'}"],
    ["task.env={DATABASE_URL='postgres://u:CANARY@host/db'}"],
]


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_a_secret_itself_is_refused_and_not_repeated(settings):
    with pytest.raises(ValueError, match="env:NAME") as caught:
        load(None, settings)
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{use='f.py:f',api_key='CANARY'", "[ {'use'=f.py:f,key='CANARY'}]"]
)
def test_a_broken_table_is_not_repeated(text):
    with pytest.raises(ValueError, match="check its quotes") as caught:
        load(None, [f"task.reward={text}"])
    assert "CANARY" not in str(caught.value)
    assert load(None, ["task.prompt={prompt} = "]).task.options["prompt"] == "{prompt} ="


def test_also_from_python():
    with pytest.raises(ValueError, match="env:NAME") as caught:
        Config(task={"use": "custom", "reward": {"use": "f.py:make", "api_key": "CANARY"}})
    assert "CANARY" not in str(caught.value)


def test_others_stay_as_they_are():
    own = ["policy.eos_token=</s>", "sampling.stop=['key:']", "task.reward.use=f.py:make"]
    options = {"max_tokens": 5, "token": 7, "api_key": "", "bos_token": "<s>"}
    given = [f"task.reward.{name}={json.dumps(value)}" for name, value in options.items()]
    assert load(None, [*own, *given]).task.options["reward"] == {"use": "f.py:make", **options}


@dataclass(frozen=True)
class Inner:
    password: str


@dataclass(frozen=True)
class Mine(Ones):
    """A user's plug-in."""

    token: str = "default in code"
    auth: dict[str, list[str]] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=lambda: {"password": "default in code"})
    inner: Inner = Inner("")


def test_options_have_their_secrets_where_they_are_built(monkeypatch):
    monkeypatch.setenv("CANARY", CANARY)
    options = {"token": "env:CANARY", "auth": {"key": ["env:CANARY", ""], "url": ["env:URL", "x"]}}
    monkeypatch.setenv("URL", url := f"postgres://user:{CANARY}@host/db")
    options["inner"] = {"password": "env:CANARY"}
    plugin = resolve("tasks", "task", "test_secrets.Mine", options)
    assert CANARY not in repr(plugin)
    built = plugin.build()
    assert built.token == built.inner.password == CANARY
    assert built.auth == {"key": [CANARY, ""], "url": [url, "x"]}


def test_a_default_in_code_is_not_written_to_the_config():
    assert options_of(Mine)["token"].default is None
    complete = with_defaults(load(None, ["task=test_secrets.Mine"]))
    assert "default in code" not in json.dumps(complete.nested())
    assert resolve("tasks", "task", "test_secrets.Mine", {}).build().token == "default in code"


@pytest.mark.parametrize("table", ["task", "engine"])
def test_a_variable_that_is_not_set_is_told_before_the_start(table, tiny_model, tmp_path):
    setting = "task.token=env:ABSENT_1" if table == "task" else "engine.api_key=env:ABSENT_1"
    settings = config(tiny_model, tmp_path / "run", "task=test_secrets.Mine", setting)
    with pytest.raises(ValueError, match="'ABSENT_1' is not set; export it"):
        run(settings)
    assert not (tmp_path / "run").exists()


def test_an_error_of_a_factory_or_a_reward_does_not_repeat_it(factory):
    with pytest.raises(ValueError, match="no such token") as caught:
        reward_function("task.reward", PluginTable(use=f"{factory}:loud", token="env:CANARY"))
    assert CANARY not in str(caught.value)
    function = reward_function(
        "task.reward", PluginTable(use=f"{factory}:raises", token="env:CANARY")
    )
    with pytest.raises(ValueError, match="no such token") as raised:
        function(["text"])
    assert CANARY not in rejection(raised.value).detail


def contents(folders: Sequence[Path]) -> bytes:
    return b"".join(p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file())


def test_no_file_of_a_run_has_it(factory, tiny_model, tmp_path):
    """Nor its checkpoints, its report, the exported model and its card."""
    rows = [json.dumps({"prompt": f"{i}", "answer": "1"}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    reward = f"task.reward={{use='{factory}:make',api_key='env:CANARY'}}"
    data = ["task=custom", f"task.data={tmp_path}/rows.jsonl", "task.held_out_size=3"]
    steps = ["run.steps=2", "reward.isolate=process", "log.report_to=tensorboard"]
    run(config(tiny_model, folder := tmp_path / "run", *data, reward, *steps))
    report([folder])
    export(folder, out := tmp_path / "out")
    assert b"env:CANARY" in contents([folder])
    assert CANARY.encode() not in contents([folder, out])
