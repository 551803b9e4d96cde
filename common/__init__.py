"""The loop that all recipes share. Recipes import from `accelerate_recipes`; code for single tasks is in `tasks/`."""

import os

if __name__ == "common":
    raise ImportError("import from accelerate_recipes, and from accelerate_recipes.common for the modules of common")

BEGUN_AS = os.getpid(), os.getppid()  # now, because the imports after this one take seconds
