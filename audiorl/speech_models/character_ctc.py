"""A small recogniser: characters by CTC on the bundled encoder of Whisper tiny, trained by `corpora` in a minute.

For speech rewards where no recogniser is at hand, and as a second opinion next to one. With `features="mel"` it reads
log-mel frames in place of the encoder's: such a recogniser knows only the voices and melodies that it has met, and
shows what a reward of intelligibility does then (docs/experiments.md).

Shapes: F frames of features (25 a second), D their width, V characters. Two labels a frame are read, 50 a second, since
CTC needs more frames than characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from audiorl.models.audio_encoder import log_mels
from audiorl.models.families.qwen_omni import tiny
from audiorl.models.weights import read_tensors
from audiorl.speech_models.ctc import align_words, ctc_log_probability
from audiorl.speech_models.protocol import CHARACTER_CTC, AlignedWord, Waveform, batches_by_length, padded, resampled

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
class CharacterCTC:
    """An `Aligner` and `TextScorer` of English: greedy CTC, repeats and blanks removed (Graves et al. 2006)."""

    head: Head
    name: str = "character-ctc"
    features: Features = "whisper"

    @property
    def device(self) -> torch.device:
        return self.head.labels.weight.device

    @torch.no_grad()
    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        return [_text(logprobs) for logprobs in self._logprobs(waveforms, sample_rate)]

    @torch.no_grad()
    def align(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[list[AlignedWord]]:
        aligned = []
        (space,) = labels_of(" ")
        for wav, logprobs, text in zip(waveforms, self._logprobs(waveforms, sample_rate), texts, strict=True):
            words = plain(text).split() if len(logprobs) else []
            labels = [labels_of(word) for word in words]
            aligned.append(align_words(logprobs, words, labels, space, BLANK, len(wav) / sample_rate, _text))
        return aligned

    @torch.no_grad()
    def log_probabilities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        if empty := [text for text in texts if not plain(text)]:
            raise ValueError(f"{self.name}: text {empty[0]!r} has no letters; leave it out")
        return [
            ctc_log_probability(logprobs, labels_of(plain(text)), BLANK)
            for logprobs, text in zip(self._logprobs(waveforms, sample_rate), texts, strict=True)
        ]

    def _logprobs(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[Tensor]:
        """[2F, V + 1] of each clip, on the CPU."""
        features = encode_clips(waveforms, sample_rate, self.features, self.device)
        if not any(map(len, features)):
            return [torch.zeros(0, len(CHARACTERS) + 1)] * len(features)
        # One transfer from the device for all.
        labels = torch.cat([self.head(frames[None])[0].log_softmax(-1) for frames in features if len(frames)]).cpu()
        return list(labels.split([2 * len(frames) for frames in features]))

    def save(self, folder: str | Path) -> None:
        """config.json and head.safetensors; the encoder comes with the package."""
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
    waveforms: Sequence[Waveform],
    sample_rate: int,
    features: Features = "whisper",
    device: torch.device | str = "cpu",
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
            frames = policy.backbone.encode_audio(policy.model, mels)
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


def _text(labels: Tensor) -> str:
    best = labels.argmax(-1)
    collapsed = best.unique_consecutive()
    return " ".join("".join(CHARACTERS[i - 1] for i in collapsed.tolist() if i != BLANK).split())
