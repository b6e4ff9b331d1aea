"""The longest clips and prompts end with a result or with one error, from the file to the update."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.config import OptimConfig, SamplingConfig, SFTConfig
from audiorl.data.manifest import read_samples
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.models.families import qwen_omni
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.fit import Learner
from audiorl.train.sft import sft_loss
from audiorl.types import Sample


def sample(folder: Path, seconds: float, words: int) -> Sample:
    rng = np.random.default_rng(0)
    soundfile.write(folder / "a.wav", 0.1 * rng.standard_normal(round(seconds * 16_000)).clip(-1, 1), 16_000)
    row = {"id": "long", "audio": "a.wav", "question": "what " * words, "answer": "a word"}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (read,) = read_samples(folder / "rows.jsonl", check_audio=True).samples
    return read


def policy(positions: int = 4096) -> AudioPolicy:
    made = qwen_omni.tiny(["what word"], hidden=32, layers=2, vocab_size=300, whisper=False)
    made.backbone.decoder(made.model).config.max_position_embeddings = positions
    return made


@pytest.mark.parametrize(("seconds", "words"), [(599, 1), (1, 20_000)])
def test_more_tokens_than_the_model_has_positions(tmp_path: Path, seconds: float, words: int) -> None:
    """Rotary positions have no end: without the check the model reads on at positions that it never learned."""
    long = sample(tmp_path, seconds, words)
    message = (
        r"sample 'long': its prompt has \d+ tokens, the model reads at most 4096; shorten the text, or cut the clip"
    )
    with pytest.raises(ValueError, match=message):
        policy().prompt(long)
    with pytest.raises(ValueError, match=message):
        HFEngine(policy(), SamplingConfig(max_new_tokens=2)).generate([Request(long)])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "words"), [(599, 1), (1, 11_000)])
def test_a_clip_of_ten_minutes_and_11_000_words_are_learned_from(tmp_path: Path, seconds: float, words: int) -> None:
    long, model = sample(tmp_path, seconds, words), policy(positions=2**17)
    (rollout,) = HFEngine(model, SamplingConfig(max_new_tokens=4)).generate([Request(long)])
    assert len(rollout.segments[0].prompt_ids) > 10_000 and rollout.num_sampled >= 1
    metrics = Learner(sft_loss, model, SFTConfig(steps=1, batch_size=1), OptimConfig()).train([Example(long, "a word")])
    assert np.isfinite(metrics["sft/loss"]) and metrics["grad_norm"] > 0
