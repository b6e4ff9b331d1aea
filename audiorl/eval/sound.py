"""Sounds and edits against what was asked: which events are heard, when, where, how cleanly, beside the recordings.

    audiorl eval sound --data scenes/new_files.jsonl --model runs/sound --sounds runs/b/sounds --judge judges/yamnet \\
        --classes scenes/classes.json --out results/sound

--model are flows, which first make a sound for each row; --sounds are folders with a file for each row, ID.flac or of
another suffix. The judge is a tagger that no reward asked: `judges/yamnet` of tools/fetch_judges.py, or a second one of
`audiorl data train-tagger`. Rows are those of `audiorl data build-scenes`; their recordings are measured too, as the
best that these measures give, and of edits the sounds before them. docs/evaluate.md says how each is computed.

Writes to --out: scores.json, page.html (the table, and sounds to listen to), and a folder a system with sounds.jsonl.
A second call continues where the first stopped, and adds systems.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import numpy as np
import soundfile

from audiorl.audio import AudioClip, AudioError, load_channels, write_wav
from audiorl.config.checks import refuse, require_counts
from audiorl.config.flow import FlowInference
from audiorl.data.schema import check, parse_json
from audiorl.data.schema.scenes import EditKind
from audiorl.eval._common import (
    Row,
    check_settings,
    complete_answers,
    complete_rows,
    print_table,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval.metrics.sound import (
    frechet_distance,
    inception_score,
    kl_divergence,
    mono,
    onset_scores,
    onsets,
    sound_quality,
)
from audiorl.protocols import Request
from audiorl.report.listening import Card, Take, listening_page
from audiorl.rollout.flow import engine_for, masked
from audiorl.run.folder import newest_checkpoint
from audiorl.speech_models import Tagger, load_tagger
from audiorl.speech_models.taggers import CLAP, Renamed
from audiorl.tasks.sound.rewards import place_errors
from audiorl.tasks.sound.rows import SUFFIXES, read_sounds
from audiorl.tasks.sound.scenes import events_of
from audiorl.types import Sample

RECORDINGS, UNEDITED = "recordings", "unedited"
PLAYED = 12
"""Scenes that the page plays."""
SAMPLED = {
    "events_right": "events right % ↑",
    "onset_f1": "onset F1 ↑",
    "onset_lag": "lag (s) ↓",
    "azimuth_error": "azimuth (°) ↓",
    "clean": "clean ↑",
    "loudness_range": "range (dB)",
    "asked": "as asked % ↑",
    **{f"asked_{kind}": f"{kind} %" for kind in get_args(EditKind)},
    "outside_snr": "outside (dB) ↑",
}
"""Measures of a sound by itself, and their headings."""
SAME = 120.0
"""dB of two sounds that are equal, or all but."""


@dataclass(frozen=True, kw_only=True)
class SoundOptions(FlowInference):
    """Measure sounds against the rows that asked for them."""

    data: Path
    """Rows with `events`, such as a set of `audiorl data build-scenes`."""
    judge: str
    """A tagger that no reward asked, as `audiorl.speech_models.load_tagger` reads it."""
    out: Path
    """Folder for results and scores."""
    sounds: tuple[Path, ...] = ()
    """Folders with the sounds of systems, ID.flac, .wav … for each row."""
    model: tuple[str, ...] = ()
    """Flows whose sounds are made and measured: folders of checkpoints, or run folders (their newest checkpoint)."""
    classes: Path | None = None
    """classes.json of the scenes, which says what YAMNet or CLAP call their classes."""
    clap: str | None = None
    """A folder of CLAP: adds its similarity of each sound with its caption."""
    limit: int | None = None
    """Only the first rows."""
    batch_size: int = 8
    """Sounds that are made or measured together."""

    def __post_init__(self) -> None:
        require_counts(self, ("batch_size",) if self.limit is None else ("batch_size", "limit"))


def main(options: SoundOptions) -> Row:
    """Do what the options say and return the scores."""
    samples = read_sounds(options.data, scenes=True, limit=options.limit).samples
    named = {"data": options.data.name, "judge": options.judge, "clap": options.clap}
    sampled = {"sampling": asdict(options.sampling), "seed": options.seed} if options.model else {}
    check_settings(options.out / "settings.json", {**named, "classes": str(options.classes), **sampled})
    systems = systems_of(options, samples)
    classes = None
    if options.classes is not None:
        held = check(parse_json(options.classes.read_bytes()), dict[str, dict[str, list[str]]])
        classes = {name: about.get("yamnet", [name]) for name, about in held.items()}
    judge = load_tagger(options.judge, classes, options.device)
    asked = {e.name for s in samples for e in events_of(s)}
    asked |= {s.metadata["event"] for s in samples if "event" in s.metadata}
    unknown = sorted(asked - set(judge.labels))
    refuse((unknown, f"--judge {options.judge}: has no class {unknown[:1]}; name its labels for it with --classes"))
    clap = load_tagger(options.clap, {}, options.device) if options.clap else None
    refuse((clap is not None and not isinstance(clap, CLAP), f"--clap {options.clap}: no folder of CLAP"))
    judged_by = [Path(p) for p in (options.judge, options.clap, options.classes) if p is not None]
    files = sorted(file for p in judged_by for file in (p, *p.rglob("*")) if file.exists())
    heard_by = digest_of(*((str(file), file.stat().st_mtime_ns) for file in files))
    rows = {
        name: measure(options.out / name, clips, samples, judge, clap, options.batch_size, heard_by)  # type: ignore[arg-type]
        for name, clips in systems.items()
    }
    scores: Row = {**named, "sounds": len(samples), "systems": {}}
    reference = rows.get(RECORDINGS)
    for name, own in rows.items():
        scores["systems"][name] = summary(own, None if name == RECORDINGS else reference, judge.name)
    head, table = table_of(scores, judge.name)
    write_scores(options.out, scores, {"page.html": page(options, samples, systems, rows, head, table)})
    print_table(head, table, f"{len(samples)} scenes of {options.data}", 160)
    return scores


def systems_of(options: SoundOptions, samples: Sequence[Sample]) -> dict[str, dict[str, AudioClip]]:
    """Return the sound of every sample for each system. Raises ValueError for a sound that is not there."""
    systems: dict[str, dict[str, AudioClip]] = {}
    for name, columns in ((RECORDINGS, ("after", "audio")), (UNEDITED, ("before",))):
        clips = {s.id: s.metadata[column] for s in samples for column in columns[::-1] if column in s.metadata}
        if len(clips) == len(samples):
            systems[name] = clips
    for model in options.model:
        name = Path(model).resolve().name
        refuse((name in systems, f"--model {model}: two systems are called {name}; rename one"))
        systems[name] = made_by(model, options, samples, options.out / name / "made")
    for folder in options.sounds:
        if not folder.is_dir():
            raise ValueError(f"--sounds {folder}: no such folder")
        files = {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES}
        missing = [stem_of(s) for s in samples if stem_of(s) not in files]
        if missing:
            raise ValueError(
                f"{folder}: no sound {missing[0]}.flac (or {', '.join(SUFFIXES[1:4])} …), {len(missing)} missing"
            )
        name = folder.name if folder.name not in systems else f"{folder.parent.name}-{folder.name}"
        refuse((name in systems, f"--sounds {folder}: two folders are called {name}; rename one"))
        systems[name] = {s.id: AudioClip(path=str(files[stem_of(s)])) for s in samples}
    refuse((not systems, f"{options.data}: its rows have no audio, and there are no --sounds and no --model"))
    return systems


def stem_of(sample: Sample) -> str:
    """Return the name of a sample's file without its suffix."""
    return sample.id.replace("/", "_")


