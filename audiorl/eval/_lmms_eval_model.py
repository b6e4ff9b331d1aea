"""A checkpoint as a model of lmms-eval 0.7, whose tasks then evaluate it under the name "audiorl":

    lmms-eval --model audiorl --model_args model=exported --tasks librispeech_test_clean --batch_size 8

`--model_args`: model (a folder, checkpoint or hub id; required), system (a system message), language (of recordings,
for Whisper, which is asked for transcripts), max_new_tokens (256; a task's own limit goes first) and seed. lmms-eval
finds this module by the entry point `lmms_eval.models` of the installed package.

Recordings are read before a task's text. Answers are greedy unless the task asks for a temperature. Images, videos,
several rounds and log-likelihoods raise an error that names the task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.prompts import asr_prompt
from audiorl.eval._common import evaluation_config, progress_display
from audiorl.models import load_policy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import newest_checkpoint
from audiorl.types import Message, Sample


def manifest() -> ModelManifest:
    """Return what the entry point gives lmms-eval."""
    return ModelManifest(model_id="audiorl", simple_class_path=f"{__name__}.AudioRL")


class AudioRL(lmms):  # type: ignore[misc]
    """Raises ValueError for arguments that are not listed in the module's text."""

    is_simple = True

    def __init__(
        self,
        model: str = "",
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        system: str = "",
        language: str = "",
        max_new_tokens: int = 256,
        seed: int = 0,
        **others: object,
    ):
        super().__init__()
        if not model or others:
            named = f"no model argument is called {min(others)!r}" if others else "name the model"
            raise ValueError(f"--model_args: {named}; for example model=exported,language=en")
        if not str(batch_size or 1).isdigit():
            raise ValueError(f"--batch_size {batch_size}: give a number")
        self.batch_size = int(batch_size or 1)
        self._system, self._language = system, language
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._policy = load_policy(newest_checkpoint(model), evaluation_config(device or "auto"))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Answer the requests, in their order."""
        answers: dict[int, str] = {}
        by_sampling: dict[SamplingConfig, list[int]] = {}
        for i, request in enumerate(requests):
            by_sampling.setdefault(self._sampling(request.args[1]), []).append(i)
        with progress_display(self.rank == 0) as display:
            bar = display.add_task("audiorl", total=len(requests))
            for sampling, numbers in by_sampling.items():
                engine = HFEngine(self._policy, sampling)
                for start in range(0, len(numbers), self.batch_size):
                    batch = numbers[start : start + self.batch_size]
                    rollouts = engine.generate([Request(self._sample(requests[i]), seed=self._seed) for i in batch])
                    for i, rollout in zip(batch, rollouts, strict=True):
                        answers[i] = _before(rollout.text, sampling.stop)
                        self.cache_hook.add_partial("generate_until", requests[i].args[:2], answers[i])
                    display.advance(bar, len(batch))
        return [answers[i] for i in range(len(requests))]

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        raise NotImplementedError(f"{requests[0].args[-2]}: asks in several rounds, which audiorl does not answer")

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(f"{requests[0].args[-2]}: compares log-likelihoods, which audiorl does not give")

    def _sampling(self, settings: Mapping[str, Any]) -> SamplingConfig:
        """Read a task's generation_kwargs."""
        if settings.get("num_beams") not in (None, 1):
            raise ValueError(f"generation_kwargs: num_beams is {settings['num_beams']}; there is no beam search")
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample", True) else 0.0
        until = settings.get("until") or ()
        return SamplingConfig(
            temperature=temperature,
            top_p=float(settings.get("top_p") or 1.0),
            max_new_tokens=int(settings.get("max_new_tokens") or self._max_new_tokens),
            stop=(until,) if isinstance(until, str) else tuple(filter(None, until)),
        )

    def _sample(self, request: Instance) -> Sample:
        text, _, doc_to_visual, doc_id, task, split = request.args
        clips = [_clip(media, f"{task}, row {doc_id}") for media in doc_to_visual(self.task_dict[task][split][doc_id])]
        if self._language:
            messages = asr_prompt(clips[0], self._language)
        else:
            messages = (Message("user", (*clips, *([text] if text else []))),)
        if self._system:
            messages = (Message("system", (self._system,)), *messages)
        return Sample(f"{task}/{split}/{doc_id}", messages)


def _before(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first stop string, as lmms-eval scores it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _clip(media: Any, where: str) -> AudioClip:
    """Read audio as data sets have it: a path, a file's bytes, decoded samples, or a decoder of datasets."""
    if isinstance(media, str):
        return AudioClip(path=media)
    if isinstance(media, Mapping) and media.get("array") is None:
        if media.get("bytes") is not None:
            return AudioClip(data=media["bytes"])
        if media.get("path") is not None:
            return AudioClip(path=str(media["path"]))
    try:
        samples, rate = np.asarray(media["array"], np.float32), int(media["sampling_rate"])
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{where}: a {type(media).__name__} is no audio; audiorl reads text and audio only") from error
    return AudioClip(array=samples.T if samples.ndim == 2 else samples, sample_rate=rate)
