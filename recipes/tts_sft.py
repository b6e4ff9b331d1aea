"""Supervised training of a model that writes codes, on texts and how they sound.

    audiorl train tts-sft --out runs/voice --model.dtype bfloat16 --lora True \
        --data LibriTTS/train.jsonl --held-out LibriTTS/test.jsonl --clone True
    audiorl train tts-sft --out runs/mine --path Qwen/Qwen2.5-Omni-3B --codec runs/codec/codec \
        --data pairs.jsonl --judge judges/whisper-base

The model is Higgs Audio V2 or one that was dualized; one that writes text only is dualized here, for the codec's
codebooks. Recordings are encoded once, into RUN/codes; a run that is started again goes on from there. Where a text
comes with a voice (prompt_audio and prompt_text, `--voice`, or `--clone True`), it stands in the prompt, as Higgs
imitates voices. Before and after, a judge transcribes the spoken held-out texts. `--tiny` tries the recipe without any
download.
"""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.config import ModelConfig, OptimConfig, SamplingConfig, SFTConfig
from audiorl.recipe.speech import SpeechConfig, measurement, speaking_policy, texts_of
from audiorl.recipes._tiny_speech import with_tiny_parts
from audiorl.report import write_report
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.tts.codes import encode_corpus
from audiorl.tts.prompts import utterance_example


@dataclass(frozen=True)
class Config(SpeechConfig):
    sft: SFTConfig = SFTConfig(batch_size=32)
    """Batches and loss. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    """The model's optimizer."""


def tiny() -> Config:
    return Config(
        path="tiny",
        codec="tiny",
        data=("bundled:en",),
        held_out_count=2,
        clone=True,
        max_seconds=0.8,
        max_steps=2,
        judge="tiny",
        judge_speaker="tiny",
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1),
        optim=OptimConfig(lr=1e-3),
        sampling=SamplingConfig(max_new_tokens=2, max_frames=16),
    )


def main(config: Config, run: Run) -> None:
    train, held_out = texts_of(config)
    examples = [utterance_example(u, config.tags) for u in train]
    config = with_tiny_parts(config, run.dir / "tiny")
    policy = speaking_policy(config, teach=True)
    measure = measurement(config, run, policy, train, held_out)
    encode_corpus(policy, [clip for u in train for clip in (u.recording, u.prompt) if clip], run.dir / "codes")
    measure("before")
    sft(policy, examples, run, config=config.scheduled(config.sft, len(examples)), optim=config.optim, seed=config.seed)
    measure("after")
    print(write_report(run.dir))


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)