def made_by(model: str, options: SoundOptions, samples: Sequence[Sample], folder: Path) -> dict[str, AudioClip]:
    """Return the sound that a flow makes for each sample, kept in a folder until the flow has been trained further.

    Raises ValueError for rows that it cannot make.
    """
    files = {s.id: folder / f"{stem_of(s)}.wav" for s in samples}
    places = ("audio", "video")  # the recording is not what is asked, and a set of scenes may be moved
    asked = {s.id: digest_of(s.messages, {k: v for k, v in s.metadata.items() if k not in places}) for s in samples}
    path = Path(newest_checkpoint(model, options.phase)).resolve()
    written = max((file.stat().st_mtime for file in path.rglob("*")), default=None)  # None of a flow that is gone
    engine = cache(lambda: engine_for(model, options))

    def make(batch: Sequence[Sample]) -> list[Row]:
        for rollout in engine().generate([Request(s, seed=options.seed, greedy=True) for s in batch]):
            sound = rollout.spoken_audio
            assert sound is not None and sound.array is not None and sound.sample_rate is not None
            # In floats: what lies outside of an edit is to stay bit for bit.
            write_wav(files[rollout.sample.id], sound.array, sound.sample_rate, "FLOAT")
        return [{"id": s.id, "checkpoint": str(path), "written": written, "asked": asked[s.id]} for s in batch]

    def is_current(sample: Sample, row: Row) -> bool:
        same = written is None or (row["checkpoint"], row["written"]) == (str(path), written)
        return same and row.get("asked", asked[sample.id]) == asked[sample.id] and files[sample.id].exists()

    complete_answers(folder / "made.jsonl", samples, make, options.batch_size, is_current)
    return {id: AudioClip(path=str(file)) for id, file in files.items()}


