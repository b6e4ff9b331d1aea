"""Shared by the benchmarks: options, generation that an interrupted call continues, judges, summaries, tables.

Results files hold JSON lines with an `id`. They grow batch by batch, so a killed run loses one batch at most.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig, torch_device
from audiorl.config.checks import require_counts
from audiorl.data import manifest
from audiorl.data.rows import BadRow, write_json_lines
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.results import ResultRow
from audiorl.errors import says_what_to_do
from audiorl.eval.metrics.corpus import bootstrap_interval, estimate, ratio
from audiorl.options import parse
from audiorl.protocols import Request, RolloutEngine
from audiorl.speech_models import Recogniser, SpeakerEncoder, load_recogniser, load_speaker_encoder
from audiorl.types import Rollout, Sample

if TYPE_CHECKING:
    from audiorl.models import AudioPolicy

T = TypeVar("T")
Row = dict[str, Any]


# -- options and the command -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Options of evaluations that run a model on a data set."""

    newest: ClassVar[bool] = True
    """A run folder as `model` stands for its newest checkpoint."""

    data: Path | None = None
    """What `audiorl.data.manifest.read_samples` reads; in qa, audit, gap and passk also `bundled`,
    `bundled:languages/test` or `bundled:languages/unseen`."""
    model: str | None = None
    """A model folder or hub id, a checkpoint, a run folder (its newest checkpoint), or `tiny`, a small random model."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    out: Path | None = None
    """Folder for predictions and scores."""
    kind: str = "auto"
    """How `read_samples` reads the data."""
    think: bool = False
    """Ask for thinking before the answer."""
    batch_size: int = 8
    """Samples that are answered together."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    limit: int | None = None
    """Only the first rows."""
    audio_root: Path | None = None
    """Where relative audio paths start; by default the folder of the data file."""
    columns: tuple[str, ...] = ()
    """Columns of the data that have other names, as WANTED=NAME: `audio=wav question=prompt`."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""

    def __post_init__(self) -> None:
        require_counts(self, ("batch_size", "max_new_tokens"))

    def check(self) -> None:
        """Raise ValueError unless there is a model, data for it, and a place for its answers."""
        if not (self.data and self.model and self.out):
            raise ValueError("give --data, --model and --out to run a model, or --score FILE to score what one said")

    @property
    def context(self) -> Row:
        """Return further settings on which the prompts depend."""
        return {}

    def check_settings(self, question: str | None = None) -> None:
        """Write out/settings.json, or raise ValueError where a run with other settings left one."""
        assert self.data and self.out
        settings: Row = {"model": self.model, "data": self.data.name, "kind": self.kind, "think": self.think}
        settings |= {"question": question} if question else {}
        settings |= {"columns": self.columns} if self.columns else {}
        settings |= self.context
        check_settings(self.out / "settings.json", {**settings, "max_new_tokens": self.max_new_tokens})

    def read(self, question: str | None = None, on_error: Literal["raise", "skip"] = "skip") -> manifest.Loaded[Sample]:
        """Return the usable samples, every clip decoded once; print those that are skipped. `question` is asked.

        on_error: "raise" also for a question without an answer.
        """
        self.check()
        self.check_settings(question)
        assert self.data
        loaded = manifest.read_samples(
            self.data,
            kind=self.kind,
            think=self.think,
            audio_root=self.audio_root,
            on_error=on_error,
            limit=self.limit,
            check_audio=True,
            need_answer=on_error == "raise",
            columns=manifest.column_names(self.columns),
            question=question,
        )
        if loaded.skipped:
            print(f"{loaded.summary()}\n{loaded.listing()}", file=sys.stderr)
        return loaded

    def engine(self) -> RolloutEngine:
        """Load the model as a greedy engine."""
        assert self.model is not None
        return greedy_engine(self.model, self.max_new_tokens, self.device)


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Options of evaluations in which speech models listen. Raises ValueError for sizes below 1."""

    out: Path
    """Folder for results and scores."""
    asr: str | None = None
    """A recogniser, as `audiorl.speech_models.load_recogniser` reads it."""
    speaker: str | None = None
    """A speaker encoder, as `audiorl.speech_models.load_speaker_encoder` reads it."""
    limit: int | None = None
    """Only so many recordings, texts or conversations."""
    batch_size: int = 8
    """Recordings that are judged together."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}: give at least 1")


def options_type(main: Callable[..., object]) -> type[Any]:
    """Return the dataclass of options that the `main(options)` of an evaluation takes."""
    options: type[Any] = get_type_hints(main)["options"]
    return options


def run_evaluation(module: ModuleType, args: Sequence[str]) -> None:
    """Run an evaluation as `audiorl eval NAME` and `python -m` do. Errors are one line and end with exit code 2."""
    options, name = options_type(module.main), Path(str(module.__file__)).stem
    try:
        given: Any = parse(options, args, prog=f"audiorl eval {name}", description=module.__doc__, run_file=True)
        named = {name: getattr(given, name, None) for name in ("model", "baseline") if getattr(given, "newest", True)}
        models = {name: model for name, model in named.items() if isinstance(model, str)}
        if models:
            from audiorl.run.folder import newest_checkpoint  # imports torch, which scoring does without

            phases = {"model": getattr(given, "phase", None)}
            newest = {name: newest_checkpoint(model, phases.get(name)) for name, model in models.items()}
            given = replace(given, **newest)
        module.main(given)
    except (ValueError, OSError, ImportError) as error:
        if not says_what_to_do(error):
            raise
        print(f"audiorl: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("audiorl: interrupted; the same command continues with what is left", file=sys.stderr)
        raise SystemExit(130) from None


# -- generation --------------------------------------------------------------------------------------------------------


def evaluation_config(device: str = "auto") -> ModelConfig:
    """Return bfloat16 on a GPU, where `auto` finds one, else float32 on the CPU."""
    device = torch_device(device)
    return ModelConfig(device=device, dtype="float32" if device == "cpu" else "bfloat16")


def question_policy(model: str, config: ModelConfig) -> AudioPolicy:
    """Load the model of a folder or hub id, or make `tiny`, a small random one."""
    from audiorl.models import load_policy
    from audiorl.models.families.qwen_omni import tiny

    if model != "tiny":
        return load_policy(model, config)
    policy = tiny(whisper=False, config=config)
    policy.model.to(torch_device(config.device))
    return policy


def greedy_engine(model: str | Path, max_new_tokens: int = 256, device: str = "auto") -> RolloutEngine:
    """Load a model as a greedy engine; see `evaluation_config`."""
    from audiorl.rollout.hf import HFEngine

    policy = question_policy(str(model), evaluation_config(device))
    return HFEngine(policy, SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens))


def generate_all(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    out_path: str | Path,
    batch_size: int = 8,
    seed: int = 0,
    describe: Callable[[Rollout], Mapping[str, Any]] = lambda rollout: {},
) -> list[Row]:
    """Return a row {id, text, tokens, stop_reason, **describe(rollout)} for each sample, in order.

    Rows are kept in `out_path` as `complete_answers` does; rows of other samples stay in the file and are not returned.
    Raises ValueError for ids that repeat and for a damaged file.
    """

    def evaluate(batch: Sequence[Sample]) -> list[Row]:
        rollouts = engine.generate([Request(sample, n=1, seed=seed) for sample in batch])
        assert [r.sample.id for r in rollouts] == [s.id for s in batch], "one rollout per request, in order"
        return [
            {"id": r.sample.id, "text": r.text, "tokens": r.num_sampled, "stop_reason": r.segments[-1].stop_reason}
            | {**describe(r)}
            for r in rollouts
        ]

    return list(complete_answers(out_path, samples, evaluate, batch_size).values())


def complete_answers(
    out_path: str | Path,
    samples: Sequence[Sample],
    answer: Callable[[Sequence[Sample]], Sequence[Row]],
    batch_size: int,
    is_current: Callable[[Sample, Row], bool] = lambda sample, row: True,
) -> dict[str, Row]:
    """Return `complete_rows` of answers to prompts: a prompt that is not what it was is asked again.

    Each row holds its `prompt_digest`; one without, of an earlier version, is taken for the prompt of its id.
    """
    digests = {sample.id: prompt_digest(sample) for sample in samples}

    def evaluate(batch: Sequence[Sample]) -> list[Row]:
        return [{**row, "prompt_digest": digests[row["id"]]} for row in answer(batch)]

    def same(sample: Sample, row: Row) -> bool:
        return row.get("prompt_digest", digests[sample.id]) == digests[sample.id] and is_current(sample, row)

    return complete_rows(out_path, by_id(samples), evaluate, batch_size, is_current=same)


def prompt_digest(sample: Sample) -> str:
    """Return a digest of the texts of a prompt and the keys of its audio and pictures."""
    messages = [[m.role, *(c if isinstance(c, str) else c.key for c in m.content)] for m in sample.messages]
    prompt = json.dumps([messages, [turn.audio.key for turn in sample.turns]])
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def recordings_digest(*clips: AudioClip | None) -> str:
    """Return a digest of the contents of recordings as they are now, and of which part of each is meant."""
    digest = hashlib.sha256()
    for clip in clips:
        if clip is None or clip.path is None:
            digest.update(b"" if clip is None else clip.key.encode())
            continue
        if (file := Path(clip.path)).is_file():
            digest.update(file.read_bytes())
        digest.update(f"{clip.start} {clip.duration}{''.join(f' {c}' for c in clip.channels)}".encode())
    return digest.hexdigest()[:16]


def by_id(samples: Sequence[Sample]) -> dict[str, Sample]:
    """Return the samples by id. Raises ValueError for one that occurs twice."""
    ids = [s.id for s in samples]
    if len(set(ids)) < len(ids):
        raise ValueError(f"sample ids must be unique to tell results apart; repeated: {max(ids, key=ids.count)}")
    return dict(zip(ids, samples, strict=True))


def complete_rows(
    out_path: str | Path,
    items: Mapping[str, T],
    evaluate: Callable[[Sequence[T]], Sequence[Row]],
    batch_size: int,
    *,
    is_current: Callable[[T, Row], bool] = lambda item, row: True,
) -> dict[str, Row]:
    """Return the row of every item by id: from `out_path` (JSON lines) where it is there, else from `evaluate`.

    Rows are appended and flushed batch by batch; a later call evaluates only what is missing, and what
    `is_current(item, row)` calls outdated, which leaves the file. `evaluate` gives rows with the key "id"; one with a
    "problem" is not written, and a later call tries it again.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    path = Path(out_path)
    found = finished_rows(path)
    rows = {id: row for id, row in found.items() if id not in items or is_current(items[id], row)}
    if len(rows) < len(found):
        write_json_lines(path, rows.values())
    missing = [item for id, item in items.items() if id not in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, progress_display() as display:
        bar = display.add_task(path.name, total=len(items), completed=len(items) - len(missing))
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            for row in evaluate(batch):
                rows[row["id"]] = row
                if "problem" not in row:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            display.advance(bar, len(batch))
    return {id: rows[id] for id in items}


def finished_rows(path: Path) -> dict[str, Row]:
    """Return the complete rows of a results file by id; cut off a torn last line, the trace of a kill."""
    if not path.exists():
        return {}
    rows, intact = _parse(path)
    with path.open("r+b") as file:
        file.truncate(intact)
        if intact:
            file.seek(intact - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return {row["id"]: row for row in rows}


def read_rows(path: str | Path) -> list[Row]:
    """Read a results file. A last line that is incomplete is left out; any other damage is a ValueError."""
    return _parse(Path(path))[0]


def distinct_rows(path: str | Path, texts: Sequence[str]) -> list[Row]:
    """Read a results file. Raises ValueError for a row without one of the fields `texts`, and for an id that comes
    again: its errors would count twice."""
    rows, first = read_rows(path), dict[str, int]()
    for number, row in enumerate(rows, 1):
        for field in texts:
            if row.get(field) is None:
                raise ValueError(str(BadRow(str(path), number, field, 'missing; give the text, "" for nothing said')))
        if (earlier := first.setdefault(str(row["id"]), number)) != number:
            message = f"{row['id']!r} also names row {earlier}; give every row its own id"
            raise ValueError(str(BadRow(str(path), number, "id", message)))
    return rows


def _parse(path: Path) -> tuple[list[Row], int]:
    """Return the complete rows of a file, and how many bytes they fill."""
    rows: list[Row] = []
    intact = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.strip():
            try:
                row = parse_json(line)
                check(row, ResultRow)
            except FieldError as error:
                field = f"{error.field}: " if error.field else ""
                raise ValueError(f"{path}, line {number}: not a result row ({field}{error.message})") from error
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break  # torn: the beginning of an object is never JSON itself
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            rows.append(row)
        intact += len(line)
    return rows, intact


def check_settings(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write `settings` to `path` (JSON). Raises ValueError where others lie there: two models must not mix.

    Of a `model` that is a folder they say when its weights were written, so that one that was trained on is another.
    """
    path = Path(path)
    new = json.loads(json.dumps(settings))
    weights = Path(new["model"]).rglob("*.safetensors") if new.get("model") else []
    if times := [file.stat().st_mtime for file in weights]:
        new["weights"] = str(datetime.fromtimestamp(max(times)))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    try:
        old = check(parse_json(path.read_bytes()), dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); choose another output folder") from error
    if not ("weights" in new and "weights" in old):  # not known: of an earlier version, or a model that is gone
        new.pop("weights", None)
        old.pop("weights", None)
    different = sorted(key for key in new.keys() | old.keys() if new.get(key) != old.get(key))
    if different:
        changes = ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in different)
        raise ValueError(f"{path} belongs to a run with other settings ({changes}); choose another output folder")


def progress_display(enabled: bool = True) -> Progress:
    """Return a bar on stderr with the count, the time taken and the time left; it shows nothing unless `enabled`."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True), disable=not enabled)


# -- judges ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judges:
    """A speech recogniser and a speaker encoder; None leaves out what it would measure."""

    recogniser: Recogniser | None = None
    encoder: SpeakerEncoder | None = None

    @classmethod
    def load(
        cls,
        asr: str | None,
        speaker: str | None,
        language: str | None = None,
        device: str = "auto",
        numerals: bool = True,
    ) -> Judges:
        """Load those that are named; see `audiorl.speech_models`. Without `numerals`: numbers as words, if possible."""
        return cls(
            load_recogniser(asr, language, device, numerals=numerals) if asr else None,
            load_speaker_encoder(speaker, device) if speaker else None,
        )

    def judge(self, waves: Sequence[np.ndarray], sample_rate: int) -> list[Row]:
        """Return {"hypothesis": text, "voice": embedding [D]} of each waveform [T], as far as there are judges."""
        rows: list[Row] = [{} for _ in waves]
        if self.recogniser is not None:
            for row, text in zip(rows, self.recogniser.transcribe(waves, sample_rate), strict=True):
                row["hypothesis"] = text
        if self.encoder is not None:
            for row, voice in zip(rows, self.encoder.embed(waves, sample_rate), strict=True):
                row["voice"] = voice
        return rows


# -- summaries ---------------------------------------------------------------------------------------------------------


FEWEST_CLUSTERS = 3
"""Least number of clusters that an interval is drawn from: speakers, recordings."""


def summarize(
    values: Sequence[float],
    name: str = "mean",
    others: Mapping[str, Sequence[float]] | None = None,
    clusters: Sequence[Hashable] | None = None,
    share: bool = False,
) -> dict[str, Any]:
    """Return {name: mean, n, low, high, **means of `others`} with the mean's 95% bootstrap interval.

    clusters: of each value what it shares with others, such as its speaker. From FEWEST_CLUSTERS on whole clusters are
    drawn, and `clusters` says how many there are. share: see `bootstrap_interval`; of equal values a cluster is one.
    """
    if not len(values):
        raise ValueError("nothing to evaluate: there is no held-out data, or the reward skipped all of it")
    low, high = bootstrap_interval(values, share=share)
    drawn = {}
    if clusters is not None and FEWEST_CLUSTERS <= (count := len(set(clusters))) < len(values):
        over = estimate(np.stack([values, np.ones(len(values))], 1), ratio, clusters=clusters)
        low, high, drawn = over.low, over.high, {"clusters": count}
        if len(set(values)) == 1:
            low, high = bootstrap_interval(values[:count], share=share)
    means = {other: float(np.mean(column)) for other, column in (others or {}).items()}
    return {name: float(np.mean(values)), "n": len(values), "low": low, "high": high, **drawn, **means}


def summarize_outside(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return {measure: mean, …, outside: {measure: [low, high]}} of the rows that have a measure; {} without any."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    if not columns:
        return {}
    means = {name: float(np.mean(column)) for name, column in columns.items()}
    return means | {"outside": {name: list(bootstrap_interval(column)) for name, column in columns.items()}}


def paired_changes(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, list[float]]:
    """Return {measure: [mean, low, high]} of the differences, after - before, of the samples that both name by id."""
    differences: dict[str, list[float]] = {}
    for id, measures in after.items():
        for name in measures.keys() & before.get(id, {}).keys():
            differences.setdefault(name, []).append(measures[name] - before[id][name])
    return {name: [float(np.mean(column)), *bootstrap_interval(column)] for name, column in sorted(differences.items())}


# -- files and tables --------------------------------------------------------------------------------------------------


def write_scores(out: Path, scores: Mapping[str, Any], pages: Mapping[str, str] | None = None) -> None:
    """Write OUT/scores.json and the pages by file name. Raises ValueError for a score that is no number (NaN)."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(scores, indent=2, ensure_ascii=False, allow_nan=False)
    (out / "scores.json").write_text(text + "\n", encoding="utf-8")
    for name, page in (pages or {}).items():
        (out / name).write_text(page, encoding="utf-8")


def with_interval(
    cell: Mapping[str, float], form: str = ".3f", name: str = "mean", scale: float = 1.0, to: str = " to "
) -> str:
    """Return a value with its interval for people: `0.123 (0.100 to 0.150)`."""
    value, low, high = (format(scale * cell[key], form) for key in (name, "low", "high"))
    return f"{value} ({low}{to}{high})"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", width: int = 0) -> None:
    """Print a table: names to the left, numbers to the right, at least `width` columns. An empty row is a line."""
    table = Table(title=title or None, show_header=any(head))
    for number, heading in enumerate(head):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    Console(width=max(Console().width, width)).print(table)
