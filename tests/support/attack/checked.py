"""Rows that recipes check before the first step. The judge does with every accepted row what training would do."""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import soundfile
import torch

from audiorl.data.manifest import Loaded, read_samples
from audiorl.data.preferences import read_pairs, read_steps
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.families import higgs, qwen2_audio, qwen_omni, whisper
from audiorl.protocols import Reward
from audiorl.recipes._common import RowCheck, answer_reward, supervised_turn
from audiorl.recipes._speech import TINY_CODEC, SpeechConfig, spoken_text
from audiorl.rewards import Hallucination, LanguageConsistency, WeightedSum, WordAccuracy
from audiorl.tasks.tts.prompts import utterance_example
from audiorl.tasks.tts.texts import read_utterances
from audiorl.train.preference import pair_examples
from audiorl.types import Rollout, Sample, Segment
from tests.support.attack.data import judge_rows
from tests.support.attack.mutation import ODD, dump, mutate_json
from tests.support.attack.targets import Input, Target
from tokenizers_audio.unified import UnifiedTokenizer

NEW_TOKENS = 64
RATE = 16_000
CODEC_SPEECH: Any = SpeechConfig()


@cache
def speaking() -> AudioPolicy:
    policy = higgs.tiny(codebooks=TINY_CODEC.num_codebooks, codebook_size=TINY_CODEC.codebook_size)
    policy.set_codec(UnifiedTokenizer(TINY_CODEC))
    return policy


POLICIES: dict[str, Callable[[], AudioPolicy]] = {
    "omni": cache(lambda: qwen_omni.tiny(whisper=False)),
    "qwen2": cache(lambda: qwen2_audio.tiny(window=30)),
    "whisper": cache(lambda: whisper.tiny(window=10)),
    "higgs": speaking,
}


@dataclass(frozen=True)
class Use:
    """What a recipe makes of rows."""

    read: Callable[..., Loaded[Any]]
    policy: str
    row: dict[str, Any]
    trained: Callable[[Any], Any] = lambda sample: [sample]
    reward: Reward | None = None
    think: bool = False


QUESTION = {"audio": "good.wav", "question": "What is heard?", "choices": ["a dog", "a bell"], "answer": "a dog"}
SPEECH = {"audio": "good.wav", "text": "one two three", "language": "en"}
WORDS = WeightedSum.of(accuracy=WordAccuracy(), guard=(Hallucination(), 0.5), language=LanguageConsistency())
USES = {
    "samples-questions": Use(read_samples, "omni", QUESTION, reward=answer_reward(False)),
    "samples-window": Use(read_samples, "qwen2", QUESTION, reward=answer_reward(True), think=True),
    "samples-recognised": Use(read_samples, "omni", SPEECH, reward=WORDS),
    "samples-transcripts": Use(
        read_samples, "whisper", SPEECH, lambda s: [Example(s, supervised_turn(s, tags=False))]
    ),
    "samples-thoughts": Use(
        read_samples, "omni", {**QUESTION, "why": "It barks."}, lambda s: [Example(s, supervised_turn(s, True, "why"))]
    ),
    "pairs-answers": Use(read_pairs, "omni", {**QUESTION, "chosen": "a dog", "rejected": "a bell"}, pair_examples),
    "steps-answers": Use(
        read_steps, "omni", {**QUESTION, "steps": ["one", "two"], "labels": [1, 0]},
        lambda item: [Example(item.sample, "\n\n".join(item.steps))],
    ),
    "utterances-spoken": Use(
        read_utterances, "higgs", {**SPEECH, "prompt_audio": "good.wav", "prompt_text": "Hi."},
        lambda u: [utterance_example(u), spoken_text(u, CODEC_SPEECH, "basic")],
    ),
}  # fmt: skip
"""By the name of a seed: its reader, then what is trained."""


