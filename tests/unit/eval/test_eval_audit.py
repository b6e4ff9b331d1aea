"""What the right audio adds to answers: on a model that learned to listen, and on models whose audio is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from audiorl import cli
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import ListeningConfig, ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.data.views import silence, swapped
from audiorl.eval._listening import audio_gains, check_frames, gain_metrics, verdict
from audiorl.eval._questions import most_probable_choices
from audiorl.eval.audit import AuditOptions, main
from audiorl.models import AudioPolicy
from audiorl.models import policy as policy_module
from audiorl.models.examples import Example, experience
from audiorl.models.families import qwen_omni
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.hooks import check_listening
from audiorl.types import Message, Sample
from tests.conftest import TEXTS, ask
from tests.support.learning import learn

ANSWERS = ("yes", "no", "why", "yes why", "no no", "why no")


@pytest.fixture(scope="module")
def questions(speech: list[Utterance]) -> list[Sample]:
    """Six recordings with the same question, each with another answer: only the audio tells them apart."""
    return [
        replace(ask(speech[25 * i].clip, name=f"q-{i}"), references=(answer,), task=("a", "b")[i % 2])
        for i, answer in enumerate(ANSWERS)
    ]


def learned(
    questions: Sequence[Sample], view: Callable[[Sample], Sample] = lambda s: s, steps: int = 50
) -> AudioPolicy:
    """A tiny model with Whisper's encoder that learned the answers by heart; `view` is what it is given in training."""
    policy = qwen_omni.tiny(TEXTS, hidden=64, layers=2, vocab_size=400, config=ModelConfig(audio="projector"))
    learn(policy, [Example(view(s), s.references[0]) for s in questions], steps)
    return policy


@pytest.fixture(scope="module")
def listener(questions: list[Sample]) -> AudioPolicy:
    return learned(questions)


def examples(questions: Sequence[Sample]) -> list[Example]:
    return [Example(s, s.references[0]) for s in questions]


def test_a_model_that_listens(listener: AudioPolicy, questions: list[Sample]) -> None:
    gains = audio_gains(listener, examples(questions))
    assert [g.view for g in gains] == ["silence", "noise", "swap"] and all(g.nats > 0.4 for g in gains)
    assert verdict(gains).word == "listens"
    metrics = gain_metrics(gains, [s.task for s in questions])
    assert metrics["audio/gain_swap"] == pytest.approx(
        (metrics["audio/gain_swap/a"] + metrics["audio/gain_swap/b"]) / 2
    )
    by_hand = []
    for view in (questions[0], replace(questions[0], messages=silent(0, questions))):
        laid_out = experience(listener, Example(view, questions[0].references[0]))
        with torch.no_grad():
            by_hand.append(float(listener.forward(pack_experiences([laid_out])).logprobs.mean()))
    assert gains[0].per_sample[0] == pytest.approx(by_hand[0] - by_hand[1], abs=1e-5)
    unclear = verdict([replace(gains[0], nats=0.1, interval=(0.0, 0.2))], 0.1)
    assert (unclear.word, unclear.reason[:42]) == ("unclear", "the interval over silence contains 0.1: me")


def silent(i: int, questions: Sequence[Sample]) -> tuple[Message, ...]:
    length = len(questions[i].audio[0].load(16_000))
    return ask(AudioClip(array=np.zeros(length, np.float32), sample_rate=16_000)).messages


def test_a_model_that_was_trained_without_its_audio(questions: list[Sample]) -> None:
    """As where features are dropped on the way to the loss."""

    def deafened(sample: Sample) -> Sample:
        return replace(sample, messages=silent(0, questions))

    result = verdict(audio_gains(learned(questions, deafened, 15), examples(questions)))
    assert result.word == "ignores_audio" and "the right audio adds" in result.reason


def rotated(encoded: list[Tensor]) -> list[Tensor]:
    """As where a collator sorts or repeats clips in another order than prompts."""
    longest = max(map(len, encoded))
    filled = [torch.nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x in encoded]
    return [other[: len(x)] for x, other in zip(encoded, filled[1:] + filled[:1], strict=True)]


def repeated(encoded: list[Tensor]) -> list[Tensor]:
    """As where the audio of a batch is read from its first row."""
    return [encoded[0].repeat(20, 1)[: len(x)] for x in encoded]


