"""Promise: a build of DeepSpeed's extension that was killed holds up no later run."""

from pathlib import Path

import pytest

from support.launching import fork
from support.recipes import USERS
from support.runs import ROOT

STEPS = "--max_steps 5 --hang_timeout 20"


@pytest.mark.full
def test_run_that_is_killed_while_it_compiles(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import contextlib, os, pathlib, runpy, signal, sys, threading, time\n"
        "import psutil\n"
        "def kill():\n"
        f"    while not list(pathlib.Path({str(tmp_path)!r}).glob('torch_extensions/*/*/*/lock')):\n"
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
    assert killed.exit_code and list(tmp_path.glob("torch_extensions/*/*/*/lock"))
    run = fork(tmp_path / "run", "deepspeed_zero2", USERS, STEPS, env=env)
    assert run.stderr.count("compiling a DeepSpeed extension once") == 1
    (library,) = tmp_path.glob("torch_extensions/*/deepspeed_shm_comm/deepspeed_shm_comm.so")
    assert not list(library.parents[1].glob("building_*"))
