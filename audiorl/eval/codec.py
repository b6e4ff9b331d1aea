"""Neural audio codecs side by side: what is lost, what is still understood, what it costs.

    audiorl eval codec --codecs runs/codec/codec facebook/encodec_24khz kyutai/mimi@8 --audio bundled:en \
        --asr judges/whisper-base --speaker judges/speaker --out results/codecs

Every recording goes through every codec (PATH@Q takes only the first Q codebooks) and is compared with the original:
multi-scale STFT and mel distance, SI-SDR, wideband PESQ, STOI, the speaker's similarity, and the errors that a
recogniser makes, next to those that it makes on the originals. Then there are bitrate, frame rate, codebook use and
entropy, and seconds of computing per second of audio. docs/speech.md says how each is computed.

Writes to --out: scores.json, page.html (the table, and recordings to listen to), original/ and a folder a codec with
audio/, codes/ and clips.jsonl (one line a recording). A second call continues where the first stopped, and adds codecs.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import soundfile
import soxr
import torch

import tokenizers_audio
from audiorl.audio import AUDIO_SUFFIXES, AudioClip, AudioError, probe
from audiorl.config import torch_device
from audiorl.config.checks import refuse
from audiorl.data.corpus import bundled_speech, split_by_key
from audiorl.data.manifest import read_samples
from audiorl.data.rows import files_below
from audiorl.data.sets import spread
from audiorl.eval._common import (
    JudgeOptions,
    Judges,
    Row,
    check_settings,
    complete_rows,
    finished_rows,
    print_table,
    recordings_digest,
    run_evaluation,
    summarize,
    write_scores,
)
from audiorl.eval.metrics.codes import bitrate, codebook_use, count_codes, entropy_bitrate
from audiorl.eval.metrics.speech import cosine, mel_distance, pesq_wb, real_time_factor, si_sdr, stft_distance, stoi
from audiorl.eval.metrics.text import CorpusErrors, Normalizer, char_errors, check_normalizer, word_errors
from audiorl.report.listening import Card, Take, listening_page
from tokenizers_audio.protocol import AudioTokenizer

ORIGINAL = "original"
HELD_OUT = 0.1
"""Share of the bundled recordings that codecs are not trained on, as in audiorl/recipes/codec.py."""
PLAYED = 12
"""Recordings that the page plays."""
_COLUMNS = {
    "stft": "STFT ↓",
    "mel": "mel ↓",
    "si_sdr": "SI-SDR ↑",
    "pesq": "PESQ ↑",
    "stoi": "STOI ↑",
    "similarity": "SIM ↑",
}


@dataclass(frozen=True, kw_only=True)
class CodecOptions(JudgeOptions):
    """Compare codecs on recordings."""

    codecs: tuple[str, ...]
    """Folders or hub ids of codecs; PATH@Q for the first Q codebooks only."""
    audio: str
    """bundled or bundled:LANGUAGE (held-out recordings), a folder of audio (and NAME.txt of each), or a manifest."""
    language: str | None = None
    """Language of the recordings, for a multilingual recogniser; None: it guesses, clip by clip."""
    sample_rate: int | None = None
    """Hz at which distances are computed; by default the lowest of recordings and codecs, above which all is silent."""
    metric: Literal["wer", "cer"] = "wer"
    """The recogniser's errors in words (WER) or characters (CER)."""
    normalizer: Normalizer = "basic"
    """What is left out before words are compared: see `audiorl.eval.metrics.text.normalize`."""
    limit: int | None = None
    """Only so many recordings, evenly spaced."""


