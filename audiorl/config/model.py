"""How a model is loaded, where, and what of it is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import DEVICES, require_ranges


def torch_device(device: str) -> str:
    """Return the name that torch knows: "auto" is "cuda" where there is a GPU, otherwise "cpu".

    Raises ValueError for a device that does not exist here.
    """
    if device in ("cpu", "meta"):
        return device
    if not re.fullmatch(DEVICES, device):
        raise ValueError(f"device {device!r}: no such device; give auto, cpu, cuda or cuda:N")
    import torch  # only here: the help of a command loads this module and shall not wait for torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        without = "torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU"
        lacking = f"{without} here (version {torch.__version__}); give cpu, or leave the option out"
        here = f"the GPUs here are cuda:0 to cuda:{count - 1}" if count else lacking
        raise ValueError(f"device {device!r}: {here}")
    return device


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the decoder (Hu et al. 2021)."""

    rank: int = 16
    """Rank of the adapters' matrices; 0: no adapters."""
    alpha: int = 32
    """Scale: the adapters' output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers of the decoder that get an adapter, by the last part of their name."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("alpha",), not_negative=("rank",), prefix="model.lora.")


@dataclass(frozen=True)
class ModelConfig:
    """How a model is loaded, and which of its weights are trained."""

    family: str = "auto"
    """The model family: auto reads it from the checkpoint, FILE.py:NAME is a class of your own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; auto takes the checkpoint's."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one, otherwise the CPU."""
    autocast: bool = False
    """Run forward passes in bfloat16 over float32 weights."""
    audio: Literal["frozen", "projector", "full"] = "frozen"
    """What of the audio side is trained: nothing (each clip is encoded once), the projector, or the encoder too."""
    lora: LoraConfig = LoraConfig(rank=0)
    """Low-rank adapters, trained instead of all decoder weights where their rank is above 0."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Compute activations again in the backward pass: less memory, about a third more time. auto: on a GPU, where
    ranks divide nothing, only of as many layers as do not fit otherwise; elsewhere of all."""
    only: tuple[str, ...] = ()
    """Train only those of the trainable weights whose names match one of these regular expressions; empty: all."""
    attention: Literal["auto", "varlen", "flex", "sdpa", "eager"] = "auto"
    """Kernel of a packed row's attention: FlashAttention over all spans (16 bits, GPU), compiled FlexAttention (GPU), a
    call for each span, or a mask of T x T. auto takes the first that can run (`audiorl doctor` names it)."""
    audio_cache_mb: int = 4096
    """Memory in MiB for the outputs of a frozen audio encoder."""

    def __post_init__(self) -> None:
        require_ranges(self, not_negative=("audio_cache_mb",), prefix="model.")
