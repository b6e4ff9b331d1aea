"""The recogniser that is trained here, alignment by CTC, and probabilities of texts."""

from __future__ import annotations

import math
from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest
import torch

from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.text import char_errors
from audiorl.speech_models import load_recogniser
from audiorl.speech_models.character_ctc import BLANK, CHARACTERS, CharacterCTC, Head, load, plain
from audiorl.speech_models.ctc import CTC, align_words, ctc_log_probability, ctc_path
from corpora.models.recogniser import train_character_ctc

RATE = 16_000
SPOKEN = [u for u in bundled_speech(("en",), 0.5, 1.5) if len(plain(u.text)) > 4][:8]


@pytest.fixture(scope="module")
def judge() -> CharacterCTC:
    waves = [u.clip.load(RATE) for u in SPOKEN]
    return train_character_ctc(waves, [u.text for u in SPOKEN], RATE, steps=150, batch_size=8, seed=0)


def test_it_learns_what_people_say(judge: CharacterCTC) -> None:
    heard = judge.transcribe([u.clip.load(24_000) for u in SPOKEN] + [np.zeros(0, np.float32)], 24_000)
    right = sum(h == plain(u.text) for h, u in zip(heard, SPOKEN, strict=False))
    assert right >= 7 and heard[-1] == "", heard


