"""The GPU memory of training a flow by sound-sft and by sound-grpo, from its size and the frames of its sounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from audiorl.config import ModelConfig, RLConfig
from audiorl.config.checks import pass_tokens, require_counts
from audiorl.config.flow import FlowConfig, FlowModelConfig
from audiorl.models.export import codec_of
from audiorl.models.flow import FlowNetwork, SoundPrompt
from audiorl.models.flow.policy import MODEL_TYPE, read_network
from audiorl.plan.memory import GIB, GPU, Assumptions, MemoryPlan, Part, make_part
from audiorl.plan.models import ModelSize, Shape

NEW = "flow"
"""In place of a folder: a new flow."""


@dataclass(frozen=True)
class FlowPlanOptions:
    """A run's options, with the defaults of sound-grpo, and what a plan must know besides."""

    network: FlowModelConfig = FlowModelConfig()
    """The size of a new flow."""
    latent_channels: int = 64
    """Channels of the latents of a new flow's codec."""
    model: ModelConfig = ModelConfig()
    rl: RLConfig = RLConfig(kl_beta=0.04)
    """micro_batch_tokens counts for sound-sft, too."""
    sampling: FlowConfig = FlowConfig()
    frames: int = 250
    """Latent frames of each sound, such as 10 s of 25 a second."""
    words: int = 80
    """Words of a caption and its thought."""
    gpu_gib: float = 80.0
    """Memory of one GPU, GiB."""
    assume: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        require_counts(self, ("latent_channels", "frames", "words"))


def is_flow(path: str) -> bool:
    """Return whether a folder holds a flow, or `path` stands for a new one."""
    file = Path(path) / "config.json"
    return path == NEW or (file.is_file() and MODEL_TYPE in file.read_text(errors="replace"))


def plan_flow(path: str, options: FlowPlanOptions) -> MemoryPlan:
    """Plan the memory of each GPU that trains the flow in a folder, or a `NEW` one; every GPU holds a whole flow.

    In sound-grpo each noisy step of a sound, or each time that it is noised to, passes through the network as a sound
    does in sound-sft. What a pass keeps for the gradient is counted by running it on one and on two sounds without
    numbers (PyTorch's meta device), in bfloat16 as half of it. Raises ValueError for a folder that holds no flow.
    """
    with torch.device("meta"):
        new = path == NEW
        network = FlowNetwork(options.network, options.latent_channels) if new else read_network(path)[0]
    network.checkpointing = options.model.gradient_checkpointing is True
    config, rl, sampling = network.config, options.rl, options.sampling
    parts = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    parts["other"] = sum(p.numel() for p in network.parameters()) - sum(parts.values())
    heads, total = config.heads, sum(parts.values())
    layers, head = config.joint_blocks + config.single_blocks, config.width // heads
    shape = Shape("flow", layers, config.width, 4 * config.width, heads, heads, head, config.text_rows)

    c = 2 if options.model.autocast else 4
    guided = 2 if sampling.guidance_scale != 1 else 1
    sounds = rl.prompts_per_step * rl.group_size
    made_at_once = guided * min(max(sampling.max_batch_frames // options.frames, rl.group_size), sounds)
    at_once = max(pass_tokens(rl) // (options.frames + options.words), 1)
    steps = sounds * (sampling.steps - 1 if sampling.noisy == "all" else sampling.window)
    own = codec_of(path)
    codec = sum(file.stat().st_size for file in Path(own).glob("*.safetensors")) if own and Path(own).is_dir() else 0

    one, two = (saved_bytes(network, sounds, options.frames, options.words) for sounds in (1, 2))

    def gpu(name: str, passes: int, samples: bool) -> GPU:
        block = 20 * config.width * c * (options.frames + options.words)  # one block's results for a sound
        kept = (one + (passes - 1) * (two - one)) * c / 4
        states = f"{total / 1e6:.1f} M x"
        rows = [
            make_part("weights", f"{states} 4 bytes", 4.0 * total),
            make_part("reference", f"{states} 4 bytes", 4.0 * total * (samples and rl.needs_reference)),
            make_part("gradients", f"{states} 4 bytes", backward=4.0 * total, step=4.0 * total),
            make_part("AdamW", f"{states} 8 bytes", 8.0 * total),
            make_part("codec", "the files of its weights", float(codec)),
            make_part("activations", f"{passes} sounds or steps of {options.frames} frames", backward=kept),
            make_part("one block", "estimated", generate=block * made_at_once * samples,
                      score=block * passes * samples, backward=block * passes),
            make_part("CUDA", "assumed", GIB * options.assume.context_gib),
        ]  # fmt: skip
        lost = options.assume.fragmentation
        waste = [lost * sum(column) for column in zip(*(row.bytes for row in rows[:-1]), strict=True)]
        rows.append(Part("fragmentation", f"{100 * lost:g} %", tuple(waste)))
        return GPU(name, 1, options.gpu_gib * GIB, tuple(row for row in rows if any(row.bytes)))

    guided_too = guided if sampling.noisy != "none" else 1
    ways = (gpu("sound-sft", at_once, False), gpu("sound-grpo", min(at_once, steps) * guided_too, True))
    return MemoryPlan(ModelSize(shape, parts, total), ways, 0.0)


def saved_bytes(network: FlowNetwork, sounds: int, frames: int, words: int) -> int:
    """Return the bytes that a forward pass of a network on any device keeps for the backward pass, weights apart."""
    weights = {p.untyped_storage()._cdata for p in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    device = network.begin.device
    x = torch.zeros(sounds * frames, network.latent_channels, device=device)
    prompts = [SoundPrompt(frames, f"{k} " + "a " * (words - len(str(k)))) for k in range(sounds)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(x, torch.full((sounds,), 0.5, device=device), prompts)
    return sum(storage.nbytes() for storage in kept.values())
