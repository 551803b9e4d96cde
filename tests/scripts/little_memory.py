"""recipes/mnist.py on a machine with so little free memory that no image set fits."""

import runpy
from pathlib import Path
from types import SimpleNamespace

from accelerate_recipes import run
from accelerate_recipes.common.tasks.vision import images

recipe = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "mnist.py"))

if __name__ == "__main__":
    images.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1000))
    run(recipe["main"], recipe["Config"])
