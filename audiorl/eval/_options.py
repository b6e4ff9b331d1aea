"""What the scripts of eval/ share: options, scores on disk, and how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from audiorl.data import manifest
from audiorl.data.manifest import Loaded
from audiorl.eval._generate import check_settings, greedy_engine
from audiorl.eval._judging import Judges
from audiorl.options import parse
from audiorl.protocols import RolloutEngine
from audiorl.run.folder import checkpoint_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Of evaluations that let a model answer a data set."""

    data: Path | None = None
    """What `audiorl.data.manifest.read_samples` reads. Evaluations of questions (audit, gap, passk) also take the
    bundled questions by name: `bundled`, `bundled:languages/test` or `bundled:languages/unseen`."""
    model: str | None = None
    """A Hugging Face model folder or hub id, a checkpoint, or a run folder (its newest checkpoint). Evaluations of
    questions also take `tiny`, a small random model."""
    out: Path | None = None
    """Folder for predictions and scores."""
    kind: str = "auto"
    """How `read_samples` reads the data."""
    think: bool = False
    """Ask for thinking before the answer."""
    batch_size: int = 8
    """Samples that are answered at once."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    limit: int | None = None
    """Only the first rows."""
    audio_root: Path | None = None
    """Where relative audio paths start; by default the folder of the data file."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""

    def check(self) -> None:
        """Raise ValueError unless there is a model, data for it, and a place for what it says."""
        if not (self.data and self.model and self.out):
            raise ValueError("give --data, --model and --out to run a model, or --score FILE to score what one said")

    def check_settings(self, question: str | None = None) -> None:
        """Write out/settings.json, or raise ValueError where a run with other settings left one."""
        assert self.data and self.out
        settings = {"model": self.model, "data": self.data.name, "kind": self.kind, "think": self.think}
        settings |= {"question": question} if question else {}
        check_settings(self.out / "settings.json", {**settings, "max_new_tokens": self.max_new_tokens})

    def read(self, question: str | None = None) -> Loaded:
        """The usable samples, every clip decoded once; what is skipped goes to stderr, a line each.

        question: asked in place of the request for a transcript.

        The settings are kept in out/settings.json: see `check_settings` for an `out` that a run left.
        """
        self.check()
        self.check_settings(question)
        assert self.data
        loaded = manifest.read_samples(
            self.data,
            kind=self.kind,
            think=self.think,
            audio_root=self.audio_root,
            on_error="skip",
            limit=self.limit,
            check_audio=True,
            need_answer=False,
            question=question,
        )
        if loaded.skipped:
            print(f"{loaded.summary()}\n{loaded.listing()}", file=sys.stderr)
        return loaded

    def engine(self) -> RolloutEngine:
        """The model, greedy."""
        assert self.model is not None
        return greedy_engine(self.model, self.max_new_tokens, self.device)


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Of evaluations in which judges listen. Raises ValueError for sizes below 1."""

    out: Path
    """Folder for results and scores."""
    asr: str | None = None
    """A recogniser, as `audiorl.speech_models.load_recogniser` reads it."""
    speaker: str | None = None
    """A speaker encoder, as `audiorl.speech_models.load_speaker_encoder` reads it."""
    limit: int | None = None
    """Only so many recordings, texts or conversations."""
    batch_size: int = 8
    """Recordings that are judged at once."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')}: give at least 1")

    def judges(self, language: str | None = None) -> Judges:
        """The judges that the options name, on `device`."""
        return Judges.load(self.asr, self.speaker, language, self.device)


def write_scores(out: Path, scores: Mapping[str, Any], pages: Mapping[str, str] | None = None) -> None:
    """OUT/scores.json and the pages by file name. Raises ValueError for a score that is no number (NaN)."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(scores, indent=2, ensure_ascii=False, allow_nan=False)
    (out / "scores.json").write_text(text + "\n", encoding="utf-8")
    for name, page in (pages or {}).items():
        (out / name).write_text(page, encoding="utf-8")


def run_script(
    run: Callable[[T], object], options: type[T], about: str | None, left: str = "samples", newest: bool = True
) -> None:
    """What `audiorl eval NAME` and `python -m audiorl.eval.NAME` do. Errors are one line and end with exit code 2.

    newest: a run folder as the option `model` stands for its newest checkpoint.
    """
    try:
        given: Any = parse(options, sys.argv[1:], prog=f"audiorl eval {Path(sys.argv[0]).stem}", description=about)
        if newest and getattr(given, "model", None):
            given = replace(given, model=checkpoint_of(given.model))
        run(given)
    except (ValueError, OSError, ImportError) as error:
        print(f"audiorl: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print(f"audiorl: interrupted; the same command continues with the {left} that are left", file=sys.stderr)
        raise SystemExit(130) from None
