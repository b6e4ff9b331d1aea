"""audiorl: reinforcement learning for speech language models."""

# Importing this loads nothing heavy: each public name is imported when it is first used.

from __future__ import annotations

import atexit
import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from audiorl import rewards as rewards
    from audiorl.api import TrainResult as TrainResult
    from audiorl.api import train_dpo as train_dpo
    from audiorl.api import train_grpo as train_grpo
    from audiorl.api import train_ppo as train_ppo
    from audiorl.api import train_sft as train_sft
    from audiorl.audio import AudioClip as AudioClip
    from audiorl.eval import metrics as metrics
    from audiorl.models import load_policy as load_policy
    from audiorl.types import Sample as Sample
    from audiorl.types import Score as Score

__version__ = "0.1.0"
__all__ = [
    "AudioClip",
    "Sample",
    "Score",
    "TrainResult",
    "load_policy",
    "metrics",
    "rewards",
    "train_dpo",
    "train_grpo",
    "train_ppo",
    "train_sft",
]


@atexit.register
def _keep_msgspec_types() -> None:
    """Hold a reference that nobody gives back to what msgspec knows of types.

    As an interpreter ends, its last garbage collection may free these twice: one process in six died with SIGSEGV when
    all its work was done (msgspec 0.22, msgspec/msgspec#717).
    """
    if "msgspec" in sys.modules:
        import ctypes

        for found in gc.get_objects():
            if type(found).__name__ in ("StructInfo", "DataclassInfo", "TypedDictInfo", "NamedTupleInfo"):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def __getattr__(name: str) -> Any:
    value: Any
    if name == "AudioClip":
        from audiorl.audio import AudioClip

        value = AudioClip
    elif name in ("Sample", "Score"):
        from audiorl.types import Sample, Score

        value = Sample if name == "Sample" else Score
    elif name == "load_policy":
        from audiorl.models import load_policy

        value = load_policy
    elif name in ("metrics", "rewards"):
        # `from audiorl import rewards` would ask this function again.
        import audiorl.rewards as rewards
        from audiorl.eval import metrics

        value = metrics if name == "metrics" else rewards
    elif name in __all__:
        from audiorl import api

        value = getattr(api, name)
    else:
        raise AttributeError(f"module 'audiorl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
