"""How rollouts are sampled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from audiorl.config.checks import require, require_ranges


@dataclass(frozen=True)
class SamplingConfig:
    """How rollouts are sampled."""

    temperature: float = 1.0
    """Softmax temperature of text tokens; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities sum to this; 1 takes all."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 takes all."""
    max_new_tokens: int = 256
    """Text tokens of a response, or of one turn of a stream."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay in it."""
    max_batch_tokens: int = 65_536
    """Tokens that the key-value cache of the rows decoded together may hold, with the longest prompt and the maximum
    response counted for all of them. A single request may need more."""
    cuda_graphs: bool = True
    """Start a token of the `hf` engine's answers by one call on a GPU; not for speech, streams, Whisper and windows."""
    max_frames: int = 500
    """Codec frames of a response or of one turn of a stream; longer speech is cut there."""
    audio_temperature: float | None = None
    """Softmax temperature of codec codes; None takes `temperature`."""
    audio_top_p: float = 1.0
    """`top_p` of codec codes."""
    audio_top_k: int = 0
    """`top_k` of codec codes."""
    codebook_temperature: tuple[float, ...] = ()
    """`audio_temperature` of each codebook, the last for those after it; none: one for all."""
    codebook_top_p: tuple[float, ...] = ()
    """`audio_top_p` of each codebook, likewise."""
    ras_window: int = 0
    """Frames of the window of repetition-aware sampling (VALL-E 2, arXiv 2406.05370); Higgs Audio uses 7, 0 is off. A
    code that occurs `ras_repeats` times in the window of its codebook is sampled again from the plain distribution,
    which the trainer does not compute: for evaluation, or with `tis_cap`."""
    ras_repeats: int = 2
    """Occurrences in the window that cause a second draw."""

    def __post_init__(self) -> None:
        require_ranges(
            self,
            positive=("max_frames", "max_new_tokens", "max_batch_tokens", "ras_repeats"),
            not_negative=("temperature", "audio_temperature", "top_k", "audio_top_k", "ras_window"),
            prefix="sampling.",
        )
        for name in ("top_p", "audio_top_p"):
            require(0 < getattr(self, name) <= 1, f"sampling.{name}", getattr(self, name), "in (0, 1]")
        for p in self.codebook_top_p:
            require(0 < p <= 1, "sampling.codebook_top_p", p, "in (0, 1]")
        for t in self.codebook_temperature:
            require(t >= 0, "sampling.codebook_temperature", t, "0 or more")

    def of_codes(self, codebook: int = 0) -> SamplingConfig:
        """Return these options with the temperature, top_p and top_k of a codebook's codes for the text's."""
        temperature = self.temperature if self.audio_temperature is None else self.audio_temperature
        temperature, *_ = (*self.codebook_temperature[: codebook + 1][-1:], temperature)
        top_p, *_ = (*self.codebook_top_p[: codebook + 1][-1:], self.audio_top_p)
        return dataclasses.replace(self, temperature=temperature, top_p=top_p, top_k=self.audio_top_k)

    @property
    def training_temperatures(self) -> tuple[float, float | tuple[float, ...]]:
        """Those of text and of codes, or of each codebook, under which log-probs are taken: of greedy answers the
        model's own."""
        by_codebook = tuple(self.of_codes(k).temperature or 1.0 for k in range(len(self.codebook_temperature)))
        return self.temperature or 1.0, by_codebook or self.of_codes().temperature or 1.0
