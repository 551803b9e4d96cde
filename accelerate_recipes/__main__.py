"""python -m accelerate_recipes"""

from accelerate_recipes.cli import main

main()
