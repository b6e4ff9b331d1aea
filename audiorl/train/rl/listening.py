"""The listening check of a run: does the policy still use its audio?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from audiorl.config import RLConfig
from audiorl.data.views import views_of
from audiorl.eval._listening import DEFAULT_VIEWS, audio_gains, gain_metrics, verdict
from audiorl.models import AudioPolicy
from audiorl.types import Rollout, Sample


def check_listening(policy: AudioPolicy, rollouts: Sequence[Rollout], config: RLConfig) -> dict[str, float]:
    """`audio/gain_*` on one answer for each of `audio_check_prompts` prompts; see `RLConfig.audio_check`.

    Prompts that have no such view, such as text or silence, are left out. Without any, or for streams and speech, there
    is nothing to measure. Raises ValueError where the policy ignores its audio and `audio_check` is "stop".
    """
    one_each = list({r.group_id: r for r in rollouts if len(r.segments) == 1 and not r.speaks}.values())
    one_each = [r for r in one_each if _has_view([r.sample], "silence")][: config.audio_check_prompts]
    views = [view for view in DEFAULT_VIEWS if one_each and _has_view([r.sample for r in one_each], view)]
    if not views:
        return {}
    gains = audio_gains(policy, one_each, views, config.micro_batch_tokens)
    result = verdict(gains, config.audio_check_min)
    if result.word == "ignores_audio":
        message = f"the model ignores its audio: {result.reason}"
        if config.audio_check == "stop":
            raise ValueError(f"{message}, less than audio_check_min {config.audio_check_min:g}")
        print(f"audiorl: {message}", file=sys.stderr)
    return gain_metrics(gains, [r.sample.task for r in one_each])


def _has_view(samples: Sequence[Sample], name: str) -> bool:
    try:
        views_of(samples, name)
    except ValueError:
        return False
    return True