@cache
def sounds() -> Path:
    """A folder of recordings, few of which can be used."""
    folder = Path(tempfile.mkdtemp())
    tone = 0.3 * np.sin(np.arange(RATE * 170) * 0.17)
    for name, seconds in (("good", 0.6), ("short", 0.02), ("long", 31.0), ("huge", 170.0)):
        soundfile.write(folder / f"{name}.wav", tone[: round(RATE * seconds)], RATE)
    good = (folder / "good.wav").read_bytes()
    for name, data in (("cut", good[:9000]), ("empty", b""), ("text", b"no audio"), ("header", good[:44])):
        (folder / f"{name}.wav").write_bytes(data)
    for name, wav in (
        ("nan", np.full(RATE, np.nan)),
        ("loud", 9000 * tone[:RATE]),
        ("phase", np.stack([tone, -tone]).T[:RATE]),
    ):
        soundfile.write(folder / f"{name}.wav", wav, RATE, subtype="FLOAT")
    soundfile.write(folder / "stereo.flac", np.stack([tone, 0.5 * tone]).T[:RATE], RATE)
    (folder / "folder.wav").mkdir()
    return folder


LONG = " ".join(f"w{i}" for i in range(6000))
TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|AUDIO|>", "<|audio_bos|>", "<|transcribe|>", "<|eot_id|>",
          "<|begin_of_text|>", "<|AUDIO_OUT|>", "<|0.00|>", "<|notimestamps|>", "<|startoftranscript|>",
          "<|im_", "end|>", "\u200b", "\ufeff", " <|im_end |>")  # fmt: skip
TEXTS = ("[laughter]", "(music)", "Um, hmm.", "...", "…", "\u200b", "\u00ad", "\u3000", "!?", "ー", "-", "\u0301", LONG,
         LONG[:2600], "x" * 3000, "\x00", "a\x00b", "<think>", "<answer>", "</answer>", "1", "½", "。", "ا", "ـ", "B",
         "a bell", "A dog", "A) a dog", "a dog.", "not a dog", "a\u200b dog", "ａ dog", "a dog or a bell")  # fmt: skip
FILES = ("short.wav", "long.wav", "huge.wav", "cut.wav", "empty.wav", "text.wav", "header.wav", "nan.wav", "loud.wav",
         "phase.wav", "stereo.flac", "folder.wav", "missing.wav", "GOOD.WAV", "../good.wav", "good.wav\n")  # fmt: skip


def mutate(rng: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    """One to three fields of a row that hold what a model or a reward may not take; the bytes of the file; its ids."""
    kind = rng.random()
    if kind < 0.25:
        return mutate_json(rng, data, others)
    if kind < 0.3:
        text = data.decode()
        return text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32", "cp037"))) if rng.random() < 0.8 else (
            text.replace("heard", "h\xf6rd").replace("two", "zw\xf6").encode("latin-1")
        )  # fmt: skip
    rows = [json.loads(line) for line in data.splitlines()]
    row = rng.choice(rows)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = [(row, key) for key in row]
        places += [(v, i) for v in row.values() if isinstance(v, list) for i in range(len(v))]
        holder, key = rng.choice(places)
        old = holder[key]
        if key in ("audio", "prompt_audio"):
            holder[key] = rng.choice(FILES)
        elif key == "id" and rng.random() < 0.7:
            holder[key] = rng.choice([other["id"] for other in rows])
        elif isinstance(old, str) and rng.random() < 0.4:
            at = rng.randrange(len(old) + 1)
            holder[key] = old[:at] + rng.choice(TOKENS) + old[at:]
        elif rng.random() < 0.7:
            holder[key] = rng.choice(TEXTS)
        else:
            holder[key] = deepcopy(rng.choice(ODD))  # a list among them is changed below
        if rng.random() < 0.2:
            more = ("start", "duration", "channel", "sample_rate", "language", "speaker", "offset", "choices", "labels")
            odd = (*deepcopy(ODD), 0.1, 0.01, 0.59, 0.7, 16000, "en", "tlh", "zh", "de-CH")
            row[rng.choice(more)] = rng.choice(odd)
    return b"\n".join(dump(row) for row in rows)


def run(given: Input, folder: Path) -> Any:
    use = USES[given.name.removesuffix(".jsonl")]
    path = folder / given.name
    path.write_bytes(given.data)
    more = {"think": use.think} if use.read is not read_utterances else {}
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = use.read(path, audio_root=sounds(), on_error="skip", check_audio=True, **more)
    check = RowCheck(POLICIES[use.policy], use.reward, NEW_TOKENS, trained=use.trained)
    return loaded.checked(check.train, "skip")


