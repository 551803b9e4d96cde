"""DeepSpeed's compiled extensions: built once per environment, even if a process is killed during a build."""

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate.utils import patch_environment
from filelock import FileLock

BUILDING = "building_"
NAME = "deepspeed_shm_comm"  # collectives of the processes of one machine, on its CPU


def extensions_folder() -> Path:
    """A folder for this environment and type of processor. Environments that share torch's own folder recompile each
    other's extensions again and again, and code for one processor may not run on another."""
    from torch.utils.cpp_extension import get_default_build_root

    facts = [sys.prefix, sys.version, torch.__version__, version("deepspeed"), platform.machine()]
    with suppress(OSError):  # the feature flags of the processor, on Linux
        facts += re.findall(r"^(?:flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    name = f"accelerate_recipes_{key}_whole"  # folders without "whole" may be incomplete
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return root if root.name == name else root / name


def load_extension() -> None:
    """Loads the extension that DeepSpeed needs on a CPU; compiles it first if necessary. A killed build leaves a lock,
    and torch's later builds wait for it forever. Here each build has its own folder, renamed when complete."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _import_module_from_library

    folder = extensions_folder()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)  # also for extensions that DeepSpeed loads itself
    with FileLock(folder / "accelerate_recipes.lock"):
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        if (folder / NAME / f"{NAME}.so").exists():
            # Without the builder, which would probe compiler and processor again, for seconds.
            builder._loaded_ops[NAME] = _import_module_from_library(NAME, str(folder / NAME), True)
            return
        print("compiling a DeepSpeed extension once (about a minute)", file=sys.stderr, flush=True)
        for left in folder.glob(f"{BUILDING}*"):  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        building = tempfile.mkdtemp(prefix=BUILDING, dir=folder)
        with patch_environment(TORCH_EXTENSIONS_DIR=building):
            builder.load(verbose=False)
        shutil.rmtree(folder / NAME, ignore_errors=True)
        Path(building, NAME).rename(folder / NAME)
        Path(building).rmdir()
