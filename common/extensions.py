"""What DeepSpeed compiles on first use: once per environment, whatever is killed meanwhile."""

import hashlib
import os
import sys
from pathlib import Path

import torch
from filelock import FileLock

BUILDERS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}


def extensions_folder() -> Path:
    """Of this environment alone: two that share torch's own folder compile in turns, each what the other has."""
    from torch.utils.cpp_extension import get_default_build_root

    key = hashlib.sha256(f"{sys.prefix} {sys.version} {torch.__version__}".encode()).hexdigest()[:12]
    return Path(get_default_build_root()) / f"accelerate_recipes_{key}"


def load_extensions(names: list[str]) -> None:
    """Compiles these, keys of `BUILDERS`, if need be, and loads them; DeepSpeed then finds them loaded.

    torch marks a build by a file, which stays when the process is killed, and for which all later ones wait for
    ever. Here one process at a time builds, under a lock that ends with it, and removes such a file. In a folder
    that the user chose (`TORCH_EXTENSIONS_DIR`) others may build without that lock: nothing is removed there.
    """
    from deepspeed.accelerator import get_accelerator

    own = "TORCH_EXTENSIONS_DIR" not in os.environ
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder())))
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "accelerate_recipes.lock"):
        for name in names:
            if own:
                (folder / name / "lock").unlink(missing_ok=True)
            if not (folder / name / f"{name}.so").exists():
                print("compiling an extension of DeepSpeed, once, about a minute", file=sys.stderr, flush=True)
            get_accelerator().create_op_builder(BUILDERS[name]).load(verbose=False)
