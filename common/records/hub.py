"""Uploads the models of finished runs to the Hugging Face Hub."""

import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from common.config import RunConfig
from common.errors import RunError
from common.records.run_card import read_card, replace_card

TIMEOUT_S = 60.0  # longest silence of the Hub within a request
# Longest upload: hf_xet, which sends large files, was seen to wait 20 minutes for a silent server.
LONGEST_S, SLOWEST = 600.0, 1e6  # seconds, and bytes a second

_finished: list[RunConfig] | None = None  # runs that `uploads` has to upload; None outside of it


class UploadError(RunError):
    """The run is done and its files are complete, but the model did not get to the Hub."""

    exit_code = 4
    label = "not uploaded"


@contextmanager
def uploads() -> Iterator[None]:
    """After the `with` block, uploads the models of the runs that finished in it with `--push_to_hub`.

    Other processes must not wait for this one then: an upload may take hours.

    Raises:
        UploadError: an upload failed.
    """
    global _finished
    _finished = []
    yield
    for config in _finished:
        _upload(config)


def can_upload() -> bool:
    """Whether this code runs inside `uploads`."""
    return _finished is not None


def upload_later(config: RunConfig) -> None:
    """Hands a finished run to `uploads`. Call it in the main process."""
    assert _finished is not None
    _finished.append(config)


def _upload(config: RunConfig) -> None:
    output_dir, name, model = config.output_dir, str(config.push_to_hub), config.output_dir / "model"
    print(f"uploading {model} to {name} on the Hugging Face Hub", flush=True)
    _note(output_dir, 0, {"name": name, "url": None, "error": "the upload did not finish"})
    try:
        with FileLock(output_dir / ".lock", timeout=0):  # no other run may replace model/ now
            url = _within(_longest(model), lambda: _send(output_dir, name))
    except Exception as error:  # the library and its network stack raise dozens of types
        later = shlex.join(["hf", "upload", name, str(model), "--private"])
        line = f"the run is done, but its model did not get to {name} on the Hub ({_reason(error)}): type {later}"
        _note(output_dir, UploadError.exit_code, {"name": name, "url": None, "error": line})
        raise UploadError(line) from None
    _note(output_dir, 0, {"name": name, "url": url, "error": None})
    print(f"uploaded: {url}", flush=True)


def _longest(model: Path) -> float:
    """Seconds after which an upload of the folder counts as failed."""
    return LONGEST_S + sum(path.stat().st_size for path in model.iterdir()) / SLOWEST


def _within(seconds: float, work: Callable[[], str]) -> str:
    """The result of `work`. Raises TimeoutError after `seconds`; then the work goes on until the process ends."""
    try:
        return ThreadPoolExecutor(1).submit(work).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no end after {seconds:.0f} s") from None


def _send(output_dir: Path, name: str) -> str:
    """Uploads `model/` with its card; returns the address of the repository."""
    # Not at the top: these imports take time.
    from huggingface_hub import HfApi, get_session, set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging

    from common.records.model_card import write_model_card

    logging.set_verbosity_error()  # it retries some requests, and says so
    if not sys.stderr.isatty():
        disable_progress_bars()
    default = get_session()
    # By default it waits for ever.
    set_client_factory(lambda: type(default)(event_hooks=default.event_hooks, follow_redirects=True, timeout=TIMEOUT_S))
    write_model_card(output_dir, name)  # first, because it also serves a later upload
    repository = HfApi().create_repo(name, private=True, exist_ok=True)
    if repository.repo_id != name:  # a name without its owner
        write_model_card(output_dir, repository.repo_id)
    HfApi().upload_folder(
        repo_id=repository.repo_id, folder_path=output_dir / "model", commit_message="Upload a trained model"
    )
    return str(repository)


def _reason(error: Exception) -> str:
    """Why an upload failed, in one line."""
    if isinstance(error, Timeout):
        return "another run writes to the folder"
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = getattr(error, "server_message", None) or str(error).split("\n\n")[0]
    return f"{status or type(error).__name__}: {' '.join(text.split())}"


def _note(output_dir: Path, exit_code: int, upload: dict[str, Any]) -> None:
    """Adds the upload to the run card."""
    replace_card(output_dir, read_card(output_dir) | {"exit_code": exit_code, "upload": upload})
