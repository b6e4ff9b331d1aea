"""What RL adds to a flow that says digits in the voice of a prompt: unseen speakers, three seeds, against more SFT.

    python tools/fetch_judges.py models whisper-tiny.en
    python experiments/measure_digits.py --words fsdd/recordings --judge models/whisper-tiny.en --out runs/digits

`fsdd` is a clone of the Free Spoken Digit Dataset (six speakers, CC BY-SA 4.0), of whom `--unseen` are in no phase;
beside the others speak the package's recordings and ten voices of espeak-ng. A flow on latents `mels` learns to fill
in parts of two or three digits. Then it says two digits in the voice of a prompt of one: Fast-GRPO and NFT from
the last checkpoint, three seeds each, OUT/seed_N/ARM, and SFT for as many CPU seconds as the longest of them. The
reward is how surely a tagger of digits, OUT/listener, which learned the same voices, hears each digit where it belongs
and no other, and 0.1 for each of an end, sound and no clipping.
No reward asks the two who judge what is said in voices of no phase: `--judge` transcribes, and OUT/judge, another
tagger, has learned those voices, too. All sound is made at the guidance that the reward of training prompts prefers.
OUT/table.md has means over seeds with 95 % intervals over prompts, changes from the start at its best guidance paired.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from arms import equal_steps, markdown, number, spaced, train_recipe
from measure_sounds import START, STEPS, UNGUIDED, best_guidance, write_sounds

from audiorl.audio import AudioClip, write_wav
from audiorl.config.flow import FlowConfig
from audiorl.data.rows import write_json_lines
from audiorl.data.sums import RATE, NumberWord, number_words, split_speakers, spoken_numbers
from audiorl.eval._common import read_rows
from audiorl.eval.metrics.text import word_errors
from audiorl.rewards.combine import WeightedSum
from audiorl.rewards.files import load_reward
from audiorl.rollout.flow import load_sounding
from audiorl.run.folder import newest_checkpoint
from audiorl.speech_models import load_recogniser
from audiorl.speech_models.taggers import SoundTagger, log_mel
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import Event
from audiorl.types import Message, Rollout, Sample
from corpora.scenes.tagger import train_tagger

DIGITS = dict(enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], 1))
SFT = "sound-sft --task tts --sft.inpaint 0.8 --sft.batch-size 32 --sft.save-every 500 --epochs 100000"
WEIGHTS = " ".join(f"--speech.{name} 0" for name in ("understood", "similarity", "duration"))
RL = (
    f"sound-grpo --task tts --epochs 100000 --on-error skip --sampling.steps {STEPS} --rl.prompts-per-step 16 "
    f"--rl.eval-every 0 --rl.save-every 10 --optim.lr 3e-4 {WEIGHTS} --reward-file {__file__}"
)
ARMS = {
    "NFT": f"{RL} --sampling.noisy none --rl.loss nft --rl.kl-beta 0.3",
    "Fast-GRPO": RL,
    "SFT": f"{SFT} --optim.lr 3e-4 --optim.schedule constant --optim.warmup-steps 10",
}
BEST_OF = 4


@cache
def listener(folder: str) -> SoundTagger:
    return SoundTagger.load(folder, "cpu")


def places(tagger: SoundTagger, wave: np.ndarray) -> torch.Tensor:
    """[P, C]: the logits of digits in each 0.16 s."""
    return tagger.network(torch.from_numpy(log_mel(wave))[None])[0][0]


def heard(tagger: SoundTagger, wave: np.ndarray) -> str:
    """The digits that a tagger hears, one after the other: in each place the most probable one, if there is one."""
    found = [tagger.labels[int(place.argmax())] if place.max() > 0 else "" for place in places(tagger, wave)]
    return " ".join(digit for digit, _ in groupby(found) if digit)


def reward(rollout: Rollout) -> float:
    """The mean over digits of 2 p(digit) / (1 + Σ p(all)), by the sample's listener, in the part of the sound that the
    digit's letters have of the text."""
    sound, tagger = rollout.spoken_audio, listener(rollout.sample.metadata["listener"])
    assert sound is not None
    said, logits = rollout.sample.references[0].split(), places(tagger, sound.load(RATE))
    letters = np.cumsum([len(digit) for digit in said])
    parts = logits.tensor_split((len(logits) * letters[:-1] / letters[-1]).round().astype(int).tolist())
    p = torch.stack([part.amax(0).sigmoid() for part in parts])
    asked = p[range(len(said)), [tagger.labels.index(digit) for digit in said]]
    return float((2 * asked / (1 + p.sum(1))).mean())


