"""The geometry of our tokenizer: everything that must be equal for codes to mean the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MODEL_TYPE = "audiorl_unified_tokenizer"


@dataclass(frozen=True)
class UnifiedConfig:
    """The defaults are 24 kHz, 25 frames/s and 8 x 1024 codes: 2 kbit/s.

    The acoustic branch halves, thirds … the time step by `strides`, with one entry of `channels` per resolution, the
    finest first. It begins and ends with samples, or with spectra of `window` samples every `spectrum_hop`:

    >>> UnifiedConfig().hop, UnifiedConfig().frame_rate, UnifiedConfig().bitrate
    (960, 25.0, 2000.0)
    >>> UnifiedConfig(spectrum_hop=240, window=960, strides=(2, 2), channels=(256, 256, 256)).hop
    960
    """

    sample_rate: int = 24_000
    """Sample rate in Hz."""
    num_codebooks: int = 8
    """Codebooks, which is codes per frame."""
    codebook_size: int = 1024
    """Codes per codebook."""
    codebook_dim: int = 64
    """Width of a code's vector."""
    quantizer: Literal["residual", "grouped"] = "residual"
    """`grouped` is the ablation without residual structure: as many plain quantisers side by side (product VQ)."""
    strides: tuple[int, ...] = (8, 5, 4, 2, 3)
    """Factors by which the acoustic branch shortens the sequence, in order."""
    channels: tuple[int, ...] = (64, 128, 256, 512, 768, 1024)
    """Channels at each resolution, one more than `strides`."""
    dilations: tuple[int, ...] = (1, 3, 9)
    """One residual unit each, at every resolution."""
    spectrum_hop: int | None = None
    """Samples between the spectra that the acoustic branch begins and ends with; None for a branch on samples.

    Spectra make a network that is small and quick to train. The encoder then sees magnitudes only: phases are not
    coded, the decoder makes up its own.
    """
    window: int = 960
    """Samples in the window of a spectrum, with `spectrum_hop`."""
    phases: Literal["learned", "peaks"] = "learned"
    """With `spectrum_hop`: the decoder learns spectra with their phases, or it says log-mels, `mels` of them, and the
    phases are worked out from the peaks, which is understood after minutes of training."""
    activation: Literal["snake", "elu"] = "snake"
    """Of the acoustic branch: Snake suits a branch on samples, ELU one on spectra, where it is quicker too."""
    acoustic_dim: int = 256
    """Width of the acoustic branch's output."""
    semantic: Literal["none", "mel", "model"] = "mel"
    """Where the semantic branch gets its features: log-mel statistics, or a frozen HuBERT, WavLM or Wav2Vec2."""
    semantic_dim: int = 256
    """Width of the semantic branch's output."""
    semantic_block: int = 25
    """Frames that the speech model encodes at once, with as many before them as context: the encoder's latency."""
    mels: int = 80
    """Mel bands of the semantic features `mel` and of the decoder with phases `peaks`."""
    lookahead: int = 1
    """Frames of codes beyond its own that a decoded frame may depend on: the decoder's latency."""

    def __post_init__(self) -> None:
        positive = ("sample_rate", "num_codebooks", "codebook_size", "codebook_dim", "acoustic_dim", "mels", "window")
        for name in (*positive, "semantic_dim", "semantic_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.lookahead < 0:
            raise ValueError(f"lookahead is {self.lookahead}; it must be at least 0")
        for name in ("strides", "dilations"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least one number, all at least 1")
        if len(self.channels) != len(self.strides) + 1:
            raise ValueError(f"channels has {len(self.channels)} entries; give one more than strides ({self.strides})")
        if self.quantizer == "grouped" and self.codebook_dim % self.num_codebooks:
            raise ValueError(
                f"codebook_dim {self.codebook_dim} cannot be cut into {self.num_codebooks} equal groups; "
                "choose a multiple of num_codebooks"
            )
        if self.spectrum_hop is not None and (self.window % self.spectrum_hop or self.window < 3 * self.spectrum_hop):
            # Squared Hann windows add up to a constant only when at least three of them overlap evenly.
            raise ValueError(
                f"window {self.window} must be a multiple of spectrum_hop {self.spectrum_hop}, at least 3 of them"
            )
        if self.phases == "peaks" and self.spectrum_hop is None:
            raise ValueError('phases="peaks" works on spectra; set spectrum_hop')
        if self.semantic == "mel" and self.hop % 4:
            raise ValueError(f"a frame of {self.hop} samples cannot be cut into the 4 steps of the log-mel statistics")

    @property
    def hop(self) -> int:
        """Samples a frame."""
        return math.prod(self.strides) * (self.spectrum_hop or 1)

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.sample_rate / self.hop

    @property
    def bitrate(self) -> float:
        """Bits a second."""
        return self.frame_rate * self.num_codebooks * math.log2(self.codebook_size)

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> UnifiedConfig:
        """Raises ValueError naming a field that is missing, unknown or wrong."""
        names = {f.name for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        for kind, keys in (("is missing", names - given.keys()), ("is not known", given.keys() - names)):
            if keys:
                raise ValueError(f"{where}: {min(keys)!r} {kind}; the file is damaged or of another version")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error


MELS = UnifiedConfig(
    spectrum_hop=240, phases="peaks", strides=(2, 2), channels=(16, 16, 16), dilations=(1,), activation="elu",
    acoustic_dim=16, semantic="none", codebook_dim=32,
)  # fmt: skip
"""24 kHz, 25 frames a second of 32 numbers. Its networks stay silent: principal components of
log-mels are what `UnifiedTokenizer.begin` makes of it."""
