"""The bundled tasks by name: what they ask, that nothing leaks, that right is right and wrong is wrong."""

from __future__ import annotations

import pytest

from audiorl.data.bundled import (
    LANGUAGE_QUESTION,
    NAMES,
    bundled_languages,
    bundled_pairs,
    bundled_questions,
    bundled_set,
    bundled_steps,
    language_phrases,
)
from audiorl.data.corpus import bundled_speech, normalised
from audiorl.types import Sample

SPOKEN = {"en": "English", "es": "Spanish", "fr": "French"}


def written(sample: Sample) -> object:
    messages = [(m.role, [c if isinstance(c, str) else c.key for c in m.content]) for m in sample.messages]
    return sample.id, messages, sample.references, sample.choices, sample.task, dict(sample.metadata)


def test_languages_ask_about_every_short_recording_once() -> None:
    train, test = bundled_languages("train"), bundled_languages("test")
    utterances = {f"{u.id}/human": u for u in bundled_speech(max_seconds=4.0)}
    assert (len(train), len(test)) == (919, 344)
    assert {s.id for s in train} | {s.id for s in test} == set(utterances)
    for s in (*train, *test):
        u = utterances[s.id]
        spoken = SPOKEN[u.language]
        assert (s.references, s.choices, s.task) == ((spoken,), ("English", "Spanish", "French"), spoken)
        assert s.metadata == {"text": u.text, "speaker": u.speaker}
        system, user = s.messages
        assert (system.role, system.content, user.role) == ("system", ("",), "user")
        assert (s.audio[0].path, user.content[1]) == (u.clip.path, LANGUAGE_QUESTION)
    assert not {normalised(s.metadata["text"]) for s in train} & {normalised(s.metadata["text"]) for s in test}


def test_language_options() -> None:
    few = language_phrases(max_seconds=1.5, max_phrases=24)
    assert len(few) == 25 and max(u.duration for u in few) <= 1.5
    train, test = bundled_languages("train", 1.5, 0.5, 24), bundled_languages("test", 1.5, 0.5, 24)
    assert len(train) + len(test) == 25 and len(test) >= 12.5


def test_unseen_speakers_ask_the_same_question() -> None:
    unseen, test = bundled_set("bundled:languages/unseen"), bundled_languages("test")
    assert {s.messages[1].content[1] for s in unseen} == {LANGUAGE_QUESTION}
    assert len({s.metadata["speaker"] for s in unseen}) == 5
    assert not {s.metadata["speaker"] for s in unseen} & {s.metadata["speaker"] for s in test}
    assert all(any(letter.isalpha() for letter in s.metadata["text"]) for s in unseen)


def test_sets_by_name() -> None:
    plain = bundled_set("bundled", think=False, seed=3)
    assert list(map(written, plain)) == list(map(written, bundled_questions(False, seed=3)))
    assert list(map(written, plain)) != list(map(written, bundled_set("bundled", think=False, seed=4)))
    for split in ("train", "test"):
        named = bundled_set(f"bundled:languages/{split}", think=True, seed=5)
        assert list(map(written, named)) == list(map(written, bundled_languages(split)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bundled:languages", "bundled:languages/dev", "bundled:", "bundledx"])
def test_unknown_names_list_the_known(name: str) -> None:
    known = "choose from bundled, bundled:languages/train, bundled:languages/test"
    for make in (bundled_set, bundled_pairs, bundled_steps):
        with pytest.raises(ValueError, match=f"no bundled set is called '{name}'; {known}"):
            make(name)  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_pairs_put_the_right_answer_against_a_wrong_choice(name: str) -> None:
    pairs = bundled_pairs(name, seed=1)
    assert [p.sample.id for p in pairs] == [s.id for s in bundled_set(name)]
    for p in pairs:
        wrong = p.rejected.removeprefix("<answer>").removesuffix("</answer>")
        assert p.chosen == f"<answer>{p.sample.references[0]}</answer>"
        assert wrong in p.sample.choices and wrong not in p.sample.references
    if name == "bundled:languages/train":  # every wrong language is used
        assert {p.rejected for p in pairs if p.sample.task == "French"} == {
            "<answer>English</answer>",
            "<answer>Spanish</answer>",
        }
    again, other = bundled_pairs(name, seed=1), bundled_pairs(name, seed=2)
    assert [p.rejected for p in pairs] == [p.rejected for p in again] != [p.rejected for p in other]


def test_thoughts_are_the_first_two_words_heard() -> None:
    pairs = {p.sample.metadata["text"]: p for p in bundled_pairs("bundled", think=True)}
    pair = pairs["Followed by the pound key."]
    assert pair.chosen == "<think>followed by</think><answer>Followed by the pound key.</answer>"
    assert pair.rejected.startswith("<think>followed by</think><answer>")
    first = bundled_pairs("bundled:languages/train", think=False)[0]
    assert first.chosen == f"<answer>{first.sample.task}</answer>"


@pytest.mark.parametrize("name", ["bundled", "bundled:languages/train"])
def test_step_labels_tell_what_is_right(name: str) -> None:
    steps = bundled_steps(name)
    assert [s.sample.id for s in steps[::2]] == [s.id for s in bundled_set(name)]
    kinds = {(1.0, 0.0): 0, (0.0, 0.0): 0}
    for good, bad in zip(steps[::2], steps[1::2], strict=True):
        assert good.sample is bad.sample
        thought, answer = good.steps
        heard = " ".join(normalised(good.sample.metadata["text"]).split()[:2])
        assert thought == f"<think>I hear {heard}</think>"
        assert answer == f"<answer>{good.sample.references[0]}</answer>"
        assert good.labels == (1.0, 1.0)
        assert (bad.steps[0] == thought) == (bad.labels[0] == 1.0)
        assert bad.steps[1] in {f"<answer>{c}</answer>" for c in good.sample.choices} - {answer}
        kinds[bad.labels[0], bad.labels[1]] += 1
    assert min(kinds.values()) > 0.4 * len(steps) / 2