def learn_to_listen(words: Sequence[NumberWord], folder: Path, size: int, steps: int, width: int, seed: int) -> None:
    """Train a tagger on so many scenes of one or two digits in two seconds."""
    if folder.exists():
        return
    rng, scenes = np.random.default_rng(seed), []
    for said in zip(*[iter(spoken_numbers(words, 2 * size, (1, 1), "count", seed=4 + seed))] * 2, strict=True):
        scene, events = np.zeros(2 * RATE, np.float32), []
        for half, sample in enumerate(said[: rng.integers(1, 3)]):
            wave = sample.audio[0].load(RATE)[:RATE]
            begin = half * RATE + int(rng.integers(0, RATE - len(wave) + 1))
            scene[begin : begin + len(wave)] = wave
            loud = (begin + np.flatnonzero(np.abs(wave) > 0.02 * np.abs(wave).max())) / RATE
            events.append(Event(sample.metadata["text"], loud[0], loud[-1]))
        about = {"events": events, "audio": AudioClip(array=scene, sample_rate=RATE)}
        scenes.append(Sample(said[0].id, (Message("user", ("",)),), metadata=about))
    train_tagger(scenes, steps=steps, width=width, seed=seed).save(folder)


def digits_in(transcript: str) -> str:
    """The digits of a transcript as words: of "Two, 35" two three five."""
    named = {str(value): word for value, word in DIGITS.items()} | {word: word for word in DIGITS.values()}
    return " ".join(named[found] for found in re.findall(r"[1-9]|" + "|".join(DIGITS.values()), transcript.lower()))


