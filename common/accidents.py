"""Explains errors of the machine: a cache that cannot be written, full shared memory, too many open files."""

import errno
import os
import re
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

import psutil

from .errors import chain

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

SHARED = Path("/dev/shm")
# Messages of torch's DataLoader, and of torch in a worker whose batch does not fit into shared memory.
LOST_WORKER = re.compile(r"DataLoader worker .*?(?:killed by signal: ([\w ]*\w)|exited unexpectedly)")
NO_SHARED_MEMORY = re.compile(
    r"unable to (?:allocate|open|mmap|resize).* shared memory|shared memory.*No space left", re.I
)

# The errors of a full disk, a quota, a read-only file system and another user's folder.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.EIO, errno.ESTALE)  # only if the error names the file
FULL = re.compile(r"\d+ requested and \d+ written|Not enough disk space")  # messages of numpy and of datasets
# {part of the path of the code that writes: variable}; for errors that name no file.
WRITERS = {
    "-packages/datasets/": "HF_DATASETS_CACHE",
    "/common/tasks/streams.py": "HF_DATASETS_CACHE",
    "-packages/huggingface_hub/": "HF_HUB_CACHE",
    "-packages/torch/utils/cpp_extension": "TORCH_EXTENSIONS_DIR",
    "-packages/triton/": "TRITON_CACHE_DIR",
    "-packages/torch/_inductor/": "TORCHINDUCTOR_CACHE_DIR",
}


def folders() -> dict[str, Path]:
    """{variable: folder} of the libraries' caches, chosen as the libraries do. Setting the variable moves the cache."""
    home = Path("~")

    def chosen(variable: str, default: Path) -> Path:
        # As the libraries do: without a home it stays "~".
        return Path(os.path.expanduser(os.environ.get(variable) or default)).absolute()  # noqa: PTH111

    shared = chosen("XDG_CACHE_HOME", home / ".cache")
    hub = chosen("HF_HOME", shared / "huggingface")
    return {
        "XDG_CACHE_HOME": shared,
        "HF_HOME": hub,
        "HF_DATASETS_CACHE": chosen("HF_DATASETS_CACHE", hub / "datasets"),
        "HF_HUB_CACHE": chosen("HF_HUB_CACHE", hub / "hub"),
        "TORCH_EXTENSIONS_DIR": chosen("TORCH_EXTENSIONS_DIR", shared / "torch_extensions"),
        "TRITON_CACHE_DIR": chosen("TRITON_CACHE_DIR", home / ".triton"),
        "TORCHINDUCTOR_CACHE_DIR": chosen("TORCHINDUCTOR_CACHE_DIR", Path(gettempdir()) / "torchinductor"),
    }


def advice(error: BaseException) -> str | None:
    """One line for an error that the machine or a tokenizer caused, perhaps indirectly: what to type; or None."""
    lines = (_cache(each) or _open_files(each) or _worker(each) or _unknown_word(each) for each in chain(error))
    return next(filter(None, lines), None)


def _cache(error: BaseException) -> str | None:
    known = folders()
    if (reason := _reason(error)) is None or (variable := _variable(error, known)) is None:
        return None
    room = "has room" if reason in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)) else "can be written"
    what = f"the cache {known[variable]} cannot be written ({reason}): run export {variable}=FOLDER"
    return f"{what}, with a folder that {room}"


def _worker(error: BaseException) -> str | None:
    """The line for a worker of the recipe's own DataLoader that could not send a batch, or that ended."""
    text = str(error)
    if NO_SHARED_MEMORY.search(text):
        return lost_worker("Bus error")
    ended = LOST_WORKER.search(text)
    return lost_worker(ended[1]) if ended else None


def lost_worker(signal_name: str | None) -> str:
    """The line for a DataLoader worker that a signal ended. `signal_name`: the system's description of the signal."""
    if signal_name == "Bus error":
        size = f" of {shutil.disk_usage(SHARED).total / 1e6:,.0f} MB" if SHARED.exists() else ""
        return (
            f"{SHARED}{size} is full; DataLoader workers send batches through it: use --num_workers 0, or give "
            "it more (docker run --shm-size 8g)"
        )
    if signal_name in (None, "Killed"):
        free = psutil.virtual_memory().available / 1e9
        how = f"was killed, probably because memory ran out ({free:,.1f} GB are free now)"
        return f"a DataLoader worker {how}: use a smaller --num_workers, or 0"
    return f"a DataLoader worker ended ({signal_name}): use --num_workers 0 to see where"


def _open_files(error: BaseException) -> str | None:
    if getattr(error, "errno", None) != errno.EMFILE and os.strerror(errno.EMFILE) not in str(error):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else "this machine's"
    return f"too many open files (the limit is {limit}): run ulimit -n 65536 before the command"


def _unknown_word(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].name == "get_lang_token":  # of M2M100
        return f"the tokenizer has no language {error}: use a language code, such as --source_lang en"
    is_missing = "Missing [UNK] token" in str(error)  # tokenizers raises a plain Exception
    return "the tokenizer has no token for unknown words: use one with an unk_token" if is_missing else None


def _reason(error: BaseException) -> str | None:
    """The file system's reason, from the error number or, if a library kept only the text, from the message."""
    text = str(error)
    if getattr(error, "filename", None) and getattr(error, "errno", None) in NO_FOLDER:
        return os.strerror(error.errno)  # type: ignore[attr-defined]
    for number in REFUSALS:
        if getattr(error, "errno", None) == number or os.strerror(number) in text:
            return os.strerror(number)
    return os.strerror(errno.ENOSPC) if isinstance(error, OSError) and FULL.search(text) else None


def _variable(error: BaseException, known: Mapping[str, Path]) -> str | None:
    """The variable of the cache with the file that an error names, or else of the code that raised the error."""
    names = [name for name in (getattr(error, "filename", None), getattr(error, "filename2", None)) if name]
    if names:
        paths = [Path(os.fsdecode(name)).absolute() for name in names if isinstance(name, str | bytes | os.PathLike)]
        holding = [name for name, folder in known.items() if any(path.is_relative_to(folder) for path in paths)]
        return max(holding, key=lambda name: len(known[name].parts), default=None)
    files = [frame.filename for frame in reversed(traceback.extract_tb(error.__traceback__))]
    return next((variable for file in files for part, variable in WRITERS.items() if part in file), None)
