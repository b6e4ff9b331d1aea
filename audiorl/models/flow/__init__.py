"""Flows: models that make sound latents of noise, conditioned on captions, thoughts, video and audio."""

from audiorl.models.flow.network import FlowNetwork, SoundPrompt
from audiorl.models.flow.policy import FlowPolicy, load_flow, new_flow

__all__ = ["FlowNetwork", "FlowPolicy", "SoundPrompt", "load_flow", "new_flow"]
