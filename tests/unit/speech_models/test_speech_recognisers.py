"""Recognisers of transformers: what its own classes say, the same in any batch, errors that name the file."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from transformers import (
    AutoModelForCTC,
    AutoTokenizer,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from audiorl.speech_models import load_recogniser, load_speech_detector
from audiorl.speech_models.ctc import CTC, frames
from audiorl.speech_models.recognisers import PROMPT, FasterWhisper, WhisperRecogniser
from tests.support.speech_models import save_whisper

RATE = 16_000


def test_whisper_says_what_transformers_says(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    recogniser = load_recogniser(whisper_folder, language="es", batch_size=3)
    assert isinstance(recogniser, WhisperRecogniser) and recogniser.name == "whisper"
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder)
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)
    tokenizer = WhisperTokenizer.from_pretrained(whisper_folder)
    wanted = []
    for wav in clips:
        features = extractor(wav, sampling_rate=RATE, return_tensors="pt").input_features
        ids = model.generate(features, language="es", task="transcribe", max_new_tokens=28, do_sample=False)
        wanted.append(tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    assert recogniser.transcribe(clips, RATE) == wanted
    assert len(set(wanted)) > 1 and all(wanted)
    assert recogniser.transcribe([clips[2]], RATE) == [wanted[2]]


def test_whisper_hears_long_clips_window_by_window(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    recogniser = WhisperRecogniser(str(whisper_folder), language="en", max_new_tokens=6)
    long = np.concatenate([clips[0], clips[1], clips[2], clips[0]])  # of 4.6 s, 3 s at a time
    texts = recogniser.transcribe([clips[1], long], RATE)
    assert texts[0] == recogniser.transcribe([clips[1]], RATE)[0]
    assert len(texts[1].encode()) > 6  # more than one window's tokens


def test_whisper_scores_texts_as_transformers_does(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    """The loss of transformers is the mean of -ln p over the labels, prompt tokens included."""
    recogniser = load_recogniser(whisper_folder, language="es", batch_size=3)
    assert isinstance(recogniser, WhisperRecogniser)
    texts = ["hola", " uno dos tres ", "你好"]
    written = [" hola", " uno dos tres", "你好"]  # as Whisper writes them
    values = recogniser.log_probabilities([*clips[:3], clips[0][:0]], RATE, [*texts, "hola"])
    assert values[3] == -math.inf
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder)
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)
    tokenizer = WhisperTokenizer.from_pretrained(whisper_folder, language="es", task="transcribe")
    for clip, text, value in zip(clips, written, values, strict=False):
        features = extractor(clip, sampling_rate=RATE, return_tensors="pt").input_features
        ids = torch.tensor([tokenizer(text).input_ids])
        labels = torch.where(torch.arange(ids.shape[1] - 1) < len(tokenizer.prefix_tokens) - 1, -100, ids[:, 1:])
        loss = model(input_features=features, decoder_input_ids=ids[:, :-1], labels=labels).loss
        assert value == pytest.approx(-float(loss.detach()) * int((labels >= 0).sum()), rel=1e-4)
    with pytest.raises(ValueError, match="give the language"):
        WhisperRecogniser(str(whisper_folder)).log_probabilities(clips[:1], RATE, ["hola"])
    with pytest.raises(ValueError, match="has no words"):
        recogniser.log_probabilities(clips[:1], RATE, [" "])


def test_a_text_longer_than_whisper_writes_has_no_probability(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    """It has 32 tokens: 4 before the text, the space, 27 letters; the end is only predicted."""
    recogniser = load_recogniser(whisper_folder, language="es")
    assert isinstance(recogniser, WhisperRecogniser)
    (fits,) = recogniser.log_probabilities(clips[:1], RATE, ["a" * 27])
    values = recogniser.log_probabilities([*clips[:2], clips[0]], RATE, ["a" * 28, "a" * 300, "a" * 27])
    assert values == [-math.inf, -math.inf, pytest.approx(fits, rel=1e-4)] and math.isfinite(fits)


def test_whisper_writes_as_much_as_it_can() -> None:
    """Half a minute of Hindi or Thai has 300 tokens and more."""
    assert WhisperRecogniser("whisper").max_new_tokens == WhisperConfig().max_target_positions - PROMPT


@pytest.mark.parametrize(("device", "parts"), [("auto", ("auto", 0)), ("cuda", ("cuda", 0)), ("cuda:1", ("cuda", 1))])
def test_ctranslate2_takes_a_device_and_its_index(
    device: str, parts: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(WhisperModel=lambda path, **options: (options["device"], options["device_index"]))
    monkeypatch.setitem(sys.modules, "faster_whisper", package)
    assert FasterWhisper("folder", device=device).model == parts


def test_whisper_identifies_the_language_that_transformers_detects(
    whisper_folder: Path, clips: list[np.ndarray]
) -> None:
    recogniser = WhisperRecogniser(str(whisper_folder), batch_size=3)
    assert recogniser.multilingual
    probabilities = recogniser.identify([*clips, clips[0][:0]], RATE)
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder)
    extractor = WhisperFeatureExtractor.from_pretrained(whisper_folder)
    tokens = model.generation_config.lang_to_id
    for wav, row in zip(clips, probabilities, strict=False):
        features = extractor(wav[: 3 * RATE], sampling_rate=RATE, return_tensors="pt").input_features
        detected = int(model.detect_language(input_features=features)[0])
        assert tokens[f"<|{max(row, key=row.__getitem__)}|>"] == detected and sum(row.values()) == pytest.approx(1)
    assert probabilities[-1] == {}


def test_whisper_transcribes_each_clip_in_its_language(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    recogniser = load_recogniser(whisper_folder, batch_size=2)
    codes = ["es", "en", "es", "en"]
    alone = [
        load_recogniser(whisper_folder, language=c).transcribe([w], RATE)[0] for w, c in zip(clips, codes, strict=True)
    ]
    assert isinstance(recogniser, WhisperRecogniser) and recogniser.transcribe(clips, RATE, languages=codes) == alone
    with pytest.raises(ValueError, match=r"no language 'fr'; it has en, es"):
        recogniser.transcribe(clips[:1], RATE, languages=["fr"])


def test_an_english_whisper_identifies_no_language(tmp_path: Path, clips: list[np.ndarray]) -> None:
    recogniser = WhisperRecogniser(str(save_whisper(tmp_path / "english", multilingual=False)))
    assert not recogniser.multilingual
    with pytest.raises(ValueError, match="identifies no languages; give a multilingual one"):
        recogniser.identify(clips[:1], RATE)


def test_silero_separates_speech_from_noise(clips: list[np.ndarray]) -> None:
    detector = load_speech_detector()
    noise = 0.01 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    wav = np.concatenate([noise, clips[1], noise])
    before = wav.copy()
    probabilities = detector.probabilities(wav, RATE)
    np.testing.assert_array_equal(wav, before)
    assert len(probabilities) == -(-len(wav) // 512) and probabilities.max() > 0.9
    assert probabilities[: RATE // 512 - 5].max() < 0.3 and len(detector.probabilities(wav[:0], RATE)) == 0


def test_ctc_says_what_transformers_says(ctc_folder: Path, clips: list[np.ndarray]) -> None:
    recogniser = load_recogniser(ctc_folder, batch_size=4)
    assert isinstance(recogniser, CTC)
    model = AutoModelForCTC.from_pretrained(ctc_folder).eval()
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(ctc_folder)
    tokenizer = AutoTokenizer.from_pretrained(ctc_folder)
    wanted = []
    with torch.no_grad():
        for wav in clips:
            logits = model(extractor(wav, sampling_rate=RATE, return_tensors="pt").input_values).logits
            assert logits.shape[1] == frames(model, len(wav))
            wanted.append(tokenizer.batch_decode(logits.argmax(-1))[0].strip())
    assert recogniser.transcribe(clips, RATE) == wanted
    assert len(set(wanted)) > 2 and min(map(len, wanted)) > 2


def test_answers_do_not_depend_on_the_batch(ctc_folder: Path, clips: list[np.ndarray]) -> None:
    together = load_recogniser(ctc_folder, batch_size=4).transcribe(clips, RATE)
    alone = [load_recogniser(ctc_folder, batch_size=1).transcribe([wav], RATE)[0] for wav in clips]
    assert together == alone
    assert load_recogniser(ctc_folder, batch_size=2).transcribe(clips[::-1], RATE) == together[::-1]


def test_nothing_to_hear_is_an_empty_text(ctc_folder: Path, whisper_folder: Path, clips: list[np.ndarray]) -> None:
    nothing = np.zeros(0, np.float32)
    for folder in (ctc_folder, whisper_folder):
        recogniser = load_recogniser(folder, language="en")
        texts = recogniser.transcribe([nothing, clips[0], nothing], RATE)
        assert texts[0] == texts[2] == "" and texts[1] == recogniser.transcribe([clips[0]], RATE)[0]
        assert recogniser.transcribe([], RATE) == []
        assert len(recogniser.transcribe([np.zeros(3, np.float32)], RATE)) == 1  # shorter than a frame


@pytest.mark.parametrize(
    ("wav", "rate", "message"),
    [
        (np.array([0.0, np.nan], np.float32), RATE, "waveform 1: 1 of 2 samples are NaN"),
        (np.zeros((2, 10), np.float32), RATE, r"waveform 1: float32 of shape \(2, 10\)"),
        (np.zeros(10, np.int16), RATE, "waveform 1: int16"),
        *((np.zeros(10, np.float32), rate, "sample_rate") for rate in (0, -1, 16_000.5)),
    ],
)
def test_what_is_no_waveform(ctc_folder: Path, wav: np.ndarray, rate: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recogniser(ctc_folder).transcribe([np.zeros(10, np.float32), wav], rate)


def test_folders_that_are_no_recogniser(ctc_folder: Path, xvector_folder: Path, tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_recogniser(folder).transcribe([np.zeros(100, np.float32)], RATE)

    refused(tmp_path / "nowhere", "nowhere: neither a local folder nor")
    refused(tmp_path, r"config\.json: missing")
    for config, message in (("{", r"config\.json: not JSON"), ("[]", "no model_type")):
        (tmp_path / "config.json").write_text(config)
        refused(tmp_path, message)
    refused(xvector_folder, r"weight '.*' .*is missing from the checkpoint")
    copy = tmp_path / "copy"
    shutil.copytree(ctc_folder, copy)
    wrong = json.loads((copy / "config.json").read_text()) | {"intermediate_size": 128}
    weights = (copy / "model.safetensors").read_bytes()
    with_nan = load(weights) | {"lm_head.bias": torch.full((32,), math.nan)}
    for name, content, message in (
        ("config.json", json.dumps(wrong).encode(), "is of another shape in the checkpoint"),
        ("model.safetensors", weights[: len(weights) // 2], r"model\.safetensors: damaged"),
        ("model.safetensors", save(with_nan), "weight 'lm_head.bias' holds values that are not finite"),
        ("preprocessor_config.json", b"", "the feature extractor cannot be read"),
    ):
        (copy / name).write_bytes(content)
        refused(copy, message)
        shutil.copy(ctc_folder / name, copy / name)


@pytest.mark.slow
def test_pocketsphinx_recognises_human_speech(speech) -> None:
    pytest.importorskip("pocketsphinx")
    from audiorl.eval.metrics.text import wer

    recogniser = load_recogniser("pocketsphinx")
    spoken = [u for u in speech if u.language == "en" and len(u.text.split()) >= 6][:3]
    waves = [u.clip.load(RATE) for u in spoken]
    texts = recogniser.transcribe(waves, RATE)
    assert wer([u.text for u in spoken], texts, "basic").rate < 0.5
    assert recogniser.transcribe(waves[::-1], RATE) == texts[::-1]  # no state goes from clip to clip
    assert recogniser.transcribe([np.zeros(0, np.float32)], RATE) == [""]


def test_whisper_without_numerals_writes_no_digit(whisper_folder: Path, clips: list[np.ndarray]) -> None:
    """Of a model in which, whatever the state, either "7" or "8" is the most probable token."""
    words = WhisperRecogniser(str(whisper_folder), language="en", max_new_tokens=6, numerals=False)
    digits = WhisperRecogniser(str(whisper_folder), language="en", max_new_tokens=6)
    model, _, tokenizer = digits.parts
    seven, eight = (tokenizer.convert_tokens_to_ids(digit) for digit in "78")
    with torch.no_grad():
        model.proj_out.weight[seven] *= 100
        model.proj_out.weight[eight] = -model.proj_out.weight[seven]
    words.__dict__["parts"] = digits.parts
    assert {seven, eight} <= {*words.suppressed} and not {*digits.suppressed} & {seven, eight}
    assert set(digits.transcribe(clips[:1], RATE)[0]) <= {"7", "8"}
    (text,) = words.transcribe(clips[:1], RATE)
    assert not any(c.isdigit() for c in text)
