"""Teach a grafted model to understand speech: CTC on its audio side, then supervised fine-tuning.

    audiorl graft --llm HuggingFaceTB/SmolLM2-135M-Instruct --encoder openai/whisper-base --family qwen2.5-omni \\
        --out grafted
    audiorl train align-speech --out runs/align --path grafted --lora --data corpus/manifest.jsonl

Greedy transcripts of held-out rows and of `--unseen` speakers are measured before and after `sft`, and with
`--retention-text bundled` text without audio. Three phases:

  ctc      connectionist temporal classification of the projected audio frames over the text model's own embeddings:
           each frame learns to look like the token that is said, or like a blank. Only the projector is trained, on
           encoder outputs that are computed once, so a step takes a hundredth of one of SFT
  encoder  the same with the audio encoder, or its layers in `encoder_only`
  sft      transcripts, translations into English where a row has a `translation`, and the rows of --questions, with
           adapters (--lora) or all decoder weights: the text model learns to follow what it is given

`data` is speech with transcripts. The prompts are those of `audiorl eval asr`. A transcript with more tokens than the
audio has frames (25 a second) has no CTC path: an error, or left out and counted with --on-error skip. The model before
`sft` is RUN/checkpoints/ctc/aligned, the result the last checkpoint of `sft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch

from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SFTConfig, require_ranges
from audiorl.config.recipe import HeldOutOptions, RecipeConfig
from audiorl.data.bundled import bundled_set, bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.data.prompts import TRANSLATE, asr_prompt
from audiorl.languages import language_code
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    RowCheck,
    evaluate_around_training,
    evaluation_of,
    policy_from,
    read_sets,
    read_split,
    supervised_turn,
)
from audiorl.rewards import CharAccuracy, WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Sample
from corpora.models.ctc import CTCConfig, fitting, train_ctc


@dataclass(frozen=True)
class AlignSpeechConfig(HeldOutOptions, RecipeConfig):
    path: str = "grafted"
    """The model: a folder that `audiorl graft` wrote, another speech model's folder or hub id, or `tiny`."""
    questions: tuple[str, ...] = ()
    """Further rows for `sft`: questions on audio with answers, named like `data`. Answers are in tags."""
    ctc_epochs: float = 20.0
    """Passes of the phase `ctc` over the transcripts."""
    ctc_max_steps: int | None = None
    """Most steps of that phase; None: no limit."""
    ctc: CTCConfig = CTCConfig()
    """Batches of the phase `ctc`. Its steps follow from `ctc_epochs` and `ctc_max_steps`."""
    ctc_optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=50, schedule="cosine")
    """The optimizer of the phase `ctc`."""
    encoder_epochs: float = 3.0
    """Passes of the phase `encoder` over the transcripts; 0 leaves it out."""
    encoder_max_steps: int | None = None
    """Most steps of that phase; None: no limit."""
    encoder: CTCConfig = CTCConfig()
    """Batches of the phase `encoder`. Its steps follow from `encoder_epochs` and `encoder_max_steps`."""
    encoder_optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=50, schedule="cosine")
    """The optimizer of the phase `encoder`."""
    encoder_only: tuple[str, ...] = ()
    """Train only those weights of the audio side in the phase `encoder` whose names match one of these regular
    expressions, for example the upper layers and the projector: `layers.[45]. ln_post proj`; empty: all."""
    eval_tokens: int = 64
    """Most tokens of a greedy transcript of a held-out row."""
    sft: SFTConfig = SFTConfig(batch_size=32)
    """Batches of the phase `sft`. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=2e-4, warmup_steps=20, schedule="cosine")
    """The optimizer of the phase `sft`."""
    model: ModelConfig = ModelConfig(dtype="auto", audio="frozen")
    """How the model is loaded, and what `sft` trains besides the decoder or its adapters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("ctc_epochs", "ctc_max_steps", "encoder_max_steps")
        require_ranges(self, positive=positive, not_negative=("encoder_epochs",))


