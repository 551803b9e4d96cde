"""Runs the recipe $RECIPE with the variables of huggingface_hub read again, because a fork has imported it before they
were set. $TIMEOUT_S is the longest silence of the Hub. A process that ends leaves a file beside the output folder."""

import atexit
import importlib
import os
import runpy
import sys
from pathlib import Path

from huggingface_hub import constants

from common.records import hub

importlib.reload(constants)
hub.TIMEOUT_S = float(os.environ.get("TIMEOUT_S", hub.TIMEOUT_S))
output_dir = Path(sys.argv[sys.argv.index("--output_dir") + 1])
atexit.register(lambda: (output_dir.parent / f"ended_{os.environ.get('RANK', 0)}").touch())
sys.argv[0] = os.environ["RECIPE"]
runpy.run_path(os.environ["RECIPE"], run_name="__main__")
