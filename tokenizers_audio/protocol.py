"""What every neural audio codec of this package offers, whole recordings and streams.

Shapes: B recordings, T samples, Q codebooks, F frames of codes. `hop` = sample_rate / frame_rate samples make one
frame, so T samples are F = ceil(T / hop) frames and F frames are F · hop samples.
"""

from typing import Protocol

from torch import Tensor


class Streaming(Protocol):
    """The state of one stream (a batch of one). Its size does not grow with the stream.

    Encoding and decoding are two independent directions of the same object. For every way to cut a recording into
    chunks, what the calls return, laid end to end, is what the codec returns for the whole recording. After `finish`
    (or `flush`) that direction is at its start again and takes the next recording.
    """

    def encode(self, wav: Tensor) -> Tensor:
        """[T'] more samples -> [Q, F'] the codes that no later sample can change; F' may be 0."""
        ...

    def finish(self) -> Tensor:
        """[Q, F''] the remaining codes, after the last samples."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """[Q, F'] more codes -> [T'] the samples that no later code can change; T' may be 0."""
        ...

    def flush(self) -> Tensor:
        """[T''] the remaining samples, after the last codes."""
        ...


class AudioTokenizer(Protocol):
    """Audio in [-1, 1] to codes and back."""

    @property
    def sample_rate(self) -> int:
        """Hz of the audio it reads and writes."""
        ...

    @property
    def frame_rate(self) -> float:
        """Frames of codes per second."""
        ...

    @property
    def num_codebooks(self) -> int:
        """Q."""
        ...

    @property
    def codebook_size(self) -> int:
        """Codes per codebook; a code is one of 0 … codebook_size - 1."""
        ...

    @property
    def identity(self) -> str:
        """Family, geometry and a hash of the weights: codes may only be decoded by a codec of equal identity."""
        ...

    def encode(self, wav: Tensor) -> Tensor:
        """[B, T] or [T] float in [-1, 1] -> [B, Q, ceil(T / hop)] int64."""
        ...

    def decode(self, codes: Tensor) -> Tensor:
        """[B, Q, F] -> [B, F · hop] float32. ValueError for a code out of range or a wrong number of codebooks."""
        ...

    def streaming(self) -> Streaming:
        """Return the fresh state of one stream."""
        ...
