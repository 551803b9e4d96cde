"""The loop that all recipes share. `accelerate_recipes` has what a recipe imports; tasks are in `tasks/`."""
