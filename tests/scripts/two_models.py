"""Runs a recipe of docs/several-models.md.

two_models.py --pattern distillation|reversal|gan [flags of the recipe]
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "several-models.md"
RECIPES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
PATTERNS = dict(zip(("distillation", "reversal", "gan"), RECIPES))

if __name__ == "__main__":
    position = sys.argv.index("--pattern")
    _, pattern = sys.argv[position : position + 2]
    del sys.argv[position : position + 2]
    exec(compile(PATTERNS[pattern], f"{PAGE}: {pattern}", "exec"))
