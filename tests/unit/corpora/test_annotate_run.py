"""audiorl annotate from end to end: rows that readers take, resuming, changed options, filters, bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip, AudioError, probe
from audiorl.data.corpus import Utterance, corpus
from audiorl.data.manifest import read_samples
from audiorl.errors import Interrupted
from audiorl.eval.metrics.text import word_errors
from audiorl.models.families import qwen2_audio
from audiorl.speech_models.loading import GE2E
from audiorl.speech_models.protocol import CHARACTER_CTC
from audiorl.tasks.tts.texts import read_utterances
from corpora import cli
from corpora.annotate import store
from corpora.annotate.options import Annotate
from corpora.annotate.recognisers import Captioner, NamedRecogniser, PolicyRecogniser
from corpora.annotate.recordings import Recording, Source
from corpora.annotate.run import run, stages
from corpora.annotate.stages import Captions
from tests.conftest import TEXTS, make_omni
from tests.support import forks
from tests.support.annotation import RATE, calls, joined, spans_of
from tests.support.families import folder_of
from tests.support.speech_models import save_whisper, save_xvector

Options = Callable[..., Annotate]


def manifest(options: Annotate, name: str = "manifest.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (options.out / name).read_text().splitlines()]


def reasons(options: Annotate) -> list[str]:
    return [row["reason"] for row in manifest(options, "left_out.jsonl")]


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_two_recordings(options: Options, folder: Path, english: list[Utterance]) -> None:
    settings = options(licence="CC0-1.0")
    run(settings)
    rows = manifest(settings)
    assert [Path(row["audio"]).name for row in rows] == sorted(Path(row["audio"]).name for row in rows)
    for name, clips in (("a.flac", english[:3]), ("b.wav", english[3:])):
        own = [row for row in rows if Path(row["audio"]).name == name]
        for start, end in spans_of(clips):
            assert any(r["start"] < end and r["start"] + r["duration"] > start for r in own)
    row = rows[0]
    assert (
        row["id"] == f"{folder}/a.flac@{row['start']:.3f}" and row["language"] == "en" and row["licence"] == "CC0-1.0"
    )
    assert row["text"] and "confidence" not in row and "mos" not in row and 20 < row["snr"] < 70
    summary = json.loads((settings.out / "annotate.json").read_text())
    assert summary["recordings"] == 2 and summary["rows"] == len(rows) and summary["options"]["pause"] == 0.3


def test_readers_of_training_take_the_rows(options: Options) -> None:
    settings = options(licence="CC0-1.0")
    run(settings)
    rows = manifest(settings)
    path = settings.out / "manifest.jsonl"
    samples = read_samples(path, think=False, check_audio=True).samples
    assert [s.references for s in samples] == [(row["text"],) for row in rows]
    assert [(s.audio[0].start, s.audio[0].duration) for s in samples] == [(r["start"], r["duration"]) for r in rows]
    utterances = read_utterances(path, check_audio=True).samples
    assert [u.text for u in utterances] == [row["text"] for row in rows]
    with pytest.raises(ValueError, match="speaker"):  # no speaker encoder was given
        corpus(settings.out)


@pytest.mark.slow
def test_speakers_quality_captions_and_cut_clips(options: Options, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    make_omni().save(policy)
    settings = options(
        speaker=str(save_xvector(tmp_path / "xvector")), speaker_threshold=2.0, quality="dnsmos", cut=True,
        licence="CC0-1.0", caption=str(policy), sounds=True,
    )  # fmt: skip
    run(settings)
    rows = manifest(settings)
    assert {row["speaker"] for row in rows} == {"speaker_001"}
    assert all(1 <= row["mos"] <= 5 and isinstance(row["caption"], str) for row in rows)
    utterances = corpus(settings.out)
    for row, utterance in zip(rows, utterances, strict=True):
        assert "start" not in row and probe(utterance.clip).seconds == pytest.approx(row["duration"], abs=1e-3)
        assert utterance.key == row["id"]
        original = AudioClip(path=row["source"], start=row["source_start"], duration=row["duration"]).load(RATE)
        np.testing.assert_allclose(utterance.clip.load(RATE), original, atol=2 / 32768)
    files = {file for file in (settings.out / "audio").rglob("*") if file.is_file()}
    assert len(files) == len(rows)
    longest = max(row["duration"] for row in rows)
    run(options(**vars(settings) | {"min_seconds": longest}))  # clips of rows that are left out go
    assert len([file for file in (settings.out / "audio").rglob("*.flac")]) == 1
    sounds = read_samples(settings.out / "sounds.jsonl", think=False) if manifest(settings, "sounds.jsonl") else None
    assert sounds is None or all(s.references == ("",) for s in sounds.samples)


@pytest.mark.slow
def test_pocketsphinx_reads_the_prompts(options: Options, english: list[Utterance]) -> None:
    settings = options(asr=("pocketsphinx",), speeds=(1.0, 0.9), language=None, inputs=options().inputs)
    run(settings)
    rows = manifest(settings) + manifest(settings, "left_out.jsonl")
    said = " ".join(row["text"] for row in sorted(rows, key=lambda r: (r["audio"], r["start"])))
    assert word_errors(" ".join(u.text for u in english), said, "basic").rate < 0.7
    assert all(0 <= row["confidence"] <= 1 and set(row["transcripts"]) == {"pocketsphinx", "pocketsphinx at 0.9"}
               for row in rows)  # fmt: skip
    assert {(row["language"], row["language_probability"]) for row in rows} == {("en", 1.0)}  # its only language


def test_whisper_identifies_languages_and_english_recognisers_read_english_only(
    options: Options, judge: Path, tmp_path: Path
) -> None:
    whisper = save_whisper(tmp_path / "whisper")
    settings = options(asr=(str(whisper), f"{judge}=es"), language=None)
    run(settings)
    rows = [*manifest(settings), *manifest(settings, "left_out.jsonl")]
    assert {row["language"] for row in rows} <= {"en", "es"}
    for row in rows:
        assert (str(judge) in row["transcripts"]) == (row["language"] == "es")
        assert ("confidence" in row) == (row["language"] == "es")
    run(options(asr=(str(whisper), f"{judge}=es"), language=None, one_language=True, out=tmp_path / "one"))
    for name in ("a.flac", "b.wav"):
        own = [r for r in manifest(options(out=tmp_path / "one")) if r["audio"].endswith(name)]
        assert len({(r["language"], r["language_probability"]) for r in own}) == 1


def test_a_policy_of_audiorl_is_a_recogniser(options: Options, tmp_path: Path) -> None:
    make_omni().save(tmp_path / "policy")
    settings = options(asr=(str(tmp_path / "policy"),), min_seconds=0.0)
    run(settings)
    texts = [row["transcripts"][str(tmp_path / "policy")] for row in manifest(settings)]
    assert texts and all(isinstance(text, str) for text in texts)


def test_a_policy_transcribes_its_languages_only(english: list[Utterance]) -> None:
    waves = [english[0].clip.load(RATE)[: RATE // 2]] * 3
    texts = PolicyRecogniser(str(folder_of("qwen3_asr"))).transcribe(waves, RATE, ["en", "uk", "fa"])
    assert [type(text) for text in texts] == [str, type(None), str]


def test_model_types_that_audiorl_trains_are_policies(tmp_path: Path) -> None:
    def is_policy(kind: str) -> bool:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        return NamedRecogniser(str(tmp_path), None).is_policy

    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    trained = re.findall(r"^\|[^|]+\| `(\w+)` \| \d+ \|", page, re.MULTILINE)
    assert len(trained) > 15 and [kind for kind in trained if not is_policy(kind)] == ["whisper"]
    assert is_policy("qwen2_5_omni_thinker") and is_policy("qwen3_omni_moe_thinker")
    assert not any(map(is_policy, ("wav2vec2", "wavlm", "parakeet_ctc", CHARACTER_CTC, GE2E)))


# ------------------------------------------------------------------------------------------------------------- resuming


def test_a_second_run_computes_nothing_and_writes_the_same(options: Options, judge: Path) -> None:
    run(options())
    first, count = (options().out / "manifest.jsonl").read_bytes(), calls(judge)
    run(options())
    assert calls(judge) == count and (options().out / "manifest.jsonl").read_bytes() == first


def test_clips_of_the_first_run_are_no_input_of_the_second(options: Options, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "in")
    settings = options(inputs=(str(tmp_path / "in"),), out=tmp_path / "in" / "out", cut=True)
    run(settings)
    first = manifest(settings)
    run(settings)
    assert manifest(settings) == first and json.loads((settings.out / "annotate.json").read_text())["recordings"] == 2


@pytest.mark.slow
def test_a_changed_option_redoes_what_depends_on_it(
    options: Options, judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(options())
    count = calls(judge)
    ran: list[str] = []
    write = store._write

    def counted(file: Path, source: Any, results: dict[str, Any]) -> None:
        ran.append(list(results)[-1])
        write(file, source, results)

    monkeypatch.setattr(store, "_write", counted)
    run(options(min_seconds=1.0, licence="CC0-1.0", speaker_threshold=0.5))  # filters and rows
    assert ran == [] and calls(judge) == count
    run(options(quality="dnsmos"))
    assert len(ran) == 2 and calls(judge) == count  # one stage of two recordings
    run(options(quality="dnsmos", speeds=(1.0, 1.1)))
    assert calls(judge) == 2 * count
    run(options(pause=0.1))  # all stages follow the segments
    assert calls(judge) > 2 * count
    run(options(speeds=(1.0, 1.1), pause=0.1))
    many = calls(judge)
    run(options(pause=0.1))
    assert calls(judge) == many


def test_a_changed_recording_and_a_changed_model_are_done_again(options: Options, folder: Path, judge: Path,
                                                                tmp_path: Path) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("a.flac", "b.flac"):
        (copy / name).write_bytes((folder / "a.flac").read_bytes())
    settings = options(inputs=(str(copy),))
    run(settings)
    count = calls(judge)
    os.utime(copy / "b.flac", (1, 1))
    run(settings)
    assert calls(judge) == count + count // 2
    os.utime(judge, (1, 1))
    run(settings)
    assert calls(judge) == 2 * count + count // 2


def test_a_damaged_result_is_computed_again(options: Options, judge: Path) -> None:
    run(options())
    before, count = manifest(options()), calls(judge)
    for file in (options().out / "stages").rglob("*.json"):
        file.write_text(file.read_text()[:100])
    run(options())
    assert manifest(options()) == before and calls(judge) == 2 * count


def test_stopped_by_the_user(options: Options, monkeypatch: pytest.MonkeyPatch, judge: Path) -> None:
    def stopped(folder: Path, source: Any, stages: Any) -> Any:
        if source.id.endswith("b.wav"):
            raise KeyboardInterrupt
        return store.annotate(folder, source, stages)

    with monkeypatch.context() as patch:
        patch.setattr("corpora.annotate.run.annotate", stopped)
        with pytest.raises(Interrupted, match="1 of 2 recordings are done; the same command goes on"):
            run(options())
    count = calls(judge)
    run(options())
    assert count > 0 and calls(judge) <= 2 * count + 2


@pytest.mark.slow
def test_ray_writes_what_one_process_writes(options: Options, tmp_path: Path) -> None:
    run(options())
    run(options(runtime="ray", workers=2, out=tmp_path / "ray"))
    assert manifest(options()) == manifest(options(out=tmp_path / "ray"))


@pytest.mark.slow
def test_killed_at_any_moment(options: Options, folder: Path, judge: Path, tmp_path: Path) -> None:
    """Two workers end with their parent; the same command goes on with what is not done."""
    many, out = tmp_path / "many", tmp_path / "out"
    many.mkdir()
    for i in range(4):
        (many / f"{i}.flac").write_bytes((folder / "a.flac").read_bytes())
    slow = judge.read_text().replace("        with open", "        import time; time.sleep(1)\n        with open")
    judge.write_text(slow)
    command = ["-m", "audiorl.cli", "annotate", str(many), "--out", str(out), "--asr", str(judge)]
    command += ["--language", "en", "--quality", "none", "--workers", "2"]
    process = forks.start(command, tmp_path / "said")
    while not any(f'"transcripts {judge}"' in f.read_text() for f in out.rglob("*.json")):
        assert process.is_alive()
        time.sleep(0.1)
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    process.kill()
    process.join()
    assert len(children) >= 2 and not (out / "manifest.jsonl").exists()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    judge.write_text(slow.replace("sleep(1)", "sleep(0)"))
    run(options(inputs=(str(many),), out=out))
    rows = manifest(options(out=out))
    assert {Path(row["audio"]).name for row in rows} == {f"{i}.flac" for i in range(4)}
    run(options(inputs=(str(many),), out=tmp_path / "whole"))
    assert rows == manifest(options(out=tmp_path / "whole"))


# -------------------------------------------------------------------------------------------------------------- filters


def test_filters_name_their_reason_and_lose_nothing(options: Options, judge: Path) -> None:
    run(options())
    rows = manifest(options())
    middle = sorted(row["duration"] for row in rows)[len(rows) // 2]
    run(options(min_seconds=middle))
    assert len(manifest(options())) + len(reasons(options())) == len(rows)
    assert set(reasons(options())) == {f"shorter than {middle:g} s"} and len(reasons(options())) == len(rows) // 2
    assert min(row["duration"] for row in manifest(options())) == middle
    with pytest.raises(ValueError, match="no row is left; most often: agreement below 1"):
        run(options(speeds=(1.0, 2.0), min_agreement=1.0))  # half as long: fewer words
    assert all(row["text"] and row["confidence"] < 1 for row in manifest(options(), "left_out.jsonl"))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.fixture
def mixed(tmp_path: Path, english: list[Utterance]) -> Path:
    """One good recording among silence, 0.05 s, music, a broken file and one that is empty."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    time_ = np.arange(3 * RATE) / RATE
    chord = sum(0.1 * np.sin(2 * np.pi * f * time_) for f in (262, 330, 392))
    for name, wav in (
        ("good", joined(english[:2])), ("music", chord), ("short", np.full(800, 0.1)), ("silent", np.zeros(RATE)),
    ):  # fmt: skip
        soundfile.write(folder / f"{name}.wav", np.asarray(wav, np.float32), RATE)
    (folder / "broken.flac").write_bytes(b"fLaC" + bytes(range(200)))
    (folder / "empty.mp3").write_bytes(b"")
    return folder


