"""The source of a run, which its checkpoints carry: so that a result can still be read when the code has changed."""

import base64
import io
import shlex
import sys
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..errors import is_own
from ..records.run_card import launch_command

LOOP = Path(__file__).parents[1]
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # one archive for one source


@cache
def source() -> str:
    """A zip archive as base64: the recipe, what it imports from its folder and for its task, the loop, the config file,
    and the command that started the run."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(zipfile.ZipInfo("command.txt", LONG_AGO), launch_command() + "\n")
        for name, path in sorted(_files().items()):
            with suppress(OSError):  # a recipe that was typed in, or a file that is gone
                entry = zipfile.ZipInfo(name, LONG_AGO)
                entry.compress_type = zipfile.ZIP_DEFLATED
                opened.writestr(entry, path.read_bytes())
    return base64.b64encode(archive.getvalue()).decode()


def _files() -> dict[str, Path]:
    """{name in the archive: file}"""
    script = Path(sys.argv[0]).resolve()
    files = {script.name: script}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and path.is_relative_to(script.parent) and is_own(str(path)):
            files[str(path.relative_to(script.parent))] = path
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = [path for path in LOOP.rglob("*.py") if path.parent.name != "tasks" or str(path) in loaded]
    files |= {f"{LOOP.name}/{path.relative_to(LOOP)}": path for path in own}
    words = shlex.split(launch_command())
    for word, following in zip(words, [*words[1:], ""]):
        if word.startswith("--config_file"):
            config = Path(word.partition("=")[2] or following)
            files[f"accelerate_configs/{config.name}"] = config
    return files
