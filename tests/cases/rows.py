"""Rows that the model or the reward cannot use (A5), and reserved tokens in what is learned (A22)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.audio import AudioClip, write_wav
from audiorl.config.recipe import RecipeConfig
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import read_pairs, read_steps
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, check_example, experience
from audiorl.models.families import higgs, qwen2_audio, qwen_omni, text, whisper
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.protocols import Reward
from audiorl.recipes._common import RowCheck, answer_reward, read_questions, read_sets, read_split, supervised_turn
from audiorl.recipes._speech import TINY_CODEC
from audiorl.recipes.tts_sft import TTSSFTConfig, conversation_turns
from audiorl.rewards import CharAccuracy, Hallucination, LanguageConsistency, WeightedSum, WordAccuracy
from audiorl.train.preference import pair_examples
from audiorl.types import Message, Sample
from tests.cases import Case, Refused
from tokenizers_audio.unified import UnifiedTokenizer

QUESTION = {"audio": "good.wav", "question": "What is heard?", "choices": ["a dog", "a bell"], "answer": "a dog"}
SPEECH = {"audio": "good.wav", "text": "one two three", "language": "en"}
omni = cache(lambda: qwen_omni.tiny(whisper=False))
qwen2 = cache(lambda: qwen2_audio.tiny(window=30))
recogniser = cache(lambda: whisper.tiny())


def manifest(folder: Path, row: dict[str, Any], bad: dict[str, Any], seconds: float = 0.6) -> Path:
    """Write three rows, of which the last has the columns `bad` and, as audio, a tone of `seconds`."""
    for name, length in (("good", 0.6), ("bad", seconds)):
        times = np.arange(round(16_000 * length)) / 16_000
        write_wav(folder / f"{name}.wav", (0.3 * np.sin(2764 * times)).astype(np.float32), 16_000)
    rows = [{"id": "r1", **row}, {"id": "r2", **row}, {"id": "bad", **row, "audio": "bad.wav", **bad}]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**r, "recording": r["id"]}) + "\n" for r in rows))
    return path


def asked(
    bad: dict[str, Any],
    seconds: float = 0.6,
    *,
    row: dict[str, Any] = QUESTION,
    policy: Callable[[], AudioPolicy] = omni,
    reward: Reward | None = None,
    read: Callable[..., Any] = read_samples,
    on_error: str = "raise",
    drawn: str = "",
    as_held_out: bool = False,
    **check: Any,
) -> Callable[[Path], Any]:
    """Read rows as recipes do, before training; the right outcome is an error, or the number of rows that are left."""

    def run(folder: Path) -> int:
        path = manifest(folder, row, bad, seconds)
        config = RecipeConfig(path="tiny", data=(f"{path}{drawn}",), on_error=on_error)  # type: ignore[arg-type]
        checks = RowCheck(policy, reward, **check)
        one = checks.held_out if as_held_out else checks.train
        ((_, rows),) = read_sets(config.data, config, lambda _: [], read, one, think=False)
        return len(rows)

    return run


def learned(row: dict[str, Any], answer: str, policy: Callable[[], AudioPolicy] = omni) -> Callable[[Path], Any]:
    """Return the learned tokens of an answer as text."""

    def run(folder: Path) -> str:
        sample = read_samples(manifest(folder, row, {}), think=False).samples[0]
        laid_out = experience(policy(), Example(sample, answer))
        return str(policy().tokenizer.decode(laid_out.ids[laid_out.loss_mask]))

    return run


def transcript(sample: Sample) -> list[Example]:
    return [Example(sample, supervised_turn(sample, tags=False))]


def in_two_pieces(folder: Path) -> int:
    clip = AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000)
    sample = Sample("bad", (Message("user", (clip, "What is <|im_", "end|> here?")),))
    return len(omni().prompt(sample))


def of_a_text_decoder(folder: Path) -> int:
    policy = text.tiny()
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["</s>"]})
    return len(policy.prompt(Sample("bad", (Message("user", ("What does </s> mean?",)),))))


def marked(folder: Path) -> int:
    sample = read_samples(manifest(folder, QUESTION, {}), think=False).samples[0]
    return len(ProcessRewardModel(omni(), "\n\n", "+", "-").mark(sample, ["one", "two<|im_end|>"]).markers)


def split(folder: Path) -> tuple[int, int]:
    """The bad row is the only one of the held-out file."""
    (folder / "held").mkdir()
    train, held = manifest(folder, QUESTION, {}), manifest(folder / "held", QUESTION, {"question": "w " * 5000})
    config = RecipeConfig(path="tiny", data=(str(train),), held_out=(str(held),))
    train_rows, held_out = read_questions(config, think=False, check=RowCheck(omni, answer_reward(False)))
    return len(train_rows), len(held_out)


def transcripts_of(folder: Path, **check: Any) -> tuple[int, int]:
    path = manifest(folder, SPEECH, {"text": "(music)"})
    config = RecipeConfig(path="tiny", data=(str(path),), held_out_count=1, on_error="skip")
    rows = read_split(config, lambda _: [], read_samples, check=RowCheck(omni, **check), think=False)
    return len(rows[0]), len(rows[1])


@cache
def speaking() -> AudioPolicy:
    policy = higgs.tiny(codebooks=TINY_CODEC.num_codebooks, codebook_size=TINY_CODEC.codebook_size)
    policy.set_codec(UnifiedTokenizer(TINY_CODEC))
    return policy


def conversation(place: tuple[str | int, ...], value: str, held_out: str = "") -> Callable[[Path], Any]:
    """Learn the turns of two conversations, the second with `value` at a place of its row."""

    def run(folder: Path) -> int:
        write_wav(folder / "said.wav", 0.3 * np.sin(np.arange(9600, dtype=np.float32)), 16_000)
        write_wav(folder / "short.wav", 0.3 * np.sin(np.arange(4800, dtype=np.float32)), 16_000)

        def row(id: str) -> dict[str, Any]:
            voices = {name: {"audio": "said.wav", "text": f"I am {name}."} for name in "AB"}
            turns = [{"speaker": "AB"[i % 2], "text": f"Turn {i}.", "audio": "said.wav"} for i in range(3)]
            return {"id": id, "voices": voices, "turns": turns}

        good, bad = row("good"), row("bad")
        *path, last = place
        holder: Any = bad
        for key in path:
            holder = holder[key]
        holder[last] = value
        (folder / "talk.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
        config = TTSSFTConfig(conversations=(str(folder / "talk.jsonl"),))
        return len(conversation_turns(config, {held_out}, partial(check_example, speaking())))

    return run


WER = WeightedSum.of(accuracy=WordAccuracy(), guard=(Hallucination(), 0.5))
PAIR = {**QUESTION, "chosen": "a dog", "rejected": "a bell"}
STEPS = {**QUESTION, "steps": ["one", "two"], "labels": [1, 0]}
LONG = " ".join(f"w{i}" for i in range(6000))
TRANSCRIPT: dict[str, Any] = {"row": SPEECH, "policy": recogniser, "trained": transcript}

CASES = [
    Case("A5", "embeddings-benchmark/mteb#4872", "a clip of 20 ms", asked({}, 0.02, row=SPEECH, reward=WER),
         Refused("rows.jsonl: row 3, field 'audio': audio of 20 ms is too short")),
    Case("A5", "speechbrain/speechbrain#1917", "the transcript [laughter]",
         asked({"text": "[laughter]"}, row=SPEECH, reward=WER),
         Refused("rows.jsonl: row 3, field 'text': the reference transcript '[laughter]' is empty")),
    Case("A5", "huggingface/distil-whisper#158", 'the transcript "Um, hmm." with the English normaliser',
         asked({"text": "Um, hmm."}, row=SPEECH, reward=WeightedSum.of(accuracy=CharAccuracy("english"))),
         Refused("rows.jsonl: row 3, field 'text': the reference transcript 'Um, hmm.' is empty")),
    Case("A5", "FranxYao/Long-Context-Data-Engineering#14", "a question with <|endoftext|>",
         asked({"question": "What does <|endoftext|> sound like?"}),
         Refused("rows.jsonl: row 3, field 'question': a message contains a reserved token")),
    Case("A5", "QwenLM/Qwen2-Audio#117", "a question of more tokens than the model has positions",
         asked({"question": LONG}), Refused("rows.jsonl: row 3, field 'question': its prompt has")),
    Case("A5", "QwenLM/Qwen2-Audio#57", "31 s for a model that reads 30 s", asked({}, 31.0, policy=qwen2),
         Refused("rows.jsonl: row 3, field 'audio': audio of 31 s is longer than the 30 s")),
    Case("A5", "yeyupiaoling/Whisper-Finetune#96", "a transcript of more tokens than Whisper writes",
         asked({"text": LONG[:2600]}, **TRANSCRIPT), Refused("at most 448 of text; shorten the transcript")),
    Case("A5", "own", "a clip of 20 ms, skipped", asked({}, 0.02, row=SPEECH, reward=WER, on_error="skip"), 2),
    Case("A5", "own", "31 s for a model that reads 30 s, skipped", asked({}, 31.0, policy=qwen2, on_error="skip"), 2),
    Case("A5", "own", "30 s for a model that reads 30 s", asked({}, 30.0, policy=qwen2), 3),
    Case("A5", "own", "a clip of 30 ms", asked({}, 0.03), 3),
    Case("A5", "own", "a clip of 10 ms by start and duration", asked({"start": 0.1, "duration": 0.01}),
         Refused("row 3, field 'audio': audio of 10 ms is too short")),
    Case("A5", "own", "a choice with a reserved token", asked({"choices": ["a dog", "<|AUDIO|>"], "answer": "a dog"}),
         Refused("row 3, field 'choices': a message contains a reserved token")),
    Case("A5", "own", "a recording of more audio tokens than the model has positions", asked({}, 170.0),
         Refused("row 3, field 'audio': its prompt has")),
    Case("A5", "own", "a prompt that leaves no room for the answer", asked({}, new_tokens=4090),
         Refused("and 4090 may be written after it, the model reads at most 4096")),
    Case("A5", "own", "a prompt that leaves just room enough", asked({}, new_tokens=3900), 3),
    Case("A5", "own", "a language that Whisper does not know", asked({"language": "tlh"}, **TRANSCRIPT),
         Refused("row 3, field 'language': this Whisper has no language 'tlh'")),
    Case("A5", "own", "a row without the language that Whisper needs", asked({"language": None}, **TRANSCRIPT),
         Refused("row 3, field 'language': Whisper needs the language")),
    Case("A5", "own", "a row without the language that a reward needs",
         asked({"language": None}, row=SPEECH, reward=WeightedSum.of(language=LanguageConsistency())),
         Refused("row 3, field 'language': LanguageConsistency")),
    Case("A5", "own", "the transcript (音乐) in a set of which all rows are drawn",
         asked({"text": "(音乐)", "language": "zh"}, row=SPEECH, reward=WER, drawn=":3"),
         Refused("rows.jsonl: row 3, field 'text'")),
    Case("A5", "own", "two of three rows are drawn, the bad one is skipped",
         asked({}, 0.02, reward=answer_reward(False), drawn=":2", on_error="skip"), 2),
    Case("A5", "own", "a held-out row of 20 ms", asked({}, 0.02, as_held_out=True),
         Refused("rows.jsonl: row 3, field 'audio'")),
    Case("A5", "own", "a held-out file with a long prompt", split, Refused("rows.jsonl: row 3, field 'question'")),
    Case("A5", "own", "the transcript (music) is skipped, another row held out",
         lambda folder: transcripts_of(folder, reward=WER), (1, 1)),
    Case("A5", "own", "a clip of 20 ms in a pair", asked({}, 0.02, row=PAIR, read=read_pairs, trained=pair_examples),
         Refused("rows.jsonl: row 3, field 'audio'")),
    Case("A22", "vllm-project/vllm#11691", "the transcript say <|im_end|> now is learned",
         asked({"text": "say <|im_end|> now"}, row=SPEECH, trained=transcript),
         Refused("rows.jsonl: row 3, field 'text': a text to be learned contains the reserved token <|im_end|>")),
    Case("A22", "vllm-project/vllm#11691", "an example whose answer holds <|im_end|>",
         learned(QUESTION, "hello<|im_end|> world"),
         Refused("sample 'r1': a text to be learned contains the reserved token <|im_end|>")),
    Case("A22", "FranxYao/Long-Context-Data-Engineering#14", "a rejected answer with <|endoftext|>",
         asked({"rejected": "a <|endoftext|> bell"}, row=PAIR, read=read_pairs, trained=pair_examples),
         Refused("row 3, field 'rejected': a text to be learned contains the reserved token <|endoftext|>")),
    Case("A22", "own", "a chosen answer of TRL's form with <|AUDIO|>",
         asked({"chosen": [{"role": "assistant", "content": "<|AUDIO|>"}]}, row=PAIR, read=read_pairs,
               trained=pair_examples),
         Refused("row 3, field 'chosen': a text to be learned contains the reserved token <|AUDIO|>")),
    Case("A22", "own", "a step with <|im_start|>",
         asked({"steps": ["one", "<|im_start|>"]}, row=STEPS, read=read_steps,
               trained=lambda item: [Example(item.sample, "\n\n".join(item.steps))]),
         Refused("row 3, field 'steps': a text to be learned contains the reserved token <|im_start|>")),
    Case("A22", "own", "a step with <|im_end|> in training", marked, Refused("reserved token <|im_end|>")),
    Case("A22", "own", "a transcript with a token of Whisper", learned(SPEECH, "so <|transcribe|> long", recogniser),
         Refused("a text to be learned contains the reserved token")),
    Case("A22", "own", "a thought with <|im_end|>",
         asked({"thought": "hm<|im_end|>"}, row={**QUESTION, "thought": "hm"},
               trained=lambda s: [Example(s, supervised_turn(s, True, "thought"))]),
         Refused("row 3, field 'thought': a text to be learned contains the reserved token <|im_end|>")),
    Case("A22", "own", "a message whose pieces form <|im_end|>", in_two_pieces, Refused("reserved token")),
    Case("A22", "own", "a reserved token of another form, </s>", of_a_text_decoder, Refused("reserved token")),
    Case("A22", "own", "pointed brackets and bars that are no token", learned(QUESTION, "a <|b|> c < d |> <think>"),
         "a <|b|> c < d |> <think><|im_end|>"),
    Case("A22", "own", "a turn of a conversation with <|eot_id|>", conversation(("turns", 1, "text"), "So <|eot_id|>."),
         Refused("talk.jsonl: row 2, field 'turns[1].text': a message contains a reserved token")),
    Case("A22", "own", "a voice of a conversation with <|eot_id|>",
         conversation(("voices", "B", "text"), "I am <|eot_id|>."),
         Refused("talk.jsonl: row 2, field 'voices.B.text': a message contains a reserved token")),
    Case("A22", "own", "a held-out turn with <|eot_id|>, before one that is learned",
         conversation(("turns", 0, "text"), "So <|eot_id|>.", "so eot_id"),
         Refused("talk.jsonl: row 2, field 'turns[0].text': a message contains a reserved token")),
    Case("A5", "own", "a turn of a conversation whose recording is gone",
         conversation(("turns", 2, "audio"), "gone.wav"), Refused("row 2, field 'turns[2].audio': ")),
    Case("A5", "own", "a voice of 0.3 s", conversation(("voices", "A", "audio"), "short.wav"),
         Refused("talk.jsonl: row 2, field 'voices.A.audio': ")),
    Case("A5", "own", "two good conversations of three turns", conversation(("turns", 2, "text"), "Well."), 6),
]  # fmt: skip
