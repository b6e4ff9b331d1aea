"""Which recordings say the text that they come with: ask a Whisper model.

    python tools/confirm_texts.py judges/whisper-base                       # downloads the packages
    python tools/confirm_texts.py judges/whisper-base --packages DEBS --voices es-co

It writes audiorl/assets/verdicts/VOICE.tsv, which `audiorl data build` reads, with a row for each recording: the
character error rate of the model's transcript against the text and, for the single words of some folders, the rank of
the text by edit distance among them. Numbers are spelled out first; case, accents, punctuation and spaces do not count.
The model runs in bfloat16: about a second for a recording on one core. `tools/fetch_judges.py` writes its folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from audiorl.data.corpus import normalised
from audiorl.eval.metrics.text import char_errors, normalize
from audiorl.speech_models.recognisers import WhisperRecogniser
from corpora.sources.build import VOICES
from corpora.sources.packages import package_files
from corpora.sources.voices import CLASSES, RATE, TABLES, SourceRecording, Verdict

WINDOWS = (10, 30)
"""Seconds that the encoder reads: 10, three times as fast, for recordings that are shorter, otherwise Whisper's 30."""


def letters(text: str, language: str) -> str:
    """The letters that are compared."""
    return normalised(normalize(text, "basic", language)).replace(" ", "")


def verdicts(recordings: Sequence[SourceRecording], transcripts: Sequence[str], language: str) -> list[Verdict]:
    """One verdict for each recording."""
    words: dict[str, set[str]] = {}
    for recording in recordings:
        folder, text = recording.name.partition("/")[0], recording.text.strip()
        if folder in CLASSES and " " not in text:
            words.setdefault(folder, set()).add(letters(text, language))
    result = []
    for recording, transcript in zip(recordings, transcripts, strict=True):
        text, written = letters(recording.text, language), letters(transcript, language)
        errors = char_errors(text, written)
        rank, others = None, words.get(recording.name.partition("/")[0], set())
        if text in others:
            rank = sum(char_errors(other, written).errors <= errors.errors for other in others - {text})
        result.append(Verdict(recording.name, errors.rate, rank, transcript))
    return result


def transcribe(
    recordings: Sequence[SourceRecording], recognisers: Mapping[int, WhisperRecogniser], batch: int = 64
) -> list[str]:
    """One transcript each; equal audio is transcribed once."""
    keys: list[bytes] = []
    transcripts: dict[bytes, str] = {}
    for start in range(0, len(recordings), batch):
        waves = [recording.read() for recording in recordings[start : start + batch]]
        keys += (keys_of_batch := [sha256(wav.tobytes()).digest() for wav in waves])
        by_window: dict[int, dict[bytes, np.ndarray]] = {}
        new = {key: wav for key, wav in zip(keys_of_batch, waves, strict=True) if key not in transcripts}
        for key, wav in new.items():
            window = next((seconds for seconds in WINDOWS if len(wav) < seconds * RATE), WINDOWS[-1])
            by_window.setdefault(window, {})[key] = wav
        for window, group in by_window.items():
            transcripts |= zip(group, recognisers[window].transcribe(list(group.values()), RATE), strict=True)
        print(f"{len(keys)} of {len(recordings)} recordings", flush=True)
    return [transcripts[key] for key in keys]


def load(path: str, language: str, seconds: int) -> WhisperRecogniser:
    """The recogniser in bfloat16, whose encoder reads `seconds`."""
    recogniser = WhisperRecogniser(path, language)
    recogniser.parts[0].to(torch.bfloat16)
    model, extractor, _ = recogniser.parts
    positions = seconds * RATE // (2 * extractor.hop_length)
    encoder = model.model.encoder
    model.config.max_source_positions = encoder.max_source_positions = positions
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[:positions].detach())
    extractor.chunk_length, extractor.n_samples = seconds, seconds * RATE
    extractor.nb_max_frames = seconds * RATE // extractor.hop_length
    return recogniser


def write_verdicts(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Write the table that `corpora.sources.voices.read_verdicts` reads."""
    lines = ["name\tcer\trank\ttranscript"]
    for v in verdicts:
        lines.append(f"{v.name}\t{v.cer:.3f}\t{'' if v.rank is None else v.rank}\t{' '.join(v.transcript.split())}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def bare(text: str) -> str:
    return text.rstrip(".!? ")


def main() -> None:
    checked = {voice.folder: voice for voice in VOICES if voice.max_cer is not None}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recogniser", help="a folder of WhisperRecogniser, or a model id")
    parser.add_argument("--voices", nargs="+", default=list(checked), choices=list(checked))
    parser.add_argument("--packages", type=Path, help="folder of .deb files; by default they are downloaded")
    parser.add_argument("--tree", type=Path, help="folder below which the packages are installed or unpacked")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check every N-th recording (default: all)")
    args = parser.parse_args()
    for voice in (checked[name] for name in args.voices):
        recognisers = {seconds: load(args.recogniser, voice.language, seconds) for seconds in WINDOWS}
        with package_files(voice.packages, args.packages, args.tree) as root:
            recordings = [r for r in voice.recordings(root) if not r.left_out][:: args.every]
            table = verdicts(recordings, transcribe(recordings, recognisers), voice.language)
        write_verdicts(TABLES / f"{voice.folder}.tsv", table)
        print(f"{TABLES / f'{voice.folder}.tsv'}: {len(table)} recordings")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
