"""Tiny real models, and groups in which every axis has its own length."""

import importlib.util
import os
import signal
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

# Read when torch is imported, here and in child processes. Without it, matrix products in threads
# other than the main one use all cores, whatever torch.set_num_threads says.
os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import numpy as np
import pytest
import torch
from pretend import Pretended
from suite import case as case
from suite import pytest_runtest_makereport as pytest_runtest_makereport

from tba.prompt import Prompt
from tba.types import Batch, Group, Trajectory, collate

# Read when transformers and datasets are imported, and when ray is: none of the above does that.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # a private Ray listens on loopback
torch.set_num_threads(1)  # on tiny models threads only wait for each other
# Under nohup or in the background they are ignored, here and in every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = [PAD, EOS, *"0123456789+="]
LETTERS = [*VOCABULARY, *string.ascii_letters, *" .,:;?!'\"-()\n#$<>*/%"]
CONTENTS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A chat template that shows what messages say, and nothing else."""
LENGTHS = ((5, 1, 3, 2), (2, 4, 4, 1), (3, 3, 2, 1))
"""Of the responses: B = 3, K = 4, T = 5, of which the last group needs only 3."""


def module_at(path: Path) -> ModuleType:
    """Run a file that is in no package, and return its module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def same_priority() -> Iterator[None]:
    """Fail if a test lowered the priority of this process: it would hold up all tests after it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random character-level Llama and its tokenizer, with any special tokens."""

    def make(
        eos: str | None = EOS,
        pad: str | None = PAD,
        vocabulary: Sequence[str] = VOCABULARY,
        hidden_size: int = 32,
        context: int = 32,
        tied: bool = True,
        template: str | None = None,
    ) -> Path:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        ids = {c: i for i, c in enumerate(vocabulary)}
        characters = Tokenizer(models.WordLevel(ids, unk_token=PAD))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
        characters.decoder = decoders.Fuse()
        special = {} if eos is None else {"eos_token": eos}
        special |= {} if pad is None else {"pad_token": pad}
        config = LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=hidden_size, intermediate_size=48,
            num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=context,
            tie_word_embeddings=tied, bos_token_id=None,
            eos_token_id=ids.get(eos), pad_token_id=ids.get(pad),
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("model")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
        special |= {"tokenizer_object": characters, "padding_side": "left"}
        tokenizer = PreTrainedTokenizerFast(**special)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random sequence classifier, of the kind and with the tokenizer of a model."""

    def make(model: Path, labels: Sequence[str] = ("good",)) -> Path:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        folder = tmp_path_factory.mktemp("classifier")
        config = AutoConfig.from_pretrained(model, id2label=dict(enumerate(labels)))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def letters_model(make_model: Callable[..., Path]) -> Path:
    """One that reads letters, with a chat template."""
    return make_model(vocabulary=LETTERS, context=4096, template=CONTENTS)


@pytest.fixture(scope="session")
def wide_model(make_model: Callable[..., Path]) -> Path:
    """One with heads of 32 dimensions and a context beyond a block of vLLM's cache."""
    return make_model(hidden_size=64, context=256)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from exact import save_model

    return save_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def shallow_toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with one layer, which is enough to represent its optimum."""
    from exact import save_model

    return save_model(tmp_path_factory.mktemp("shallow-toy"), layers=1)


@pytest.fixture
def unchecked_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check no shapes, in tests of hundreds of steps that other tests check."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention without compilation, as operators of PyTorch."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def pretend() -> Iterator[Pretended]:
    """A GPU, `cuda:0`, that is pretended for the length of a test."""
    with Pretended() as gpu:
        yield gpu


@pytest.fixture
def groups() -> list[Group]:
    """Three groups of four, with values; only the first response of each was cut off before EOS."""
    rng = np.random.default_rng(0)

    def trajectory(k: int, length: int) -> Trajectory:
        tokens = rng.integers(2, len(VOCABULARY), length).astype(np.int32)
        tokens[-1] = tokens[-1] if k == 0 else VOCABULARY.index(EOS)
        behavior, ref = (-rng.exponential(size=length).astype(np.float32) for _ in range(2))
        value = np.linspace(-1, k, length, dtype=np.float32)
        reward, version = float(rng.normal()), int(rng.integers(7))
        return Trajectory(tokens, behavior, ref, reward, version, finished=k > 0, value=value)

    groups = []
    for b, (text, lengths) in enumerate(zip(("1+", "7", "2="), LENGTHS, strict=True)):
        tokens = np.array([VOCABULARY.index(c) for c in text], np.int32)
        some = tuple(trajectory(k, n) for k, n in enumerate(lengths))
        groups.append(Group(Prompt(f"prompt-{b}", text, {"answer": str(b)}), tokens, some))
    return groups


@pytest.fixture
def batch(groups: list[Group]) -> Batch:
    """[B=3, K=4, T=5], responses of 1 to 5 tokens after prompts of 1 or 2."""
    return collate(groups)


@pytest.fixture
def logp(batch: Batch) -> torch.Tensor:
    """[B K T] of a policy that is neither the reference nor the one that sampled; 0 at padding."""
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    return ((batch.ref_logp + 0.3 * noise).clamp(max=-0.01) * batch.mask).requires_grad_()
