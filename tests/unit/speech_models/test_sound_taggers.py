"""Taggers: the small one learns and comes back as it was saved, others are found by their folders."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, PreTrainedTokenizerFast

from audiorl.audio import AudioClip
from audiorl.models.tiny import tiny_tokenizer
from audiorl.speech_models import load_tagger
from audiorl.speech_models.taggers import CLAP, Renamed, SoundTagger, TaggerNetwork, YAMNet, log_mel
from audiorl.tasks.sound.rows import read_sounds
from audiorl.types import Message, Sample
from corpora.scenes.tagger import PLACE, _varied, frames_of, right, targets_of, train_tagger
from tests.support.scenes import scenes, write_sounds

RATE = 16_000


def tone(pitch: float, seconds: float = 1.0, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def test_frames_are_those_that_yamnet_reads() -> None:
    """The bands and the times of Plakal and Ellis' front end, on a tone whose place in them is known."""
    frames = log_mel(np.concatenate([np.zeros(RATE, np.float32), tone(1000)]))
    assert frames.shape == (1 + (2 * RATE - 512) // 160, 64)
    mels = 2595 * np.log10(1 + np.array([125, 1000, 7500]) / 700)
    assert frames[-1].argmax() == round((mels[1] - mels[0]) / (mels[2] - mels[0]) * 65 - 1)
    assert frames[0] == pytest.approx(np.log(0.001)) and frames[150].max() > 2
    assert log_mel(np.zeros(10, np.float32)).shape == (96, 64)


@pytest.mark.slow
def test_a_tagger_learns_the_classes_of_scenes(tmp_path: Path) -> None:
    corpus = scenes(tmp_path / "scenes", write_sounds(tmp_path / "tree"), counts=(60, 12, 12), edits=0)
    tagger = train_tagger(read_sounds(corpus / "train.jsonl").samples, steps=120, batch_size=12, width=8)
    assert right(tagger, read_sounds(corpus / "new_combinations.jsonl").samples) > 0.6  # by chance two in nine
    tagger.save(tmp_path / "tagger")
    again = load_tagger(tmp_path / "tagger")
    waves = [tone(440), tone(660, 2.5)]
    assert again.labels == tagger.labels and len(again.labels) == 9
    assert np.array_equal(again.tag(waves, RATE), tagger.tag(waves, RATE))
    assert again.embed(waves, RATE).shape == (2, 64)


def test_places_of_events_are_those_of_frames_whatever_the_rows_say_of_their_length() -> None:
    """An event is loud, all else silent: also in scenes that are turned in time."""
    wave = np.concatenate([np.zeros(RATE, np.float32), tone(440, 1.28), np.zeros(2 * RATE, np.float32)])
    events = [{"name": "a", "start": 1.0, "end": 2.2}]
    audio = AudioClip(array=wave, sample_rate=RATE)
    scene = Sample("s", (Message("user", ("x",)),), metadata={"audio": audio, "events": events, "duration": 2.5})
    frames = frames_of([scene] * 8)
    targets = targets_of([scene] * 8, ["a"], frames.shape[1] // PLACE)
    assert frames.shape[1] == PLACE * targets.shape[1]
    for one, target in zip(*_varied(frames, targets, random.Random(0)), strict=True):
        loud = one.amax(1).reshape(-1, PLACE).mean(1)
        assert loud[target[:, 0] == 1].min() > loud[target[:, 0] == 0].max()


def test_a_sound_has_the_same_tags_alone_and_beside_others_and_at_another_rate() -> None:
    torch.manual_seed(0)
    tagger = SoundTagger(TaggerNetwork(3, 4).eval(), ("a", "b", "c"))
    together = tagger.tag([tone(440), tone(300, 2.0)], RATE)
    assert np.array_equal(together[:1], tagger.tag([tone(440)], RATE))
    assert together[0] == pytest.approx(tagger.tag([tone(440, rate=48_000)], 48_000)[0], abs=0.01)
    assert ((together > 0) & (together < 1)).all()


def test_a_class_is_as_probable_as_the_most_probable_of_its_labels() -> None:
    tagger = SoundTagger(TaggerNetwork(3, 4).eval(), ("moo", "bleat", "cattle"))
    renamed = Renamed.of(tagger, {"cow": ["moo", "cattle"], "sheep": ["bleat"]})
    own, theirs = renamed.tag([tone(440)], RATE)[0], tagger.tag([tone(440)], RATE)[0]
    assert own.tolist() == [max(theirs[0], theirs[2]), theirs[1]] and renamed.labels == ("cow", "sheep")
    with pytest.raises(ValueError, match="class 'cow': sound-tagger has no label 'neigh'"):
        Renamed.of(tagger, {"cow": ["neigh"]})


def save_clap(folder: Path, fused: bool = False) -> Path:
    """A random CLAP that hears a second at a time."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(["a bell", "a cow, a moo", "The sound of"], 300)
    text = dict(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    text |= dict(intermediate_size=16, max_position_embeddings=64, pad_token_id=1)
    bands = 64 if fused else 16  # the extractor shrinks a long clip to 64
    audio = dict(hidden_size=8, patch_embeds_hidden_size=4, depths=[1, 1], num_attention_heads=[1, 1], spec_size=64)
    audio |= dict(
        num_mel_bins=bands, window_size=4, num_hidden_layers=2, patch_size=4, patch_stride=[4, 4], enable_fusion=fused
    )
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=8)).eval()
    model.save_pretrained(folder)
    truncation = "fusion" if fused else "rand_trunc"
    features = ClapFeatureExtractor(feature_size=bands, sampling_rate=RATE, max_length_s=1, truncation=truncation)
    features.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fused", [False, True])
def test_clap_hears_the_whole_of_a_long_clip_always_the_same(tmp_path: Path, fused: bool) -> None:
    clap = CLAP(str(save_clap(tmp_path, fused)), {})
    wav = np.concatenate([tone(200 + 300 * k, 0.5) for k in range(6)])
    before = np.random.get_state()[1].copy()
    first, again = (clap.embed([wav], RATE)[0] for _ in range(2))
    assert np.array_equal(first, again) and np.array_equal(before, np.random.get_state()[1])
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    if not fused:
        parts = clap.embed([wav[i * RATE : (i + 1) * RATE] for i in range(3)], RATE).mean(0)
        assert first == pytest.approx(parts / np.linalg.norm(parts), abs=1e-5)
        assert clap.embed([wav[:RATE]], RATE)[0] != pytest.approx(first, abs=1e-4)


def test_clap_of_a_local_folder_scores_sounds_with_texts(tmp_path: Path) -> None:
    clap = load_tagger(save_clap(tmp_path), {"bell": ["a bell"], "cow": ["a cow", "a moo"]})
    assert isinstance(clap, CLAP) and clap.labels == ("bell", "cow")
    waves = [tone(440), tone(900)]
    tags = clap.tag(waves, RATE)
    assert tags.shape == (2, 2) and tags.sum(axis=1) == pytest.approx([1, 1], abs=1e-5)
    (both,) = [clap.similarities(waves, RATE, ["a bell", "a cow"])]
    assert both[1] == pytest.approx(float(clap.embed([waves[1]], RATE)[0] @ clap.embed_texts(["a cow"])[0]), abs=1e-6)
    assert all(-1 <= x <= 1 for x in both)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "passt"},
            "passt tags no sounds; .*PaSST, OpenL3, Synchformer and Audiobox need a file of yours",
        ),
        (
            {"model_type": "audiorl_sound_tagger", "labels": "a", "width": 4},
            "config.json, field 'labels': 'a' is not a list",
        ),
        ({"model_type": "yamnet_w8a8", "labels": ["a"]}, "config.json, field 'input': missing"),
    ],
)
def test_folders_that_tag_nothing_are_refused(tmp_path: Path, config: dict, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=problem):
        load_tagger(tmp_path).tag([tone(440)], RATE)


def test_yamnet_reads_windows_of_its_own_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scales and windows, on a session that returns what it was given; the network itself is not in the package."""
    config = {"model_type": "yamnet_w8a8", "labels": ["a", "b"], "input": [0.05, 144], "output": [0.5, 10]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen: list[np.ndarray] = []

    class Session:
        def run(self, outputs: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            seen.append(inputs["audio"])
            return [np.array([[10 + len(seen), 10]], np.uint8)]

    yamnet = load_tagger(tmp_path)
    monkeypatch.setitem(yamnet.__dict__, "_session", Session())
    assert isinstance(yamnet, YAMNet)
    tags = yamnet.tag([tone(440, 2.0)], RATE)
    assert [w.shape for w in seen] == [(1, 1, 96, 64)] * 4 and seen[0].dtype == np.uint8, "the last is half silence"
    assert seen[3][0, 0, 49].max() > seen[3][0, 0, 60].max() == 6, "2 s end in it"
    assert seen[1][0, 0, 0] == pytest.approx(np.clip(np.round(log_mel(tone(440, 2.0))[48] / 0.05 + 144), 0, 255))
    assert tags[0] == pytest.approx([1 / (1 + np.exp(-2.0)), 0.5])
