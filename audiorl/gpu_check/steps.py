"""Checks of whole steps: GRPO of a 3B thinker by its parts, the quickstart's small model, a flow, experts as groups."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    WhisperFeatureExtractor,
)

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.config.flow import FlowConfig, FlowModelConfig, FlowSFTConfig
from audiorl.gpu_check.setup import TEXTS, Check, Outcome, Setup, experiences, question
from audiorl.gpu_check.speed import MEMORY_TOLERANCE, pass_flops, peak_flops
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.models.families import qwen_omni
from audiorl.models.families.qwen_omni import QwenOmni, thinker_config
from audiorl.models.families.text import TextDecoder
from audiorl.models.flow import FlowNetwork, SoundPrompt, new_flow
from audiorl.models.tiny import SPECIAL, tiny_tokenizer
from audiorl.plan.flow import NEW, FlowPlanOptions, plan_flow
from audiorl.plan.memory import Assumptions
from audiorl.protocols import Request
from audiorl.rollout.flow import FlowEngine
from audiorl.rollout.hf import HFEngine
from audiorl.train.fit import Learner
from audiorl.train.flow import sound_loss
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.train.sft import sft_loss
from audiorl.types import Message, Sample, Score
from tokenizers_audio.unified import UnifiedTokenizer
from tokenizers_audio.unified.config import MELS

ROLLOUT_SECONDS, UPDATE_SECONDS, MFU = 2.5, 1.2, 0.4
"""Targets of a step of 3B on an H100: 8 prompts of 20 s x 8 answers of 256 tokens."""
QUICKSTART_SECONDS = 150.0
SFT_STEPS, GRPO_STEPS = 280, 80
"""Steps of the quickstart; its control takes as long as the latter."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's parts on an idle machine, after the device has done what it was given."""

    rollout: float
    update: float
    tokens: int  # Sampled in the step
    mfu: float  # Of the update
    peak_gb: float

    def ms_a_token(self, most: int) -> float:
        """Return the milliseconds in which every answer grew by a token."""
        return 1e3 * self.rollout / most


def thinker(setup: Setup, config: ModelConfig) -> AudioPolicy:
    """Make a random Qwen2.5-Omni thinker of the real class: of 3B's sizes on a GPU, else tiny. No answer ends early.

    Its tokenizer knows few words; the embeddings have the real number of rows.
    """
    tokenizer, large = tiny_tokenizer(TEXTS, 400), setup.is_gpu
    hidden, heads = (2048, 16) if large else (64, 4)
    text: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 2}
    text |= {"intermediate_size": 11_008 if large else 128, "num_hidden_layers": 36 if large else 2}
    text |= {"vocab_size": 151_936 if large else 1000, "max_position_embeddings": 32_768, "tie_word_embeddings": False}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    third = hidden // heads // 6
    sections = [hidden // heads // 2 - 2 * third, third, third]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    if large:
        audio = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio |= {"num_mel_bins": 128, "n_window": 100, "max_source_positions": 1500}
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (*SPECIAL.values(), "user")}
    sizes = thinker_config(audio, text | {"rope_parameters": rope}, ids, ids["user"])
    model = _random(lambda: Qwen2_5OmniThinkerForConditionalGeneration(sizes), setup, config)
    extractor = WhisperFeatureExtractor(feature_size=128, n_fft=400, hop_length=160, chunk_length=300)
    policy = AudioPolicy(model, tokenizer, extractor, QwenOmni("tiny", tokenizer), config)
    policy.stop_ids = (-1,)
    return policy


