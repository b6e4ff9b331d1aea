"""The protocols of speech models, and what implementations share: resampling, batching, reading a folder of weights.

All take mono waveforms [T] of floats in [-1, 1] at one rate, any number and any length, resample them, and return one
result each, in order. A result does not depend on the other waveforms (within the dtype's tolerance) nor on the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import soxr
from numpy.typing import NDArray

from audiorl.data.schema import parse_json

CHARACTER_CTC = "audiorl_character_ctc"
"""The model_type of folders that `CharacterCTC.save` writes."""
SOUND_TAGGER = "audiorl_sound_tagger"
"""The model_type of folders that `SoundTagger.save` writes."""
YAMNET = "yamnet_w8a8"
"""The model_type of the folder of YAMNet that `tools/fetch_judges.py` writes."""
Waveform = NDArray[Any]


@dataclass(frozen=True)
class AlignedWord:
    """A word of a text that should have been said, and what a recogniser understood in its place."""

    text: str
    transcript: str
    """What the recogniser understood in that time, "" for nothing."""
    start: float
    """Seconds. Words follow each other without gaps: a pause is divided between its neighbours."""
    end: float


class SpeechModel(Protocol):
    """A model by its name in tables and settings."""

    @property
    def name(self) -> str: ...


class Recogniser(SpeechModel, Protocol):
    """Speech to text."""

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        """Return a text each; "" for no samples."""


@runtime_checkable
class Aligner(Recogniser, Protocol):
    """A recogniser that also says where each word of a text is said: one with a CTC head."""

    def align(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[list[AlignedWord]]:
        """Return the words of the text of each waveform, in order; none for no samples and for a text without words.

        Raises ValueError for a text with a character that the recogniser does not know.
        """


@runtime_checkable
class TextScorer(Recogniser, Protocol):
    """A recogniser that also says how probable a text is for a clip: one with a CTC head, and Whisper."""

    def log_probabilities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        """Return ln p(text | waveform) in nats of each whole text; -inf for no samples and for too long a text.

        Raises ValueError for a text without words or with a character that the recogniser does not know.
        """


class LanguageIdentifier(Recogniser, Protocol):
    """A recogniser of many languages: it says which one is spoken, and transcribes in the one that it is given."""

    @property
    def multilingual(self) -> bool:
        """Return whether the model has more than one language; False for Whisper's English models."""

    def identify(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[dict[str, float]]:
        """Return the probability of each language, by its code; {} for no samples. Whisper looks at the first 30 s."""

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str]:
        """Return a text each; `languages` holds the code of each waveform's, in place of the recogniser's own."""


class SpeakerEncoder(SpeechModel, Protocol):
    """Speech to a vector; vectors of the same speaker are close."""

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        """[N, D] float32, each of length 1. Raises ValueError for a waveform without samples."""


class QualityModel(SpeechModel, Protocol):
    """Speech to a predicted mean opinion score of listeners."""

    def rate(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[float]:
        """Return a mean opinion score from 1 to 5 each. Raises ValueError for a waveform without samples."""


class Tagger(SpeechModel, Protocol):
    """Sound to which classes are heard in it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes."""

    def tag(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        """[N, C] float32: the probability that each class is heard anywhere in the sound; several may be."""

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        """[N, D] float32, for distances of sets of sounds."""


class SpeechDetector(SpeechModel, Protocol):
    """Audio to the probability of speech over time."""

    @property
    def frame_seconds(self) -> float:
        """Length of a frame in seconds."""

    def probabilities(self, waveform: Waveform, sample_rate: int) -> NDArray[Any]:
        """[ceil(T / frame)] float32 in [0, 1], for one waveform; the last frame may be shorter."""


Wave = NDArray[np.float32]


@dataclass(frozen=True)
class ModelFolder:
    """A model that is read from a folder, by whose name it is called, or from a cached hub id."""

    path: str

    @property
    def name(self) -> str:
        return Path(self.path).name


def resampled(waveforms: Sequence[Waveform], sample_rate: int, wanted: int) -> list[Wave]:
    """Return each as float32 [T] at `wanted` Hz. Raises ValueError naming a waveform that is not usable."""
    if not (isinstance(sample_rate, int) and sample_rate > 0):
        raise ValueError(f"sample_rate: {sample_rate!r}; give the waveforms' rate in Hz, an integer")
    waves = []
    for number, wav in enumerate(map(np.asarray, waveforms)):
        if wav.ndim != 1 or wav.dtype.kind != "f":
            raise ValueError(f"waveform {number}: {wav.dtype} of shape {wav.shape}; give mono floats [T] in [-1, 1]")
        if bad := np.count_nonzero(~np.isfinite(wav)):
            raise ValueError(f"waveform {number}: {bad} of {len(wav)} samples are NaN or infinite")
        wav = np.ascontiguousarray(wav, dtype=np.float32)
        waves.append(wav if sample_rate == wanted or not len(wav) else soxr.resample(wav, sample_rate, wanted))
    return waves


def require_samples(waves: Sequence[Wave]) -> None:
    """Raise ValueError naming the first waveform without samples, for models that have no result for it."""
    for number, wav in enumerate(waves):
        if not len(wav):
            raise ValueError(f"waveform {number}: holds no samples")


def padded(wav: Wave, samples: int) -> Wave:
    """Return the waveform, with silence after it where it is shorter than `samples`."""
    return wav if len(wav) >= samples else np.pad(wav, (0, samples - len(wav)))


def batches_by_length(waves: Sequence[Wave], size: int) -> Iterator[list[int]]:
    """Indices in batches of up to `size` of similar length, the longest first; those without samples are left out."""
    order = sorted((i for i, wav in enumerate(waves) if len(wav)), key=lambda i: -len(waves[i]))
    for at in range(0, len(order), size):
        yield order[at : at + size]


TRAINING_ONLY = ("masked_spec_embed",)
"""Weights that only training uses; released checkpoints may lack them."""


def load_model(model_class: Any, path: str | Path, device: str) -> Any:
    """Return the model of a folder or cached hub id in eval mode: float32 on the CPU, float16 on a GPU.

    Raises ValueError when weights are damaged, missing, not finite, or of another shape than config.json says.
    """
    import torch

    from audiorl.models.weights import check_sizes, naming_damage, silent_transformers
    from tokenizers_audio.loading import check_loaded

    try:
        if (config := Path(path) / "config.json").is_file():
            content = parse_json(config.read_bytes())
            check_sizes(Path(path), content if isinstance(content, dict) else {})
        with silent_transformers(), naming_damage(path):  # the errors below replace transformers' table of weights
            model, info = model_class.from_pretrained(
                str(path),
                dtype=torch.float32 if device == "cpu" else torch.float16,
                trust_remote_code=False,  # else transformers may ask whether to run it
                ignore_mismatched_sizes=True,  # so that they are listed; none is accepted
                output_loading_info=True,
            )
    except OSError as error:
        raise ValueError(f"{path}: neither a local model folder nor a model id that can be loaded ({error})") from error
    missing = [key for key in info["missing_keys"] if not key.endswith(TRAINING_ONLY)]
    check_loaded(model, path, missing, info["mismatched_keys"])
    return model.to(device).eval().requires_grad_(False)


def load_processor(loader: Any, path: str | Path, what: str) -> Any:
    """Return the tokenizer or feature extractor in a model's folder. ValueError when it is missing or damaged."""
    try:
        return loader.from_pretrained(str(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: the {what} cannot be read: {error}") from error
