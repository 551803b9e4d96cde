"""Runs the unit tests and all pairs of recipe and config with the lowest versions that pyproject.toml allows.

    python tests/cluster/lowest_versions.py FOLDER

The first use makes a virtual environment in FOLDER. It takes several gigabytes, because the packages come from the
package index in their usual builds.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = ("torch", "accelerate", "transformers", "datasets", "deepspeed", "safetensors", "filelock", "psutil", "tqdm")


def lowest(requirements: list[str]) -> list[str]:
    """Returns `name==version` for each package in `TESTED` that has a lower bound."""
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", requirement) for requirement in requirements)
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound and bound[1] in TESTED]


def main(folder: Path) -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = lowest([*project["dependencies"], *extras["data"], *extras["deepspeed"]])
    assert {pin.partition("==")[0] for pin in pins} == set(TESTED)
    print("\n".join(pins), flush=True)
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        (folder / "constraints.txt").write_text("\n".join(pins))
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(folder / "constraints.txt")]
        subprocess.run([*install, "--editable", ".[data,deepspeed,test]"], cwd=ROOT, check=True)
        (folder / "installed").touch()
    # A separate folder: environments with a common folder recompile each other's DeepSpeed extensions.
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    env["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    tests = ["tests/unit", "tests/process/test_one_result.py", "tests/process/test_forking.py"]
    return subprocess.run([str(python), "-m", "pytest", "-n", "2", *tests], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
