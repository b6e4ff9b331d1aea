"""`audiorl eval sound`: recordings of scenes measure as they were made, what was changed measures worse by as much."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.config.flow import FlowConfig
from audiorl.eval.sound import RECORDINGS, SAME, UNEDITED, SoundOptions, highest, main
from audiorl.speech_models.taggers import SoundTagger, TaggerNetwork
from audiorl.tasks.sound.rows import read_sounds
from corpora.scenes.build import KINDS
from corpora.scenes.sounds import CLASSES
from tests.support.flows import tiny_flow
from tests.support.scenes import RATE, scenes, write_sounds
from tokenizers_audio.unified import UnifiedTokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    torch.manual_seed(0)
    labels = tuple(sorted(name for name, kind in CLASSES.items() if "sonic-pi" in kind.files))
    network = TaggerNetwork(len(labels), 8).eval()
    network.hidden.weight.data *= 100  # without training its embeddings are all but equal
    SoundTagger(network, labels).save(folder / "judge")
    built = scenes(folder / "scenes", write_sounds(folder / "tree"), counts=(6, 1, 1), edits=0)
    for sample in read_sounds(built / "train.jsonl").samples:
        wave, _ = soundfile.read(sample.metadata["audio"].path)
        for name, changed in {
            "turned": wave[:, ::-1],
            "late": np.concatenate([np.zeros((RATE // 4, 2)), wave])[: len(wave)],
            "hissing": wave + np.random.default_rng(0).normal(0, 0.01, wave.shape),
            "mono": wave.mean(axis=1),
            "silent": np.zeros_like(wave),
        }.items():
            (folder / name).mkdir(exist_ok=True)
            soundfile.write(folder / name / f"{sample.id}.wav", changed, RATE)
    return folder


def options(corpus: Path, out: Path, **changes: Any) -> SoundOptions:
    given = {"data": corpus / "scenes/train.jsonl", "judge": str(corpus / "judge"), "out": out}
    return SoundOptions(**{**given, **changes})


def test_what_is_wrong_is_measured(corpus: Path, tmp_path: Path) -> None:
    names = ("turned", "late", "hissing", "mono", "silent")
    first = main(options(corpus, tmp_path, sounds=(corpus / "turned",)))
    scores = main(options(corpus, tmp_path, sounds=tuple(corpus / name for name in names)))
    systems = scores["systems"]
    assert systems["turned"] == first["systems"]["turned"] and set(systems) == {RECORDINGS, *names}

    def mean(system: str, measure: str) -> float:
        return systems[system][measure]["mean"]

    recordings = systems[RECORDINGS]
    assert recordings["onset_f1"]["mean"] > 0.9 and recordings["azimuth_error"]["mean"] < 5
    assert recordings["clean"]["mean"] > 0.99 and "KL_judge" not in recordings
    samples = read_sounds(corpus / "scenes/train.jsonl").samples
    turned = [np.mean([2 * abs(e["azimuth"]) for e in s.metadata["events"]]) for s in samples]
    assert mean("turned", "azimuth_error") == pytest.approx(np.mean(turned), abs=5)
    assert mean("turned", "onset_f1") == recordings["onset_f1"]["mean"]
    assert mean("late", "onset_lag") == pytest.approx(0.25, abs=0.06) and mean("late", "onset_f1") < 0.3
    assert mean("hissing", "clean") < 0.5
    assert "azimuth_error" not in systems["mono"]
    assert mean("silent", "azimuth_error") == 90 and mean("silent", "events_right") == mean("silent", "clean") == 0
    assert systems["turned"]["FD_judge"] == pytest.approx(0, abs=1e-3)  # the judge hears the mean of both ears
    assert min(systems["silent"]["FD_judge"], systems["hissing"]["FD_judge"]) > 1e-3 > systems["turned"]["FD_judge"]
    assert (
        systems["hissing"]["KL_judge"]["low"] <= mean("hissing", "KL_judge") <= systems["hissing"]["KL_judge"]["high"]
    )
    page = (tmp_path / "page.html").read_text()
    assert "azimuth (°) ↓" in page and "semantic: " in page and page.count("<audio") >= 6 * 6
    assert json.loads((tmp_path / "scores.json").read_text())["systems"].keys() == systems.keys()


def test_flows_are_sampled_and_measured(corpus: Path, tmp_path: Path) -> None:
    policy = tiny_flow(channels=2)
    policy.save(tmp_path / "a_flow")
    assert isinstance(policy.codec, UnifiedTokenizer)
    policy.codec.save(tmp_path / "a_flow" / "codec")
    given = options(corpus, tmp_path / "out", model=(str(tmp_path / "a_flow"),), limit=3, sampling=FlowConfig(steps=3))
    first = main(given)
    assert set(first["systems"]) == {RECORDINGS, "a_flow"} and "azimuth_error" in first["systems"]["a_flow"]
    sound, rate = soundfile.read(tmp_path / "out/a_flow/made/train-00002.wav")
    assert rate == 24_000 and sound.shape[1] == 2
    lines = given.data.read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    other = tmp_path / "other" / given.data.name
    other.parent.mkdir()
    (other.parent / "audio").symlink_to(given.data.parent / "audio")
    thoughts = [{**row, "thought": row.get("thought", "") + " aesthetic: quiet"} for row in asked[:1]] + asked[1:]
    other.write_text("\n".join(map(json.dumps, thoughts)))
    made = [(tmp_path / f"out/a_flow/made/{row['id']}.wav") for row in asked[:2]]
    before = [file.stat().st_mtime_ns for file in made]
    main(replace(given, data=other))
    after = [file.stat().st_mtime_ns for file in made]
    assert after[0] > before[0] and after[1] == before[1], "what is asked with another thought is made again"
    first = main(given)
    shutil.move(tmp_path / "a_flow", tmp_path / "b" / "a_flow")
    measured = (tmp_path / "out/a_flow/sounds.jsonl").stat().st_ino
    assert main(given) == first, "nothing is made again"
    assert (tmp_path / "out/a_flow/sounds.jsonl").stat().st_ino == measured, "nor measured"
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    policy.save(tmp_path / "b" / "a_flow")
    trained = main(replace(given, model=(str(tmp_path / "b" / "a_flow"),)))
    assert trained["systems"][RECORDINGS] == first["systems"][RECORDINGS]
    assert trained["systems"]["a_flow"] != first["systems"]["a_flow"], "another flow of the same name"
    with pytest.raises(ValueError, match="seed"):
        main(replace(given, seed=1))


def test_an_id_with_a_slash_has_a_file(corpus: Path, tmp_path: Path) -> None:
    row = {**json.loads((corpus / "scenes/train.jsonl").read_text().splitlines()[0]), "id": "a/1"}
    (corpus / "scenes/slash.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "mine").mkdir()
    shutil.copy(corpus / "scenes" / row["audio"], tmp_path / "mine/a_1.flac")
    given = options(corpus, tmp_path / "out", data=corpus / "scenes/slash.jsonl", sounds=(tmp_path / "mine",))
    assert set(main(given)["systems"]) == {RECORDINGS, "mine"}


@pytest.mark.parametrize(("count", "shares"), [(1, [0, 1, 0, 0]), (2, [0.5, 1, 0.5, 0]), (3, [1, 1, 1, 0])])
def test_equally_probable_classes_share_a_place(count: int, shares: list[float]) -> None:
    assert highest(np.array([0.5, 0.9, 0.5, 0.1]), count).tolist() == shares


PITCHES = """
import numpy as np
from corpora.scenes.sounds import CLASSES

