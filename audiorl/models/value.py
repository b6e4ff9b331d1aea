"""A scalar on top of a policy's decoder: the critic of PPO and the reward model.

Shapes: N sampled tokens, E experiences of a packed batch, H decoder width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.algos.experience import PackedBatch
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy, load_policy, load_weights
from audiorl.models.examples import Example, experience
from audiorl.models.weights import read_tensors
from tokenizers_audio import AudioTokenizer

HEAD_FILE = "value_head.safetensors"
_HEAD = "value_head."


class ValueHead(nn.Module):
    """[N, H] -> [N] float32. Starts at zero (`spread` 0) or with weights of standard deviation spread / sqrt(H + 1)."""

    def __init__(self, width: int, spread: float = 0.0, device: torch.device | None = None):
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device)
        nn.init.zeros_(self.linear.bias)
        nn.init.normal_(self.linear.weight, std=spread / math.sqrt(width + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            # ZeRO holds the head in the trunk's dtype and keeps a float32 master.
            weight, bias = self.linear.weight.float(), self.linear.bias.float()
            return nn.functional.linear(hidden.float(), weight, bias).squeeze(-1)


class ValueModel(nn.Module):
    """A trunk and a value head. The trunk is a separate policy, or with `shared` the one that is trained."""

    def __init__(self, trunk: AudioPolicy, spread: float = 0.0, shared: bool = False):
        super().__init__()
        self.shared = shared
        width = int(trunk.backbone.head(trunk.model).weight.shape[1])
        self.head = ValueHead(width, spread, trunk.device)
        self._trunk = (trunk,)  # not a submodule: a shared trunk is trained, saved and counted by its owner

    @property
    def trunk(self) -> AudioPolicy:
        return self._trunk[0]

    @property
    def config(self) -> ModelConfig:
        return self.trunk.config

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return V of the state before each sampled token, [N]."""
        with self.trunk.autocast():
            hidden = self.trunk.predicting_hidden(batch)
        return self.head(hidden)

    def scores(self, batch: PackedBatch) -> Tensor:
        """Return one value per experience [E], read at its last token."""
        with self.trunk.autocast():
            hidden = self.trunk.hidden(batch)
        last = torch.stack([rows[-1] for rows in batch.source]).to(hidden.device)
        return self.head(hidden[last])

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return by name the head's weights as `value_head.*`, and the trunk's unless it is shared.

        The trunk's heads are left out where they are not also its embedding: no value depends on them.
        """
        own = {f"{_HEAD}{name}": p for name, p in self.head.named_parameters()}
        if self.shared:
            return own
        trunk = self.trunk
        heads = [trunk.backbone.head(trunk.model).weight]
        if trunk.speech is not None:
            heads.append(trunk.code_head.weight)
        embedding = trunk.backbone.decoder(trunk.model).get_input_embeddings().weight
        unused = {id(h) for h in heads if h is not embedding}
        return own | {name: p for name, p in trunk.trainable().items() if id(p) not in unused}

    def weights_changed(self) -> None:
        self.trunk.weights_changed()

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, by reference."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        self._set_head({name: weights[f"{_HEAD}{name}"] for name, _ in self.head.named_parameters()})
        self.trunk.load_weights({name: w for name, w in weights.items() if not name.startswith(_HEAD)})

    def save(self, folder: str | Path) -> None:
        """Write the trunk's folder (see `AudioPolicy.save`) with the head in the same folder."""
        self.trunk.save(folder)
        save_file({n: p.detach().contiguous() for n, p in self.head.named_parameters()}, Path(folder) / HEAD_FILE)

    def restore(self, folder: str | Path) -> None:
        """Copy a saved value model's weights into this one. Raises ValueError for another architecture."""
        head = self._read_head(Path(folder))  # before anything changes
        load_weights(folder, self.trunk)
        self._set_head(head)

    def _read_head(self, folder: Path) -> dict[str, Tensor]:
        if not (folder / HEAD_FILE).is_file():
            raise ValueError(f"{folder}: no {HEAD_FILE}; a value or reward model is expected, this is a policy")
        saved = read_tensors(folder / HEAD_FILE)
        own = dict(self.head.named_parameters())
        if {n: t.shape for n, t in saved.items()} != {n: p.shape for n, p in own.items()}:
            raise ValueError(f"{folder / HEAD_FILE}: the head has another shape: another architecture")
        return saved

    @torch.no_grad()
    def _set_head(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.head.named_parameters():
            p.copy_(weights[name])


def make_critic(policy: AudioPolicy, shared: bool) -> ValueModel:
    """Make a critic that begins as `policy` with a head of zeros: on the policy's own trunk, or on a copy of it."""
    return ValueModel(policy if shared else policy.copy(), shared=shared)


def load_value_model(
    path: str | Path, config: ModelConfig | None = None, codec: AudioTokenizer | None = None
) -> ValueModel:
    """Load a saved value or reward model from its folder; see `load_policy`."""
    model = ValueModel(load_policy(path, config, codec))
    model._set_head(model._read_head(Path(path)))
    return model


@torch.no_grad()
def score_answers(model: ValueModel, examples: Sequence[Example], budget: int = 8192) -> list[float]:
    """Score each answer. Neighbours with the same sample share their prompt."""
    experiences = [experience(model.trunk, e, e.sample.id, sampled=True) for e in examples]
    scores = [0.0] * len(examples)
    for indices in micro_batches(experiences, budget):
        values = model.scores(pack_experiences([experiences[i] for i in indices]))
        for i, value in zip(indices, values.tolist(), strict=True):
            scores[i] = value
    return scores