def write_data(out: Path, known: Sequence[NumberWord], unseen: Sequence[NumberWord], size: int, most: int) -> None:
    """train.jsonl of recordings; prompts.jsonl and unseen.jsonl of what is to be said in which voice."""
    if (out / "unseen.jsonl").exists():
        return
    said = spoken_numbers(known, size, (2, 3), "count", seed=0)
    rows = [{"id": s.id, "audio": f"train/{s.id}.wav", "text": s.metadata["text"]} for s in said]
    for row, sample in zip(rows, said, strict=True):
        write_wav(out / row["audio"], sample.audio[0].load(RATE), RATE)
    write_json_lines(out / "train.jsonl", rows)
    heard_by = str((out / "listener").absolute())
    for name, words, count in (("prompts", known, size // 4), ("unseen", unseen, most)):
        voices = spoken_numbers(words, count, (1, 1), "count", seed=1)
        texts = spoken_numbers(words, count, (2, 2), "count", seed=2, written=True)
        rows = []
        for voice, text in zip(voices, texts, strict=True):
            file = f"{name}/{voice.id}.wav"
            write_wav(out / file, voice.audio[0].load(RATE), RATE)
            rows.append({"id": voice.id, "text": text.metadata["text"], "prompt_audio": file,
                         "prompt_text": voice.metadata["text"], "listener": heard_by})  # fmt: skip
        write_json_lines(out / f"{name}.jsonl", rows)
    recorded = spoken_numbers(unseen, most, (2, 2), "count", seed=3)
    for sample in recorded:
        write_wav(out / "recorded" / f"{sample.id}.wav", sample.audio[0].load(RATE), RATE)
    write_json_lines(out / "recorded.jsonl", [{"id": s.id, "text": s.metadata["text"]} for s in recorded])


def right(folder: Path, texts: dict[str, str], recogniser: str, judge: str) -> np.ndarray:
    """1 - WER of the sounds of a folder by two judges, [sound, 2] in %, 0 or more; texts in heard.jsonl."""
    if not (folder / "heard.jsonl").exists():
        whisper, rows = load_recogniser(recogniser, "en"), []
        for id, text in texts.items():
            wave = AudioClip(path=str(folder / f"{id}.wav")).load(RATE)
            (written,) = whisper.transcribe([np.pad(wave, RATE // 2)], RATE)  # it misses what begins at once
            rows.append({"id": id, "said": text, "written": written, "heard": heard(listener(judge), wave)})
        write_json_lines(folder / "heard.jsonl", rows)
    rows = read_rows(folder / "heard.jsonl")
    return np.array(
        [
            [100 * max(0.0, 1 - word_errors(r["said"], h).rate) for h in (digits_in(r["written"]), r["heard"])]
            for r in rows
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", required=True, help="folder of recordings, DIGIT_SPEAKER_TAKE.wav")
    parser.add_argument("--unseen", nargs="+", default=["lucas", "yweweler"], help="speakers of no phase")
    parser.add_argument("--judge", required=True, help="a recogniser that no reward asks")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--listening", type=int, default=1500, help="updates of the listener")
    parser.add_argument("--updates", type=int, default=4000, help="of the start")
    parser.add_argument("--steps", type=int, default=40, help="of RL")
    parser.add_argument("--options", default="", help="more of all arms of RL")
    parser.add_argument("--size", type=int, default=2000, help="recordings that are learned; a quarter as many prompts")
    parser.add_argument("--most", type=int, default=60, help="prompts that are measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out = args.out
    words = [word for source in (args.words, "bundled", "synthetic:10") for word in number_words(source)]
    known, unseen = split_speakers(words, args.unseen)
    learn_to_listen(known, out / "listener", args.size, args.listening, 16, 0)
    learn_to_listen(words, out / "judge", args.size, args.listening, 24, 1)
    write_data(out, known, unseen, args.size, args.most)
    begin = f"{SFT} --codec mels --network.width 128 --network.text-rows 512 --network.max-seconds 6 --optim.lr 2e-3"
    train_recipe(out / "start", f"{begin} --data {out}/train.jsonl --held-out-count 2 --max-steps {args.updates}")
    start = newest_checkpoint(out / "start")
    scored = WeightedSum.of(heard=load_reward(__file__))
    prompts = spaced(read_sounds(out / "prompts.jsonl", task="tts").samples, 48)
    asked = read_sounds(out / "unseen.jsonl", task="tts").samples
    texts = {s.id: s.references[0] for s in asked}
    found: dict[str, list[np.ndarray]] = {}
    for seed in args.seeds:
        for arm, command in ARMS.items():
            folder = out / f"seed_{seed}" / arm
            command += f" --path {start} --held-out-count 2 --seed {seed}"
            if arm == "SFT":
                command += f" --data {out}/train.jsonl --max-steps {equal_steps(out / 'start', folder.parent, ARMS)}"
            else:
                command += f" --data {out}/prompts.jsonl --max-steps {args.steps} {args.options}"
            train_recipe(folder, command, trust=[__file__])
        for system in (UNGUIDED, START, f"best of {BEST_OF}", *ARMS):
            policy = load_sounding(newest_checkpoint(out / f"seed_{seed}" / system) if system in ARMS else start)
            kept = out / f"seed_{seed}" / f"{system}.json" if system in ARMS else out / "start.json"
            sampling = FlowConfig(steps=STEPS)
            if system != UNGUIDED:
                sampling = best_guidance(kept, policy, prompts, scored)
            made = out / f"seed_{seed}" / "made" / system
            write_sounds(made, policy, asked, sampling, seed, BEST_OF if system.startswith("best") else 1, scored)
            found.setdefault(system, []).append(right(made, texts, args.judge, str(out / "judge")))
    recorded = {row["id"]: row["text"] for row in read_rows(out / "recorded.jsonl")}
    of_people = right(out / "recorded", recorded, args.judge, str(out / "judge"))
    lines = [["recordings", *(cell for column in of_people.T for cell in (number(column), "", ""))]]
    before = np.mean(found[START], axis=0)
    for system, each in found.items():
        cells = []
        for judge, column in enumerate(np.mean(each, axis=0).T):
            cells.append(number(column))
            cells.append(", ".join(f"{of_seed[:, judge].mean():.1f}" for of_seed in each))
            cells.append("" if system == START else number(column - before[:, judge], "+"))
        lines.append([system, *cells])
    heads = (
        head for judge in ("recogniser", "judge") for head in (f"digits right % by the {judge}", "each seed", "change")
    )
    table = markdown(("", *heads), lines)
    (out / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
