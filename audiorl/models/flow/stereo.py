"""Stereo as one sound and its place in every frame: for codecs that make their phases up.

What is coded channel by channel by such a codec comes back with other phases in each, and with them goes the delay
between the ears, by which a place is heard. Parametric stereo (Breebaart et al. 2005, doi 10.1155/ASP.2005.1305) codes
one sound, the delay and the level. Here a frame has one place: of two sounds at once, that of the louder one.

Shapes: T samples, F frames of `hop` samples. A place is (delay of the left channel in ms, level of the left channel
over the right one in units of 10 dB): both about -1 … 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 0.001
"""Seconds of the longest delay; between human ears it is 0.66 ms."""
AUDIBLE = 1e-5
"""Energy of a frame, of that of the loudest one, below which its place is that of the frame before."""
LEVEL = 2.0
"""Highest level of one channel over the other, in units of 10 dB."""
WINDOW, STEP = 1024, 256


def mixed_down(wave: Tensor, rate: int, hop: int) -> tuple[Tensor, Tensor]:
    """Return the sound [T] of two channels [T, 2], each at its delay and level, and its places [F, 2]."""
    places = _places(wave, rate, hop)
    left, right = _moved(wave.T, places, rate, hop, -1)
    one, other = _gains(places, hop, len(wave))
    return (one * left + other * right) / 2, places


def spread(wave: Tensor, places: Tensor, rate: int, hop: int) -> Tensor:
    """Return the two channels [T, 2] of a sound [T] at places [F, 2], which are brought to what places can be."""
    places = places.clamp(places.new_tensor([-1000 * MOST, -LEVEL]), places.new_tensor([1000 * MOST, LEVEL]))
    moved = _moved(wave.expand(2, -1), places, rate, hop, 1)
    return (moved * torch.stack(_gains(places, hop, len(wave)))).T


def _places(wave: Tensor, rate: int, hop: int) -> Tensor:
    """Return the place of each frame from two hops around it."""
    from audiorl.eval.metrics.sound import interaural_delay  # with the metrics of text, which a plain checkout lacks

    frames = -(-len(wave) // hop)
    padded = torch.nn.functional.pad(wave.T, (hop // 2, (frames + 1) * hop - hop // 2 - len(wave)))
    parts = (padded.unfold(-1, 2 * hop, hop) * torch.hann_window(2 * hop)).double()  # [2, F, 2 · hop]
    delays = torch.tensor([interaural_delay(part.T.numpy(), rate, MOST) for part in parts.transpose(0, 1)])
    energy = parts.square().sum(-1)
    levels = (energy[0].clamp(min=1e-12) / energy[1].clamp(min=1e-12)).log10().clamp(-LEVEL, LEVEL)
    loud = energy.sum(0)
    audible = (loud >= AUDIBLE * loud.max()).nonzero()[:, 0]
    last = torch.searchsorted(audible, torch.arange(frames), right=True).sub(1).clamp(min=0)
    return torch.stack([delays * 1000, levels], 1)[audible[last]].float()


def _moved(waves: Tensor, places: Tensor, rate: int, hop: int, sign: int) -> Tensor:
    """Move two channels [2, T] apart by the delays of places, half of it each, or with sign -1 together."""
    window = torch.hann_window(WINDOW)
    spectra = torch.stft(waves, WINDOW, STEP, window=window, pad_mode="constant", return_complex=True)
    at = (torch.arange(spectra.shape[-1]) * STEP // hop).clamp(max=len(places) - 1)
    turns = torch.pi * torch.fft.rfftfreq(WINDOW, 1 / rate)[:, None] * places[at, 0] / 1000  # half of the delay
    shift = torch.polar(torch.ones_like(turns), -sign * turns)
    return torch.istft(spectra * torch.stack([shift, shift.conj()]), WINDOW, STEP, window=window, length=waves.shape[1])


def _gains(places: Tensor, hop: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the gains [T] of the left and of the right channel; their squares add up to 2."""
    ratio = 10 ** places[:, 1].repeat_interleave(hop)[:length]
    return (2 * ratio / (1 + ratio)).sqrt(), (2 / (1 + ratio)).sqrt()
