"""Lists the files of this package, and writes a wheel of them for projects that cannot use the checkout."""

import csv
import hashlib
import io
import os
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from accelerate_recipes import bundle
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.package import digest_in_record, names_the_code
from accelerate_recipes.common.package import version as own_version

NAME = "accelerate-recipes"
_PACKAGE = Path(__file__).parent
_DATA = (bundle.CONFIGS, bundle.LAUNCHERS, bundle.RECIPES)  # in the package; in a checkout, beside it


def files() -> dict[str, Path]:
    """{name in a wheel: file}"""
    places = {_PACKAGE.name: _PACKAGE, f"{_PACKAGE.name}/common": bundle.COMMON}  # in a checkout, the second is a link
    if not bundle.ROOT.is_relative_to(_PACKAGE):
        places |= {f"{_PACKAGE.name}/bundle/{place.name}": place for place in _DATA}
    return {f"{name}/{path.relative_to(top).as_posix()}": path for name, top in places.items() for path in _in(top)}


def _in(folder: Path) -> list[Path]:
    """The files below a folder, without the outputs of runs and Python's caches."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "outputs") and name[0] != ".")
        found += [Path(place, name) for name in sorted(names) if name[0] != "."]
    return found


def requirements(extra: str = "") -> list[str]:
    """The package's requirements for this extra, or without one."""
    split = [requirement.partition(";") for requirement in _installed().requires or []]
    return [name.strip() for name, _, marker in split if marker.partition("extra == ")[2].strip("'\" ") == extra]


def write_wheel(folder: Path) -> Path:
    """Writes a wheel of the package into a folder, as a build from the checkout would; returns its path.

    If the version does not identify the code, a digest of the files follows it.
    """
    contents = {name: path.read_bytes() for name, path in files().items()}
    version, installed = own_version(), _installed()
    if not names_the_code():
        version = f"{bundle.VERSION}+{hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()[:8]}"
    stem = f"{_PACKAGE.name}-{version}"
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        text = (installed.read_text(name) or "").replace(f"Version: {installed.version}\n", f"Version: {version}\n", 1)
        contents[f"{stem}.dist-info/{name}"] = text.encode()
    about = f"Wheel-Version: 1.0\nGenerator: {NAME} {bundle.VERSION}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{stem}.dist-info/WHEEL"] = about.encode()
    record, list_of_all = io.StringIO(), f"{stem}.dist-info/RECORD"
    rows = [(name, f"sha256={digest_in_record(content)}", len(content)) for name, content in contents.items()]
    csv.writer(record, lineterminator="\n").writerows([*rows, (list_of_all, "", "")])
    contents[list_of_all] = record.getvalue().encode()
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in contents.items():
            opened.writestr(name, content)
    return wheel


def _installed() -> Distribution:
    try:
        installed = distribution(NAME)
    except PackageNotFoundError:
        raise UsageError(f"{NAME} is not installed: run pip install -e . in its checkout") from None
    if installed.version.partition("+")[0] != bundle.VERSION:
        what = f"its files are from version {bundle.VERSION}: run pip install -e . in its checkout again"
        raise UsageError(f"{NAME} {installed.version} is installed, but {what}")
    return installed
