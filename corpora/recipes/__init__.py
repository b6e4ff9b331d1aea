"""Recipes on the bundled speech and for grafted models; `audiorl train` finds them by entry points."""
