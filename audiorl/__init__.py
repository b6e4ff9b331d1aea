"""audiorl: reinforcement learning for speech language models."""

__version__ = "0.1.0"