def tiny() -> AlignSpeechConfig:
    return AlignSpeechConfig(
        path="tiny",
        data=("bundled",),
        questions=("bundled:languages/train",),
        held_out_count=4,
        max_steps=2,
        ctc_max_steps=3,
        eval_tokens=8,
        lora=True,
        on_error="skip",
        ctc=CTCConfig(batch_size=4, save_every=1, eval_every=2),
        encoder_max_steps=2,
        encoder=CTCConfig(batch_size=4, save_every=1),
        sft=SFTConfig(batch_size=4, save_every=1),
    )


def main(config: AlignSpeechConfig, run: Run) -> None:
    source: dict[str, Any] = {"bundled": lambda _: bundled_transcripts(), "think": False}
    reward = WeightedSum.of(accuracy=WordAccuracy(normalizer="basic"))
    aligned = run.model("ctc", "aligned")
    check = RowCheck(
        cache(lambda: load_policy(aligned.resolve(), config.adapted) if aligned.is_dir() else start(config)),
        reward,
        eval_tokens=config.eval_tokens,
        trained=spoken_examples,
    )
    transcripts, held_out = read_split(config, read=partial(read_samples, kind="asr"), check=check, **source)
    learned = replace(check, trained=lambda s: [Example(s, supervised_turn(s))]).train
    bundled = partial(bundled_set, think=False)
    questions = read_sets(config.questions, config, bundled, read_samples, learned, think=False)
    examples = [e for s in transcripts for e in spoken_examples(s)]
    examples += [Example(s, supervised_turn(s)) for _, rows in questions for s in rows]
    as_written = WeightedSum.of(as_written=CharAccuracy(normalizer="none"))
    evaluation = evaluation_of(
        config, transcripts, held_out, reward, config.eval_tokens, check=check, outside=as_written, **source
    )
    if not aligned.is_dir():
        learn_ctc(config, run, check.policy(), transcripts, held_out)

    torch.manual_seed(config.seed)  # adapters start at random
    policy = load_policy(aligned.resolve(), config.adapted)
    with evaluate_around_training(run, policy, evaluation):
        training = config.with_steps_for(config.sft, len(examples))
        sft(policy, examples, run, config=training, optim=config.optim, seed=config.seed)


def start(
    config: AlignSpeechConfig, audio: Literal["projector", "full"] = "projector", only: tuple[str, ...] = ()
) -> AudioPolicy:
    """Load the model without adapters."""
    model = replace(config.model, lora=LoraConfig(rank=0), dtype="float32", audio=audio, only=only)
    return policy_from(replace(config, model=model, lora=False))


def learn_ctc(
    config: AlignSpeechConfig, run: Run, policy: AudioPolicy, transcripts: Sequence[Sample], held_out: Sequence[Sample]
) -> None:
    """Run the phases `ctc`, of `policy`, and `encoder`: they write checkpoints/ctc/aligned, a whole model."""
    examples = fitting(policy, [Example(s, s.references[0]) for s in transcripts], config.on_error)
    rest = fitting(policy, [Example(s, s.references[0]) for s in held_out], "skip")
    training = replace(config, epochs=config.ctc_epochs, max_steps=config.ctc_max_steps)
    batches = training.with_steps_for(config.ctc, len(examples))
    seed = config.seed
    aligned = train_ctc(
        policy, examples, run, config=batches, optim=config.ctc_optim, seed=seed, phase="ctc", held_out=rest
    )
    if config.encoder_epochs:
        policy = start(config, "full", config.encoder_only)
        training = replace(config, epochs=config.encoder_epochs, max_steps=config.encoder_max_steps)
        batches = training.with_steps_for(config.encoder, len(examples))
        train_ctc(
            policy,
            examples,
            run,
            config=batches,
            optim=config.encoder_optim,
            seed=seed,
            phase="encoder",
            held_out=rest,
            start=aligned,
        )
    run.keep_model("ctc", "aligned", policy)


def spoken_examples(sample: Sample) -> list[Example]:
    """Return the transcript, and the translation into English of a row that has one and is in another language."""
    examples = [Example(sample, sample.references[0])]
    translation = sample.metadata.get("translation")
    if translation and language_code(sample.metadata.get("language") or "und") != "en":
        (clip,) = (c for m in sample.messages for c in m.content if isinstance(c, AudioClip))
        request = replace(sample, id=f"{sample.id}/en", messages=asr_prompt(clip, ask=TRANSLATE), task="translate")
        examples.append(Example(replace(request, references=(translation,)), translation))
    return examples
