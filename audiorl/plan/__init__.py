"""Will it fit: the GPU memory of a run by part and phase, and what takes less (`audiorl doctor --plan`).

models.py counts the weights of a model on torch's meta device, memory.py adds up what a run puts on each GPU.

    options = PlanOptions(RuntimeConfig(kind="torchrun", ranks=8, zero=2), gpu_gib=80)
    plan = make_plan(options.size("qwen2.5-omni-7b"), options)
    plan.fits, [gpu.peak for gpu in plan.gpus]
"""

from audiorl.plan.memory import MemoryPlan, PlanOptions, largest_pass, make_plan, suggestions
from audiorl.plan.models import ModelSize, size_of

__all__ = ["MemoryPlan", "ModelSize", "PlanOptions", "largest_pass", "make_plan", "size_of", "suggestions"]