def judge(given: Input, loaded: Loaded[Any]) -> Iterator[str]:
    yield from judge_rows(given, loaded)
    use = USES[given.name.removesuffix(".jsonl")]
    policy = POLICIES[use.policy]()
    for bad in loaded.skipped:
        if not str(bad).startswith(bad.file) or "\n" in str(bad):
            yield f"no line that names the file: {bad}"
    for item in loaded.samples:
        name = getattr(getattr(item, "sample", item), "id", "") or getattr(item, "name", "")
        try:
            for part in use.trained(item):
                yield from (f"{name!r}: {fault}" for fault in faults(policy, part, use))
        except ValueError as error:
            yield f"{name!r} is accepted, but training says: {error}"
    ids = [getattr(getattr(item, "sample", item), "id", "") for item in loaded.samples]
    if use.read is read_samples and len(set(ids)) < len(ids):
        yield f"ids {ids}"
    kept = {origin.number for origin in loaded.rows}
    pristine, lines = _seed(given.name).splitlines(), given.data.split(b"\n")
    for number, line in enumerate(lines, 1):
        alone = line in pristine and sum(json.loads(line)["id"].encode() in other for other in lines) == 1
        if alone and number not in kept:
            yield f"row {number} has not changed, but is skipped"


def faults(policy: AudioPolicy, use: Sample | Example, of: Use) -> Iterator[str]:
    """What goes wrong with a prompt or an example, or is learned as what it is not."""
    sample = use.sample if isinstance(use, Example) else use
    for clip in (*sample.audio, *(use.speech if isinstance(use, Example) else ())):
        clip.load(RATE)
    most = policy.prompts.max_tokens or 10**9
    if isinstance(use, Example):
        laid_out = experience(policy, use)
        text = laid_out.ids[~laid_out.loss_mask] if use.speech else laid_out.ids
        audio = (
            0
            if policy.prompts.counts_audio
            else int(policy.is_audio(text, torch.zeros(len(text), dtype=torch.bool)).sum())
        )
        if len(laid_out.ids) - audio > most:
            yield f"{len(laid_out.ids)} tokens to learn, the model has {most} positions"
        if not use.speech:
            learned = policy.tokenizer.decode(laid_out.ids[laid_out.loss_mask])
            end = policy.tokenizer.decode([policy.end_id])
            if not learned.endswith(end) or end in learned.removesuffix(end):
                yield f"learned {learned[-80:]!r}"
        return
    prompt = policy.prompt(sample)
    if policy.prompts.counts_audio and len(prompt.ids) + NEW_TOKENS > most:
        yield f"a prompt of {len(prompt.ids)} tokens, the model has {most} positions"
    if policy.speech is None:
        turns = policy.tokenizer.decode(prompt.ids).count("<|im_start|>")
        if turns != len(sample.messages) + 1 + (sample.messages[0].role != "system"):
            yield f"{turns} turns in the prompt of {len(sample.messages)} messages"
    if of.reward is not None:
        gold = sample.references[0]
        answer = gold if of.reward is WORDS else f"{'<think>It is.</think>' * of.think}<answer>{gold}</answer>"
        segment = Segment(torch.arange(2), torch.arange(3), torch.zeros(3), answer)
        (score,) = of.reward([Rollout(sample, (segment,), "g", 0)])
        if score is None or not math.isfinite(score.total) or score.parts["accuracy"] != 1:
            yield f"the reference {gold!r} itself gets {score}"


@cache
def _seed(name: str) -> bytes:
    use = USES[name.removesuffix(".jsonl")]
    return b"\n".join(dump({"id": f"row-{i}", **use.row}) for i in range(3))


TARGETS = [
    Target("rows checked", run, judge, mutate, weight=4.0,
           more_seeds=lambda: [Input(f"{name}.jsonl", _seed(f"{name}.jsonl")) for name in USES]),
]  # fmt: skip
