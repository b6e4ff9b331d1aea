"""Flows: packs equal single sounds, log-probs equal those of sampling, the loss and the KL by hand, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from audiorl.algos import flow
from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.flow import FlowConfig, FlowSFTConfig
from audiorl.config.rl import GROUP_LOSSES
from audiorl.data.rollout_rows import rollout_from_row, rollout_row
from audiorl.distributed.local import World
from audiorl.eval.metrics.speech import si_sdr
from audiorl.models.flow import FlowPolicy, SoundPrompt, load_flow
from audiorl.models.flow.policy import LatentCodec, SoundLatents
from audiorl.models.flow.stereo import mixed_down, spread
from audiorl.protocols import Request
from audiorl.rollout.flow import FlowEngine
from audiorl.tasks.sound.places import placed
from audiorl.tasks.sound.rewards import place_errors
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import Event
from audiorl.train.flow import draw, held_out_loss, sound_losses
from audiorl.train.rl.advantages import compute_advantages
from audiorl.train.rl.minibatch import TrainBatch, mini_batches_of, trained_by
from audiorl.train.rl.trainer import Trainer, with_logprobs
from audiorl.types import Score
from tests.support.flows import CODEC, asked, clip, tiny_flow
from tokenizers_audio.unified import UnifiedTokenizer


@pytest.fixture(scope="module")
def policy() -> FlowPolicy:
    return tiny_flow(video=4)


def requests(n: int = 3) -> list[Request]:
    return [Request(asked("a", "a dog", 0.6), n, seed=1), Request(asked("b", "the cat, twice", 1.0), n, seed=1)]


def test_a_pack_is_what_its_sounds_are_alone(policy: FlowPolicy) -> None:
    context = torch.randn(7, 9) * torch.tensor([1.0, 0, 0, 1, 1, 1, 1])[:, None]
    full = SoundPrompt(7, "a dog", "dog 0.5 s", context, torch.rand(7, 4))
    prompts = [SoundPrompt(12), full, SoundPrompt(1, "a dog", video=torch.rand(1, 4)), SoundPrompt(7, "", "dog 0.5 s")]
    x, t, lengths = torch.randn(27, 8), torch.tensor([0.2, 0.9, 1.0, 0.5]), [12, 7, 1, 7]
    for guidance in (1.0, 3.0, 0.0):
        packed = policy.velocity(x, t, prompts, guidance)
        parts = zip(x.split(lengths), t.split(1), prompts, strict=True)
        alone = torch.cat([policy.velocity(own, at, [prompt], guidance) for own, at, prompt in parts])
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    v = policy.velocity(x[12:19], t[1:2], [full])
    for name, nothing in (("caption", ""), ("thought", ""), ("context", None), ("video", None)):
        without = policy.velocity(x[12:19], t[1:2], [replace(full, **{name: nothing})])
        assert float((v - without).detach().abs().max()) > 1e-3, f"{name} changes nothing"
    bare, guided = (policy.velocity(x[12:19], t[1:2], [full], w) for w in (0.0, 3.0))
    torch.testing.assert_close(guided, bare + 3 * (v - bare), rtol=1e-4, atol=1e-5)


def test_no_weight_is_idle(policy: FlowPolicy) -> None:
    prompt = SoundPrompt(7, "a dog", "dog 0.5 s", video=torch.rand(7, 4), said="oh")
    v = policy.velocity(torch.randn(7, 8), torch.tensor([0.5]), [prompt])
    names, weights = zip(*policy.trainable().items(), strict=True)
    grads = torch.autograd.grad(v.square().sum(), weights, allow_unused=True)
    assert [name for name, grad in zip(names, grads, strict=True) if grad is None or not grad.any()] == []


@pytest.mark.parametrize("options", [
    {"noisy": "branch"}, {"noisy": "window", "noise": "cps", "noise_level": 0.8, "solver": "dpm++"},
    {"noisy": "all", "noise": "dance", "noise_level": 0.3, "guidance_scale": 2.0},
    {"noisy": "window", "solver": "midpoint"},
])  # fmt: skip
def test_log_probs_are_those_of_sampling_whatever_is_in_the_pack(policy: FlowPolicy, options: dict[str, Any]) -> None:
    config = FlowConfig(steps=6, **options)
    engine = FlowEngine(policy, config)
    rollouts = engine.generate(requests())
    assert [(r.sample.id, r.index) for r in rollouts] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    experiences = [Experience.from_rollout(r) for r in rollouts]
    sampled = torch.cat([r.segments[0].logprobs for r in rollouts])
    assert len(sampled) == 6 * (5 if config.noisy == "all" else 2)
    out = policy.forward(pack_experiences(experiences))
    torch.testing.assert_close(out.logprobs, sampled, rtol=1e-4, atol=1e-5)
    assert out.noisy_steps is not None and float(out.noisy_steps.drift.detach().max()) < 1e-8
    parts = micro_batches(experiences, 40)
    assert max(map(len, parts)) < 6, "the budget counts the frames of every noisy step"
    alone = [policy.forward(pack_experiences([e])).logprobs for e in experiences]
    torch.testing.assert_close(torch.cat(alone), sampled, rtol=1e-4, atol=1e-5)
    only = FlowEngine(policy, config).generate(requests()[1:])
    for a, b in zip(only, rollouts[3:], strict=True):
        one, other = a.segments[0].flow, b.segments[0].flow
        assert one is not None and other is not None and one.times == other.times
        torch.testing.assert_close(one.states, other.states, rtol=1e-4, atol=1e-4)
        assert a.spoken_audio is not None and a.spoken_audio.load(24_000).shape == (24_000,)
    paths = [r.segments[0].flow for r in rollouts[:3]]
    shared = all(p is not None and torch.equal(p.states[0], paths[0].states[0]) for p in paths if paths[0])
    assert shared == (config.noisy == "branch")
    back = rollout_from_row(rollout_row(rollouts[0], 1, 0.5), Path("/"))
    assert back.segments[0].flow is None and torch.equal(back.segments[0].ids, rollouts[0].segments[0].ids)
    (greedy,) = engine.generate([replace(requests()[0], n=1, greedy=True)])
    assert (
        greedy.num_sampled == 0
        and policy.forward(pack_experiences([Experience.from_rollout(greedy)])).logprobs.numel() == 0
    )


def test_the_kl_is_exact_and_falls_where_the_flow_goes_back(policy: FlowPolicy) -> None:
    reference, moved = policy.reference(), policy.copy()
    experiences = [Experience.from_rollout(r) for r in FlowEngine(policy, FlowConfig(steps=6)).generate(requests(2))]
    experiences = with_logprobs(experiences, "ref_logprobs", reference, RLConfig(micro_batch_tokens=60), (1.0, 1.0))
    kl = moved.forward(pack_experiences(experiences)).noisy_steps.kl  # type: ignore[union-attr]
    assert kl is not None and float(kl.detach().abs().max()) < 1e-8
    with torch.no_grad():
        moved.model.last.bias += 0.5  # the velocity, everywhere
    batch = pack_experiences(experiences)
    steps = moved.forward(batch).noisy_steps
    assert steps is not None and steps.kl is not None
    for i, (path, k) in enumerate((f, k) for f in batch.flows for k in range(2)):
        zero = torch.zeros(1, 1)
        a, b = (flow.transition(zero, v, *path.times[k : k + 2]) for v in (zero, zero + 0.5))
        assert float(steps.kl[i].detach()) == pytest.approx(float((b.mean - a.mean) ** 2 / (2 * a.std**2)), rel=1e-4)
    before = moved.model.last.bias.detach().clone()
    steps.kl.sum().backward()
    assert moved.model.last.bias.grad is not None and bool((moved.model.last.bias.grad > 0).all())
    assert torch.equal(before, moved.model.last.bias)


@pytest.mark.parametrize("loss", ["nft", "crpo", "raft", "ppo"])
def test_losses_of_sounds_that_are_noised_again(loss: str) -> None:
    """Gradients in the loop are those of the pure functions, sound by sound, after the policy has moved."""
    policy = tiny_flow()
    made = FlowEngine(policy, FlowConfig(steps=4, noisy="none", window=2)).generate(requests(4))
    scores = [0.1, 0.5, 0.2, 0.3, 1.0, 0.0, 0.4, 0.6]
    rollouts = [r.with_score(Score(s)) for r, s in zip(made, scores, strict=True)]
    paths = [(r.segments[0].flow, policy.prompt(r.sample)) for r in rollouts]
    assert all(f is not None and f.times == paths[i // 4 * 4][0].times for i, (f, _) in enumerate(paths))  # type: ignore
    config = RLConfig(loss=loss, epochs=2, kl_beta=0.1, micro_batch_tokens=80, clip_low=1.0, clip_high=1.0)
    trainer = Trainer(policy, config, OptimConfig(max_grad_norm=1e9), 1.0, 10)
    batch = TrainBatch([Experience.from_rollout(r) for r in rollouts])
    chosen = trained_by(config, batch.experiences)
    assert chosen == {"raft": [1, 4], "crpo": [1, 0, 4, 5]}.get(loss, list(range(8)))
    start = policy.copy()
    prepared = compute_advantages(trainer.prepare(batch.experiences), config, 0.1)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    batch = replace(batch, experiences=[prepared[i] for i in chosen])
    assert trained_by(config, [e.replace(score=0.5) for e in prepared[:4]]) == (
        [] if loss in GROUP_LOSSES else [0, 1, 2, 3]
    )
    (mini_batch,) = mini_batches_of(batch, config, 10, World())
    assert len(mini_batch) > 1
    trainer._passes(mini_batch, batch, 0, None)

    def terms(i: int, k: int) -> tuple[torch.Tensor, ...]:
        path, prompt = paths[i]
        assert path is not None
        x0, noise, t = path.states[0], path.states[k + 1], torch.tensor([path.times[k]])
        x = flow.interpolate(x0, noise, t)
        v, old = policy.velocity(x, t, [prompt]), start.velocity(x, t, [prompt]).detach()
        both = [flow.flow_matching_loss(each, x0, noise, [len(x)]) for each in (v, old)]
        return v, old, noise - x0, t, *both

    total = torch.zeros(())
    for at, i in enumerate(chosen):
        for k in range(2):
            v, old, target, t, ours, before = terms(i, k)
            advantage, weight = prepared[i].advantages[-1:], 1 / (2 * len(chosen))  # type: ignore[index]
            total = total + weight * 0.1 * ((v - old) ** 2).mean()
            if loss == "nft":
                total = total + weight * flow.nft_loss(v, old, target, t, advantage, [len(v)]).sum()
            elif loss == "raft":
                total = total + weight * ours.sum()
            elif loss == "ppo":  # FPO
                total = total - weight * ((before - ours).exp().clamp(0, 2) * advantage).sum()
            elif at % 2 == 0:
                *_, other, other_before = terms(chosen[at + 1], k)
                total = total + 2 * weight * flow.crpo_loss(ours, other, before, other_before, 2000.0).sum()
    found = {name: p.grad for name, p in policy.trainable().items()}
    expected = torch.autograd.grad(total, list(policy.trainable().values()), allow_unused=True)
    for (name, grad), wanted in zip(found.items(), expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()) + 1e-7, msg=name)


def test_the_loss_leaves_conditions_out_and_is_the_same_for_the_same_key(policy: FlowPolicy) -> None:
    sample = asked("a", "hello", 0.6, audio=clip(), thought="speech 0.0 s")
    config = FlowSFTConfig(drop=0.4, inpaint=0.5)
    drawn = [draw(policy, sample, config, str(k)) for k in range(200)]
    share = [np.mean([not getattr(p, name) for p, *_ in drawn]) for name in ("caption", "thought")]
    assert all(0.54 < s < 0.74 for s in share), "1 - 0.6²"
    given = [p.context for p, *_ in drawn if p.context is not None]
    assert 0.08 < len(given) / 200 < 0.3 and len({tuple(c[:, -1].tolist()) for c in given}) > 10, "spans"
    assert not any(bool(c[:, -1].all()) for c in given), "each span has a frame"
    times = torch.tensor([t for *_, t in drawn])
    assert 0.4 < float(times.mean()) < 0.6
    again = draw(policy, sample, config, "7")
    assert again[3] == drawn[7][3] and torch.equal(again[2], drawn[7][2])
    prompt, x0, noise, t = drawn[7]
    v = policy.velocity(flow.interpolate(x0, noise, t), torch.tensor([t]), [prompt])
    torch.testing.assert_close(sound_losses(policy, [drawn[7]]), ((v - (noise - x0)) ** 2).mean()[None])
    assert held_out_loss(policy, [sample], config) == held_out_loss(policy, [sample], config)


def test_sounds_come_back_from_latents_and_stereo_is_two_of_them(policy: FlowPolicy) -> None:
    codec = UnifiedTokenizer(CODEC)
    wav = torch.from_numpy(clip().load(24_000)[:12_345])[None]
    assert torch.equal(codec.quantizer.encode(codec.latents(wav), 8), codec.encode(wav))
    codes = codec.encode(wav)
    assert torch.equal(codec.decode(codes), codec.decode_latents(codec.quantizer.decode(codes)))
    left, right = clip(0).load(24_000)[:9600], clip(1).load(24_000)[:9600]
    both = AudioClip(array=np.stack([left, right], 1), sample_rate=24_000)
    with_phases = UnifiedTokenizer(replace(CODEC, spectrum_hop=None, phases="learned", strides=(30, 32)))
    stereo = SoundLatents(cast(LatentCodec, with_phases), 2, 0)
    latents = stereo.encode(both)
    assert latents.shape == (10, stereo.width) == (10, 16) and stereo.decode(latents).shape == (9600, 2)
    alone = stereo.encode(AudioClip(array=left, sample_rate=24_000))
    torch.testing.assert_close(alone[:, :8], latents[:, :8])
    mono = policy.encode(AudioClip(array=left, sample_rate=24_000))
    spectra = [np.abs(np.fft.rfft(w[2400:7200])) for w in (left, policy.decode(mono))]
    assert np.corrcoef(*spectra)[0, 1] > 0.5, "principal components of log-mels are a codec"


def test_stereo_keeps_its_places_where_the_codec_makes_phases_up() -> None:
    """Two clips from two places, after each other: they come back, from there, also through the codec."""
    rate = 24_000
    heard = [placed(clip(i).load(rate)[2400:12_000], azimuth, rate)[:9600] for i, azimuth in enumerate((-60.0, 30.0))]
    wave, events = np.concatenate(heard), [Event("a", 0, 0.4, 0, -60.0), Event("b", 0.4, 0.8, 0, 30.0)]
    back = spread(*mixed_down(torch.from_numpy(wave), rate, 960), rate, 960).numpy()
    for part in (slice(0, 9000), slice(10_200, None)):  # apart from where one place goes over into the other
        assert si_sdr(wave[part].ravel(), back[part].ravel()) > 20
    assert max(error for error, _ in place_errors(events, back, rate)) < 3
    stereo = tiny_flow(channels=2)
    latents = stereo.encode(AudioClip(array=wave, sample_rate=rate))
    assert latents.shape == (20, 10)
    assert max(error for error, _ in place_errors(events, stereo.decode(latents), rate)) < 6
    silence, places = mixed_down(torch.zeros(1500, 2), rate, 960)
    assert not silence.any() and places.shape == (2, 2) and not places.any()


def test_a_saved_flow_is_the_same_and_others_are_refused(policy: FlowPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "flow")
    again = load_flow(tmp_path / "flow", codec=policy.codec)
    (one,), (two,) = (
        FlowEngine(p, FlowConfig(steps=3)).generate([replace(requests()[0], n=1)]) for p in (policy, again)
    )
    assert one.spoken_audio is not None and two.spoken_audio is not None
    with pytest.raises(FloatingPointError, match="latents that are not finite"):
        policy.decode(torch.full((3, 8), math.nan))
    assert np.array_equal(one.spoken_audio.load(24_000), two.spoken_audio.load(24_000))
    with pytest.raises(ValueError, match="not of"):
        load_flow(tmp_path / "flow", codec=UnifiedTokenizer(replace(CODEC, mels=40)))
    with pytest.raises(ValueError, match="weights are float32"):
        load_flow(tmp_path / "flow", ModelConfig(dtype="bfloat16"))
    with pytest.raises(ValueError, match="flows are trained whole"):
        load_flow(tmp_path / "flow", ModelConfig(lora=replace(ModelConfig().lora, rank=4)))
    weights = tmp_path / "flow" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_flow(tmp_path / "flow")
    (tmp_path / "flow" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama' is no flow"):
        load_flow(tmp_path / "flow")


@pytest.mark.parametrize(("metadata", "message"), [
    ({"duration": 3.0}, r"3 s was asked for; this flow makes up to 2 s"),
    ({"duration": None}, r"give the seconds of the sound"),
    ({"duration": 1.0, "channels": 2}, r"asks for stereo, but this flow makes mono"),
    ({"duration": 1.0, "video": "nowhere.npy"}, r"missing; give the frames a second of the video"),
    ({"duration": 1.0, "video": "nowhere.npy", "video_rate": 8}, r"nowhere\.npy is no \.npy file"),
        ({"duration": 1.0, "video": "seen.npy", "video_rate": 8}, r"seen\.npy lasts 2\.00 s at 8 frames a second"),
        ({"duration": 2.0, "video": "seen.npy", "video_rate": 8}, r"\[16, 5\], but this flow reads \[frames, 4\]"),
    ({"duration": 1.0, "video": "pickled.npy", "video_rate": 8}, r"pickled\.npy is no \.npy file of numbers"),
    ({"duration": 1.0, "video": "empty.npy", "video_rate": 8}, r"empty\.npy is no \.npy file of numbers"),
    ({"duration": 2.0, "video": "nan.npy", "video_rate": 8}, r"nan\.npy holds numbers that are not finite"),
    ({"duration": 2.0, "video": "float.npy", "video_rate": 8}, r"float\.npy holds pictures of float32; they are uint8"),
])  # fmt: skip
def test_what_a_flow_cannot_make_is_refused_by_field(
    policy: FlowPolicy, metadata: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("seen.npy", np.zeros((16, 5 if metadata["duration"] == 2.0 else 4), np.float32))
    np.save("pickled.npy", np.array([{}], object), allow_pickle=True)
    np.save("nan.npy", np.full((16, 4), np.nan, np.float32))
    np.save("float.npy", np.ones((16, 8, 8), np.float32))
    Path("empty.npy").touch()
    with pytest.raises(ValueError, match=message):
        policy.prompt(asked("a", "x", **metadata))


def test_rows_of_sounds(tmp_path: Path) -> None:
    path = str(clip().path)
    events = [{"name": "voice", "start": 0, "end": 0.2}]
    rows = [json.dumps({"caption": "a voice", "audio": path, "thought": "t", "events": events})]
    rows += ['{"text": "rain", "duration": 2}', '{"duration": 2}', '{"caption": "x"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[:2]))
    first, second = read_sounds(tmp_path / "rows.jsonl", check_audio=True).samples
    assert first.metadata["thought"] == "t" and first.metadata["events"] == events
    assert 0 < first.metadata["duration"] <= 1.0 and second.messages[0].content == ("rain",)
    given = {"caption": "a voice", "audio": path, "caption_cot": "A voice begins at once."}
    edit = {"caption": "a voice", "instruction": "Remove the voice.", "before": path, "mask": [[0, 0.1]]}
    thought, edited = read_sounds([given, edit]).samples
    assert thought.metadata["thought"] == given["caption_cot"]
    assert edited.messages[0].content == (edit["instruction"],)
    for row, message in ((rows[2], "'caption': missing"), (rows[3], "'duration': missing")):
        (tmp_path / "rows.jsonl").write_text(row)
        with pytest.raises(ValueError, match=f"row 1, field {message}"):
            read_sounds(tmp_path / "rows.jsonl")


def test_options_that_flows_do_not_have_are_refused() -> None:
    RLConfig(loss="guard").check_sampling(FlowConfig())
    RLConfig(loss="nft").check_sampling(FlowConfig(noisy="none", window=30))
    for options, noisy, message in (
        ({"advantage": "gae"}, "all", "no critic"),
        ({"loss": "crpo"}, "all", "set sampling.noisy 'none'"),
        ({"loss": "dppo-tv"}, "all", "compares probabilities of tokens"),
        ({"entropy_coef": 0.1}, "all", "the entropy of a flow's noisy steps is fixed"),
        ({"loss": "guard"}, "none", "one of noisy steps"),
        ({"loss": "raft", "advantage": "rloo"}, "none", "reads no advantages"),
        ({"loss": "crpo", "mini_batches": 3, "group_size": 3}, "none", "3 must divide prompts_per_step 8"),
    ):
        with pytest.raises(ValueError, match=message):
            RLConfig(**options).check_sampling(FlowConfig(noisy=noisy))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'nft' is one of flows"):
        RLConfig(loss="nft").check_sampling(SamplingConfig())