def _random(make: Callable[[], Any], setup: Setup, config: ModelConfig) -> Any:
    """Make a model in the config's type on the device, the same weights every time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.dtype))
    try:
        with torch.random.fork_rng(devices=[setup.device] if setup.is_gpu else []), setup.device:
            torch.manual_seed(0)
            return make()
    finally:
        torch.set_default_dtype(before)


def time_steps(
    policy: AudioPolicy, setup: Setup, sampling: SamplingConfig, steps: int, prompts: int, group: int, seconds: float
) -> list[StepTimes]:
    """Run steps of GRPO without a KL on prompts of so many seconds of noise, and return the times of each."""
    rl = RLConfig(steps=steps, prompts_per_step=prompts, group_size=group, kl_beta=0.0)
    engine, trainer = HFEngine(policy, sampling), Trainer(policy, rl, OptimConfig(), 1.0, sampling.max_new_tokens)
    peak, _ = peak_flops(setup)
    rng, found = np.random.default_rng(0), []
    for step in range(steps):
        if setup.is_gpu:
            torch.cuda.reset_peak_memory_stats(setup.device)
        samples = []
        for i in range(prompts):
            noise = (0.1 * rng.standard_normal(round(16_000 * seconds))).astype(np.float32)
            clip = AudioClip(array=noise, sample_rate=16_000)
            samples.append(Sample(f"{step}/{i}", (Message("user", (clip, "What is said, and by whom?")),), ("yes",)))
        setup.wait()
        began = time.perf_counter()
        learned = _sampled(engine, samples, step, rl)
        setup.wait()
        sampled = time.perf_counter()
        trainer.step(TrainBatch(learned))
        setup.wait()
        update = time.perf_counter() - sampled
        used = torch.cuda.max_memory_allocated(setup.device) / 1e9 if setup.is_gpu else 0.0
        mfu = pass_flops(policy, pack_experiences(learned)) / update / peak
        found.append(StepTimes(sampled - began, update, sum(e.num_sampled for e in learned), mfu, used))
    return found


def _sampled(engine: HFEngine, samples: Sequence[Sample], step: int, rl: RLConfig) -> list[Experience]:
    """Return the answers of a step, scored by their odd tokens."""
    requests = [Request(s, rl.group_size, step, f"{step}/{i}") for i, s in enumerate(samples)]
    rollouts = engine.generate(requests)
    scores = [sum(i % 2 for i in r.segments[0].ids.tolist()) / max(r.num_sampled, 1) for r in rollouts]
    return [Experience.from_rollout(r.with_score(Score(x))) for r, x in zip(rollouts, scores, strict=True)]


def grpo_step(setup: Setup) -> Outcome:
    """Time the second of two steps of 3B in bfloat16, from the request for answers to the new weights."""
    config = ModelConfig(dtype="bfloat16" if setup.is_gpu else "float32", gradient_checkpointing=True)
    prompts, group, most, seconds = (8, 8, 256, 20.0) if setup.is_gpu else (2, 2, 6, 2.0)
    policy = thinker(setup, config)
    step = time_steps(policy, setup, SamplingConfig(max_new_tokens=most), 2, prompts, group, seconds)[-1]
    detail = (
        f"{step.rollout + step.update:.2f} s: rollout {step.rollout:.2f} s ({step.ms_a_token(most):.1f} ms a token), "
        f"update {step.update:.2f} s (MFU {step.mfu:.1%}); peak {step.peak_gb:.1f} GB"
    )
    numbers = {"rollout": step.rollout, "update": step.update, "mfu": step.mfu, "peak_gb": step.peak_gb}
    numbers |= {"ms_a_token": step.ms_a_token(most), "tokens_per_second": step.tokens / step.rollout}
    if not setup.is_gpu:
        return Outcome("measured", detail, numbers)
    reached = step.rollout <= ROLLOUT_SECONDS and step.update <= UPDATE_SECONDS and step.mfu >= MFU
    targets = f"; targets {ROLLOUT_SECONDS:g} s, {UPDATE_SECONDS:g} s, {MFU:.0%}"
    return Outcome("pass" if reached else "fail", detail + targets, numbers)


def quickstart_steps(setup: Setup) -> Outcome:
    """Time the first and the later supervised steps of the quickstart's model, and its steps of GRPO; from them follows
    how long the quickstart trains."""
    policy = qwen_omni.tiny(TEXTS, config=ModelConfig(audio="projector"))
    policy.model.to(setup.device)
    rng = np.random.default_rng(0)

    def sample(name: str) -> Sample:
        wav = (0.1 * rng.standard_normal(int(16_000 * rng.uniform(1, 3)))).astype(np.float32)
        clip = AudioClip(array=wav, sample_rate=16_000)
        return Sample(name, (Message("user", (clip, "What is said, and by whom?")),), ("yes",))

    learner = Learner(sft_loss, policy, SFTConfig(steps=10, batch_size=24), OptimConfig(lr=1e-3))
    examples = [Example(sample(str(i)), "English Spanish French") for i in range(24)]

    def timed(run: Callable[[], object]) -> float:
        setup.wait()
        began = time.perf_counter()
        run()
        setup.wait()
        return time.perf_counter() - began

    first = timed(lambda: learner.train(examples))
    later = setup.seconds(lambda: learner.train(examples), repeats=3)
    rl = RLConfig(steps=3, prompts_per_step=16, group_size=8)
    engine, trainer = HFEngine(policy, SamplingConfig(max_new_tokens=20)), Trainer(policy, rl, OptimConfig(), 1.0, 20)
    asked = [[sample(f"{k}/{i}") for i in range(16)] for k in range(2)]

    def step(k: int) -> None:
        trainer.step(TrainBatch(_sampled(engine, asked[k], k, rl)))

    warm, grpo = (timed(lambda k=k: step(k)) for k in range(2))  # type: ignore[misc]
    whole = first + SFT_STEPS * later + warm + 2 * GRPO_STEPS * grpo
    detail = f"first {first:.1f} s, then SFT {later:.2f} s and GRPO {grpo:.2f} s a step: {whole:.0f} s of training"
    numbers = {"first": first, "sft": later, "grpo": grpo, "seconds": whole}
    if not setup.is_gpu:
        return Outcome("measured", detail, numbers)
    state = "pass" if whole <= QUICKSTART_SECONDS else "fail"
    return Outcome(state, f"{detail}; target {QUICKSTART_SECONDS:g} s", numbers)  # type: ignore[arg-type]


def flow_step(setup: Setup) -> Outcome:
    """Time an update of sound-sft on 32 sounds of 10 s and a step of sound-grpo (8 prompts x 8 sounds) of a flow of
    ThinkSound's size in bfloat16, and compare the peaks of memory with the plan."""
    large, seconds = setup.is_gpu, 10.0 if setup.is_gpu else 1.0
    blocks = {"width": 1024, "heads": 16, "joint_blocks": 7, "single_blocks": 14} if large else {"width": 64}
    size, caption = FlowModelConfig(**blocks), "A bell, then rain on a roof, far to the left."
    codec = UnifiedTokenizer(replace(MELS, codebook_dim=64))
    rng, rate, count = np.random.default_rng(0), codec.sample_rate, 32 if large else 2
    noise = [(0.1 * rng.standard_normal(round(seconds * rate))).astype(np.float32) for _ in range(count)]
    codec.begin(torch.from_numpy(np.stack([wave[:rate] for wave in noise])), torch.Generator().manual_seed(0))
    model = ModelConfig(device=str(setup.device), autocast=True, gradient_checkpointing=False)
    policy = new_flow(size, codec, model)
    about = [{"audio": AudioClip(array=wave, sample_rate=rate), "duration": seconds} for wave in noise]
    samples = [Sample(str(i), (Message("user", (caption,)),), metadata=a) for i, a in enumerate(about)]
    prompts, group, tokens = (8, 8, 8192) if large else (1, 2, 8192)
    rl = RLConfig(steps=9, prompts_per_step=prompts, group_size=group, kl_beta=0.0, micro_batch_tokens=tokens)
    sampling, sft = FlowConfig(), FlowSFTConfig(batch_size=count, micro_batch_tokens=tokens)

    learners = [Learner(partial(sound_loss, seed=0), policy, sft, OptimConfig())]
    engine, trainer = FlowEngine(policy, sampling), Trainer(policy, rl, OptimConfig(), 1.0, sampling.steps)
    learned: list[Experience] = []

    def sample() -> None:
        rollouts = engine.generate([Request(s, group, seed=0) for s in samples[:prompts]])
        learned[:] = [Experience.from_rollout(r.with_score(Score(i % 2))) for i, r in enumerate(rollouts)]

    times, peaks = {}, {}
    supervised, reinforced = (lambda: learners[0].train(samples)), (lambda: trainer.step(TrainBatch(learned)))
    for name, part in (("sft", supervised), ("sampling", sample), ("rl", reinforced)):
        if large:
            torch.cuda.reset_peak_memory_stats(setup.device)
        times[name] = setup.seconds(part, repeats=2)
        peaks[name] = torch.cuda.max_memory_allocated(setup.device) / 1e9 if large else 0.0
        learners.clear()  # with its AdamW: each update is measured with its own

    frames = round(seconds * policy.frame_rate)
    with torch.device("meta"):
        network, x, t = FlowNetwork(size, 64), torch.zeros(frames, 64), torch.zeros(1)
    with FlopCounterMode(display=False) as counter:
        network(x, t, [SoundPrompt(frames, caption)])
    mfu = 3 * counter.get_total_flops() * count / times["sft"] / peak_flops(setup)[0]
    weights = sum(p.numel() for p in policy.model.parameters())
    options = FlowPlanOptions(
        size, 64, model, rl, sampling, frames, len(caption.split()), assume=Assumptions(0, 0, 0, 0, 0, 0)
    )
    planned = {n: g.peak / 1e9 for n, g in zip(("sft", "rl"), plan_flow(NEW, options).gpus, strict=True)}
    detail = (
        f"{weights / 1e6:.0f} M weights: update of sound-sft {times['sft']:.2f} s (MFU {mfu:.1%}), sound-grpo "
        f"{times['sampling'] + times['rl']:.2f} s (sampling {times['sampling']:.2f} s, update {times['rl']:.2f} s); "
        + ", ".join(f"{name} {peaks[name]:.1f} GB, planned {own:.1f}" for name, own in planned.items())
    )
    numbers = {"weights": float(weights), "mfu": mfu, **times}
    numbers |= {f"{name}_gb": peaks[name] for name in planned}
    numbers |= {f"{name}_planned_gb": own for name, own in planned.items()}
    if not large:
        return Outcome("measured", detail, numbers)
    near = all(abs(planned[name] / peaks[name] - 1) <= MEMORY_TOLERANCE for name in planned)
    return Outcome("pass" if near else "fail", detail, numbers)