def test_unusable_recordings_are_named_and_the_rest_goes_on(
    mixed: Path, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = options(inputs=(str(mixed),), sounds=True)
    run(settings)
    assert {Path(row["audio"]).name for row in manifest(settings)} == {"good.wav"}
    left_out = {Path(row["audio"]).name: row for row in manifest(settings, "left_out.jsonl")}
    assert {name: row["reason"] for name, row in left_out.items()} == {
        "broken.flac": "unusable audio", "empty.mp3": "unusable audio",
        "music.wav": "no speech", "short.wav": "no speech", "silent.wav": "no speech",
    }  # fmt: skip
    assert "empty (0 bytes)" in left_out["empty.mp3"]["detail"]
    assert {Path(row["audio"]).name for row in manifest(settings, "sounds.jsonl")} >= {"music.wav"}
    said = capsys.readouterr()
    assert "3 no speech, 2 unusable audio" in said.out and "broken.flac" in said.err


def test_a_recording_that_a_policy_refuses_is_named_and_the_rest_goes_on(
    options: Options, judge: Path, folder: Path, english: list[Utterance], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(folder / "a.flac", tmp_path / "in")
    soundfile.write(tmp_path / "in" / "brief.wav", english[0].clip.load(RATE)[: RATE // 2], RATE)
    policy = str(tmp_path / "policy")
    qwen2_audio.tiny(TEXTS, layers=2, vocab_size=400, window=1).save(policy)
    settings = options(inputs=(str(tmp_path / "in"),), asr=(str(judge), policy), padding=0.0)
    run(settings)
    assert [Path(row["audio"]).name for row in manifest(settings)] == ["brief.wav"]
    (left_out,) = manifest(settings, "left_out.jsonl")
    assert left_out["reason"] == "unusable audio"
    assert re.match(r".*a\.flac, [\d.]+ to [\d.]+ s: .*longer than the 1 s that qwen2_audio enc", left_out["detail"])
    with pytest.raises(AudioError, match=r"a\.flac, 0\.5 to 2 s: .*longer than the 1 s"):
        Captions(Captioner(policy, "Describe it."))(Recording(
            Source("a.flac", AudioClip(path=str(folder / "a.flac"))), {"segments": [(0.5, 2.0)]}
        ))  # fmt: skip
    slow = stages(options(asr=(policy,), speeds=(1.0, 0.8)))[0]
    assert (slow.settings["max_seconds"], stages(options())[0].settings["max_seconds"]) == (24.0, 30.0)


def test_manifests_of_known_formats_are_inputs(folder: Path, options: Options, tmp_path: Path) -> None:
    whole = dict.fromkeys(("translation", "transcription", "rationale", "clean_audio", "image"), "of the recording")
    rows = [
        {"id": "one", "audio": str(folder / "a.flac"), "start": 0.5, "duration": 4.0, "room": "kitchen", "text": "old"}
        | whole,
        {"id": "two", "audio": "missing.wav"},
        {"id": "three"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = options(inputs=(str(tmp_path / "rows.jsonl"),))
    run(settings)
    first = manifest(settings)[0]
    assert first["id"] == f"one@{first['start']:.3f}" and first["room"] == "kitchen" and first["text"] != "old"
    assert not first.keys() & whole.keys()
    assert all(row["start"] >= 0.5 and row["start"] + row["duration"] <= 4.5 for row in manifest(settings))
    assert sorted(reasons(settings)) == ["row of the manifest", "unusable audio"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asr": ()}, "no recogniser; give --asr"),
        ({"inputs": ("nowhere",)}, "nowhere: missing"),
        ({"min_agreement": 0.5}, "needs two transcripts"),
        ({"min_mos": 3.0}, "--min-mos needs --quality dnsmos"),
        ({"min_speaker_seconds": 3.0}, "needs --speaker"),
        ({"pause": -1.0}, "--pause is -1.0; give 0 to 60"),
        ({"speeds": (3.0,)}, "give numbers from 0.5 to 2"),
        ({"asr": ("JUDGE", "JUDGE")}, "each recogniser and each speed once"),
        ({"asr": ("JUDGE=es",)}, "no recogniser of --asr transcribes it"),
        ({"languages": ("es",)}, "no row would be left"),
        ({"address": "localhost:1"}, "add --runtime ray"),
    ],
)
def test_bad_options_are_one_clear_line(options: Options, judge: Path, changes: dict[str, Any], message: str) -> None:
    if "asr" in changes:
        changes = {"asr": tuple(name.replace("JUDGE", str(judge)) for name in changes["asr"])}
    with pytest.raises(ValueError, match=message):
        run(options(**changes))


def test_a_folder_of_the_users_is_left_alone(options: Options, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="not empty, and not written by this command"):
        run(options(out=tmp_path / "full"))


def test_the_command_line(folder: Path, judge: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder), "--out", str(tmp_path / "out"), "--asr", str(judge), "--quality", "none"]
    assert cli.annotate([*words, "--language", "en"]) == 0
    said = capsys.readouterr().out
    assert "2 recordings, " in said and "files that are not audio by their name: 1 (1 .txt)" in said
    with pytest.raises(ValueError, match="name audio files or folders first"):
        cli.annotate([])
    with pytest.raises(ValueError, match="needs two transcripts"):
        cli.annotate([*words, "--min-agreement", "0.5"])


# ------------------------------------------------------------------------------------------------------------- training
