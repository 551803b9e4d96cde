"""Data sets of the Hub, and the files that scikit-learn brings."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState

from common.errors import UsageError


def sklearn_file(name: str) -> Path:
    """A data file of scikit-learn, which is real data that every machine has; no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name


def load_splits(data: str, advice: str) -> list[Any]:
    """The training split and, where there is one, the evaluation split of a set of the Hub, or of a
    folder laid out as the Hub stores one, each a `datasets.Dataset`.

    Args:
        data: Hub id or folder.
        advice: what to type instead, for the error.

    Raises:
        UsageError: nothing there, no network, or no training split.
    """
    # The first process of each machine downloads or converts; the others then find it in the cache.
    with PartialState().local_main_process_first():
        splits = _load_dataset(data, advice)
    if "train" not in splits:
        raise UsageError(f"--data {data} has no train split but {', '.join(splits)}")
    evaluation = next((name for name in ("test", "validation", "valid") if name in splits), None)
    return [splits[name] for name in ("train", evaluation) if name]


def _load_dataset(data: str, advice: str) -> dict[str, Any]:
    import datasets  # here, because the import takes seconds

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(data)
    except Exception as error:  # the library raises dozens of kinds, its network stack more
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if Path(data).is_dir():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(
            f"--data {data}: not a folder here, and the Hub gave no such set ({reason}); {advice}"
        ) from None
