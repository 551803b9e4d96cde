"""Promise: what a machine lacks ends a run with one line that says what to use; what a terminal lacks ends none."""

import errno
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from accelerate_recipes.common.accidents import advice
from accelerate_recipes.common.records.output_dir import _move_beside
from support.launching import environment, execute, fork
from support.recipes import LATEST, LINEAR, MNIST
from support.runs import ROOT, Run, refused

WORKERS = "tests/scripts/workers.py"
TABLE = "recipes/text_classification.py"


def mounts() -> bool:
    """Whether this process may mount file systems, in a namespace of its own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def mounted(folder: Path, options: str, *command: str) -> list[str]:
    """A command for which a folder is a file system with these options."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {folder} && exec "$@"', "sh", *command]


needs_mounts = pytest.mark.skipif(not mounts(), reason="needs root, to mount file systems")


def recipe(script: str, output_dir: Path, flags: str = "") -> list[str]:
    return [sys.executable, str(ROOT / script), "--output_dir", str(output_dir), "--check_steps", "0", *flags.split()]


@needs_mounts
@pytest.mark.parametrize(
    ("options", "script", "line"),
    [
        ("size=64k", MNIST, "cannot be written (No space left on device): run export HF_DATASETS_CACHE=FOLDER"),
        ("ro", MNIST, "cannot be written (Read-only file system): run export HF_DATASETS_CACHE=FOLDER"),
        pytest.param("ro", "recipes/finetune.py", "cannot be written (Read-only file", marks=pytest.mark.full),
        pytest.param("size=64k", "recipes/transformer.py", "(No space left on device)", marks=pytest.mark.full),
    ],
)
def test_cache_that_cannot_be_written_is_named(tmp_path: Path, options: str, script: str, line: str) -> None:
    (tmp_path / "cache").mkdir()
    data = tmp_path / "data"
    if script == MNIST:
        import datasets

        data.mkdir()
        images = [{"bytes": _png(number), "path": None} for number in range(400)]
        datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 200}).to_parquet(data / "train.parquet")
    elif "finetune" in script:
        data = data.with_suffix(".jsonl")
        data.write_text(
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 99
        )
    else:
        data = data.with_suffix(".txt")
        data.write_text("the quick brown fox jumps over the lazy dog. \n" * 400_000)
    command = recipe(script, tmp_path / "run", f"--max_steps 1 --data {data}")
    run = execute(mounted(tmp_path / "cache", options, *command), tmp_path, tmp_path / "run", {"HF_HOME": "cache"})
    assert run.exit_code == 2 and f"the cache {tmp_path / 'cache'}" in refused(run) and line in refused(run)


def _png(number: int) -> bytes:
    from io import BytesIO

    from PIL import Image

    noise = numpy.random.default_rng(number).integers(0, 256, (16, 16), dtype=numpy.uint8)  # it cannot be compressed
    Image.fromarray(noise).save(file := BytesIO(), "PNG")
    return file.getvalue()


