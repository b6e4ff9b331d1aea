"""Exceptions that several layers share."""


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""


class RewardError(RuntimeError):
    """A user's reward raised anything but a ValueError; the message names file, function, sample, line and error."""


class RankError(RuntimeError):
    """Another rank failed."""
