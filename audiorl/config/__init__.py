"""Configuration: frozen dataclasses, nothing but values.

A recipe composes these into its own dataclass; run files and the command line override any field by its path
(`--optim.lr 1e-6`); the result is written to the run folder as JSON. Each module has the options of those who read it.
"""

from audiorl.config.checks import require_finite, require_ranges, require_sound, to_json
from audiorl.config.flow import FlowConfig, FlowModelConfig, FlowSFTConfig
from audiorl.config.model import LoraConfig, ModelConfig, torch_device
from audiorl.config.optim import OptimConfig
from audiorl.config.preference import PreferenceConfig, PreferenceLoss
from audiorl.config.rewards import ProcessRewardConfig, RewardModelConfig, RewardServerConfig
from audiorl.config.rl import (
    Aggregation,
    CriticConfig,
    DistillConfig,
    EstimatorConfig,
    GenerationConfig,
    KLConfig,
    KLKind,
    ListeningConfig,
    LossOptions,
    PtxConfig,
    RLConfig,
    ScoreConfig,
)
from audiorl.config.sampling import SamplingConfig
from audiorl.config.supervised import SFTConfig

__all__ = [
    "Aggregation", "CriticConfig", "DistillConfig", "EstimatorConfig", "FlowConfig",
    "FlowModelConfig", "FlowSFTConfig", "GenerationConfig", "KLConfig",
    "KLKind", "ListeningConfig", "LoraConfig", "LossOptions", "ModelConfig", "OptimConfig", "PreferenceConfig",
    "PreferenceLoss", "ProcessRewardConfig", "PtxConfig", "RLConfig", "RewardModelConfig", "RewardServerConfig",
    "SFTConfig", "SamplingConfig", "ScoreConfig", "require_finite", "require_ranges", "require_sound",
    "to_json", "torch_device",
]  # fmt: skip
