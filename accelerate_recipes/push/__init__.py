"""`accelerate-recipes push`: uploads the model of a finished run, with a model card, to the Hugging Face Hub."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import typer

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.console import AsJson, print_json

# The longest silence of the Hub within a request, in seconds. The longest upload: hf_xet, which sends large files, once
# waited 20 minutes for a silent server; seconds, and bytes per second.
TIMEOUT_S = float(os.environ.get("ACCELERATE_RECIPES_HUB_TIMEOUT", 60.0))
LONGEST_S, SLOWEST = 10 * TIMEOUT_S, 1e6


def push(
    output_dir: Annotated[Path, typer.Argument(help="output folder of a finished run")],
    name: Annotated[str, typer.Argument(help="repository on the Hugging Face Hub; a new one is private")],
    as_json: AsJson = False,
) -> None:
    """Upload the model of a run, with a model card, to the Hugging Face Hub. Exit code 1 if that fails.

    Example: accelerate-recipes push outputs/mnist your_name/digits
    """
    from filelock import FileLock, Timeout

    card = _finished(output_dir)
    check_name(name)
    model = output_dir / "model"
    print(f"uploading {model} to {name} on the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        seconds = LONGEST_S + sum(path.stat().st_size for path in model.iterdir()) / SLOWEST
        with FileLock(output_dir / ".lock", timeout=0):  # no run may replace model/ now
            upload = ThreadPoolExecutor(1).submit(_send, output_dir, card, name)
            if not wait([upload], seconds).done:
                raise TimeoutError(f"not done after {seconds:.0f} s")
            url = upload.result()
    except Exception as error:  # the library and its network stack raise dozens of types
        why = "a run writes to the folder" if isinstance(error, Timeout) else _reason(error)
        line = f"not uploaded: sending {model} to {name} failed ({why}): run the same command again"
        print(line, file=sys.stderr, flush=True)
        # Not sys.exit: a silent Hub holds a thread.
        os._exit(1)
    print_json({"url": url}) if as_json else print(f"uploaded: {url}")


def check_name(name: str) -> None:
    """Raises UsageError if it is clear without the network that an upload to `name` must fail."""
    from huggingface_hub import get_token, is_offline_mode
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UsageError(f"{name} is not a repository name: use your_name/model (letters, digits, - _ .)") from None
    if is_offline_mode():
        raise UsageError("HF_HUB_OFFLINE forbids an upload: unset the variable")
    if get_token() is None:
        raise UsageError("an upload needs a login on this machine: run hf auth login, or set HF_TOKEN")


def _finished(output_dir: Path) -> dict[str, Any]:
    """The run card of a finished run. Raises UsageError if there is none."""
    from accelerate_recipes.common.records.run_card import read_card  # the import takes seconds

    try:
        card = read_card(output_dir)
        is_done = card["status"] == "done" or card.get("trained", False)
        has_model = any((output_dir / "model").glob("*.safetensors"))
    except (OSError, KeyError):
        raise UsageError(f"{output_dir} has no run: use the --output_dir of a finished run") from None
    if not is_done:
        raise UsageError(f"the run in {output_dir} is not done: use its command with --resume_from_checkpoint latest")
    if not has_model:
        advice = f"if it has checkpoints, run accelerate-recipes export {output_dir} {output_dir / 'model'}"
        raise UsageError(f"{output_dir / 'model'} has no weights, though the run is done: {advice}")
    return card


def _send(output_dir: Path, card: dict[str, Any], name: str) -> str:
    """Uploads `model/` with its card; returns the address of the repository."""
    # Not at the top: these imports take time.
    from huggingface_hub import HfApi, get_session, set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging

    from accelerate_recipes.push.card import write_model_card

    logging.set_verbosity_error()  # it logs its retries
    if not sys.stderr.isatty():
        disable_progress_bars()
    default = get_session()
    # By default it waits forever.
    set_client_factory(lambda: type(default)(event_hooks=default.event_hooks, follow_redirects=True, timeout=TIMEOUT_S))
    repository = HfApi().create_repo(name, private=True, exist_ok=True)
    write_model_card(output_dir, card, repository.repo_id)
    HfApi().upload_folder(repo_id=repository.repo_id, folder_path=output_dir / "model", commit_message="Upload a model")
    return str(repository)


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    text = getattr(error, "server_message", None) or str(error).split("\n\n")[0]
    return f"{status or type(error).__name__}: {' '.join(text.split())}"