def measure(
    folder: Path,
    clips: dict[str, AudioClip],
    samples: Sequence[Sample],
    judge: Tagger,
    clap: CLAP | None,
    batch_size: int,
    heard_by: str = "",
) -> dict[str, Row]:
    """Return what was measured of each sound by id, kept in folder/sounds.jsonl while sound and row are the same, and
    the judges, of which `heard_by` is a digest."""
    digests = {sample.id: _digest(clips[sample.id], sample, heard_by) for sample in samples}

    def evaluate(batch: Sequence[Sample]) -> list[Row]:
        sounds = [_read(clips[sample.id], sample) for sample in batch]
        rows = []
        for sample, (wave, rate) in zip(batch, sounds, strict=True):
            one = mono(wave).astype(np.float32)
            row: Row = {"id": sample.id, "digest": digests[sample.id], "seconds": len(one) / rate}
            row |= measures(sample, wave, rate)
            heard = (
                [one, one * masked(sample.metadata["mask"], len(one), rate)] if "event" in sample.metadata else [one]
            )
            every = judge.tagger.tag(heard, rate) if isinstance(judge, Renamed) else judge.tag(heard, rate)
            renamed = judge.renamed(every) if isinstance(judge, Renamed) else every
            tags = renamed[0]
            asked = {e.name for e in events_of(sample)}
            # The judge never heard these classes in training, so that its probabilities say little; their order does.
            right = highest(tags, len(asked))[[judge.labels.index(name) for name in asked]]
            row["events_right"] = float(right.mean()) if one.any() else 0.0
            if "event" in sample.metadata:
                # Of a span of the sound, too, the order says most: is the event heard above all others that may be new?
                event, kind = sample.metadata["event"], sample.metadata["kind"]
                new = [i for i, name in enumerate(judge.labels) if name not in asked - {event}]
                first = float(highest(renamed[1][new], 1)[new.index(judge.labels.index(event))] * heard[1].any())
                row["asked"] = row[f"asked_{kind}"] = 1 - first if kind == "remove" else first
            row["tags"] = [round(float(t), 6) for t in every[0]]  # of all its classes
            row["embedding"] = [round(float(x), 5) for x in judge.embed([one], rate)[0]]
            if clap is not None:
                (caption,) = [c for c in sample.messages[0].content if isinstance(c, str)]
                row["clap"] = clap.similarities([one], rate, [caption])[0]
            rows.append(row)
        return rows

    return complete_rows(
        folder / "sounds.jsonl",
        {s.id: s for s in samples},
        evaluate,
        batch_size,
        is_current=lambda sample, row: row.get("digest") == digests[sample.id],
    )


def _digest(clip: AudioClip, sample: Sample, heard_by: str) -> str:
    """Return a digest of the row, of who judges, and of the sound as its file is now."""
    file = None if clip.path is None else Path(clip.path).stat()
    sound = clip.key, file and (file.st_size, file.st_mtime_ns)
    return digest_of(*sound, sample.messages, dict(sample.metadata), heard_by)


def digest_of(*values: object) -> str:
    """Return a digest of what values look like."""
    return sha256(repr(values).encode()).hexdigest()[:16]


def highest(tags: np.ndarray, count: int) -> np.ndarray:
    """Return 1 for each of the `count` highest tags [C], else 0; equal ones share the places that are left."""
    least = np.sort(tags)[-count]
    above, equal = tags > least, tags == least
    return above + equal * (count - above.sum()) / equal.sum()


def _read(clip: AudioClip, sample: Sample) -> tuple[Any, int]:
    try:
        return load_channels(clip)
    except AudioError as error:
        raise ValueError(f"sample {sample.id!r}: {error}") from error


