"""Datasets of the Hub, and data files in the scikit-learn package."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import PartialState

from common.errors import UsageError


def sklearn_file(name: str) -> Path:
    """Path of a data file in the scikit-learn package: real data, no download, and no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name


def load_splits(data: str, advice: str) -> list[Any]:
    """The training split and, if there is one, the evaluation split of a dataset, each a `datasets.Dataset`.

    Args:
        data: Hub id, or a folder in the Hub's layout.
        advice: end of the error message: what to type instead.

    Raises:
        UsageError: no data, no network, or no training split.
    """
    # The first process of each machine downloads and converts. The others then read the cache.
    with PartialState().local_main_process_first():
        splits = _load_dataset(data, advice)
    if "train" not in splits:
        raise UsageError(f"--data {data}: expected a train split, found {', '.join(splits)}")
    evaluation = next((name for name in ("test", "validation", "valid") if name in splits), None)
    return [splits[name] for name in ("train", evaluation) if name]


def _load_dataset(data: str, advice: str) -> dict[str, Any]:
    import datasets  # not at the top: the import takes seconds

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(data)
    except Exception as error:  # the library and its network stack raise dozens of types
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if Path(data).is_dir():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(
            f"--data {data}: no such folder, and loading from the Hub failed ({reason}); {advice}"
        ) from None
