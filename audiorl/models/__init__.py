"""Policies: speech models and text decoders that are trained, one file per model family."""

from audiorl.models.backbone import Backbone
from audiorl.models.families import load_policy, load_weights, read_config
from audiorl.models.flow import FlowPolicy
from audiorl.models.lora import adapted_model
from audiorl.models.policy import AudioPolicy, Reference, dualize
from audiorl.models.prompts import Prompt
from audiorl.models.speech import FrameLayout

TrainedPolicy = AudioPolicy | FlowPolicy
"""The policies that reinforcement learning trains."""

__all__ = [
    "AudioPolicy",
    "Backbone",
    "FlowPolicy",
    "FrameLayout",
    "Prompt",
    "Reference",
    "TrainedPolicy",
    "adapted_model",
    "dualize",
    "load_policy",
    "load_weights",
    "read_config",
]