def grouped_experts(setup: Setup) -> Outcome:
    """Compare experts multiplied as groups with one after the other, in four layers of Qwen3-Omni-30B-A3B's width:
    log-probs, and the times of an update and of decoding."""
    wide, tokenizer = setup.is_gpu, tiny_tokenizer(TEXTS, 400)
    sizes = Qwen3MoeConfig(
        hidden_size=2048 if wide else 64, moe_intermediate_size=768 if wide else 48, num_hidden_layers=4,
        num_attention_heads=32 if wide else 4, num_key_value_heads=4 if wide else 2, head_dim=128 if wide else 16,
        num_experts=128 if wide else 8, num_experts_per_tok=8 if wide else 2, norm_topk_prob=True,
        vocab_size=151_936 if wide else 1000, max_position_embeddings=32_768, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config = ModelConfig(dtype="bfloat16" if wide else "float32", gradient_checkpointing=True)
    model = _random(lambda: Qwen3MoeForCausalLM(sizes), setup, config)
    policy = AudioPolicy(model, tokenizer, None, TextDecoder(tokenizer), config)
    policy.stop_ids = (-1,)
    batch = pack_experiences(experiences(setup.scale))
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=32, cuda_graphs=False))

    def update() -> None:
        policy.model.zero_grad()
        policy.forward(batch).logprobs.mean().backward()

    logprobs, times = [], {}
    for name in ("grouped_mm", "eager"):
        model.config._experts_implementation_internal = name
        with torch.no_grad():
            logprobs.append(policy.forward(batch).logprobs.float())
        decode = setup.seconds(lambda: engine.generate([Request(question(), n=setup.scale.decoded)]), repeats=1)
        times[name] = setup.seconds(update, repeats=1), decode
    error = float((logprobs[0] - logprobs[1]).abs().mean())
    (grouped, grouped_decode), (eager, eager_decode) = times["grouped_mm"], times["eager"]
    numbers = {"error": error, "update": grouped, "update_eager": eager}
    numbers |= {"decode": grouped_decode, "decode_eager": eager_decode}
    detail = (
        f"mean difference of a log-prob {error:.2g}; update {grouped:.3f} s, one by one {eager:.3f} s; 32 tokens "
        f"{grouped_decode:.2f} s, one by one {eager_decode:.2f} s"
    )
    return Outcome("pass" if error <= (0.05 if wide else 1e-4) else "fail", detail, numbers)


def against_trl(setup: Setup) -> Outcome:
    """Compare a step with TRL's, where TRL and a checkout with bench/ are: see bench/against_trl.py."""
    if any(importlib.util.find_spec(package) is None for package in ("trl", "datasets", "accelerate")):
        return Outcome("skipped", "TRL is not installed")
    try:
        module = importlib.import_module("bench.against_trl")
    except ModuleNotFoundError:
        return Outcome("skipped", "bench/against_trl.py is in a checkout only")
    outcome: Outcome = module.step_against_trl(replace(setup))
    return outcome


CHECKS: dict[str, Check] = {
    "GRPO step of 3B": grpo_step,
    "quickstart's steps": quickstart_steps,
    "flow step of 500 M": flow_step,
    "experts as groups": grouped_experts,
    "step against TRL": against_trl,
}