class Pitches:
    name = "pitches"
    labels = tuple(sorted(name for name, kind in CLASSES.items() if "sonic-pi" in kind.files))

    def tag(self, waves, rate):
        out = []
        for wave in waves:
            power, hz = np.abs(np.fft.rfft(wave)) ** 2, np.fft.rfftfreq(len(wave), 1 / rate)
            pitches = 200 * 1.45 ** np.arange(len(self.labels))
            out.append(np.array([power[(hz > 0.97 * f) & (hz < 1.07 * f)].sum() for f in pitches]))
        return np.array([tags / max(tags.max(), 1e-9) for tags in out], np.float32)

    def embed(self, waves, rate):
        return self.tag(waves, rate)

def load(folder, device):
    return Pitches()
"""


def test_of_edits_the_mask_and_all_else_are_measured(tmp_path: Path) -> None:
    """The sounds are tones, one pitch a class: a judge that hears pitches knows what is in the mask."""
    (tmp_path / "pitches.py").write_text(PITCHES)
    (tmp_path / "folder").mkdir()
    data = scenes(tmp_path / "scenes", write_sounds(tmp_path / "tree"), counts=(6, 1, 1), edits=2) / "edits_train.jsonl"
    quieter = tmp_path / "quieter"
    quieter.mkdir()
    for sample in read_sounds(data).samples:
        wave, rate = soundfile.read(sample.metadata["after"].path)
        soundfile.write(quieter / f"{sample.id}.flac", wave / 2, rate)
    judge = f"{tmp_path}/pitches.py:{tmp_path}/folder"
    systems = main(SoundOptions(data=data, judge=judge, out=tmp_path / "out", sounds=(quieter,)))["systems"]
    for kind in KINDS:
        found = [systems[name][f"asked_{kind}"]["mean"] for name in (RECORDINGS, UNEDITED, "quieter")]
        assert found == [1, 0, 1], kind
    assert [systems[name]["outside_snr"]["mean"] for name in (RECORDINGS, UNEDITED)] == [SAME, SAME]
    assert systems["quieter"]["outside_snr"]["mean"] == pytest.approx(20 * np.log10(2), abs=0.1)
    page = (tmp_path / "out" / "page.html").read_text()
    assert "outside (dB) ↑" in page and "Remove the" in page


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sounds": (Path("nowhere"),)}, "--sounds nowhere: no such folder"),
        ({"sounds": (Path(__file__).parent,)}, r"no sound train-00000.flac \(or .wav, .opus, .ogg …\), 6 missing"),
        ({"clap": "judge"}, "no folder of CLAP"),
        ({"judge": "foreign"}, "has no class .*; name its labels for it with --classes"),
        ({"limit": 0}, "limit"),
        ({"model": ("nowhere",)}, "nowhere: no folder codec/"),
    ],
)
def test_what_cannot_be_measured_is_refused(corpus: Path, tmp_path: Path, changes: dict, problem: str) -> None:
    if "judge" in changes:
        SoundTagger(TaggerNetwork(2, 2).eval(), ("siren", "rain")).save(tmp_path / "foreign")
        changes = {"judge": str(tmp_path / "foreign")}
    if "clap" in changes:
        changes = {"clap": str(corpus / "judge")}
    with pytest.raises(ValueError, match=problem):
        main(options(corpus, tmp_path / "out", **changes))
