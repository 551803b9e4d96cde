"""Runs `make quick` with the CUDA build of torch, the one that `pip install torch` brings on Linux, without a GPU.

    python tests/cluster/cuda_wheel.py FOLDER INDEX_URL

The first use makes a virtual environment of about 5 GB in FOLDER. INDEX_URL is the package index of the build, from
PyTorch's install page.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(folder: Path, index_url: str) -> int:
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        torch = next(name for name in dependencies if name.startswith("torch"))
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, torch, "--index-url", index_url], check=True)
        subprocess.run([*install, "--editable", ".[data,deepspeed,test]"], cwd=ROOT, check=True)
        (folder / "installed").touch()
    built_for = subprocess.run(
        [str(python), "-c", "import torch; print(torch.version.cuda or '')"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not built_for:
        sys.exit(f"the torch in {folder} is built for the CPU: give the index of a CUDA build")
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions")}
    return subprocess.run(["make", "quick", f"VENV={os.path.relpath(folder, ROOT)}"], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2]))
