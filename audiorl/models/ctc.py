"""CTC on a speech model's projector, through the text model's own embeddings: alignment without the text model.

Connectionist temporal classification (Graves et al. 2006) over a policy's audio frames. A frame's score of a token is
the dot product of the projected frame with the token's embedding: frames learn to look like the tokens that are
said; a trained vector scores the blank. No layer of the text model runs: a step costs the audio encoder and a product.

Shapes: T frames of a clip, H decoder width, V candidate tokens, B clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.audio import AudioClip
from audiorl.models.policy import AudioPolicy
from audiorl.models.weights import copy_weights, read_tensors

WEIGHTS = "ctc.safetensors"
BLANK = "ctc.blank"
SCALE = 16.0
"""Scale of the logits: a frame equal to a token's embedding scores 16, and about 0 on unrelated tokens."""


class CTCModel(nn.Module):
    """A policy's audio side and a blank. `token_ids`: the tokens that the texts consist of."""

    def __init__(self, policy: AudioPolicy, token_ids: Sequence[int], seed: int = 0):
        super().__init__()
        self._policy = (policy,)  # not a submodule: its weights have names of their own
        embeddings = self._embeddings()
        self.token_ids = torch.tensor(sorted(set(token_ids)), device=embeddings.device)
        if not len(self.token_ids):
            raise ValueError("CTC: the texts hold no token")
        self.size = float(embeddings[self.token_ids].float().norm(dim=1).mean())
        start = torch.randn(embeddings.shape[1], generator=torch.Generator().manual_seed(seed))
        self.blank = nn.Parameter((self.size * start / start.norm()).to(embeddings.device))

    @property
    def policy(self) -> AudioPolicy:
        return self._policy[0]

    def _embeddings(self) -> Tensor:
        policy = self.policy
        weight: Tensor = policy.backbone.decoder(policy.model).get_input_embeddings().weight
        return weight.detach()

    def frames(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """Return the projected frames [T, H] of each clip, differentiable in the trained weights.

        Clips go through a trained audio encoder together: the frames of one depend on the others in the last bits.
        """
        policy = self.policy
        audio = policy.audio
        with policy.autocast():
            if policy.config.audio != "full":
                return audio.encode(clips)
            weight = next(policy.backbone.audio_encoder(policy.model).parameters())
            mels = [audio.mel(clip)[0].to(device=weight.device, dtype=weight.dtype) for clip in clips]
            return [policy.backbone.project(policy.model, h) for h in policy.backbone.encode_audio(policy.model, mels)]

    def logprobs(self, frames: Sequence[Tensor], candidates: Tensor) -> Tensor:
        """Return [all frames, 1 + V] float32: log-probs of the blank and of the `candidates` [V], token ids."""
        table = torch.cat([self.blank[None], self._embeddings()[candidates].to(self.blank.dtype)]) / self.size
        with self.policy.autocast():
            logits = (torch.cat(list(frames)) / self.size) @ table.T
        return (SCALE * logits.float()).log_softmax(-1)

    def losses(self, frames: Sequence[Tensor], targets: Sequence[Tensor], others: Tensor) -> Tensor:
        """Return [B]: -log P of each clip's token ids, divided by their number. `others`: competing ids."""
        candidates = torch.cat([*targets, others.cpu()]).unique()
        flat = self.logprobs(frames, candidates.to(self.blank.device))
        lengths = torch.tensor([len(f) for f in frames])
        padded = flat.new_zeros(int(lengths.max()) * len(frames), flat.shape[1])
        # One copy; the backward pass of pad_sequence makes one of the whole batch for every clip.
        rows = torch.cat([torch.arange(n) * len(frames) + clip for clip, n in enumerate(lengths.tolist())])
        padded = padded.index_copy(0, rows.to(flat.device), flat).view(-1, len(frames), flat.shape[1])
        places = torch.searchsorted(candidates, torch.cat(list(targets))) + 1
        counts = torch.tensor([len(t) for t in targets])
        losses = nn.functional.ctc_loss(padded, places.to(flat.device), lengths, counts, reduction="none")
        return losses / counts.to(flat.device)

    @torch.no_grad()
    def read(self, clips: Sequence[AudioClip]) -> list[list[int]]:
        """Return the token ids of the best path of each clip: repeats merged, blanks left out."""
        frames = self.frames(clips)
        best = self.logprobs(frames, self.token_ids).argmax(-1)
        texts = []
        for path in best.split([len(f) for f in frames]):
            merged = path.unique_consecutive()
            texts.append(self.token_ids[merged[merged > 0] - 1].tolist())
        return texts

    # -- what is trained and saved ---------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the blank as `ctc.blank`, and the policy's trainable weights of encoder and projector."""
        policy = self.policy
        modules = [policy.backbone.audio_encoder(policy.model), *policy.backbone.projector(policy.model)]
        audio = {id(p) for module in modules for p in module.parameters()}
        return {BLANK: self.blank} | {name: p for name, p in policy.trainable().items() if id(p) in audio}

    def weights_changed(self) -> None:
        self.policy.weights_changed()

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, by reference."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_weights(self, weights: Mapping[str, Tensor], where: str = "weights") -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        copy_weights({BLANK: self.blank} | self.policy.parameters_by_name(), weights, where)
        self.weights_changed()

    def save(self, folder: Path) -> None:
        """Write the trained weights alone."""
        save_file({name: w.contiguous() for name, w in self.weights().items()}, folder / WEIGHTS)

    def restore(self, folder: Path) -> None:
        """Copy what `save` wrote into this model. Raises ValueError for weights of another architecture."""
        self.load_weights(read_tensors(folder / WEIGHTS), str(folder / WEIGHTS))


def fits(tokens: Sequence[int], frames: int) -> bool:
    """Tell if a CTC path exists: a frame per token, and a blank between two equal ones."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens)) <= frames
