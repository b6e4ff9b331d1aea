"""Judges of our own experiments, and examples of judges as Python files: `load(folder, device)` in each."""
