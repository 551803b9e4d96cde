"""Promise: each script that a page or a make target names runs, so that each table in docs/ can be made again.

Each is started by its own command line, with its smallest sizes, and the numbers of its table are looked at.
"""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.launching import fork, fork_script
from support.recipes import MNIST, STEPS
from support.runs import ROOT
from support.small_mnist import write_mnist

GPT2 = "--layers 1 --heads 2 --width 64 --context 32 --vocabulary 256 --batch_size 4 --steps 3 --rounds 1"
# Their flags. Each is a fork, and so are the commands that it starts.
SCRIPTS = {
    "benchmarks/checkpoint.py": "--megabytes 1 --rounds 1",
    "benchmarks/control_plane.py": "--processes 2 --layers 2",
    "benchmarks/gpt2.py": f"{GPT2} --inductor none",
    "benchmarks/gpt2_variants.py": f"--variants residual=bf16 {GPT2} --inductor none",
    "benchmarks/gpu_goals.py": "--max_steps 2 --mnist {folder}/mnist --text {folder}/text.txt",
    "benchmarks/large_text.py": "--sizes 1 --tokenizers bytes",
    "benchmarks/loop_cost.py": "--steps 60 --rounds 1",
    "benchmarks/loss_memory.py": "--rounds 1 --vocabulary 64 --context 16",
    "benchmarks/memory.py": "--size 100k --config ddp",
    "benchmarks/norms.py": "--elements 1000",
    "benchmarks/parity_check.py": "--size 100k --config ddp",
    "benchmarks/peers/run.py": "--steps 5 --rounds 1",
    "benchmarks/preferences_trl.py": "",
    "benchmarks/scaling.py": "--quick --plot {folder}/plot.svg",
    "benchmarks/silent_errors/run.py": "--only wrapper_left_out",
    "benchmarks/startup.py": "--rounds 1 --recipes mnist",
    "docs/tools/catalogue.py": "",
    "docs/tools/gallery.py": "--data linear_regression",
    "docs/tools/upgrades.py": "compare newest",
    "docs/tools/walk.py": "{folder}/docs/architecture.md",
}
# The packages of others, which nothing else needs.
PACKAGES = {
    "benchmarks/preferences_trl.py": ["trl"],
    "benchmarks/peers/run.py": ["trl", "sentence_transformers", "timm", "diffusers"],
}
# Under accelerate launch: (config, flags).
LAUNCHED = {
    "benchmarks/llama.py": ("single", "--size 100k --context 16 --batch_size 2 --max_steps 2"),
    "benchmarks/replicas.py": ("ddp", "--size 100k --context 16 --batch_size 2 --max_steps 6"),
    "tests/gpu/no_sync.py": ("single", f"{STEPS} --model mlp"),
    "tests/gpu/overflow.py": ("single", "--max_steps 4 --log_every 1"),
}
# They run as parts of others, or where the name after them says.
ELSEWHERE = {
    "benchmarks/gpt2_loops.py": "benchmarks/gpt2.py",
    "benchmarks/scaling_plot.py": "benchmarks/scaling.py",
    **{f"benchmarks/silent_errors/{part}.py": "benchmarks/silent_errors/run.py" for part in ("framework", "mistakes")},
    "docs/tools/modules.py": "tests/unit/test_layout.py",
    "launchers/hosts.sh": "tests/cluster/test_multi_node.py",
    "launchers/kubernetes/trainjob.yaml": "tests/cluster/test_kubernetes.py",
    "launchers/network.py": "tests/process/test_commands.py",
    "launchers/node.py": "tests/cluster/test_multi_node.py",
    "launchers/slurm/train.sbatch": "tests/cluster/test_slurm.py",
    "tests/gpu/lease.py": "tests/process/test_one_device.py",
}
NUMBER = re.compile(r"\d")


def numbers_in(text: str) -> int:
    """The rows with a number in the tables of a text. Each row has one; none has nan."""
    rows = re.findall(r"^\|(?! ?-{3})(.*)\|$\n(?!\| ?-{3})", f"{text}\n\n", re.MULTILINE)
    for row in rows:
        values = " ".join(row.split("|")[1:])
        assert NUMBER.search(values) and not re.search(r"\b(nan|inf|None)\b", values), row
    return len(rows)


