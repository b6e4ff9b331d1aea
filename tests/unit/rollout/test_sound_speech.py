"""Flows of speech: enhancement of noisy recordings and text in a voice, their rows, rewards and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip, seconds, write_wav
from audiorl.cli import main
from audiorl.config.flow import FlowConfig, FlowSFTConfig
from audiorl.data.augment import noisy, noisy_recording
from audiorl.data.corpus import bundled_speech
from audiorl.eval._common import read_rows
from audiorl.models.flow import FlowPolicy
from audiorl.models.flow.network import letters_of
from audiorl.protocols import Request
from audiorl.recipes import sound_grpo
from audiorl.rollout.flow import FlowEngine, filtered
from audiorl.tasks.sound.rows import read_sounds, speech_sound
from audiorl.tasks.tts.rewards import SpeechRewards, signal_to_distortion
from audiorl.train.flow import draw, sound_losses
from audiorl.types import Rollout, Sample
from tests.support.flows import clip, tiny_flow
from tests.support.rank_runs import rewind, saved_tensors

SPEECH = bundled_speech(("en",), max_seconds=1.0)
RATE = 24_000


@pytest.fixture(scope="module")
def policy() -> FlowPolicy:
    return tiny_flow()


def enhance(**about: Any) -> Sample:
    return speech_sound("e", "enhance", SPEECH[0].text, {"audio": clip(0), **about})


def tts(text: str = "one two", **about: Any) -> Sample:
    return speech_sound("t", "tts", text, {"prompt_audio": clip(1), "prompt_text": SPEECH[1].text, **about})


def test_noisy_speech_is_the_condition_and_new_noise_is_drawn_at_every_update(policy: FlowPolicy) -> None:
    config, before = FlowSFTConfig(drop=0.0), noisy(clip(0), "recorded")
    (one, clean, noise, t), (other, again, _, _) = (draw(policy, enhance(), config, key) for key in "ab")
    assert torch.equal(clean, again) and torch.equal(clean, policy.target(enhance(), one))
    assert one.context is not None and other.context is not None and not torch.equal(one.context, other.context)
    recorded = [draw(policy, enhance(before=before), config, key)[0].context for key in "ab"]
    for context in recorded:
        assert context is not None and bool((context[:, -1] == 1).all())
        torch.testing.assert_close(context[:, :-1], policy.encode(before)[: len(context)])
    losses = [sound_losses(policy, [(prompt, clean, noise, t)]) for prompt in (one, other)]
    assert abs(float((losses[0] - losses[1]).detach())) > 1e-5, "the loss sees the noisy recording"
    held = policy.prompt(enhance()).context
    assert held is not None and torch.equal(held[:, :-1], policy.encode(noisy_recording(enhance()))[: len(held)])


def test_enhanced_speech_keeps_the_phases_of_the_recording_and_is_nowhere_louder(policy: FlowPolicy) -> None:
    speech = AudioClip(array=clip(0).load(RATE), sample_rate=RATE)
    bad = noisy(speech, "x")
    low, high = (signal_to_distortion(speech, w, RATE) for w in (bad.load(RATE), filtered(bad, speech).load(RATE)))
    assert high > low + 5, "of a perfect sound"
    same = filtered(bad, AudioClip(array=np.clip(8 * bad.load(RATE), -1, 1), sample_rate=RATE)).load(RATE)
    assert signal_to_distortion(bad, same, RATE) > 10, "as it was, but for what lies below the bands"
    (rollout,) = FlowEngine(policy, FlowConfig(steps=4)).generate([Request(enhance(), greedy=True)])
    assert rollout.spoken_audio is not None
    assert seconds(rollout.spoken_audio) == pytest.approx(seconds(clip(0)), abs=1 / RATE), "though frames are longer"


def test_text_is_spread_over_the_voice_and_what_is_said_in_it(policy: FlowPolicy) -> None:
    sample, voice = tts(), len(policy.encode(clip(1)))
    prompt = policy.prompt(sample)
    letters = [sum(map(str.isalnum, text)) for text in ("one two", SPEECH[1].text)]
    wanted = seconds(clip(1)) * letters[0] / letters[1]
    assert sample.metadata["duration"] == pytest.approx(wanted)
    assert prompt.voice == voice and prompt.frames == pytest.approx(voice + wanted * policy.frame_rate, abs=1)
    assert prompt.said == f"{SPEECH[1].text} one two" and prompt.context is not None
    assert prompt.context[:, -1].tolist() == [1.0] * voice + [0.0] * (prompt.frames - voice)
    spoken = letters_of(prompt.said, prompt.frames)
    assert (
        spoken[0] == ord(SPEECH[1].text[0].lower()) + 1 and spoken[-1] == ord("o") + 1 and len(spoken) == prompt.frames
    )
    with pytest.raises(ValueError, match=r"a text of .* bytes, at most .* bytes in .* s, a frame says one"):
        policy.prompt(replace(sample, references=("one two three four five six seven eight nine ten " * 9,)))
    both = tts(audio=clip(0))
    target = policy.target(both, policy.prompt(both))
    torch.testing.assert_close(target[:voice], policy.encode(clip(1)))
    torch.testing.assert_close(target[voice:], policy.encode(clip(0))[: len(target) - voice])
    x, t = torch.randn(prompt.frames, 8), torch.tensor([0.5])
    v, other = (policy.velocity(x, t, [p]) for p in (prompt, replace(prompt, said=f"{SPEECH[1].text} six ten")))
    assert float((v - other).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("sample", [enhance(), tts()], ids=["enhance", "tts"])
def test_log_probs_of_noisy_steps_are_those_of_sampling(policy: FlowPolicy, sample: Sample) -> None:
    rollouts = FlowEngine(policy, FlowConfig(steps=4)).generate([Request(sample, 2, seed=1)])
    sampled = torch.cat([r.segments[0].logprobs for r in rollouts])
    out = policy.forward(pack_experiences([Experience.from_rollout(r) for r in rollouts]))
    torch.testing.assert_close(out.logprobs, sampled, rtol=1e-4, atol=1e-5)
    length = sample.metadata["duration"]
    for rollout in rollouts:
        assert rollout.spoken_audio is not None, "the sound is without the voice that it imitates"
        assert seconds(rollout.spoken_audio) == pytest.approx(length, abs=1 / RATE)


def test_a_group_enhances_one_recording_each_step_another_and_evaluation_always_the_same(policy: FlowPolicy) -> None:
    engine = FlowEngine(policy, FlowConfig(steps=2, noisy="none"))
    kept = len(policy.audio._cache._values)
    asked = [Request(enhance(), 2, seed=1), Request(enhance(), seed=1), Request(enhance(), seed=2)]
    heard = [r.segments[0].flow.context for r in engine.generate(asked)]  # type: ignore[union-attr]
    same = [bool(torch.equal(heard[0], context)) for context in heard]  # type: ignore[arg-type]
    assert same == [True, True, True, False]
    assert len(policy.audio._cache._values) == kept, "made-up recordings do not come again"
    for seed in (1, 2):
        (greedy,) = engine.generate([Request(enhance(), seed=seed, greedy=True)])
        assert torch.equal(greedy.segments[0].flow.context, policy.prompt(enhance()).context)  # type: ignore


@pytest.mark.parametrize(("words", "message"), [
    ("--enhance a.wav --thought x", "--thought: what is enhanced has none; leave it out"),
    ("--say hm --seconds 1 --voice-text oh", "--voice-text: name the recording that says it, too: --voice"),
    ("--text x --seconds 0", "--seconds is 0.0; give more than 0"),
    ("--say hm --seconds 1 --video a.npy --video-rate 8", "--video: is for other sounds than speech; leave it out"),
    ("--enhance a.wav --video a.npy --video-rate 8", "--video: is for other sounds than speech; leave it out"),
])  # fmt: skip
def test_options_that_would_do_nothing_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sound", "nowhere", *words.split(), "--out", "b.wav"]) == 2
    assert message in capsys.readouterr().err


def rollouts_of(samples: list[Sample], waves: list[np.ndarray]) -> list[Rollout]:
    clips = [AudioClip(array=wave, sample_rate=RATE) for wave in waves]
    return [Rollout(s, (), s.id, 0, spoken_audio=c) for s, c in zip(samples, clips, strict=True)]


def test_each_task_has_its_rewards(tmp_path: Path) -> None:
    config = sound_grpo.tiny()
    clean = clip(0).load(RATE)
    terms = sound_grpo.speech_terms(replace(config, task="enhance"), RATE, [enhance()], tmp_path)
    assert [t.name for t in terms][:2] == ["sdr", "understood"] and "similarity" in {t.name for t in terms}
    scores = terms[0].reward(rollouts_of([enhance()] * 3, [clean, noisy_recording(enhance()).load(RATE), 0 * clean]))
    good, bad, none = [s for s in scores if s is not None]
    assert good.total == pytest.approx(1) and 0.3 < bad.total < 0.98 and none.total == pytest.approx(0, abs=1e-6)
    assert bad.total == pytest.approx(1 / (1 + 10 ** (-bad.parts["si_sdr"] / 10)))
    terms = sound_grpo.speech_terms(replace(config, task="tts"), RATE, [tts()], tmp_path)
    by_name = {t.name: t.reward for t in terms}
    assert "sdr" not in by_name
    same, silence = rollouts_of([tts()] * 2, [clip(1).load(RATE), 0 * clean])
    for name in ("understood", "similarity", "silence"):
        first, last = by_name[name]([same, silence])
        assert first is not None and last is not None and 0 <= last.total <= first.total <= 1
    assert by_name["similarity"]([same])[0].total == pytest.approx(1, abs=1e-3)  # type: ignore[union-attr]


GATED = SpeechRewards(asr="tiny", speaker="tiny", understood=0, gate=0.3)


@pytest.mark.parametrize(("samples", "options", "message"), [
    ([speech_sound("e", "enhance", "hm", {"before": clip()})], {}, "sample 'e': no clean audio to compare with"),
    ([speech_sound("e", "enhance", "", {"audio": clip()})], {}, "sample 'e' has no reference transcript"),
    ([tts()], {"judge": "tiny"}, "--judge tiny: the reward asks it, too"),
    ([tts()], {"judge": "tiny", "speech": GATED}, "--judge tiny: the reward asks it, too"),
    ([speech_sound("t", "tts", "hm", {"duration": 1.0})], {}, "a recording in audio, or a voice in prompt_audio"),
])  # fmt: skip
def test_rows_that_the_rewards_cannot_score_are_refused(
    samples: list[Sample], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    speech = SpeechRewards(asr="tiny", speaker="tiny")
    config = replace(sound_grpo.tiny(), **{"task": samples[0].task, "speech": speech, **options})
    with pytest.raises(ValueError, match=message):
        sound_grpo.speech_terms(config, RATE, samples, tmp_path)


@pytest.mark.parametrize(("row", "message"), [
    ({"task": "enhance"}, "'audio': missing; give the clean recording, or as before the noisy one"),
    ({"task": "tts", "duration": 1}, "'text': missing; give what is to be said"),
    ({"task": "tts", "text": "hm", "prompt_audio": "a.wav"}, "'prompt_text': missing; give what prompt_audio says"),
    ({"task": "tts", "text": "hm"}, "'duration': missing; give seconds, or prompt_audio"),
    ({"task": "tts", "text": "hm", "prompt_audio": "a.wav", "prompt_text": "oh"}, r"'prompt_audio': .*a\.wav"),
    (
        {"task": "tts", "text": "?!", "prompt_audio": str(clip().path), "prompt_text": "oh"},
        "'duration': '\\?!' takes no time to be said",
    ),
    ({"task": "clean", "audio": "a.wav"}, "'task': .*give sound, enhance or tts"),
])  # fmt: skip
def test_rows_of_speech_say_what_is_missing(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"row 1, field {message}"):
        read_sounds([row])


def test_rows_of_speech() -> None:
    path = str(clip().path)
    given = {"audio": path, "text": "Good morning."}
    plain, clean, said = read_sounds(
        [given, {**given, "task": "enhance"}, {"task": "tts", "text": "hm", "prompt_audio": path, "prompt_text": "oh"}]
    ).samples
    assert (plain.task, plain.messages[0].content, plain.references) == ("sound", ("Good morning.",), ())
    assert (clean.task, clean.messages[0].content, clean.references) == ("enhance", ("",), ("Good morning.",))
    assert said.metadata["duration"] == seconds(clip()) and said.metadata["reference_audio"].path == path
    (default,) = read_sounds([given], task="enhance").samples
    assert default.task == "enhance" and clean.metadata["reference_seconds"] == seconds(clip())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["enhance", "tts"])
def test_speech_is_learned_rewarded_resumed_and_made(task: str, tmp_path: Path) -> None:
    sft, rl, judge = tmp_path / "sft", tmp_path / "rl", tmp_path / "rl" / "tiny" / "asr"
    assert main(["train", "sound-sft", "--tiny", "--task", task, "--out", str(sft)]) == 0
    kept = saved_tensors(sft / "checkpoints/sft/step_000002")
    rewind(sft, "sft", 1, 1)
    assert main(["resume", str(sft)]) == 0
    again = saved_tensors(sft / "checkpoints/sft/step_000002")
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items()), "the same bits, noise too"
    words = ["--path", str(sft / "checkpoints/sft/step_000002"), "--codec", str(sft / "codec"), "--max-steps", "1"]
    assert main(["train", "sound-grpo", "--tiny", "--task", task, *words, "--out", str(rl)]) == 0
    values = read_rows(rl / "eval" / "after.jsonl")[0]
    assert {"reward", "understood", "similarity"} <= set(values) and ("si_sdr" in values) == (task == "enhance")
    words = ["--judge", str(judge), "--max-steps", "1", "--out", str(tmp_path / "judged")]
    assert main(["train", "sound-sft", "--tiny", "--task", task, *words]) == 0
    assert {"wer", "transcript"} <= set(read_rows(tmp_path / "judged" / "eval" / "after.jsonl")[0])
    voice, out = tmp_path / "voice.wav", tmp_path / "out.wav"
    write_wav(voice, clip().load(RATE), RATE)
    words = (
        ["--enhance", str(voice)] if task == "enhance" else ["--say", "hm", "--voice", str(voice), "--voice-text", "oh"]
    )
    assert main(["sound", str(rl), *words, "--sampling.steps", "3", "--out", str(out)]) == 0
    assert seconds(AudioClip(path=str(out))) == pytest.approx(seconds(AudioClip(path=str(voice))), abs=0.04)
