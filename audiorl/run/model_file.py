"""A model in the run folder, from which worker processes make their own copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from audiorl.config import ModelConfig
from audiorl.distributed.torchrun import local_device
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.value import ValueModel, load_value_model
from audiorl.run.folder import Run
from tokenizers_audio import AudioTokenizer

M = TypeVar("M", AudioPolicy, ValueModel)


@dataclass(frozen=True)
class ModelFile(Generic[M]):
    """A policy or a value model in a folder, and how to hold it."""

    folder: str
    kind: type[M]
    config: ModelConfig
    codec: AudioTokenizer | None

    @classmethod
    def save(cls, run: Run, phase: str, name: str, model: M) -> ModelFile[M]:
        """checkpoints/PHASE/NAME of the run, written unless it is there."""
        trunk = model.trunk if isinstance(model, ValueModel) else model
        config = replace(trunk.config, device=trunk.device.type)
        return cls(run.keep_model(phase, name, model), type(model), config, trunk.codec)

    def load(self) -> M:
        config = replace(self.config, device=local_device(self.config.device))
        load = load_value_model if issubclass(self.kind, ValueModel) else load_policy
        return load(self.folder, config, self.codec)
