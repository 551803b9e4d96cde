"""Promise: a build of DeepSpeed's extension that was killed holds up no later run."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from accelerate_recipes.common.parallel.extensions import BUILDS_IN, extensions_folder
from support.launching import fork
from support.recipes import USERS
from support.runs import ROOT

STEPS = "--max_steps 5 --hang_timeout 20"


@pytest.mark.full
def test_build_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    """A killed build leaves running compilers, torch's lock file, which makes all other builds wait, and maybe an
    incomplete library."""
    fork(tmp_path / "first", "deepspeed_zero2", USERS, STEPS)  # compiles the extension if necessary
    folder = tmp_path / "torch_extensions" / extensions_folder().name
    shutil.copytree(extensions_folder(), folder)
    (folder / "deepspeed_shm_comm" / "lock").touch()
    (folder / "deepspeed_shm_comm" / "is_whole").unlink()
    compilers = [
        subprocess.Popen(["sleep", "1000"], env=os.environ | {BUILDS_IN: str(place)}) for place in (folder, tmp_path)
    ]
    try:
        fork(tmp_path / "run", "deepspeed_zero2", USERS, STEPS, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert [compiler.poll() for compiler in compilers] == [-signal.SIGKILL, None]  # the other one builds elsewhere
    finally:
        for compiler in compilers:
            compiler.kill()
            compiler.wait()
    assert not (folder / "deepspeed_shm_comm" / "lock").exists()
    assert (folder / "deepspeed_shm_comm" / "is_whole").exists()


@pytest.mark.full
def test_run_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import contextlib, os, pathlib, runpy, signal, sys, threading, time\n"
        "import psutil\n"
        "def kill():\n"
        f"    while not list(pathlib.Path({str(tmp_path)!r}).glob('torch_extensions/*/*/lock')):\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(3)\n"
        "    children = [child.pid for child in psutil.Process().children(recursive=True)]\n"
        "    sys.setswitchinterval(60)  # else the main thread may see that its compiler ends, and remove the lock\n"
        "    for pid in [*children, os.getpid()]:\n"
        "        with contextlib.suppress(ProcessLookupError):\n"
        "            os.kill(pid, signal.SIGKILL)\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        f"runpy.run_path({str(ROOT / USERS)!r}, run_name='__main__')\n"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    # One process, because a second one would continue the build.
    killed = fork(tmp_path / "run", "deepspeed_zero2", script, STEPS, num_processes=1, env=env, succeeds=False)
    assert killed.exit_code and list(tmp_path.glob("torch_extensions/*/*/lock"))
    run = fork(tmp_path / "run", "deepspeed_zero2", USERS, STEPS, env=env)
    assert run.stderr.count("compiling an extension of DeepSpeed, once") == 1