def folder_of(tmp_path: Path) -> Path:
    """A copy of what the tools for docs/ write, and what others read."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("records", "*.svg", "*.png"))
    (tmp_path / "docs/records/newest").mkdir(parents=True)
    shutil.copy(ROOT / "docs/records/newest/linear_regression.json", tmp_path / "docs/records/newest")
    for path in ROOT.iterdir():
        if path.is_dir() and path.name[0] != "." and path.name not in ("docs", "outputs"):
            (tmp_path / path.name).symlink_to(path)
    write_mnist(tmp_path / "mnist", num_images=800)  # more than a batch of the goals, as are the texts
    (tmp_path / "text.txt").write_text("one two three four " * 5000)
    return tmp_path


def place(script: str, folder: Path) -> Path:
    """Of the script: the tools for docs/ write beside themselves."""
    return (folder if script.startswith("docs/") and "walk" not in script else ROOT) / script


@pytest.mark.every_case
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_prints_a_table_of_numbers(tmp_path: Path, script: str) -> None:
    if missing := [name for name in PACKAGES.get(script, ()) if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    folder = folder_of(tmp_path)
    arguments = SCRIPTS[script].format(folder=folder).split()
    # torch.compile returns the function as it is: compiling C++ takes minutes.
    run = fork_script(place(script, folder), arguments, tmp_path, {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"})
    assert run.exit_code == 0, run.stdout + run.stderr
    written = {"catalogue": "verified.md", "gallery": "recipes/linear_regression.md", "walk": "architecture.md"}
    if page := written.get(Path(script).stem):  # it writes this page, and the repository has what it writes
        own, there = ((root / "docs" / page).read_text() for root in (folder, ROOT))
        today = re.compile("that of today|changed since")  # a recipe may have changed since its certificate
        assert today.sub("", own) == today.sub("", there)
    else:
        assert numbers_in(run.stdout) >= 1, run.stdout


@pytest.mark.every_case
@pytest.mark.parametrize("script", LAUNCHED)
def test_launched_script_trains(tmp_path: Path, script: str) -> None:
    config, flags = LAUNCHED[script]
    run = fork(tmp_path / "run", config, script, flags, env={"RECIPE": str(ROOT / MNIST)})
    assert run.card["status"] == "done"
    if script == "benchmarks/replicas.py":
        assert re.search(r"a comparison takes [\d.]+ ms, [\d.]+ % of a step of [\d.]+ s", run.stdout)


def test_tensor_parallelism_on_a_mesh_of_one(tmp_path: Path) -> None:
    run = fork_script("tests/gpu/one_rank_mesh.py", [], tmp_path)
    assert run.exit_code == 0, run.stderr


def test_lost_peer(tmp_path: Path) -> None:
    run = fork(tmp_path / "run", "ddp", "tests/gpu/lost_peer.py", str(tmp_path), succeeds=False)
    assert "process 1 has ended" in run.stdout + run.stderr


def test_each_script_that_a_page_or_target_names_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", *ROOT.glob("tests/gpu/test_*.py")]
    named = {
        name
        for page in pages
        for name in re.findall(
            r"(?:benchmarks|docs/tools|launchers|tests/gpu)/[\w/]+\.(?:py|sh|sbatch|yaml)", page.read_text()
        )
    }
    run = {*SCRIPTS, *LAUNCHED, *ELSEWHERE, "tests/gpu/one_rank_mesh.py", "tests/gpu/lost_peer.py"}
    there = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/gpu/*.py"))}
    there -= {name for name in there if Path(name).name.startswith(("test_", "conftest"))}
    assert named | there <= run, "a script that no test starts"
    assert all((ROOT / name).exists() for name in {*run, *ELSEWHERE.values()})
    for script, test in ELSEWHERE.items():
        text = "".join(path.read_text() for path in (ROOT / test, *ROOT.glob("tests/support/*.py")))
        assert Path(script).stem in text, f"{test} does not run {script}"
