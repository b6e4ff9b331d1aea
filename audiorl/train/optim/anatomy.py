"""The parts of a model that the ranks of a sharded optimizer gather and reduce separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from audiorl.models.policy import AudioPolicy
from audiorl.models.value import ValueModel


@dataclass(frozen=True)
class Anatomy:
    """Module, trained weights by name, decoder layers, and the other weights of a pass."""

    module: nn.Module
    trained: Mapping[str, nn.Parameter]
    layers: Sequence[nn.Module]
    non_layer: Sequence[nn.Parameter]
    decoder: nn.Module | None
    """What holds the layers; None where there are none."""

    @classmethod
    def of(cls, model: AudioPolicy | ValueModel) -> Anatomy:
        if isinstance(model, AudioPolicy):
            return cls(model.model, model.trainable(), *_passed(model), _decoder(model))
        if model.shared:
            return cls(model.head, model.trainable(), (), tuple(model.head.parameters()), None)
        layers, non_layer = _passed(model.trunk)
        both = nn.ModuleList([model.trunk.model, model.head])
        non_layer = (*non_layer, *model.head.parameters())
        return cls(both, model.trainable(), layers, non_layer, _decoder(model.trunk))


def _decoder(policy: AudioPolicy) -> nn.Module:
    decoder: nn.Module = policy.backbone.decoder(policy.model)
    return decoder


def _passed(policy: AudioPolicy) -> tuple[Sequence[nn.Module], Sequence[nn.Parameter]]:
    """The decoder's layers, and the other weights that a pass uses. An encoder of images is not among them."""
    backbone, model = policy.backbone, policy.model
    decoder = backbone.decoder(model)
    parts = [decoder, backbone.head(model)]
    if policy.speech is not None:
        parts.append(policy.code_head)
    if backbone.audio_token is not None:
        parts += [backbone.audio_encoder(model), *backbone.projector(model)]
    inside = {id(p) for layer in decoder.layers for p in layer.parameters()}
    non_layer = {id(p): p for part in parts for p in part.parameters() if id(p) not in inside}
    return list(decoder.layers), list(non_layer.values())
