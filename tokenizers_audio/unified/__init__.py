"""Our own codec: a semantic and an acoustic branch in one row of residual codes."""

from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.model import UnifiedTokenizer, load

__all__ = ["UnifiedConfig", "UnifiedTokenizer", "load"]
