"""Exceptions that several layers share."""


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""


class RankError(RuntimeError):
    """Another rank failed."""
