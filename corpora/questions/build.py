"""Build the benchmark: a training and a held-out set of four-choice questions in the format of MMAU.

    OUT/train.json, held_out.json       as MMAU's, with `licence` and `sources` of each clip besides
    OUT/audio/SPLIT/ID.opus             mono Opus at 16 kHz
    OUT/ATTRIBUTION.md, LICENSE-*.txt   what the audio is made from, and the licences

The splits share no speaker, prompt, sound file or piece of music. `audiorl eval mmau --data OUT/held_out.json` reads
it, and so do recipes. The table that is printed has the accuracy of a classifier that reads only the text, learned from
the training set: it must be near 25 %.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from audiorl.data.corpus import corpus
from corpora.questions.choices import Draft, Question, text_only_accuracy, with_choices
from corpora.questions.music import FluidSynth, Render, music_drafts, require_fluidsynth
from corpora.questions.sounds import sound_drafts
from corpora.questions.speech import speech_drafts, split_speech, stamps
from corpora.sources.build import encode_opus
from corpora.sources.packages import package_files
from corpora.sources.voices import RATE

PACKAGES = ("tuxpaint-stamps-default", "fluid-soundfont-gm")
SOUND_FONT = Path("usr/share/sounds/sf2/FluidR3_GM.sf2")
SPLITS = {"train": "train", "held_out": "test"}
"""Names of the manifests, and of the splits in their rows."""
COMPARES = ("voices", "speakers", "count", "loudness", "mode", "instruments", "direction")
"""Kinds whose answer compares parts of a clip; the others recognise something."""
ATTRIBUTION = """\
# Attribution

Every row of train.json and held_out.json names the licence of its clip and what it was made from. Clips were cut,
joined, changed in level and speed, mixed with a little noise, and converted to Opus. The questions are under the
licences of their clips.

- Sounds of animals and things (`sound-*`, but for instruments): the stamps of Tux Paint, copyright 2002-2022 by Bill
  Kendrick and contributors (https://tuxpaint.org), packaged by Debian as tuxpaint-stamps-default. GPL-2.0-or-later.
- Music (`music-*`): pieces drawn by a seed, rendered with FluidR3_GM.sf2 by Frank Wen, packaged by Debian as
  fluid-soundfont-gm. MIT, see LICENSE-MIT.txt.
- Speech (`speech-*`): the recordings of the corpus whose attribution follows.

"""


def build_questions(
    out: Path,
    speech: Path,
    counts: Sequence[int] = (3000, 600),
    seed: int = 0,
    packages: Path | None = None,
    tree: Path | None = None,
    render: Render | None = None,
    bitrate: int = 24_000,
) -> dict[str, list[Question]]:
    """Write the benchmark to the folder `out` and print what it holds; the questions by manifest.

    counts: about how many questions to train on and to hold out; kinds have equally many.
    speech: a corpus that `audiorl data build` wrote with all sources. packages, tree: as for `package_files`. render:
    what plays the music, by default fluidsynth with FluidR3_GM. bitrate: bits per second of the Opus files.
    Raises ValueError for a folder that holds other things, and for missing voices, packages or programs.
    """
    if out.exists() and any(out.iterdir()) and not (out / "audio").is_dir():
        raise ValueError(f"{out}: not empty; name a new folder or empty this one first")
    splits = dict(zip(SPLITS, split_speech(corpus(speech), seed), strict=True))
    if render is None:
        require_fluidsynth()  # before the packages are downloaded
    questions: dict[str, list[Question]] = {}
    with package_files(PACKAGES, packages, tree) as root:
        play = render or FluidSynth(root / SOUND_FONT)
        for (name, utterances), wanted in zip(splits.items(), counts, strict=True):
            count = wanted // 3
            music = music_drafts(name, count, seed, play)
            people = [(u.id, lambda u=u: u.clip.load(RATE)) for u in stamps(utterances)]
            instruments = [d for d in music if d.kind == "instrument"]
            drafts = [
                *speech_drafts(name, count, seed, utterances),
                *sound_drafts(name, count, seed, root, people, instruments),
                *music,
            ]
            questions[name] = with_choices(drafts, seed)
            for q in track(questions[name], description=f"writing {name}"):
                encode_opus(q.draft.wave(), out / audio_path(name, q.draft), bitrate)
        _write_licences(out, speech, root)
    for name, split in questions.items():
        rows = [row(name, q) for q in split]
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    Console().print(table(questions))
    return questions


def audio_path(name: str, draft: Draft) -> str:
    return f"audio/{name}/{draft.id}.opus"


def row(name: str, question: Question) -> dict[str, object]:
    """Return a question as MMAU writes it, with the licence and the sources of its clip."""
    draft = question.draft
    return {
        "id": draft.id,
        "audio_id": f"./{audio_path(name, draft)}",
        "question": draft.question,
        "choices": list(question.choices),
        "answer": draft.answer,
        "dataset": "audiorl-qa",
        "task": draft.task,
        "split": SPLITS[name],
        "category": "Reasoning" if draft.kind in COMPARES else "Perception",
        "sub-category": draft.kind,
        "difficulty": draft.difficulty,
        "licence": draft.licence,
        "sources": list(draft.sources),
    }


def table(questions: dict[str, list[Question]]) -> Table:
    """Questions by kind, and the accuracy of a classifier that reads only the text."""
    out = Table("task", "kind", *SPLITS, "text only")
    for column in out.columns[2:]:
        column.justify = "right"
    train, held_out = questions["train"], questions["held_out"]
    kinds = list(dict.fromkeys((q.draft.task, q.draft.kind) for q in train))
    for task, kind in [*kinds, ("all", "")]:
        of_kind = [[q for q in split if q.draft.kind == kind or task == "all"] for split in (train, held_out)]
        accuracy = f"{100 * text_only_accuracy(*of_kind):.1f} %"
        out.add_row(
            task, kind, *(str(len(split)) for split in of_kind), accuracy, end_section=(task, kind) == kinds[-1]
        )
    return out


def _write_licences(out: Path, speech: Path, root: Path) -> None:
    licences: Sequence[Path] = sorted(speech.glob("LICENSE-*.txt"))
    credits = speech / "ATTRIBUTION.md"
    if not credits.exists() or not licences:
        raise ValueError(f"{speech}: has no ATTRIBUTION.md and LICENSE-*.txt; build it with `audiorl data build`")
    for file in licences:
        shutil.copy(file, out / file.name)
    font = root / "usr/share/doc/fluid-soundfont-gm/copyright"
    if not font.exists():
        raise ValueError(f"{font}: missing; is fluid-soundfont-gm installed or unpacked here?")
    shutil.copy(font, out / "LICENSE-MIT.txt")
    text = ATTRIBUTION + credits.read_text(encoding="utf-8").replace("# Attribution\n", "## The speech corpus\n")
    (out / "ATTRIBUTION.md").write_text(text, encoding="utf-8")
