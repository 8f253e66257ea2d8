"""Export of a run's model with its card: to a folder, and to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, RepoUrl, constants, get_token
from huggingface_hub.errors import HfHubHTTPError

from tba.runs.card import write_card
from tba.runs.choice import chosen
from tba.runs.early import check_export
from tba.runs.generations import step_of
from tba.runs.offline import let_others_read, write_model


def share(
    run: Path,
    out: Path | None,
    adapter: bool = False,
    step: int | str | None = None,
    name: str | None = None,
    private: bool = False,
) -> str:
    """Write a checkpoint's model and its card to a new folder, and upload them as `name`.

    Return the path of the folder, or the address of the repository. Without `out`, the folder is
    removed after the upload. ValueError, before anything is written, if something is wrong.
    """
    policy = check_export(run, out, adapter, name, private)
    if name is not None and get_token() is None:
        raise ValueError(
            "--push-to-hub needs a token of the Hugging Face hub: type `hf auth login`, or set"
            " HF_TOKEN"
        )
    with ExitStack() as closing:
        generation = closing.enter_context(chosen(run, step))
        # before a model is merged, because the hub may refuse
        repository = None if name is None else _create(name, private)
        folder = out
        if folder is None:
            aside = TemporaryDirectory(prefix=".export-", dir=run)  # /tmp may be too small
            folder = Path(closing.enter_context(aside)) / "model"
        write_model(policy, generation, folder, adapter)
        title = folder.name if repository is None else repository.repo_id
        write_card(run, folder, step_of(generation), title, adapter)
        let_others_read(folder)
        if repository is None:
            return str(folder)
        with _asking(title):
            message = f"Checkpoint of step {step_of(generation)}"
            HfApi().upload_folder(repo_id=title, folder_path=folder, commit_message=message)
    return str(repository)


def _create(name: str, private: bool) -> RepoUrl:
    """Create the repository unless it exists; ValueError if it must be private and is not."""
    api = HfApi()
    with _asking(name):
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(url.repo_id).private:
            raise ValueError(
                f"{url} exists and is public; make it private on its settings page, choose another"
                " name, or leave out --private"
            )
    return url


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """Turn what the hub refuses into a ValueError that says what to type."""
    try:
        yield
    except HfHubHTTPError as error:
        denied = error.response.status_code in (401, 403)
        advice = "; type `hf auth login`, with a token that may write there" if denied else ""
        why = error.server_message or str(error).partition("\n")[0]
        raise ValueError(f"{constants.ENDPOINT} refuses {name!r}: {why}{advice}") from error
    except ValueError:
        raise
    except Exception as error:  # no connection, a timeout, or offline mode: the class varies
        raise ValueError(f"{name!r} was not uploaded to {constants.ENDPOINT}: {error}") from error
