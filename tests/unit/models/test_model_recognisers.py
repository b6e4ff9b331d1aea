"""Prompts of encoder-decoders; what else is true of them is in `test_model_families.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from transformers import CanaryProcessor, CohereAsrProcessor

from audiorl.audio import AudioClip
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy, load_policy
from audiorl.types import Message, Sample
from tests.conftest import RECOGNISERS

MOST_SECONDS = {"whisper": 10, "canary": 10, "cohere-asr": 10, "moonshine": 64}
TEMPLATE = """{%- for message in messages -%}{%- for part in message.content -%}{%- if part.type == 'text' -%}
{{- '<|startofcontext|><|startoftranscript|><|emo:undefined|><|' ~ part.source_language ~ '|><|' ~ part.target_language
~ '|>' ~ ('<|pnc|>' if part.punctuation else '<|nopnc|>') ~ '<|noitn|><|notimestamp|><|nodiarize|>' -}}
{%- endif -%}{%- endfor -%}{%- endfor -%}"""


@pytest.fixture(
    params=[pytest.param(kind, marks=[] if kind == "moonshine" else pytest.mark.slow) for kind in RECOGNISERS]
)
def make(request: pytest.FixtureRequest) -> Callable[..., AudioPolicy]:
    if request.param in ("canary", "cohere-asr"):
        pytest.importorskip("librosa", reason="their extractors need it")

    def made() -> AudioPolicy:
        return RECOGNISERS[request.param]()

    made.kind = request.param  # type: ignore[attr-defined]
    return made


def text_of(policy: AudioPolicy, ids: Tensor) -> Tensor:
    return ids[~policy.is_audio(ids)]


@pytest.mark.slow
def test_prompts_are_those_of_the_processors(samples: list[Sample], tmp_path: Path) -> None:
    pytest.importorskip("librosa", reason="their extractors need it")
    clip = samples[0].audio[0]
    for kind, processor_class in (("cohere-asr", CohereAsrProcessor), ("canary", CanaryProcessor)):
        RECOGNISERS[kind]().save(tmp_path / kind)
        processor = processor_class.from_pretrained(tmp_path / kind)
        policy = load_policy(tmp_path / kind)
        ids = text_of(policy, policy.prompt(Sample("a", asr_prompt(clip, "fr"))).ids).tolist()
        if kind == "cohere-asr":
            assert ids == processor.get_decoder_prompt_ids("fr")
        else:
            wanted = processor.apply_transcription_request(
                clip.load(), source_language="French", chat_template=TEMPLATE
            )
            assert ids == wanted["decoder_input_ids"][0].tolist()
            policy.tokenizer.chat_template = TEMPLATE
            assert ids == text_of(policy, policy.prompt(Sample("a", asr_prompt(clip, "fr"))).ids).tolist()
        asked = policy.prompt(Sample("a", (Message("user", (clip, "Which animal?")),))).ids
        assert "<|startofcontext|>Which animal?<|startoftranscript|>" in policy.tokenizer.decode(asked).replace(
            "> ", ">"
        )


def test_bad_clips_and_requests_are_refused(make: Any, samples: list[Sample]) -> None:
    policy, most = make(), MOST_SECONDS[make.kind]

    def clip(seconds: float) -> AudioClip:
        return AudioClip(array=np.full(int(16_000 * seconds), 0.1, np.float32), sample_rate=16_000)

    cases = {
        "too short": asr_prompt(clip(0.02), "es"),
        f"longer than the {most} s that": asr_prompt(clip(most + 0.5), "es"),
        "one recording, got 0": (Message("user", ("What?",)),),
        "one user turn": (Message("system", ("Be brief.",)), Message("user", (clip(1),))),
    }
    if make.kind == "moonshine":
        cases |= {"no place for a request": (Message("user", (clip(1), "Which animal?")),)}
        cases |= {"50 ms is too short for Moonshine": asr_prompt(clip(0.05), "es")}
    else:
        cases |= {
            "needs the language of a recording": asr_prompt(clip(1)),
            "no language 'tlh'": asr_prompt(clip(1), "tlh"),
        }
    for message, messages in cases.items():
        with pytest.raises(ValueError, match=message):
            policy.prompt(Sample("row-7", messages))