def main(options: CodecOptions) -> Row:
    """Do what the options say and return the scores."""
    check_normalizer(options.normalizer)
    options = replace(options, device=torch_device(options.device))
    codecs = load_codecs(options)
    recordings = recordings_of(options)
    rates = [probe(r.clip).sample_rate for r in recordings] + [c.sample_rate for c in codecs.values()]
    rate = options.sample_rate or min(rates)
    judges = Judges.load(options.asr, options.speaker, options.language, options.device)
    settings = {key: getattr(options, key) for key in ("audio", "asr", "language", "speaker")}
    check_settings(options.out / "settings.json", {**settings, "sample_rate": rate})
    missing: set[str] = set()
    results = {ORIGINAL: evaluate_originals(recordings, judges, rate, options)}
    for name, codec in codecs.items():
        results[name] = evaluate_codec(options.out / name, codec, recordings, judges, rate, options, missing)

    transcribed = all(r.text for r in recordings)
    understood = {id: row.get("hypothesis", "") for id, row in results[ORIGINAL].items()}
    references = {r.id: r.text or "" for r in recordings} if transcribed else understood
    count = word_errors if options.metric == "wer" else char_errors

    def errors(rows: Mapping[str, Row]) -> Row:
        """Return error rates of what was understood, of the corpus and the mean of its files with an interval."""
        if not all("hypothesis" in row for row in rows.values()):
            return {}
        languages = {r.id: r.language or options.language for r in recordings}
        texts = [(references[id], rows[id]["hypothesis"], options.normalizer, languages[id]) for id in languages]
        corpus = CorpusErrors(tuple(count(*pair) for pair in texts))
        return {options.metric: corpus.rate, f"mean_{options.metric}": summarize([u.rate for u in corpus.utterances])}

    scores: Row = {
        "recordings": len(recordings),
        "minutes": sum(row["seconds"] for row in results[ORIGINAL].values()) / 60,
        "sample_rate": rate,
        "metric": options.metric,
        "normalizer": options.normalizer,
        "reference": "transcripts" if transcribed else "what the recogniser understood in the originals",
        "device": options.device,
        "threads": torch.get_num_threads(),
        **settings,
        ORIGINAL: errors(results[ORIGINAL]),
        "codecs": {},
    }
    for name, codec in codecs.items():
        own = scores_of_codec(options.out / name, codec, results[name], recordings)
        scores["codecs"][name] = {**own, **errors(results[name])}
    head, table = summary(scores)
    cards = []
    for recording in spread(recordings, PLAYED):
        takes = []
        for system, rows in results.items():
            row = rows[recording.id]
            values = {_COLUMNS[c]: row[c] for c in _COLUMNS if row.get(c) is not None}
            takes.append(Take(system, f"{system}/audio/{recording.file}", values, row.get("hypothesis")))
        cards.append(Card(recording.id, recording.text or "", tuple(takes)))
    lead = f"{scores['recordings']} recordings, {scores['minutes']:.1f} minutes ({options.audio}), compared at "
    lead += f"{rate / 1000:g} kHz. Errors against {scores['reference']}."
    write_scores(options.out, scores, {"page.html": listening_page("Codecs", lead, head, table, cards, options.out)})
    for line in sorted(missing):
        print(f"not measured: {line}", file=sys.stderr)
    # A column a system: terminals are too narrow for one a measure.
    first, *others = map(list, zip(head, *table, strict=True))
    print_table(first, others, str(options.out / "page.html"))
    return scores


# -- recordings and codecs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecRecording:
    """One recording with its transcript, None if unknown."""

    id: str
    clip: AudioClip
    text: str | None = None
    language: str | None = None

    @property
    def file(self) -> str:
        """Return a name for its files."""
        return re.sub(r"[^\w.-]+", "_", self.id) + ".flac"


def recordings_of(options: CodecOptions) -> list[CodecRecording]:
    """Read the recordings; those that cannot be decoded are named on stderr and left out."""
    recordings: dict[str, CodecRecording] = {}
    skipped = 0
    for recording in spread(list(_listed(options.audio)), options.limit):
        try:
            recording.clip.load(probe(recording.clip).sample_rate)
        except AudioError as error:
            skipped += 1
            print(f"skipped: {error}", file=sys.stderr)
            continue
        if recording.file in recordings:
            other = recordings[recording.file].id
            raise ValueError(f"{options.audio}: {other!r} and another recording would share a file name; rename one")
        recordings[recording.file] = recording
    if not recordings:
        raise ValueError(f"{options.audio}: no recording to be used{f', {skipped} skipped' if skipped else ''}")
    return list(recordings.values())


def _listed(audio: str) -> Iterator[CodecRecording]:
    bundled = re.fullmatch(r"bundled(?::(\w+))?", audio)
    if bundled:
        # The split first: it must not depend on the language asked for.
        _, test = split_by_key(bundled_speech(), HELD_OUT, seed=0)
        languages = {u.language for u in test}
        if bundled[1] and bundled[1] not in languages:
            raise ValueError(f"--audio {audio}: there are recordings in {', '.join(sorted(languages))}")
        yield from (CodecRecording(u.id, u.clip, u.text, u.language) for u in test if bundled[1] in (None, u.language))
        return
    path = Path(audio)
    if not path.exists():
        raise ValueError(f"{audio}: missing; give bundled, a folder of audio files, or a manifest")
    if path.is_dir() and not files_below(path, ".trans.txt"):
        for file in files_below(path, *AUDIO_SUFFIXES):
            text = file.with_suffix(".txt")
            said = text.read_text(encoding="utf-8-sig").strip() if text.is_file() else None
            yield CodecRecording(str(file.relative_to(path)), AudioClip(path=str(file)), said or None)
        return
    for sample in read_samples(path, "asr").samples:
        language = sample.metadata.get("language")
        said = sample.references[0] if sample.references else None
        yield CodecRecording(sample.id, sample.audio[0], said, language if isinstance(language, str) else None)


