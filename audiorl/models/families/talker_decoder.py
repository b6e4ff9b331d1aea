"""The decoders of Omni checkpoints from the codes of their talkers to sound, as codecs that cannot encode.

Shapes: B speeches, Q codebooks, F frames, T samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3_omni

from audiorl.models.speech import TalkerLayout
from audiorl.models.weights import naming_damage, silent_transformers, tensors_of


class TalkerDecoder(nn.Module):
    """The decoder of an Omni checkpoint from codes to sound, as a codec that cannot encode.

    Qwen3-Omni's decodes in chunks of 300 frames after 25 of context, as transformers does, which loses the last
    samples of each chunk; its streams decode what arrives after the same context and lose them at the end only.
    Qwen2.5-Omni's makes a whole speech from noise that is the same each time, in a
    voice: a stream of it gives all at its end.
    """

    sample_rate = 24_000

    def __init__(self, model: Any, layout: TalkerLayout, voices: Mapping[str, Any], voice: str = ""):
        """model: Code2Wav of Qwen3-Omni, or Token2Wav of Qwen2.5-Omni, which speaks in one of `voices`, the first
        unless `voice` names another."""
        super().__init__()
        self.model, self.layout = model.eval().requires_grad_(False), layout
        self.voices, self.voice = voices, voice or next(iter(voices))
        self.num_codebooks, self.codebook_size = layout.codebooks, layout.size
        self.in_blocks = hasattr(model, "chunked_decode")

    @classmethod
    def load(
        cls, base: str | Path, whole: Mapping[str, Any], layout: TalkerLayout, voices: Mapping[str, Any]
    ) -> TalkerDecoder:
        """Read it from a whole checkpoint, whose config.json is `whole`. Raises ValueError where it is not there."""
        newer = str(whole.get("model_type")).startswith("qwen3")
        prefix = "code2wav" if newer else "token2wav"
        model_class: Any = qwen3_omni.Qwen3OmniMoeCode2Wav if newer else transformers.Qwen2_5OmniToken2WavModel
        config_class: Any = qwen3_omni.Qwen3OmniMoeCode2WavConfig if newer else transformers.Qwen2_5OmniToken2WavConfig
        with silent_transformers(), naming_damage(base):
            model = model_class(config_class(**whole.get(f"{prefix}_config", {})))
            tensors = tensors_of(base, f"{prefix}.")
            missing = sorted(model.state_dict().keys() - tensors.keys())
            if missing:
                raise ValueError(f"{base}: weight {prefix}.{missing[0]} is missing; copy the whole checkpoint again")
            model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return cls(model, layout, voices)

    def of_voice(self, prompt_ids: Tensor) -> TalkerDecoder:
        """Return the decoder of the voice that a prompt [P] asks for; weights are shared."""
        if self.in_blocks:
            return self
        begin = int(prompt_ids[-2])
        name = next(n for n, voice in self.voices.items() if int(voice["bos_token"]) == begin)
        return TalkerDecoder(self.model, self.layout, self.voices, name)

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        if self.in_blocks:
            return int(self.model.total_upsample)
        vocoder = self.model.code2wav_bigvgan_model.config
        return int(np.prod(vocoder.upsample_rates)) * int(self.model.code2wav_dit_model.repeats)

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self.hop

    @property
    def identity(self) -> str:
        weight = next(self.model.parameters())
        digest = hashlib.blake2b(weight.detach().float().cpu().numpy().tobytes(), digest_size=8).hexdigest()
        return f"{type(self.model).__name__}/{self.num_codebooks}x{self.codebook_size}/{digest}"

    def encode(self, wav: Tensor) -> Tensor:
        raise ValueError("the checkpoint turns codes into sound, not sound into codes; name a codec with --codec")

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[B, Q, F] -> [B, T] float32."""
        codes = codes.to(next(self.model.parameters()).device)
        if self.in_blocks:
            waves: Tensor = self.model.chunked_decode(codes, chunk_size=300, left_context_size=25)
            return waves[:, 0].float()
        voice = self.voices[self.voice]
        cond = voice["cond"].to(codes.device).float().expand(1, -1)
        mel = voice["ref_mel"].to(codes.device).float().expand(1, -1, -1)
        out = []
        for one in codes:
            with torch.random.fork_rng(devices=[codes.device] if codes.device.type == "cuda" else []):
                torch.manual_seed(0)
                out.append(self.model(one, conditioning=cond, reference_mel=mel).reshape(-1).float())
        return torch.stack(out)

    def streaming(self) -> TalkerStream:
        return TalkerStream(self)


class TalkerStream:
    """A speech of `TalkerDecoder` in blocks."""

    def __init__(self, decoder: TalkerDecoder):
        self._decoder, self._codes = decoder, torch.zeros(decoder.num_codebooks, 0, dtype=torch.long)
        self._owed = 0

    def encode(self, wav: Tensor) -> Tensor:
        return self._decoder.encode(wav)

    def finish(self) -> Tensor:
        return self._codes[:, :0]

    def decode(self, codes: Tensor) -> Tensor:
        """[Q, F'] more codes -> [T'] their samples."""
        if not self._decoder.in_blocks:
            self._codes = torch.cat([self._codes, codes], 1)
            return torch.zeros(0)
        if codes.shape[1] > 275:  # with the frames before them the 300 that it decodes at once
            return torch.cat([self.decode(part) for part in codes.split(275, 1)])
        hop, context = self._decoder.hop, self._codes[:, -25:]
        self._codes = torch.cat([context, codes], 1)
        wave = self._decoder.decode(self._codes[None])[0]
        # Code2Wav cuts the last samples off, which need the frame after them: they come with the next block.
        start = context.shape[1] * hop - self._owed
        self._owed = self._codes.shape[1] * hop - len(wave)
        return wave[start:]

    def flush(self) -> Tensor:
        """[T''] what is left."""
        codes, self._codes, self._owed = self._codes, self._codes[:, :0], 0
        said = self._decoder.in_blocks or not codes.shape[1]
        return torch.zeros(0) if said else self._decoder.decode(codes[None])[0]