@pytest.mark.parametrize("fault", [rotated, repeated])
def test_audio_of_another_prompt_in_the_forward_pass(
    fault: Callable[[list[Tensor]], list[Tensor]],
    listener: AudioPolicy,
    questions: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = AudioPolicy.encode_audio
    monkeypatch.setattr(policy_module.AudioPolicy, "encode_audio", lambda self, *of: fault(encode(self, *of)))
    assert verdict(audio_gains(listener, examples(questions))).word == "ignores_audio"


def test_features_that_are_too_long(
    listener: AudioPolicy, questions: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = [s.audio[0] for s in questions]
    check_frames(listener, clips)
    encoder_output = listener.audio.encoder_output
    longer = lambda clip: torch.nn.functional.pad(encoder_output(clip), (0, 0, 0, 1))  # noqa: E731
    monkeypatch.setattr(listener.audio, "encoder_output", longer)
    with pytest.raises(ValueError, match=r"audio tokens, but \d+ samples have \d+"):
        check_frames(listener, clips)


def test_the_check_of_a_run(listener: AudioPolicy, questions: list[Sample], capsys: pytest.CaptureFixture[str]) -> None:
    config = ListeningConfig(every=1, prompts=5, min_gain=0.1)
    engine = HFEngine(listener, SamplingConfig(max_new_tokens=6))
    rollouts = engine.generate([Request(s, 2, seed=1) for s in questions])
    metrics = check_listening(listener, rollouts, config, 8192)
    assert metrics["audio/gain_silence"] > 0.1 and not capsys.readouterr().err
    strict = replace(config, min_gain=50.0)
    check_listening(listener, rollouts, strict, 8192)
    assert "audiorl: the model ignores its audio: the right audio adds" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"the model ignores its audio.*less than listening\.min_gain 50"):
        check_listening(listener, rollouts, replace(strict, action="stop"), 8192)
    # of one prompt there is nothing to swap with, of silence nothing in place of silence
    assert "audio/gain_swap" not in check_listening(listener, rollouts[:2], config, 8192)
    quiet = replace(rollouts[0], sample=replace(questions[0], messages=silent(0, questions)))
    assert check_listening(listener, [quiet], strict, 8192) == {}


def test_the_command(listener: AudioPolicy, questions: list[Sample], tmp_path: Path) -> None:
    for i, s in enumerate(questions):
        soundfile.write(tmp_path / f"{i}.wav", s.audio[0].load(16_000), 16_000)
    rows = [
        {"id": s.id, "audio": f"{i}.wav", "question": "What is said?", "answer": s.references[0]}
        for i, s in enumerate(questions)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "out"
    data = {"data": tmp_path / "rows.jsonl", "model": "m", "out": out, "max_new_tokens": 8}
    scores = main(AuditOptions(**data, views=("silence", "swap"), filter=3), policy=listener)
    kinds = scores["filter"]
    assert scores["n"] == 6 and set(scores["gains"]) == {"silence", "swap"} and kinds["answers_each"] == 3
    assert scores["verdict"] in ("listens", "ignores_audio", "unclear")
    ids = [s.id for s in questions]
    for name in ("results", "filter"):
        written = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert [row["id"] for row in written] == ids and ("gain_swap" in written[0]) == (name == "results")
    page = (out / "examples.html").read_text()
    assert page.count("<audio") == 6 and scores["reason"] in page
    selected = read_samples(out / "listening.jsonl", think=False, check_audio=True).samples
    by_id = {s.id: s for s in read_samples(tmp_path / "rows.jsonl", think=False).samples}
    assert len(selected) == kinds["selected"] == kinds["need_listening"]["n"]
    for s in selected:
        assert s.references == by_id[s.id].references
        assert s.messages[0].content[1:] == by_id[s.id].messages[0].content[1:]
    assert sum(kinds[name]["n"] for name in ("text_answerable", "need_listening", "rest")) == 6
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        main(AuditOptions(**data, views=("silence",)), policy=listener)


def command(*words: object) -> int:
    """The exit code of `audiorl WORDS`."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_the_short_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", "bundled", "--limit", "4", "--views", "silence", "--device", "cpu", "--max-new-tokens", "4")
    assert command("audit", "tiny", *words, "--out", tmp_path / "short", "--filter", "2") == 0
    assert "nats per token" in capsys.readouterr().out
    assert command("eval", "audit", "--model", "tiny", *words, "--out", tmp_path / "long", "--filter", "2") == 0
    assert (tmp_path / "short" / "scores.json").read_text() == (tmp_path / "long" / "scores.json").read_text()
    answers = (tmp_path / "short" / "answers-audio.jsonl").read_bytes()
    selects_all = ("--min-pass", "0", "--max-pass", "1", "--max-blind", "0.25")
    assert command("audit", "tiny", *words, "--out", tmp_path / "short", "--filter", "2", *selects_all) == 0
    assert (tmp_path / "short" / "answers-audio.jsonl").read_bytes() == answers  # not asked again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "audit: name a model first"),
        (("--data", "bundled"), "audit: name a model first"),
        (("tiny", "--data", "bundled"), "give --data, --model and --out"),
        (("tiny", "--data", "bundled:nothing", "--out", "OUT"), "no bundled set is called 'bundled:nothing'"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--max-blind", "0"), "--max-blind 0: give a share above 0"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--min-pass", "0.9", "--max-pass", "0.1"), "min <= max"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--filter", "-1"), "filter is -1; it must be at least 0"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--limit", "0"), "limit"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--views", "a.py:f", "b.py:f"), "two are called 'f'"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--views", "a.py:audio"), "two are called 'audio'"),
        (("tiny", "--data", "bundled", "--out", "OUT", "--batch-size", "0"), "batch_size is 0"),
    ],
)
def test_bad_options(words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("audit", *(str(tmp_path / "out") if word == "OUT" else word for word in words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_planted_questions_that_their_text_answers(speech: list[Utterance], tmp_path: Path) -> None:
    """What is said in 12 bundled recordings, and 12 questions about others whose text names the answer.

    The model learned the planted answers under other audio as well, so it has them from the text.
    """
    short = list({u.text: u for u in speech if len(u.text) <= 10}.values())[::3][:24]
    rows = []
    for i, u in enumerate(short):
        planted = i >= 12
        soundfile.write(tmp_path / f"{i}.wav", u.clip.load(16_000), 16_000)
        answer = short[i - 12].text if planted else u.text
        question = f"The answer is {answer} What is the answer?" if planted else "What is said?"
        task = "planted" if planted else "audio"
        rows.append({"id": i, "audio": f"{i}.wav", "question": question, "answer": answer, "task": task})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    samples = list(read_samples(tmp_path / "rows.jsonl", think=False).samples)
    asked = (c for s in samples for c in s.messages[0].content if isinstance(c, str))
    texts = [" ".join([*asked, *(s.references[0] for s in samples)])]
    policy = qwen_omni.tiny(texts, hidden=64, layers=2, vocab_size=400, config=ModelConfig(audio="projector"))
    planted_samples = samples[12:]
    lesson = [*samples, *map(silence, planted_samples), *swapped(planted_samples)]
    learn(policy, [Example(s, f"<answer>{s.references[0]}</answer>") for s in lesson], steps=100)
    paths = {"data": tmp_path / "rows.jsonl", "model": "m", "out": tmp_path / "out", "max_new_tokens": 24}
    scores = main(AuditOptions(**paths, filter=8), policy=policy)
    shares = [json.loads(line) for line in (tmp_path / "out" / "filter.jsonl").read_text().splitlines()]
    named = {row["id"] for row in shares if row["kind"] == "text"}
    planted_ids = {s.id for s in planted_samples}
    precision, recall = len(named & planted_ids) / len(named), len(named & planted_ids) / len(planted_ids)
    print(f"planted questions: precision {precision:.2f}, recall {recall:.2f}, of {len(named)} named")
    assert precision >= 0.9 and recall >= 0.9
    assert scores["filter"]["text_answerable"]["n"] == len(named) and scores["filter"]["with_audio"] > 0.9
    listening = [json.loads(line) for line in (tmp_path / "out" / "listening.jsonl").read_text().splitlines()]
    assert {row["id"] for row in listening} == {row["id"] for row in shares if row["kind"] == "listening"}


def test_the_most_probable_choice_follows_the_audio(listener: AudioPolicy, questions: list[Sample]) -> None:
    asked = [replace(s, choices=tuple(c for c in ANSWERS if c not in s.references) + s.references) for s in questions]
    assert most_probable_choices(listener, asked, budget=600) == list(ANSWERS)
    exchanged = [
        replace(s, messages=other.messages) for s, other in zip(asked, asked[1:] + asked[:1], strict=True)
    ]  # each with the audio of the next
    assert most_probable_choices(listener, exchanged) == [*ANSWERS[1:], ANSWERS[0]]
    following = dict(zip(ANSWERS, (*ANSWERS[1:], ANSWERS[0]), strict=True))
    written_as_the_next = most_probable_choices(listener, asked, following.__getitem__)
    assert [following[choice] for choice in written_as_the_next] == list(ANSWERS)
    with pytest.raises(ValueError, match="'q-0': no choices to compare"):
        most_probable_choices(listener, questions[:1])
