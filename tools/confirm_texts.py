"""Which recordings say the text that they come with: ask a Whisper model.

    python tools/confirm_texts.py judges/whisper-base                       # downloads the packages
    python tools/confirm_texts.py judges/whisper-base --packages DEBS --voices es-co

It writes audiorl/assets/verdicts/VOICE.tsv, which `audiorl data build` reads, with a row for each recording: the
character error rate of the model's transcript against the text and, for the single words of some folders, the rank of
the text by probability among them. Numbers are spelled out first; case, accents, punctuation and spaces do not count.
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
from audiorl.data.sources.build import VOICES
from audiorl.data.sources.packages import package_files
from audiorl.data.sources.verdicts import CLASSES, TABLES, Verdict, write_verdicts
from audiorl.data.sources.voice import RATE, Recording
from audiorl.judges.whisper import Whisper
from audiorl.metrics.text import char_errors, normalize

WINDOWS = (10, 30)
"""Seconds that the encoder reads: 10, three times as fast, for recordings that are shorter, otherwise Whisper's 30."""


class Ranking:
    """Log-probabilities of texts given the audio, by a Whisper model."""

    def __init__(self, recogniser: Whisper, language: str):
        self.model, self.extractor, self.tokenizer = recogniser.parts
        start = ["<|startoftranscript|>", f"<|{language}|>", "<|transcribe|>", "<|notimestamps|>"]
        self.prefix = self.tokenizer.convert_tokens_to_ids(start)
        self.end = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")

    @torch.no_grad()
    def logprobs(self, wav: np.ndarray, texts: Sequence[str]) -> torch.Tensor:
        """[N]: the sum over the text's tokens and the end, each text as a sentence: " Siete."."""
        features = self.extractor([wav], sampling_rate=RATE, return_tensors="pt").input_features
        encoded = self.model.model.encoder(features.to(self.model.dtype)).last_hidden_state
        # The frames of the recording and half a second more: the padding up to 30 s costs 20 times as much.
        encoded = encoded[:, : (len(wav) + RATE // 2) // (2 * self.extractor.hop_length)]
        tokens = [self.tokenizer(f" {t[:1].upper()}{t[1:]}.", add_special_tokens=False).input_ids for t in texts]
        length = len(self.prefix) + max(map(len, tokens))
        inputs = torch.full((len(tokens), length), self.end)
        targets = torch.full((len(tokens), length), -1)
        for row, ids in enumerate(tokens):
            inputs[row, : len(self.prefix) + len(ids)] = torch.tensor(self.prefix + ids)
            targets[row, len(self.prefix) - 1 : len(self.prefix) + len(ids)] = torch.tensor([*ids, self.end])
        hidden = self.model.model.decoder(
            input_ids=inputs, encoder_hidden_states=encoded.expand(len(tokens), -1, -1), use_cache=False
        ).last_hidden_state
        scored = targets >= 0
        logits = self.model.proj_out(hidden[scored]).float()
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[scored][:, None])[:, 0]
        return torch.zeros(len(tokens)).index_add_(0, scored.nonzero()[:, 0], logprobs)


def letters(text: str, language: str) -> str:
    """The letters that are compared."""
    return normalised(normalize(text, "basic", language)).replace(" ", "")


def verdicts(recordings: Sequence[Recording], recognisers: Mapping[int, Whisper], language: str) -> list[Verdict]:
    """One verdict for each recording, by the recognisers for each window in seconds."""
    ranking = Ranking(recognisers[WINDOWS[0]], language)
    words: dict[str, list[str]] = {}
    for recording in recordings:
        folder, text = recording.name.partition("/")[0], bare(recording.text)
        if folder in CLASSES and " " not in text and text not in words.setdefault(folder, []):
            words[folder].append(text)
    transcripts = transcribe(recordings, recognisers)
    result = []
    for recording, transcript in zip(recordings, transcripts, strict=True):
        text = bare(recording.text)
        cer = char_errors(letters(text, language), letters(transcript, language)).rate
        rank, others = None, words.get(recording.name.partition("/")[0], [])
        if text in others:
            logprobs = ranking.logprobs(recording.read(), others)
            rank = int((logprobs > logprobs[others.index(text)]).sum())
        result.append(Verdict(recording.name, cer, rank, transcript))
    return result


def transcribe(recordings: Sequence[Recording], recognisers: Mapping[int, Whisper], batch: int = 64) -> list[str]:
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


def load(path: str, language: str, seconds: int) -> Whisper:
    """The recogniser in bfloat16, whose encoder reads `seconds`."""
    recogniser = Whisper(path, language)
    recogniser.parts[0].to(torch.bfloat16)
    model, extractor, _ = recogniser.parts
    positions = seconds * RATE // (2 * extractor.hop_length)
    encoder = model.model.encoder
    model.config.max_source_positions = encoder.max_source_positions = positions
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(encoder.embed_positions.weight[:positions].detach())
    extractor.chunk_length, extractor.n_samples = seconds, seconds * RATE
    extractor.nb_max_frames = seconds * RATE // extractor.hop_length
    return recogniser


def bare(text: str) -> str:
    return text.rstrip(".!? ")


def main() -> None:
    checked = {voice.folder: voice for voice in VOICES if voice.candidates}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recogniser", help="a folder of Whisper, or a model id")
    parser.add_argument("--voices", nargs="+", default=list(checked), choices=list(checked))
    parser.add_argument("--packages", type=Path, help="folder of .deb files; by default they are downloaded")
    parser.add_argument("--tree", type=Path, help="folder below which the packages are installed or unpacked")
    args = parser.parse_args()
    for voice in (checked[name] for name in args.voices):
        assert voice.candidates is not None
        recognisers = {seconds: load(args.recogniser, voice.language, seconds) for seconds in WINDOWS}
        with package_files(voice.packages, args.packages, args.tree) as root:
            recordings = [r for r in voice.candidates(root) if not r.left_out]
            table = verdicts(recordings, recognisers, voice.language)
        write_verdicts(TABLES / f"{voice.folder}.tsv", table)
        print(f"{TABLES / f'{voice.folder}.tsv'}: {len(table)} recordings")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
