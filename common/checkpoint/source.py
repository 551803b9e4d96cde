"""The source of a run, which its checkpoints carry: so that a result can still be read when the code has changed."""

import base64
import io
import shlex
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..package import files_of_run, version
from ..records.run_card import launch_command

LONG_AGO = (1980, 1, 1, 0, 0, 0)  # one archive for one source


@cache
def source() -> str:
    """A zip archive as base64: the recipe, what it imports from its folder, the config file, the command that started
    the run, the version of this package and, unless that names its code, the package."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(zipfile.ZipInfo("command.txt", LONG_AGO), launch_command() + "\n")
        opened.writestr(zipfile.ZipInfo("version.txt", LONG_AGO), f"accelerate-recipes {version()}\n")
        for name, path in sorted((files_of_run() | _config_file()).items()):
            with suppress(OSError):  # a recipe that was typed in, or a file that is gone
                entry = zipfile.ZipInfo(name, LONG_AGO)
                entry.compress_type = zipfile.ZIP_DEFLATED
                opened.writestr(entry, path.read_bytes())
    return base64.b64encode(archive.getvalue()).decode()


def _config_file() -> dict[str, Path]:
    """{name in the archive: file}; empty without one."""
    words = shlex.split(launch_command())
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("--config_file"):
            config = Path(word.partition("=")[2] or following)
            return {f"accelerate_configs/{config.name}": config}
    return {}
