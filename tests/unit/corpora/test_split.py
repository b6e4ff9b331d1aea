"""Rows of `audiorl data split`: nothing that is measured is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audiorl.data.corpus import bundled_speech, unseen_speakers
from audiorl.data.manifest import read_samples
from corpora import cli
from corpora.split import Selection, split

STRANGER = unseen_speakers()[0]


def manifest(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    audio = str(bundled_speech()[0].clip.path)
    base = {"language": "es", "audio": audio, "duration": 1.0, "translation": "", "licence": "CC0-1.0", "speaker": "A"}
    (folder / "manifest.jsonl").write_text("".join(json.dumps(base | row) + "\n" for row in rows))
    return folder


def ids(path: Path) -> set[str]:
    return {json.loads(line)["id"] for line in path.read_text().splitlines()}


def test_no_measured_text_or_speaker_is_trained_on(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": f"es/{n}", "key": f"k{n}", "text": f"palabra {n}", "translation": f"word {n}"} for n in range(40)
    ]
    rows += [{**row, "id": f"robot/{n}", "speaker": "espeak-ng es+m1"} for n, row in enumerate(rows)]
    rows += [
        {"id": "said", "key": "said", "text": STRANGER.text.upper() + "!"},
        {"id": "meant", "key": "meant", "text": "otra cosa", "translation": STRANGER.translation},
        {"id": "stranger", "key": "stranger", "text": "hola", "speaker": STRANGER.speaker},
        {"id": "long", "key": "long", "text": "largo", "duration": 9.0},
        {"id": "other", "key": "other", "text": "ciao", "language": "it"},
    ]
    corpus, out = manifest(tmp_path / "corpus", rows), tmp_path / "rows"
    options = ["--unseen", "unseen_speakers", "--languages", "es", "--held-out", "0.25"]
    assert cli.data(["split", str(corpus), "--out", str(out), *options]) == 0
    train, held_out, unseen = (ids(out / f"{name}.jsonl") for name in ("train", "held_out", "unseen"))
    assert len(train) == 60 and len(held_out) == 10 and all(id.startswith("es/") for id in held_out)
    keys = [{id.split("/")[1] for id in part} for part in (train, held_out)]
    assert not keys[0] & keys[1] and keys[0] | keys[1] == {str(n) for n in range(40)}
    spanish = [u for u in unseen_speakers() if u.language == "es" and 0.4 <= u.duration <= 8]
    assert unseen == {u.id for u in spanish}
    samples = read_samples(str(out / "unseen.jsonl"), think=False).samples
    assert samples[0].audio[0].load(16_000).size > 0 and samples[0].references == (spanish[0].text,)


def test_every_utterance_is_in_a_set_or_counted(tmp_path: Path) -> None:
    said = bundled_speech()
    result = split(said, [STRANGER], 0.1, Selection(("en", "es"), min_words=2))
    assert len(result.train) + len(result.held_out) + sum(result.left_out.values()) == len(said)
    reasons = {"another language", "too short or too long", "too few words", "text of an unseen folder"}
    assert set(result.left_out) == reasons
    assert result.held_out == split(said, [STRANGER], 0.1, Selection(("en", "es"), min_words=2)).held_out
    assert result.held_out != split(said, [STRANGER], 0.1, Selection(("en", "es"), min_words=2), seed=1).held_out


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no training utterances are left, of \d+: \d+ another language"):
        split(bundled_speech(), [], 0.1, Selection(("de",)))
    with pytest.raises(ValueError, match="no held-out utterances"):
        split(bundled_speech(), [], 0.0)
    with pytest.raises(ValueError, match="no unseen utterances"):
        split(bundled_speech(), [STRANGER], 0.1, Selection(("fr",)))
    with pytest.raises(ValueError, match="audiorl data split CORPUS --out ROWS"):
        cli.data(["split", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="data build, data split, data build-qa"):
        cli.data(["splti"])
