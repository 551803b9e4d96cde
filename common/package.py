"""Tells the user's files from this package's, and whether the version identifies the package's code."""

import base64
import hashlib
import json
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from .. import __version__

_PACKAGE = Path(__file__).parents[1]
LOCAL = "+local"
_RECIPES = _PACKAGE / "bundle" / "recipes"  # an installed recipe is a recipe


@cache
def is_own(file: str) -> bool:
    """Whether a file is the user's, such as the recipe: not part of this package, of another one or of Python."""
    path = Path(file)
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_RECIPES)
    is_package = {"site-packages", "dist-packages"} & {*path.parts} or path.is_relative_to(sysconfig.get_path("stdlib"))
    return not (is_package or file.startswith("<frozen"))


@cache
def version() -> str:
    """The version of this package; with "+local" after it unless it identifies the code: in a checkout, in a vendored
    folder, installed from a folder or a commit, or with files that differ from the wheel's."""
    with suppress(PackageNotFoundError):
        if _is_whole(installed := distribution("accelerate-recipes")):
            return installed.version
    return f"{__version__}{LOCAL}"


def names_the_code() -> bool:
    """Whether two packages of this version have the same files."""
    return not version().endswith(LOCAL)


def _is_whole(installed: Distribution) -> bool:
    """Whether a wheel installed the running files, unchanged."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # pip writes none for a name and a version
    if {"dir_info", "vcs_info"} & origin.keys():
        return False
    # Another folder of this name may come first in sys.path: whole paths are compared.
    digests = {Path(str(file.locate())): file.hash.value for file in installed.files or [] if file.hash}
    return all(digests.get(path) == digest_in_record(path.read_bytes()) for path in _PACKAGE.rglob("*.py"))


def digest_in_record(content: bytes) -> str:
    """The SHA-256 of a file as the RECORD of a wheel has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def installed_versions(*packages: str) -> dict[str, str]:
    """{name: version} of these packages, if they are installed."""
    found: dict[str, str] = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = distribution(package).version
    return found


def files_of_run() -> dict[str, Path]:
    """{name: file} of the recipe, of its imports from its folder and, unless the version identifies it, of this
    package without the command-line tool. With these names, the recipe can start."""
    script = Path(sys.argv[0]).resolve()
    files = {script.name: script}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and path.is_relative_to(script.parent) and is_own(str(path)):
            files[str(path.relative_to(script.parent))] = path
    if not names_the_code():
        ours = [_PACKAGE / "__init__.py", *(_PACKAGE / "common").rglob("*.py")]
        files |= {str(path.relative_to(_PACKAGE.parent)): path for path in ours}
    return files