def test_a_saved_one_is_the_same(judge: CharacterCTC, tmp_path: Path) -> None:
    judge.save(tmp_path / "ear")
    wav = SPOKEN[1].clip.load(RATE)
    for same in (load(tmp_path / "ear"), load_recogniser(tmp_path / "ear")):
        assert same.name == "ear" and same.transcribe([wav], RATE) == judge.transcribe([wav], RATE)
    whole = (tmp_path / "ear" / "head.safetensors").read_bytes()
    (tmp_path / "ear" / "head.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"head\.safetensors"):
        load(tmp_path / "ear")


@pytest.mark.slow
def test_it_learns_from_mel_frames(tmp_path: Path) -> None:
    waves = [u.clip.load(RATE) for u in SPOKEN]
    texts = [u.text for u in SPOKEN]
    judge = train_character_ctc(waves, texts, RATE, steps=150, batch_size=8, seed=0, features="mel")
    judge.save(tmp_path)
    understood = load(tmp_path).transcribe(waves, RATE)
    assert understood == judge.transcribe(waves, RATE)
    assert sum(text == plain(u.text) for text, u in zip(understood, SPOKEN, strict=True)) >= 6, understood
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mel"', '"lpc"'))
    with pytest.raises(ValueError, match="features 'lpc' is not one of whisper, mel"):
        load(tmp_path)


def test_labels_become_text() -> None:
    """Greedy CTC by hand: a a blank a space space b reads "aa b"."""
    a, b, space = (CHARACTERS.index(c) + 1 for c in "ab ")
    best = torch.tensor([a, a, BLANK, a, space, space, b])
    assert CharacterCTC(Head()).read(torch.nn.functional.one_hot(best, len(CHARACTERS) + 1).float()) == "aa b"


@pytest.mark.parametrize(("text", "said"), [("Press 2, now!", "press two now"), ("It's  P.M.", "it s p m"), ("¿?", "")])
def test_plain_text(text: str, said: str) -> None:
    assert plain(text) == said


def test_clips_that_cannot_be_learned() -> None:
    with pytest.raises(ValueError, match="no letters"):
        train_character_ctc([np.zeros(RATE, np.float32)], ["…"], RATE, steps=1)
    with pytest.raises(ValueError, match="too long for its clip"):
        train_character_ctc([np.zeros(RATE // 5, np.float32)], ["far too many letters for this"], RATE, steps=1)


def best_path(logprobs: torch.Tensor, labels: list[int]) -> list[int]:
    """The most probable path of those that spell `labels` (0 is the blank), by trying all."""
    paths = [p for p in product(range(logprobs.shape[1]), repeat=len(logprobs)) if spelled(p) == labels]
    return list(max(paths, key=lambda p: sum(float(logprobs[t, label]) for t, label in enumerate(p))))


def spelled(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in groupby(path) if label]


@pytest.mark.parametrize("labels", [[1], [1, 2], [2, 2], [1, 2, 1]])
def test_the_best_path_of_all(labels: list[int]) -> None:
    for seed in range(5):
        logprobs = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
        spans = ctc_path(logprobs, labels, blank=0)
        path, expected = best_path(logprobs, labels), []
        for _, frames in groupby(enumerate(path), key=lambda entry: entry[1]):
            run = list(frames)
            if run[0][1]:
                expected.append((run[0][0], run[-1][0] + 1))
        assert spans == expected


@pytest.mark.parametrize("labels", [[1], [1, 2], [2, 2], [1, 2, 1]])
def test_the_probability_of_all_paths(labels: list[int]) -> None:
    logprobs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    paths = [p for p in product(range(3), repeat=5) if spelled(p) == labels]
    total = sum(math.exp(sum(float(logprobs[t, label]) for t, label in enumerate(path))) for path in paths)
    assert ctc_log_probability(logprobs, labels, blank=0) == pytest.approx(math.log(total), abs=1e-5)
    assert ctc_log_probability(logprobs[:1], [2, 2], blank=0) == -math.inf


def test_the_text_that_is_said_is_the_most_probable(judge: CharacterCTC, ctc_folder: Path) -> None:
    wavs, texts = [u.clip.load(RATE) for u in SPOKEN[:3]], [u.text for u in SPOKEN[:3]]
    right = judge.log_probabilities(wavs, RATE, texts)
    wrong = judge.log_probabilities(wavs, RATE, [*texts[1:], texts[0]])
    assert all(a > b + 2 for a, b in zip(right, wrong, strict=True))
    assert judge.log_probabilities([np.zeros(0, np.float32)], RATE, ["a"]) == [-math.inf]
    with pytest.raises(ValueError, match="has no words"):
        judge.log_probabilities(wavs[:1], RATE, ["…"])
    recogniser = CTC(str(ctc_folder), "cpu")
    together = recogniser.log_probabilities(wavs[:2], RATE, ["A, b!", "a"])
    (alone,) = recogniser.log_probabilities(wavs[:1], RATE, ["a b"])
    assert together[0] == pytest.approx(alone, abs=1e-3) and all(value < 0 for value in together)
    with pytest.raises(ValueError, match="has no words"):
        recogniser.log_probabilities(wavs[:1], RATE, ["…"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I don’t know.", ["i", "don't", "know"]),
        ("'L'homme' d'en-bas (l'an)", ["l'homme", "d'en", "bas"]),
        ("Rock 'n' roll, rock'n'roll", ["rock", "n", "roll", "rock'n'roll"]),
    ],
)
def test_an_apostrophe_in_a_word_has_its_label(ctc_folder: Path, text: str, words: list[str]) -> None:
    recogniser = CTC(str(ctc_folder), "cpu")
    labels = recogniser.parts[2].get_vocab()
    found = recogniser.words(text)
    assert found == [(word, [labels[letter] for letter in word]) for word in words]


def test_a_text_that_does_not_fit_shares_the_clip() -> None:
    assert ctc_path(torch.zeros(3, 3), [2, 2, 1], blank=0) is None  # two equal labels need a blank between them
    words = align_words(
        torch.zeros(4, 3), ["ab", "abb"], [[1, 2], [1, 2, 2]], None, 0, 2.0, lambda part: str(len(part))
    )
    assert [(w.text, w.transcript, w.start, w.end) for w in words] == [("ab", "2", 0, 1), ("abb", "2", 1, 2)]


def test_words_are_where_they_were_joined(judge: CharacterCTC) -> None:
    single = [u for u in SPOKEN if " " not in plain(u.text)][:2]
    first, second = (u.clip.load(RATE) for u in single)
    text = " ".join(u.text for u in single)
    joined = np.concatenate([first, np.zeros(RATE // 5, np.float32), second])
    words, nothing = judge.align([joined, np.zeros(0, np.float32)], RATE, [text, text])
    assert [w.text for w in words] == plain(text).split() and nothing == []
    assert all(char_errors(w.text, w.transcript, "none").rate < 0.2 for w in words)
    assert len(first) / RATE - 0.3 < words[0].end < len(first) / RATE + 0.3
    assert words[0].start == 0 and words[0].end == words[1].start
    assert words[1].end == pytest.approx(len(joined) / RATE)


def test_a_head_of_transformers_aligns(ctc_folder: Path) -> None:
    """Words follow each other without gaps up to the end of the clip, and a single word has all of the transcript."""
    recogniser = CTC(str(ctc_folder), "cpu")
    wav = SPOKEN[0].clip.load(RATE)
    first, second = recogniser.align([wav, wav[:8000]], RATE, ["A, b!", "a"])
    assert [w.text for w in first] == ["a", "b"] and first[-1].end == pytest.approx(len(wav) / RATE)
    assert first[0].end == first[1].start and len(second) == 1
    assert second[0].transcript == recogniser.transcribe([wav[:8000]], RATE)[0]
    with pytest.raises(ValueError, match=r"the character 'ж', for which"):
        recogniser.align([wav], RATE, ["ж"])
