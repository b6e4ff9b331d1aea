"""The experiment on recognition runs to its tables, and its rows keep speakers and texts apart."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from audiorl.data.corpus import bundled_speech, unseen_speakers
from audiorl.models.families.whisper import tiny
from tests.support.tools import load_tool, run_tool


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """The bundled recordings in the form of a corpus in six languages."""
    folder, names = tmp_path / "corpus", ("en", "es", "fr", "it", "ca", "ru")
    folder.mkdir()
    rows = []
    for n, u in enumerate(bundled_speech(max_seconds=4.0)):
        language = names[n % len(names)]
        speaker = "IvrvoiceRU" if language == "ru" else language
        row = {"id": u.id, "key": u.key, "language": language, "text": u.text, "audio": str(u.clip.path)}
        rows.append(row | {"duration": u.duration, "speaker": speaker, "translation": "", "licence": u.licence})
    stranger = unseen_speakers()[0]
    rows[0]["text"] = stranger.text  # said by somebody who is measured
    rows[1]["speaker"] = stranger.speaker
    (folder / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_share_neither_texts_nor_unseen_speakers(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tool("measure_recognition", monkeypatch).write_rows(tmp_path / "out", built, False)
    train, held_out, retention = (
        read(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "held_out", "retention")
    )
    keys = [{row["id"].split("/", 1)[1] for row in rows} for rows in (train, held_out)]
    assert not keys[0] & keys[1] and len(held_out) > 20 and len(retention) == 60
    assert {row["language"] for row in train} == {"en", "es", "fr", "it", "ca"} and retention[0]["language"] == "ru"
    strangers = unseen_speakers()
    said = [*train, *held_out, *retention]
    assert not {row["text"] for row in said} & {u.text for u in strangers}
    assert not {row["speaker"] for row in said} & {u.speaker for u in strangers}


def test_a_corpus_without_a_language(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (built / "manifest.jsonl").read_text().splitlines()
    (built / "manifest.jsonl").write_text("\n".join(line for line in lines if '"language": "it"' not in line))
    with pytest.raises(ValueError, match="no speech in it; build it with all sources"):
        load_tool("measure_recognition", monkeypatch).write_rows(tmp_path / "out", built, False)


@pytest.mark.slow
def test_a_seed_is_trained_once_and_measured_on_every_set(built: Path, tmp_path: Path) -> None:
    tiny().save(tmp_path / "whisper")
    places = ["--corpus", str(built), "--path", str(tmp_path / "whisper"), "--out", str(tmp_path / "out")]
    run = partial(run_tool, "measure_recognition", "--quick", *places)
    assert "grpo 1/1" in run() and "grpo 1/1" not in run()
    words, characters, other = (tmp_path / "out" / "table.md").read_text().split("\n\n")
    for table in (words, characters):
        assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| known", "| unseen", "| retention"]
    assert "| no_speech, no word written, %" in other
