"""A small recogniser: characters by CTC on the bundled encoder of Whisper tiny, trained by `corpora` in a minute.

With `features="mel"` it reads log-mel frames in place of the encoder's and knows only the voices and melodies that it
has met (docs/experiments.md).

Shapes: F frames of features (25 a second), D their width, V characters. Two labels a frame are read, 50 a second, since
CTC needs more frames than characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.config import torch_device
from audiorl.eval.metrics.text import normalize, spell_numbers
from audiorl.models import AudioPolicy
from audiorl.models.families.qwen_omni import tiny
from audiorl.models.features import log_mels
from audiorl.models.weights import read_tensors
from audiorl.speech_models.ctc import CTCHead
from audiorl.speech_models.protocol import CHARACTER_CTC, Waveform, batches_by_length, padded, resampled

CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
BLANK = 0
RATE = 16_000
MIN_SAMPLES = 1600
"""Samples (0.1 s) to which shorter clips are filled with silence."""
ENCODER_BATCH = 8
"""Clips per batch of the encoder on a CPU."""
GPU_BATCH = 64
"""Clips per batch of the encoder on a GPU."""


Features = Literal["whisper", "mel"]
"""What the head reads: frames of the encoder, or four frames of log-mel side by side."""
WIDTHS: dict[Features, int] = {"whisper": 384, "mel": 4 * 80}


def plain(text: str) -> str:
    """Return the text as `CHARACTERS` say it: lower case, numbers spelled out, nothing else."""
    spelled = normalize(spell_numbers(text, "en"), "basic")
    return " ".join("".join(c if c in CHARACTERS else " " for c in spelled).split())


class Head(nn.Module):
    """Features [B, F, D] to labels [B, 2F, V + 1]; it sees five frames (0.2 s) to either side."""

    def __init__(self, width: int = WIDTHS["whisper"], hidden: int = 256):
        super().__init__()
        self.before = nn.Conv1d(width, hidden, 5, padding=2)
        self.between = nn.Conv1d(hidden, hidden, 7, padding=3)
        self.labels = nn.Linear(hidden, 2 * (len(CHARACTERS) + 1))

    def forward(self, frames: Tensor) -> Tensor:
        x = nn.functional.gelu(self.before(frames.transpose(1, 2)))
        x = (x + nn.functional.gelu(self.between(x))).transpose(1, 2)
        return self.labels(x).reshape(len(x), 2 * frames.shape[1], -1)


@dataclass(frozen=True, eq=False)
class CharacterCTC(CTCHead):
    """An `Aligner` and `TextScorer` of English: greedy CTC, repeats and blanks removed (Graves et al. 2006)."""

    head: Head
    name: str = "character-ctc"
    features: Features = "whisper"

    @torch.no_grad()
    def clips(self, waveforms: Sequence[Waveform], sample_rate: int) -> Iterator[tuple[int, Tensor, float]]:
        features = encode_clips(waveforms, sample_rate, self.features, self.head.labels.weight.device)
        places = [i for i, frames in enumerate(features) if len(frames)]
        if places:
            # One transfer from the device for all.
            labels = torch.cat([self.head(features[i][None])[0].log_softmax(-1) for i in places]).cpu()
            for i, logprobs in zip(places, labels.split([2 * len(features[i]) for i in places]), strict=True):
                yield i, logprobs, len(waveforms[i]) / sample_rate

    def separators(self) -> tuple[int | None, int]:
        return labels_of(" ")[0], BLANK

    def read(self, logprobs: Tensor) -> str:
        best = logprobs.argmax(-1).unique_consecutive()
        return " ".join("".join(CHARACTERS[i - 1] for i in best.tolist() if i != BLANK).split())

    def words(self, text: str) -> list[tuple[str, list[int]]]:
        return [(word, labels_of(word)) for word in plain(text).split()]

    def save(self, folder: str | Path) -> None:
        """Write config.json and head.safetensors; the encoder comes with the package."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: p.detach().contiguous() for n, p in self.head.named_parameters()}, folder / "head.safetensors")
        config = {"model_type": CHARACTER_CTC, "characters": CHARACTERS, "features": self.features}
        (folder / "config.json").write_text(json.dumps(config) + "\n")


def load(folder: str | Path, device: str = "cpu") -> CharacterCTC:
    """Return a recogniser that was saved. Raises ValueError for other weights."""
    features = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("features", "whisper")
    if features not in WIDTHS:
        raise ValueError(f"{folder}/config.json: features {features!r} is not one of {', '.join(WIDTHS)}")
    head = Head(WIDTHS[features])
    weights = read_tensors(Path(folder) / "head.safetensors")
    own = dict(head.named_parameters())
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
        raise ValueError(f"{folder}/head.safetensors: its weights are not those of this recogniser; train it again")
    head.load_state_dict(weights)
    return CharacterCTC(head.to(torch_device(device)).eval().requires_grad_(False), Path(folder).name, features)


@torch.no_grad()
def encode_clips(
    waveforms: Sequence[Waveform], sample_rate: int, features: Features, device: torch.device | str
) -> list[Tensor]:
    """Return the features [F, D] of each clip, on the device; none for no samples."""
    device = torch.device(device)
    policy = _encoder(device)
    assert policy.extractor is not None
    wavs = resampled(waveforms, sample_rate, RATE)
    out = [torch.zeros(0, WIDTHS[features], device=device)] * len(wavs)
    for part in batches_by_length(wavs, ENCODER_BATCH if device.type == "cpu" else GPU_BATCH):
        clips = [padded(wavs[i], MIN_SAMPLES) for i in part]
        mels = [mel.to(device) for mel in log_mels(policy.extractor, clips, str(device))]
        if features == "mel":
            frames = [mel[:, : mel.shape[1] // 4 * 4].T.reshape(-1, WIDTHS["mel"]) for mel in mels]
        else:
            frames = policy.backbone.encode_audio(policy.model, [{"input_features": mel[None]} for mel in mels])
        for i, frames_FD in zip(part, frames, strict=True):
            out[i] = frames_FD
    return out


@cache
def _encoder(device: torch.device) -> AudioPolicy:
    """Return the bundled encoder, read once for each device."""
    policy = tiny(hidden=16, layers=1)
    policy.model.to(device)
    return policy


def labels_of(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 1 for c in text]
