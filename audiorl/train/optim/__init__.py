"""Optimizers, their sharding over ranks, and the checks around an update."""
