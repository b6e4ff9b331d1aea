"""Evaluations of models and of recorded results, a file each. Installed as audiorl.eval."""
