"""Recipes: what one kind of run does, a file each. Installed as audiorl.recipes."""
