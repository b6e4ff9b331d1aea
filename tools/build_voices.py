"""Write recordings in other voices and melodies: with another pitch, other formants, and a flatter or livelier melody.

    pip install pyworld 'setuptools<81'                                     # needs a C compiler
    python tools/build_voices.py melodies --voices 1:1:0.1 1:1:1 1:1:1.6
    audiorl train tts-quickstart --corpus melodies --recogniser-speakers "Allison Smith 1:1:0.1" --out runs/start
    python tools/build_voices.py voices --voices 1:1:1 0.6:0.84:1 0.8:0.92:1 1.2:1.08:1 0.7:1.16:1
    audiorl train tts-quickstart --corpus voices --clone --unseen-speakers "Allison Smith 0.8:0.92:1" --out runs/voices
    python tools/build_voices.py both --languages en es --keys digits/ vm- queue- --voices 1:1:1 0.6:0.84:1 1.2:1.08:1
    audiorl train simul-quickstart --texts announcements --speakers both --codec runs/voices/codec --out runs/speech

A voice is PITCH:FORMANTS:RANGE, three factors: of the median pitch (F0) of each recording, of the frequencies of the
spectral envelope (a longer vocal tract has less), and of the intervals between the pitch of each moment and that
median. WORLD (Morise et al. 2016) makes the speech again, also for 1:1:1. The folder has the form of `audiorl data
build`, a speaker for each voice of each speaker.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from build_streams import copy_attribution

from audiorl.audio import write_wav
from audiorl.data.corpus import Utterance, bundled_speech, corpus
from audiorl.data.rows import write_json_lines

RATE = 16_000


@dataclass(frozen=True)
class Voice:
    """Factors of the median F0, of the formants, and of the intervals around the median F0."""

    pitch: float = 1.0
    formants: float = 1.0
    range: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Voice:
        try:
            pitch, formants, f0_range = map(float, text.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not PITCH:FORMANTS:RANGE, such as 0.8:0.9:1") from None
        if not (0.3 <= pitch <= 3 and 0.5 <= formants <= 2 and 0 <= f0_range <= 5):
            raise argparse.ArgumentTypeError(f"{text!r}: PITCH is 0.3 to 3, FORMANTS 0.5 to 2, RANGE 0 to 5")
        return cls(pitch, formants, f0_range)

    def __str__(self) -> str:
        return f"{self.pitch:g}:{self.formants:g}:{self.range:g}"


@dataclass(frozen=True)
class Analysis:
    """WORLD's of a recording: F0 [frames] in Hz (0: unvoiced), envelope and aperiodicity [frames, bins]."""

    f0: np.ndarray
    envelope: np.ndarray
    aperiodicity: np.ndarray

    @classmethod
    def of(cls, wav: np.ndarray) -> Analysis:
        try:
            import pyworld
        except ImportError as error:
            raise ValueError("pyworld is not installed; pip install pyworld 'setuptools<81'") from error
        x = wav.astype(np.float64)
        f0, times = pyworld.harvest(x, RATE)
        return cls(f0, pyworld.cheaptrick(x, f0, times, RATE), pyworld.d4c(x, f0, times, RATE))

    def said_by(self, voice: Voice) -> np.ndarray:
        """The speech [T] at RATE Hz in that voice."""
        import pyworld

        f0 = self.f0.copy()
        voiced = f0 > 0
        if voiced.any():
            median = np.median(f0[voiced])
            f0[voiced] = np.clip(voice.pitch * median * (f0[voiced] / median) ** voice.range, 60, 600)
        bins = np.arange(self.envelope.shape[1])
        stretched = [
            np.stack([np.interp(bins / voice.formants, bins, frame) for frame in part])
            for part in (self.envelope, self.aperiodicity)
        ]
        return pyworld.synthesize(f0, *stretched, RATE).astype(np.float32)


def write_voices(out: Path, speech: Sequence[Utterance], voices: Sequence[Voice]) -> list[dict[str, object]]:
    """The rows of the manifest, whose recordings are written below `out`."""
    rows: list[dict[str, object]] = []
    for u in speech:
        wav = u.clip.load(RATE)
        analysis = Analysis.of(wav)
        for voice in voices:
            path = Path("audio") / f"{u.id.replace('/', '-')}-{str(voice).replace(':', '-')}.wav"
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write_wav(out / path, np.clip(analysis.said_by(voice)[: len(wav)], -1, 1), RATE)
            row = {"id": f"{u.id} {voice}", "key": u.key, "language": u.language, "text": u.text, "audio": str(path)}
            rows.append(row | {"duration": u.duration, "speaker": f"{u.speaker} {voice}", "licence": u.licence})
        if len(rows) % 100 < len(voices):
            print(f"{len(rows)} of {len(speech) * len(voices)} recordings", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to create; must be empty or absent")
    parser.add_argument("--voices", type=Voice.parse, nargs="+", required=True, help="PITCH:FORMANTS:RANGE of each")
    parser.add_argument(
        "--corpus", type=Path, help="folder of `audiorl data build` (default: the package's recordings)"
    )
    parser.add_argument("--languages", nargs="+", default=["en"], help="of the recordings (default: en)")
    parser.add_argument(
        "--keys", nargs="+", default=[""], metavar="PREFIX", help="only recordings whose key begins so, as digits/"
    )
    parser.add_argument("--max-seconds", type=float, default=2.0, help="of a recording (default: %(default)s)")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out}: not empty; name a new folder or empty this one first")
    if args.corpus:
        speech = corpus(args.corpus, args.languages, max_seconds=args.max_seconds)
    else:
        speech = bundled_speech(args.languages, max_seconds=args.max_seconds)
    speech = [u for u in speech if u.key.startswith(tuple(args.keys))]
    if not speech:
        raise ValueError(f"no recording in {', '.join(args.languages)} has a key that begins with --keys")
    rows = write_voices(args.out, speech, args.voices)
    write_json_lines(args.out / "manifest.jsonl", rows)
    source = args.corpus or Path(str(resources.files("audiorl"))) / "assets" / "speech"
    copy_attribution(
        source, args.out, "The audio in this folder is these recordings, made again in other voices by WORLD."
    )
    print(f"{args.out}: {len(rows)} recordings")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"build_voices: {error}")