def test_errors_of_caches_are_told_from_those_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises them, and however deep they are in other errors."""
    (tmp_path / "a_file").touch()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "a_file"))
    monkeypatch.setenv("HF_HOME", "/sys/kernel")

    def makes_folder(place: str) -> None:
        try:
            Path(place).mkdir(parents=True)
        except OSError:
            raise ValueError("the data cannot be read") from None

    cases: list[tuple[Callable[[], object], str | None]] = [
        (lambda: makes_folder(f"{tmp_path}/a_file/a"), "a_file cannot be written (Not a directory): run export HF_DA"),
        (lambda: makes_folder("/sys/kernel/hub/x"), "the cache /sys/kernel/hub cannot be written (Operation not perm"),
        (lambda: makes_folder("/sys/elsewhere"), None),
        (lambda: Path("/dev/full").write_text("x" * 10_000), None),  # of no cache
        (lambda: numpy.zeros(10_000).tofile("/dev/full"), None),
        (lambda: Path("nowhere").read_text(), None),
    ]
    for do, line in cases:
        with pytest.raises((OSError, ValueError)) as caught:
            do()
        found = advice(caught.value)
        assert (found is None) if line is None else (found is not None and line in found), found


def test_terminal_that_shows_less_or_closes_ends_no_run(tmp_path: Path) -> None:
    """The first line has a sign that ASCII lacks; then nobody reads on."""
    command = " ".join(recipe(LINEAR, tmp_path / "run", "--max_steps 50 --log_every 1"))
    env = {"PYTHONIOENCODING": "ascii"}
    run = execute(["bash", "-o", "pipefail", "-c", f"{command} | head -1"], tmp_path, tmp_path / "run", env)
    assert run.exit_code == 0 and "64 = 1 ? 64" in run.stdout and run.stdout.count("\n") == 1
    assert (run.card["status"], run.card["exit_code"], run.stderr) == ("done", 0, "")


@pytest.mark.parametrize(
    ("how", "exit_code", "status", "line"),
    [
        ("raise ValueError('a bug')", 1, "failed", "error: ValueError: a bug"),
        ("sys.exit(7)", 7, "failed", "error: the recipe called sys.exit(7)"),
        ("return lambda: 1 / 0", 0, "done", None),
    ],
)
def test_run_card_agrees_with_the_exit_code_after_training(
    tmp_path: Path, how: str, exit_code: int, status: str, line: str | None
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'recipes')!r})\nimport linear_regression\n"
        "from accelerate_recipes import run\n\n\ndef main(config):\n    linear_regression.main(config)\n"
        f"    {how}\n\n\nrun(main, linear_regression.Config)\n"
    )
    flags = "--max_steps 2 --check_steps 0"
    run = fork(tmp_path / "run", "single", script, flags, succeeds=False)
    assert (run.exit_code, run.card["status"], run.card["exit_code"]) == (exit_code, status, exit_code)
    assert (run.card["error"] or "").startswith(line or "") and (run.output_dir / "model").exists()
    assert exit_code or "the run is done, but the recipe failed afterwards: ZeroDivisionError" in run.stderr
    script.write_text(script.read_text().replace(how, "pass"))
    again = fork(tmp_path / "run", "single", script, f"{flags} {LATEST}")
    assert "nothing to do" in again.stdout  # it is not trained again
    assert (again.card["status"], again.card["exit_code"], again.card["error"]) == ("done", 0, None)


@pytest.mark.parametrize(
    ("config", "fault", "line"),
    [
        ("ddp", "killed", "a DataLoader worker was killed, probably because memory ran out"),
        ("single", "files", "too many open files (the limit is"),
    ],
)
def test_worker_that_ends_or_cannot_send_ends_the_run(tmp_path: Path, config: str, fault: str, line: str) -> None:
    flags = f"--num_workers 1 --fault {fault}"
    run = fork(tmp_path / "run", config, WORKERS, flags, succeeds=False)
    assert line in refused(run) and "Traceback" not in run.stderr.partition("torch/distributed/elastic")[0]
    assert (run.card["status"], run.card["exit_code"]) == ("failed", 2) and line in run.card["error"]


@needs_mounts
def test_small_shared_memory_is_named(tmp_path: Path) -> None:
    command = recipe(WORKERS, tmp_path / "run", "--num_workers 2 --size 300000")
    env = {"PYTHONPATH": str(ROOT)}
    run = execute(mounted(Path("/dev/shm"), "size=4m", *command), tmp_path, tmp_path / "run", env)
    assert run.exit_code == 2 and "/dev/shm of 4 MB" in refused(run) and "use --num_workers 0" in refused(run)


LATE_WORKER = """
import multiprocessing, os, time
from accelerate_recipes.common.data import batches
def work():
    while os.getppid() == main:
        time.sleep(0.01)
    batches._start_worker(0)
    time.sleep(600)
main = os.getpid()
multiprocessing.set_start_method("fork")
multiprocessing.Process(target=work).start()
os._exit(0)
"""


def test_worker_that_starts_after_the_end_of_its_process_ends() -> None:
    """As long as it lives, it holds the output of the run, and a launcher that reads that waits."""
    command = [sys.executable, "-c", LATE_WORKER]
    subprocess.run(command, capture_output=True, env=environment(PYTHONPATH=str(ROOT)), timeout=60, check=True)


def on_another_file_system(folder: Path) -> Path | None:
    """A new folder on another file system than this folder; None if there is none."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == folder.stat().st_dev:
        return None
    return Path(tempfile.mkdtemp(dir=other))


def test_checkpoints_on_another_file_system_are_replaced(tmp_path: Path) -> None:
    """As where checkpoints/ is a link to a scratch disk."""
    if (scratch := on_another_file_system(tmp_path)) is None:
        pytest.skip("there is no other file system")
    try:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(scratch)
        flags = "--model mlp --check_steps 0 --save_every 2 --log_every 1"
        fork(tmp_path / "run", "single", MNIST, f"{flags} --max_steps 6")
        over = fork(tmp_path / "run", "single", MNIST, f"{flags} --max_steps 4 --overwrite_output_dir")
        assert over.checkpoints == [2, 4] and len(over.column("train/loss")) == 4
        assert not list(over.output_dir.rglob("previous")) and not (scratch / "previous").exists()
        longer = fork(tmp_path / "run", "single", MNIST, f"{flags} --max_steps 8 {LATEST}")
        assert len(longer.column("train/loss")) == 8 and longer.card["first_step"] == 4
    finally:
        shutil.rmtree(scratch)


def test_all_that_is_replaced_moves_or_nothing_does(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "checkpoints/step_1", "checkpoints/previous"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    moves = [
        (tmp_path / "metrics.jsonl", tmp_path / "previous"),
        (tmp_path / "checkpoints" / "step_1", tmp_path / "checkpoints" / "previous"),  # a file is in the way
    ]
    with pytest.raises(OSError, match="File exists") as caught:
        _move_beside(moves)
    assert caught.value.errno == errno.EEXIST and all(path.exists() for path, _ in moves)


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to("run")])
def test_output_dir_that_is_no_folder(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run")
    run: Run = fork(tmp_path / "run", "single", LINEAR, succeeds=False)
    assert f"--output_dir {tmp_path / 'run'} is not a folder: use another" in refused(run) and run.exit_code == 2
