"""Runs the recipe $RECIPE with the variables of huggingface_hub read again, because a fork has imported it before they
were set. $TIMEOUT_S and $LONGEST_S are those of common/records/hub.py. A process that ends leaves a file beside the
output folder."""

import atexit
import importlib
import os
import runpy
import sys
from pathlib import Path

from huggingface_hub import constants

from common.records import hub

importlib.reload(constants)
for name in ("TIMEOUT_S", "LONGEST_S"):
    setattr(hub, name, float(os.environ.get(name, getattr(hub, name))))
output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])
atexit.register(lambda: (output_dir.parent / f"ended_{os.environ.get('RANK', 0)}").touch())
sys.argv[0] = os.environ["RECIPE"]
runpy.run_path(os.environ["RECIPE"], run_name="__main__")