def measures(sample: Sample, wave: Any, rate: int) -> dict[str, float]:
    """Return what a sound is like against the events of its sample; no place where none is asked or it is mono."""
    events = events_of(sample)
    times = onset_scores([(e.start, e.end) for e in events], onsets(wave, rate).tolist())
    values = {"onset_f1": times["f1"], "onset_lag": times["lag"], **sound_quality(wave, rate)}
    if "mask" in sample.metadata and "before" in sample.metadata:
        old, new = mono(load_channels(sample.metadata["before"], rate)[0]), mono(wave)
        shared = min(len(old), len(new))
        stays = ~masked(sample.metadata["mask"], shared, rate)
        old, new = old[:shared][stays], new[:shared][stays]
        power, change = (float(x @ x) for x in (old, new - old))
        values["outside_snr"] = SAME if not change else min(10 * float(np.log10(max(power, 1e-12) / change)), SAME)
    if any(e.azimuth is not None for e in events) and wave.ndim == 2:
        degrees, seconds = zip(*place_errors(events, wave, rate), strict=True)
        values |= {"azimuth_error": float(np.mean(degrees)), "delay_error": float(np.mean(seconds)) * 1e6}
    return values


def summary(rows: dict[str, Row], reference: dict[str, Row] | None, judge: str) -> Row:
    """Return means with intervals, and the distances from the recordings under names that say who measured."""
    out: Row = {}
    for name in (*SAMPLED, "clipping", "hiss", "delay_error", "clap"):
        if values := [row[name] for row in rows.values() if name in row]:
            out[name] = summarize(values, share=name.startswith(("events_right", "asked")))
    tags, embeddings = (np.array([row[key] for row in rows.values()]) for key in ("tags", "embedding"))
    out[f"IS_{judge}"] = inception_score(tags)
    if reference is not None:
        out[f"KL_{judge}"] = summarize(kl_divergence(np.array([r["tags"] for r in reference.values()]), tags).tolist())
        if len(rows) > 1:
            out[f"FD_{judge}"] = frechet_distance(embeddings, np.array([r["embedding"] for r in reference.values()]))
    return out


def table_of(scores: Row, judge: str) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows) of the table for people, a row a system."""
    systems = scores["systems"].values()
    sampled = {name: heading for name, heading in SAMPLED.items() if any(name in s for s in systems)}
    sampled |= {"clap": "CLAP score ↑"} if any("clap" in s for s in systems) else {}
    distances = [name for name in (f"KL_{judge}", f"FD_{judge}", f"IS_{judge}") if any(name in s for s in systems)]
    arrows = {"KL": "↓", "FD": "↓", "IS": "↑"}
    head = ["", *sampled.values(), *(f"{name} {arrows[name[:2]]}" for name in distances)]

    def cell(values: Row, name: str) -> str:
        if name not in values:
            return "-"
        if not isinstance(values[name], dict):
            return f"{values[name]:.2f}"
        scale = 100 if name.startswith(("events_right", "asked")) else 1
        form = ".1f" if scale == 100 or name in ("azimuth_error", "outside_snr") else ".3f"
        return with_interval(values[name], form, scale=scale)

    return head, [[name, *(cell(s, n) for n in (*sampled, *distances))] for name, s in scores["systems"].items()]


def page(
    options: SoundOptions,
    samples: Sequence[Sample],
    systems: dict[str, dict[str, AudioClip]],
    rows: dict[str, dict[str, Row]],
    head: list[str],
    table: list[list[str]],
) -> str:
    """Return the page, and write the sounds that it plays."""
    cards = []
    for sample in samples[:: -(-len(samples) // PLAYED) | 1]:  # odd: four kinds of edits take turns in their file
        takes = []
        for name, clips in systems.items():
            path = f"{name}/audio/{stem_of(sample)}.flac"
            (options.out / path).parent.mkdir(parents=True, exist_ok=True)
            wave, rate = _read(clips[sample.id], sample)
            soundfile.write(options.out / path, np.clip(wave, -1, 1), rate, subtype="PCM_16")
            own = rows[name][sample.id]
            values = {SAMPLED[k]: own[k] for k in SAMPLED if k in own and not k.startswith("asked_")}
            takes.append(Take(name, path, values))
        text = " ".join(c for c in sample.messages[0].content if isinstance(c, str))
        cards.append(Card(sample.id, f"{text}\n{sample.metadata['thought']}", tuple(takes)))
    lead = f"{len(samples)} scenes of {options.data}, heard by {options.judge}. Means with 95 % intervals over scenes."
    return listening_page("Sounds", lead, head, table, cards, options.out)


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
