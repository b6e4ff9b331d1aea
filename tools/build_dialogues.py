"""Write conversations of two people, to learn from and to say, from their recordings of the same words.

    python tools/build_dialogues.py dialogues
    audiorl train codec --data dialogues/texts.jsonl --out runs/codec
    audiorl train tts-sft --path dialogues/decoder --codec runs/codec/codec --data dialogues/texts.jsonl --clone \
        --conversations dialogues/train.jsonl --held-out dialogues/held_out.jsonl --out runs/two-voices
    audiorl eval tts --model runs/two-voices --codec runs/codec/codec --turns dialogues/scripts.jsonl \
        --pieces.own-voice --pieces.context 0 --asr judges/whisper-base --speaker judges/speaker --out evals/two

The two speak Spanish: one voice of the package, one of `unseen_speakers/`. A turn is two words, its speech their
recordings one after the other. Who of the two is SPEAKER0 is drawn for each conversation, so that nothing but the
recordings of the voices tells. The folder has

    train.jsonl      conversations of six turns with their recordings
    texts.jsonl      single texts with their recordings and speakers
    held_out.jsonl   the same, of texts that train.jsonl and texts.jsonl do not have
    scripts.jsonl    long conversations to be said, of other texts that they do not have, each text once
    recorded.jsonl   the same as the two people say them
    decoder/         a text decoder with random weights and a tokenizer of these texts

The recordings keep their licences: ATTRIBUTION.md and unseen_speakers/ATTRIBUTION.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from build_streams import copy_attribution

from audiorl.audio import write_wav
from audiorl.data.corpus import bundled_speech, unseen_speakers
from audiorl.data.rows import write_json_lines
from audiorl.data.silence import trimmed
from audiorl.models.families.text import tiny as tiny_text

ROOT = Path(__file__).parents[1]
RATE = 16_000
LANGUAGE, PEOPLE = "es", ("Allison Smith", "July E. Jiménez")
Words = tuple[str, str]
LONGEST_WORD = 1.5
"""Seconds of a word above which it is not used."""
GAP = 0.06
"""Seconds of silence between words."""
TURNS = 6
"""Turns of a conversation in train.jsonl."""


@dataclass(frozen=True)
class Voices:
    """The words that both say, and their recordings [T] at RATE Hz by person and word."""

    words: list[str]
    recordings: dict[str, dict[str, np.ndarray]]

    @classmethod
    def load(cls) -> Voices:
        recordings: dict[str, dict[str, np.ndarray]] = {person: {} for person in PEOPLE}
        for u in [*bundled_speech((LANGUAGE,)), *unseen_speakers()]:
            if u.speaker in PEOPLE and u.duration <= LONGEST_WORD:
                recordings[u.speaker].setdefault(u.text.strip(" .").lower(), trimmed(u.clip.load(RATE)))
        first, second = recordings.values()
        return cls(sorted(first.keys() & second.keys()), recordings)

    def said(self, person: str, text: Words) -> np.ndarray:
        """The words' recordings one after the other, [T] at RATE Hz."""
        gap = np.zeros(round(GAP * RATE), np.float32)
        return np.concatenate([part for word in text for part in (self.recordings[person][word], gap)][:-1])


class Writer:
    """Draws texts and writes recordings of them below a folder. Texts that are to be measured are drawn before those to
    be learned, and are in no other place."""

    def __init__(self, folder: Path, voices: Voices, seed: int):
        self.folder, self.voices, self.rng, self.number = folder, voices, random.Random(seed), 0
        self.measured: set[Words] = set()
        (folder / "audio").mkdir(parents=True)

    def text(self, measured: bool) -> Words:
        while True:
            first, second = self.rng.sample(self.voices.words, 2)
            if (first, second) not in self.measured:
                if measured:
                    self.measured.add((first, second))
                return first, second

    def row(self, person: str, text: Words) -> dict[str, Any]:
        """{text, audio, duration} of a new recording."""
        wav, path = self.voices.said(person, text), f"audio/{self.number:05d}.wav"
        self.number += 1
        write_wav(self.folder / path, wav, RATE)
        return {"text": " ".join(text), "audio": path, "duration": len(wav) / RATE}

    def conversation(self, id: str, turns: int, measured: bool) -> dict[str, Any]:
        people = self.rng.sample(PEOPLE, 2)
        voices = {f"SPEAKER{i}": self.row(person, self.text(measured)) for i, person in enumerate(people)}
        speakers = [self.rng.randrange(2) for _ in range(turns)]
        rows = [{"speaker": f"SPEAKER{i}"} | self.row(people[i], self.text(measured)) for i in speakers]
        return {"id": id, "voices": voices, "turns": rows}


def script(conversation: dict[str, Any]) -> dict[str, Any]:
    """A conversation without the recordings of its turns."""
    return conversation | {"turns": [{"speaker": t["speaker"], "text": t["text"]} for t in conversation["turns"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to create; must be empty or absent")
    parser.add_argument("--conversations", type=int, default=500, help="in train.jsonl (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=1000, help="in texts.jsonl (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=60, help="in held_out.jsonl (default: %(default)s)")
    parser.add_argument("--scripts", type=int, default=4, help="in scripts.jsonl (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=56, help="of a script, of 2 seconds each (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the decoder (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the decoder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out}: not empty; name a new folder or empty this one first")
    voices = Voices.load()
    writer = Writer(args.out, voices, args.seed)

    def singles(count: int, name: str, measured: bool) -> list[dict[str, Any]]:
        people = [writer.rng.choice(PEOPLE) for _ in range(count)]
        return [
            {"id": f"{name}-{i}", "speaker": p, "language": LANGUAGE} | writer.row(p, writer.text(measured))
            for i, p in enumerate(people)
        ]

    held_out = singles(args.held_out, "held-out", measured=True)
    recorded = [writer.conversation(f"dialogue-{i}", args.turns, measured=True) for i in range(args.scripts)]
    train = [writer.conversation(f"train-{i}", TURNS, measured=False) for i in range(args.conversations)]
    texts = singles(args.texts, "text", measured=False)
    files = {"recorded": recorded, "scripts": list(map(script, recorded)), "train": train}
    for name, rows in (files | {"texts": texts, "held_out": held_out}).items():
        write_json_lines(args.out / f"{name}.jsonl", rows)
    tiny_text(voices.words, hidden=args.hidden, layers=args.layers, vocab_size=600, seed=args.seed).save(
        args.out / "decoder"
    )
    copy_attribution(Path(str(resources.files("audiorl"))) / "assets" / "speech", args.out)
    copy_attribution(ROOT / "unseen_speakers", args.out / "unseen_speakers")
    seconds = sum(row["duration"] for conversation in train for row in conversation["turns"])
    print(
        f"{args.out}: {len(voices.words)} words; {len(train)} conversations ({seconds / 60:.0f} minutes) and "
        f"{len(texts)} texts to learn; {sum(len(r['turns']) for r in recorded)} turns in {len(recorded)} to be said"
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"build_dialogues: {error}")
