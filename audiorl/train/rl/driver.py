"""The driver's copy of the model, where trainers in other processes hold the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from audiorl.distributed.local import Group
from audiorl.distributed.torchrun import local_device
from audiorl.models import AudioPolicy
from audiorl.train.rl.weight_sync import free_cached


@contextmanager
def without_driver_gpu(policy: AudioPolicy, trainers: Group) -> Iterator[None]:
    """For the length of the block the driver's model is in CPU memory, unless the first trainer trains this object.

    On a node with GPUs the driver would otherwise hold a copy on one that a trainer was given.
    """
    with _moved(policy, "cpu", trainers):
        yield


@contextmanager
def with_driver_gpu(policy: AudioPolicy, trainers: Group) -> Iterator[None]:
    """Inside `without_driver_gpu`: the model on the device that its config names, while the driver computes with it."""
    with _moved(policy, local_device(policy.config.device), trainers):
        yield


@contextmanager
def _moved(policy: AudioPolicy, device: str, trainers: Group) -> Iterator[None]:
    before = policy.device
    if trainers.shared or before.type == torch.device(device).type:
        yield
        return
    _move(policy, torch.device(device))
    try:
        yield
    finally:
        _move(policy, before)


def _move(policy: AudioPolicy, device: torch.device) -> None:
    policy.model.to(device)
    free_cached()
