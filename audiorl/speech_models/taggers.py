"""Taggers of sounds: which classes are heard. A small one that `audiorl data train-tagger` trains, YAMNet, and CLAP.

YAMNet and the small one read the same frames: log-mel, 64 bands from 125 to 7500 Hz, 100 a second. Shapes: F frames,
C classes, D the width of an embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.config import torch_device
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.errors import install
from audiorl.eval.metrics.sound import mel_bands
from audiorl.models.weights import read_tensors
from audiorl.speech_models.protocol import (
    SOUND_TAGGER,
    ModelFolder,
    Tagger,
    Wave,
    Waveform,
    load_model,
    load_processor,
    padded,
    require_samples,
    resampled,
)

T = TypeVar("T")
RATE, HOP, SIZE, WINDOW, BANDS = 16_000, 160, 512, 400, 64
QUIET = 0.001
"""What YAMNet adds to magnitudes before the logarithm."""
PATCH, PATCH_HOP = 96, 48
"""Frames of one input of YAMNet, 0.96 s, and between two."""


def log_mel(wav: Wave) -> NDArray[np.float32]:
    """Return YAMNet's frames [F, BANDS] of a waveform at RATE, at least PATCH. Source: Plakal and Ellis 2019."""
    wav = padded(wav, (PATCH - 1) * HOP + SIZE)
    window = np.zeros(SIZE, np.float32)
    window[(SIZE - WINDOW) // 2 : (SIZE + WINDOW) // 2] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    frames = np.lib.stride_tricks.sliding_window_view(wav, SIZE)[::HOP] * window
    magnitudes = np.abs(np.fft.rfft(frames, axis=-1)).astype(np.float32)
    bands = mel_bands(RATE, SIZE, BANDS, 125.0, 7500.0).T.astype(np.float32)
    return np.asarray(np.log(magnitudes @ bands + QUIET), np.float32)


class TaggerNetwork(nn.Module):
    """Frames [B, F, BANDS] to (logits [B, F / 16, C], hidden [B, F / 16, D]): four convolutions that halve time and
    frequency. A place sees about half a second."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 4 * width, 6 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
                for a, b in pairwise(sizes)
            )
        )
        self.hidden = nn.Linear(sizes[-1] * BANDS // 16, 8 * width)
        self.classes = nn.Linear(8 * width, classes)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers((frames[:, None] + 3.0) / 3.0)  # about 0 ± 1
        hidden = torch.relu(self.hidden(x.permute(0, 2, 1, 3).flatten(2)))  # [B, F / 16, D]
        return self.classes(hidden), hidden


@dataclass(frozen=True, eq=False)
class SoundTagger:
    """A `Tagger` of the classes that it was trained on. A class is as probable as in the place that has most of it."""

    network: TaggerNetwork
    labels: tuple[str, ...]
    name: str = "sound-tagger"

    def tag(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        return self._run(waveforms, sample_rate, 0, len(self.labels))

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        return self._run(waveforms, sample_rate, 1, self.network.hidden.out_features)

    @torch.no_grad()
    def _run(self, waveforms: Sequence[Waveform], sample_rate: int, which: int, size: int) -> NDArray[Any]:
        waves = resampled(waveforms, sample_rate, RATE)
        require_samples(waves)
        out = np.zeros((len(waves), size), np.float32)
        device = self.network.classes.weight.device
        for i, wav in enumerate(waves):  # one at a time: none depends on the length of another
            places = self.network(torch.from_numpy(log_mel(wav)).to(device)[None])[which][0]
            out[i] = (places.amax(0).sigmoid() if which == 0 else places.mean(0)).cpu().numpy()
        return out

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: p.detach().cpu().contiguous() for n, p in self.network.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        width = self.network.hidden.out_features // 8
        config = {"model_type": SOUND_TAGGER, "labels": list(self.labels), "width": width}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, device: str = "auto") -> SoundTagger:
        """Return a tagger that was saved. Raises ValueError for other weights."""
        folder = Path(folder)
        config = _config_of(folder, _TaggerConfig)
        network = TaggerNetwork(len(config.labels), config.width)
        weights = read_tensors(folder / "model.safetensors")
        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in network.state_dict().items()}:
            raise ValueError(f"{folder}/model.safetensors: its weights are not those of this tagger; train it again")
        network.load_state_dict(weights)
        return cls(network.to(torch_device(device)).eval().requires_grad_(False), tuple(config.labels), folder.name)


@dataclass(frozen=True)
class _TaggerConfig:
    labels: list[str]
    width: int


@dataclass(frozen=True)
class YAMNet(ModelFolder):
    """YAMNet's 521 classes of AudioSet, in 8 bits, from a folder that tools/fetch_judges.py writes. A tag is the
    highest probability of all windows of 0.96 s; an embedding is the mean of their logits, since the file
    gives no other.

    Source: Plakal and Ellis 2019; the ONNX file is that of the package sead.
    """

    @cached_property
    def _config(self) -> _YAMNetConfig:
        return _config_of(Path(self.path), _YAMNetConfig)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self._config.labels)

    @cached_property
    def _session(self) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(f"YAMNet needs onnxruntime: {install('speech')}") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        return onnxruntime.InferenceSession(str(Path(self.path) / "model.onnx"), options)

    def tag(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        logits = [values.max(axis=0) for values in self._logits(waveforms, sample_rate)]
        return np.asarray(1 / (1 + np.exp(-_stacked(logits, len(self.labels)))), np.float32)

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        means = [values.mean(axis=0) for values in self._logits(waveforms, sample_rate)]
        return _stacked(means, len(self.labels))

    def _logits(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[NDArray[np.float32]]:
        """Return the logits [windows, C] of each."""
        (scale, zero), (out_scale, out_zero) = self._config.input, self._config.output
        waves = resampled(waveforms, sample_rate, RATE)
        require_samples(waves)
        out = []
        first, hop = (PATCH - 1) * HOP + SIZE, PATCH_HOP * HOP
        for wav in waves:
            wav = padded(wav, first + -(-max(len(wav) - first, 0) // hop) * hop)  # to whole windows, as the source does
            frames = np.clip(np.round(log_mel(wav) / scale + zero), 0, 255).astype(np.uint8)
            windows = [frames[i : i + PATCH] for i in range(0, len(frames) - PATCH + 1, PATCH_HOP)]
            values = [self._session.run(None, {"audio": w[None, None]})[0][0] for w in windows]
            out.append((np.stack(values).astype(np.float32) - out_zero) * out_scale)
        return out


@dataclass(frozen=True)
class _YAMNetConfig:
    labels: list[str]
    input: tuple[float, float]
    """Scale and zero point of the frames."""
    output: tuple[float, float]


def _config_of(folder: Path, schema: type[T]) -> T:
    try:
        return check(parse_json((folder / "config.json").read_bytes()), schema)
    except FieldError as error:
        raise ValueError(f"{folder}/config.json, field {error.field!r}: {error}; write the folder again") from error


def _stacked(rows: Sequence[NDArray[Any]], width: int) -> NDArray[np.float32]:
    return np.stack(rows).astype(np.float32) if len(rows) else np.zeros((0, width), np.float32)


@dataclass(frozen=True)
class Renamed:
    """A tagger under other names: a class is as probable as the most probable of the labels that stand for it."""

    tagger: Tagger
    classes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, tagger: Tagger, classes: Mapping[str, Sequence[str]]) -> Renamed:
        """Raises ValueError for a label that the tagger does not have."""
        places = {label: i for i, label in enumerate(tagger.labels)}
        for name, labels in classes.items():
            unknown = [label for label in labels if label not in places]
            if unknown or not labels:
                raise ValueError(
                    f"class {name!r}: {tagger.name} has no label {unknown[0]!r}"
                    if unknown
                    else f"class {name!r}: no labels"
                )
        return cls(tagger, {name: tuple(places[label] for label in labels) for name, labels in classes.items()})

    @property
    def name(self) -> str:
        return self.tagger.name

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.classes)

    def tag(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        return self.renamed(self.tagger.tag(waveforms, sample_rate))

    def renamed(self, tags: NDArray[Any]) -> NDArray[Any]:
        """Return [N, classes] of the tagger's own tags [N, C]."""
        return np.stack([tags[:, list(places)].max(axis=1) for places in self.classes.values()], axis=1)

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        return self.tagger.embed(waveforms, sample_rate)


@dataclass(frozen=True)
class CLAP(ModelFolder):
    """CLAP of transformers: the similarity of a sound and a text. As a tagger, a class is as probable as the softmax of
    its texts among those of all classes. A clip that is longer than the model's is heard in windows, whose vectors are
    averaged; a model with fusion sees it as a whole and three crops. Source: Wu et al. 2023, arXiv 2211.06687."""

    classes: Mapping[str, Sequence[str]]
    device: str = "auto"

    @cached_property
    def _parts(self) -> tuple[Any, Any, Any]:
        from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

        model = load_model(ClapModel, self.path, torch_device(self.device))
        extractor = load_processor(ClapFeatureExtractor, self.path, "feature extractor")
        return model, extractor, load_processor(AutoTokenizer, self.path, "tokenizer")

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.classes)

    @torch.no_grad()
    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        model, extractor, _ = self._parts
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        require_samples(waves)
        rows = []
        for wav in waves:  # one at a time: longer clips are fused differently
            parts = [wav] if extractor.truncation == "fusion" else _windows(wav, extractor.nb_max_samples)
            state = np.random.get_state()
            np.random.seed(0)  # the extractor draws the crops that it fuses from numpy's global generator
            try:
                inputs = extractor(parts, sampling_rate=extractor.sampling_rate, return_tensors="pt").to(model.device)
            finally:
                np.random.set_state(state)
            features = inputs["input_features"].to(model.dtype)
            rows.append(_unit(model.get_audio_features(features, is_longer=inputs.get("is_longer"))))
        return _stacked(rows, model.config.projection_dim)

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> NDArray[Any]:
        """[N, D] float32 of length 1."""
        model, _, tokenizer = self._parts
        ids = [tokenizer(text, return_tensors="pt").to(model.device) for text in texts]
        return _stacked([_unit(model.get_text_features(**tokens)) for tokens in ids], model.config.projection_dim)

    def similarities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        """Return the CLAP score of each sound with its text: the cosine, -1 to 1."""
        return [float(x) for x in (self.embed(waveforms, sample_rate) * self.embed_texts(texts)).sum(axis=1)]

    def tag(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        if not self.classes:
            raise ValueError(f"{self.path}: CLAP tags classes by texts; give them, as classes.json does")
        texts = self.embed_texts([f"The sound of {', '.join(names)}." for names in self.classes.values()])
        logits = self.embed(waveforms, sample_rate) @ texts.T * float(self._parts[0].logit_scale_a.exp())
        return np.asarray(torch.from_numpy(logits).softmax(-1).numpy(), np.float32)


def _windows(wav: Wave, size: int) -> list[Wave]:
    """Return the fewest windows of at most `size` samples that hold the whole clip, equally far apart."""
    starts = np.linspace(0, max(len(wav) - size, 0), -(-len(wav) // size)).astype(int)
    return [wav[start : start + size] for start in starts]


def _unit(features: Any) -> NDArray[np.float32]:
    """Return the mean direction of the vectors [W, D], of length 1.

    transformers 5 returns an output with pooler_output, earlier ones a tensor.
    """
    vectors = nn.functional.normalize(getattr(features, "pooler_output", features).float(), dim=-1)
    return np.asarray(nn.functional.normalize(vectors.mean(0), dim=-1).cpu().numpy())
