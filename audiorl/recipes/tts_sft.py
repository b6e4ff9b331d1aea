"""Supervised training of a model that writes codes, on texts and how they sound.

    audiorl train tts-sft --out runs/voice --model.dtype bfloat16 --lora True \\
        --data LibriTTS/train.jsonl --held-out LibriTTS/test.jsonl --clone True
    audiorl train tts-sft --out runs/mine --path Qwen/Qwen2.5-Omni-3B --codec runs/codec/codec \\
        --data pairs.jsonl --conversations dialogues.jsonl --judge judges/whisper-base

The model is Higgs Audio V2 or one that was dualized; one that writes text only is dualized here, for the codec's
codebooks. Recordings are encoded once, into RUN/codes; a run that is started again goes on from there. Where a text
comes with a voice (prompt_audio and prompt_text, `--voice`, or `--clone True`), it stands in the prompt, as Higgs
imitates voices. In conversations every turn is learned, after the voices of all speakers and the turns before it, as
`audiorl eval tts --turns` asks for it. Before and after, a judge transcribes the spoken held-out texts. `--tiny` tries
the recipe without any download.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial

from audiorl.audio import AudioClip, AudioError, seconds
from audiorl.config import OptimConfig, SamplingConfig, SFTConfig, require_ranges
from audiorl.data.schema import FieldError
from audiorl.data.seedtts import read_conversations
from audiorl.eval.metrics.text import normalize
from audiorl.models.examples import Example, check_example
from audiorl.recipes._common import RowCheck
from audiorl.recipes._speech import (
    TINY,
    Measurement,
    SpeechConfig,
    speaking_policy,
    spoken_text,
    texts_of,
    with_tiny_parts,
)
from audiorl.report import write_report
from audiorl.run.folder import Run
from audiorl.tasks.tts.prompts import check_voices, conversation_examples, utterance_example
from audiorl.tasks.tts.texts import encode_corpus
from audiorl.train.sft import sft


@dataclass(frozen=True)
class TTSSFTConfig(SpeechConfig):
    conversations: tuple[str, ...] = ()
    """Files of conversations to learn besides `data`, with a recording of every turn: what `audiorl eval tts --turns`
    reads. Speakers' names are the tags of their texts."""
    context: int = 2
    """Turns of a conversation that stand, with their speech, in the prompt of the next."""
    sft: SFTConfig = SFTConfig(batch_size=32)
    """Batches and loss. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    """The model's optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ranges(self, not_negative=("context",))


def tiny() -> TTSSFTConfig:
    return TTSSFTConfig(
        **TINY,
        judge_speaker="tiny",
        sft=SFTConfig(batch_size=4, save_every=1),
        sampling=SamplingConfig(max_new_tokens=2, max_frames=16),
    )


def main(config: TTSSFTConfig, run: Run) -> None:
    policy_of = cache(lambda: speaking_policy(with_tiny_parts(config, run.dir / "tiny"), teach=True))
    check = RowCheck(
        policy_of,
        trained=lambda u: [utterance_example(u, config.tags)],
        measured=lambda u: [spoken_text(u, config, None if config.judge is None else config.normalizer)],
    )
    train, held_out = texts_of(config, check)
    policy = policy_of()
    turns = conversation_turns(config, {normalize(u.text, "basic") for u in held_out}, partial(check_example, policy))
    examples = [*(utterance_example(u, config.tags) for u in train), *turns]
    config = with_tiny_parts(config, run.dir / "tiny")
    measure = Measurement(config, run, policy, train, held_out)
    prompts = [(c for m in e.sample.messages if m.role == "assistant" for c in m.content) for e in examples]
    spoken = [c for e, prompt in zip(examples, prompts, strict=True) for c in (*prompt, *e.speech)]
    encode_corpus(policy, [clip for clip in spoken if isinstance(clip, AudioClip)], run.dir / "codes")
    measure("before")
    training = config.with_steps_for(config.sft, len(examples))
    sft(policy, examples, run, config=training, optim=config.optim, seed=config.seed)
    measure("after")
    print(write_report(run.dir))


def conversation_turns(
    config: TTSSFTConfig, held_out: Collection[str], check: Callable[[Example], None]
) -> list[Example]:
    """Return the turns of `config.conversations`. Those that are too long and those whose text is held out are not
    learned, and counted.

    Raises ValueError naming file, row, field and turn for a recording that cannot be read, a voice that is too short,
    and what `check` refuses by a FieldError.
    """
    learned: list[Example] = []
    turns = long = measured = 0
    for path in config.conversations:
        for conversation in read_conversations(path):
            check_voices(conversation)
            texts = {f"voices.{name}.text": text for name, (text, _) in conversation.voices.items()}
            for number, example in enumerate(conversation_examples(conversation, config.context)):
                own = f"turns[{number}].text"
                texts[own] = example.sample.references[0]
                turns += 1
                try:
                    if seconds(example.speech[0]) > config.max_seconds:
                        long += 1
                    elif normalize(texts[own], "basic") in held_out:
                        measured += 1
                    else:
                        check(example)
                        learned.append(example)
                except (AudioError, FieldError) as error:
                    if isinstance(error, AudioError) or error.field == "audio":
                        raise conversation.fault(f"turns[{number}].audio", str(error)) from error
                    # The prompt holds the voices and the turns before it, too.
                    at = next((k for k, text in texts.items() if error.holding and error.holding in text), own)
                    raise conversation.fault(at, str(error)) from error
    if len(learned) < turns:
        print(
            f"conversations: {turns} turns, of which {long} are longer than {config.max_seconds:g} s and {measured} "
            "say a held-out text; these are left out",
            flush=True,
        )
    return learned