def load_codecs(options: CodecOptions) -> dict[str, AudioTokenizer]:
    """Load the codecs by the name of their folder; by their whole path where two share one."""
    refuse(
        (not options.codecs, "--codecs: give one or more"),
        (len(set(options.codecs)) < len(options.codecs), "--codecs: one is given twice"),
    )
    short = [Path(path).name for path in options.codecs]
    codecs = {}
    for given, name in zip(options.codecs, short, strict=True):
        first = re.fullmatch(r"(.+)@(\d+)", given)
        codec = tokenizers_audio.load(first[1], num_codebooks=int(first[2])) if first else tokenizers_audio.load(given)
        label = name if short.count(name) == 1 else re.sub(r"[^\w.@-]+", "_", given.strip("/"))
        codecs[ORIGINAL + "_" if label == ORIGINAL else label] = codec.to(torch_device(options.device))  # type: ignore[attr-defined]
    return codecs


# -- measuring ---------------------------------------------------------------------------------------------------------


def through(codec: AudioTokenizer, wav: np.ndarray, device: str) -> tuple[torch.Tensor, np.ndarray, Row]:
    """Encode and decode a waveform [T] at the codec's rate. Return codes [Q, F], the copy [T] and seconds of each."""
    given = torch.from_numpy(wav).to(device)

    def timed(work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        out = work()
        if device != "cpu":
            torch.cuda.synchronize(device)  # work on a GPU has only been queued so far
        return out, time.perf_counter() - start

    codes, encoding = timed(lambda: codec.encode(given))
    out, decoding = timed(lambda: codec.decode(codes))
    seconds = {"encode_seconds": encoding, "decode_seconds": decoding}
    return codes[0].cpu(), out[0, : len(wav)].float().cpu().numpy(), seconds


def distances(original: np.ndarray, copy: np.ndarray, sample_rate: int, missing: set[str]) -> dict[str, float | None]:
    """Measure two waveforms; None where a distance is not defined. What is not installed goes into `missing`."""
    measures: dict[str, Callable[[], float]] = {
        "stft": lambda: stft_distance(original, copy),
        "mel": lambda: mel_distance(original, copy, sample_rate),
        "si_sdr": lambda: si_sdr(original, copy),
        "pesq": lambda: pesq_wb(original, copy, sample_rate),
        "stoi": lambda: stoi(original, copy, sample_rate),
    }
    values: dict[str, float | None] = {}
    for name, measure in measures.items():
        try:
            value = measure()
            values[name] = value if math.isfinite(value) else None
        except ImportError as error:
            missing.add(f"{name}: {error}")
    return values


def evaluate_originals(
    recordings: Sequence[CodecRecording], judges: Judges, sample_rate: int, options: CodecOptions
) -> dict[str, Row]:
    """Return rows of the originals by id, with what was understood; each is written as FLAC."""
    folder = options.out / ORIGINAL

    def evaluate(batch: Sequence[CodecRecording]) -> list[Row]:
        waves = [r.clip.load(sample_rate) for r in batch]
        rows = []
        judged = replace(judges, encoder=None).judge(waves, sample_rate)
        for recording, wav, row in zip(batch, waves, judged, strict=True):
            _write_audio(folder, recording, wav, sample_rate)
            rows.append({"id": recording.id, "seconds": len(wav) / sample_rate, **row})
        return rows

    return _kept(folder, recordings, evaluate, options)


def evaluate_codec(
    folder: Path,
    codec: AudioTokenizer,
    recordings: Sequence[CodecRecording],
    judges: Judges,
    sample_rate: int,
    options: CodecOptions,
    missing: set[str],
) -> dict[str, Row]:
    """Return rows of one codec by id; codes and audio of each are kept in `folder`."""
    check_settings(folder / "codec.json", {"identity": codec.identity})
    finished = finished_rows(folder / "clips.jsonl")
    if any(r.id not in finished for r in recordings):
        silence = np.zeros(codec.sample_rate, np.float32)
        through(codec, silence, options.device)  # the first call of all allocates and plans

    def evaluate(batch: Sequence[CodecRecording]) -> list[Row]:
        originals = [r.clip.load(sample_rate) for r in batch]
        copies = [through(codec, np.clip(r.clip.load(codec.sample_rate), -1, 1), options.device) for r in batch]
        waves = []
        for original, (_, wav, _) in zip(originals, copies, strict=True):
            wav = wav if codec.sample_rate == sample_rate else soxr.resample(wav, codec.sample_rate, sample_rate)
            waves.append(np.pad(wav, (0, max(0, len(original) - len(wav))))[: len(original)])
        judged = judges.judge(waves, sample_rate)
        voices = replace(judges, recogniser=None).judge(originals, sample_rate)
        rows = []
        for i, (recording, (codes, wav, seconds), row) in enumerate(zip(batch, copies, judged, strict=True)):
            _write_audio(folder, recording, wav, codec.sample_rate)
            tokenizers_audio.save_codes(_codes_file(folder, recording), codes, codec)
            voice = row.pop("voice", None)
            measured: Row = {"id": recording.id, "seconds": len(wav) / codec.sample_rate, **seconds}
            measured |= distances(originals[i], waves[i], sample_rate, missing)
            measured |= {} if voice is None else {"similarity": cosine(voice, voices[i]["voice"])}
            rows.append(measured | row)
        return rows

    return _kept(folder, recordings, evaluate, options)


def _kept(
    folder: Path,
    recordings: Sequence[CodecRecording],
    evaluate: Callable[[Sequence[CodecRecording]], list[Row]],
    options: CodecOptions,
) -> dict[str, Row]:
    """Return `complete_rows` of recordings; one that is not what it was is evaluated again."""
    digests = {r.id: recordings_digest(r.clip) for r in recordings}
    return complete_rows(
        folder / "clips.jsonl",
        {r.id: r for r in recordings},
        lambda batch: [{**row, "file": digests[row["id"]]} for row in evaluate(batch)],
        options.batch_size,
        is_current=lambda r, row: row.get("file", digests[r.id]) == digests[r.id],
    )


def _write_audio(folder: Path, recording: CodecRecording, wav: np.ndarray, rate: int) -> None:
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    soundfile.write(folder / "audio" / recording.file, np.clip(wav, -1, 1), rate, format="FLAC", subtype="PCM_16")


def _codes_file(folder: Path, recording: CodecRecording) -> Path:
    (folder / "codes").mkdir(parents=True, exist_ok=True)
    return folder / "codes" / Path(recording.file).with_suffix(".safetensors").name


# -- scores ------------------------------------------------------------------------------------------------------------


def scores_of_codec(
    folder: Path, codec: AudioTokenizer, rows: Mapping[str, Row], recordings: Sequence[CodecRecording]
) -> Row:
    """Return means with intervals, and what the codes cost; without the errors of the recogniser."""
    seconds = sum(row["seconds"] for row in rows.values())
    codes = (tokenizers_audio.load_codes(_codes_file(folder, r), codec).numpy() for r in recordings)
    uses = codebook_use(count_codes(codes, codec.num_codebooks, codec.codebook_size))
    about = ("identity", "sample_rate", "frame_rate", "num_codebooks", "codebook_size")
    scores: Row = {
        **{name: getattr(codec, name) for name in about},
        "bitrate": bitrate(codec.frame_rate, codec.num_codebooks, codec.codebook_size),
        "entropy_bitrate": entropy_bitrate(codec.frame_rate, uses),
        "codebooks": [{**asdict(use), "perplexity": use.perplexity} for use in uses],
        "used": sum(use.used for use in uses) / len(uses),
        "entropy": sum(use.entropy for use in uses) / len(uses),
        "encode_rtf": real_time_factor(sum(row["encode_seconds"] for row in rows.values()), seconds),
        "decode_rtf": real_time_factor(sum(row["decode_seconds"] for row in rows.values()), seconds),
    }
    for name in _COLUMNS:
        if values := [row[name] for row in rows.values() if row.get(name) is not None]:
            scores[name] = summarize(values)
    return scores


def summary(scores: Row) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the table for people, a row a system."""
    columns = [key for key in _COLUMNS if any(key in s for s in scores["codecs"].values())]
    metric = [scores["metric"]] if scores["metric"] in scores[ORIGINAL] else []
    head = ["", "kbit/s", "frames/s", "codebooks", *(_COLUMNS[c] for c in columns)]
    head += [*(f"{m.upper()} % ↓" for m in metric), "used", "entropy (bits)", "RTF enc", "RTF dec"]
    blank = [""] * (3 + len(columns))
    rows = [[ORIGINAL, *blank, *(f"{100 * scores[ORIGINAL][m]:.2f}" for m in metric), *[""] * 4]]
    for name, s in scores["codecs"].items():
        row = [name, f"{s['bitrate'] / 1000:.2f}", f"{s['frame_rate']:g}"]
        row += [f"{s['num_codebooks']} × {s['codebook_size']}"]
        row += [f"{s[c]['mean']:.3f}" if c in s else "-" for c in columns]
        row += [f"{100 * s[m]:.2f}" for m in metric]
        row += [f"{s['used']:.0%}", f"{s['entropy']:.2f} of {math.log2(s['codebook_size']):.0f}"]
        rows.append([*row, f"{s['encode_rtf']:.3f}", f"{s['decode_rtf']:.3f}"])
    return head, rows


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
