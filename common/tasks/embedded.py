"""Data sets that come with every installation."""

from importlib.util import find_spec
from pathlib import Path


def sklearn_file(name: str) -> Path:
    """Path of a data file in the scikit-learn package: real data, no download, and no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name
