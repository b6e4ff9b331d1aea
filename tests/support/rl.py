"""Short configs of reinforcement learning for tests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from audiorl.config import RLConfig

SHORT = {
    "kl_in": ("kl", "place"),
    "kl_kind": ("kl", "kind"),
    "kl_control": ("kl", "control"),
    "kl_target": ("kl", "target"),
    "kl_horizon": ("kl", "horizon"),
    "kl_gain": ("kl", "gain"),
    "advantage_std": ("estimator", "std"),
    "advantage_eps": ("estimator", "eps"),
    "score_clip": ("scores", "clip"),
    "score_normalize": ("scores", "normalize"),
    "ptx_coef": ("ptx", "coef"),
    "ptx_batch": ("ptx", "batch"),
}


def rl_config(base: RLConfig | None = None, **options: Any) -> RLConfig:
    """Return an `RLConfig`, or `base`, with options by short names: `gamma=0.5` is `EstimatorConfig(gamma=0.5)`."""
    defaults = base or RLConfig()
    own = [(g, f.name) for g in ("estimator", "loss_options", "generation") for f in fields(getattr(defaults, g))]
    places = {field: (group, field) for group, field in own} | SHORT
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if name in places:
            group, field = places[name]
            nested.setdefault(group, {})[field] = value
        else:
            flat[name] = value
    groups = {group: replace(getattr(defaults, group), **changes) for group, changes in nested.items()}
    return replace(base, **flat, **groups) if base else RLConfig(**flat, **groups)
