"""One GRPO step against TRL's GRPOTrainer, and an update on audio prompts against its padded form.

    python -m bench.grpo_step [--quick] [--only text|audio] [--threads 1]

Text: a Qwen2 of 5.4 M parameters, 8 prompts x 8 samples x 64 tokens, float32 on the CPU, from asking for the samples
to the optimizer's step. Each side is a process of its own that waits idle while another one works; they take turns, and
the table gives medians. CPU seconds are what the process was charged (user + system). Memory is the largest resident
size during a step, less that of the same process between steps (weights, reference and optimizer state loaded, no
gradients, freed memory handed back). `TRL, 8 x 8` accumulates a step over 8 batches of 8 samples. The ratios are
audiorl's share of the row's.

TRL comes with its own pins, so it does not belong into this project's environment. A second one that sees this one's
packages will do; without TRL only audiorl's side is timed::

    python -m venv /tmp/trl
    python -c "import sysconfig, pathlib; print(sysconfig.get_path('purelib'), pathlib.Path.cwd(), sep='\\n')" \\
        > $(/tmp/trl/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth
    /tmp/trl/bin/pip install --no-deps "trl>=1,<2"
    /tmp/trl/bin/python -m bench.grpo_step

Audio: groups of 8 answers of 64 tokens to 20 s of speech, for the tiny Qwen2.5-Omni with Whisper tiny as its audio
tower. `Trainer.step` on prepared experiences, against the usual form: the prompt repeated for every
sample, right padding, transformers' own forward with the tower on every sample, full logits. Both step the optimizer.
`--families audioflamingo3 glmasr` compares them for tiny models of these families instead, in CPU seconds and memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from audiorl.algos.experience import Experience
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.data.corpus import bundled_speech
from audiorl.models import AudioPolicy
from audiorl.models.audio_encoder import AudioEncoder
from audiorl.models.families import generic, qwen_omni
from audiorl.models.families.qwen_omni import QwenOmni
from audiorl.models.families.text import TextDecoder
from audiorl.models.features import Features
from audiorl.models.tiny import tiny_tokenizer
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.advantages import compute_advantages
from audiorl.train.rl.collect import collect, scored_experiences
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Message, Rollout, Sample, Score
from bench.against_trl import train_with_trl

PROMPTS, GROUP, ANSWER = 8, 8, 64
LR = 1e-5
VOCABULARY = 8192


# -- text: what both sides share --------------------------------------------------------------------------------------


def tokenizer_of_words() -> Qwen2Tokenizer:
    """A byte-level BPE learned from invented words. Its end token lies beyond the model's vocabulary: never sampled."""
    rng = random.Random(0)
    syllables = [a + b + c for a in "bcdfglmnprst" for b in "aeiou" for c in ("", "n", "r", "s", "l")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(40_000)]
    tokenizer = tiny_tokenizer((" ".join(words[i : i + 20]) for i in range(0, len(words), 20)), VOCABULARY - 40)
    while len(tokenizer) < VOCABULARY:
        tokenizer.add_tokens([f"<extra {len(tokenizer)}>"])
    tokenizer.add_tokens(["<never>"], special_tokens=True)
    tokenizer.eos_token = "<never>"
    return tokenizer


def text_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256, intermediate_size=816, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).float()


def prompt_texts(tokenizer: Qwen2Tokenizer, length: int) -> list[str]:
    """ChatML questions of `length` tokens, and up to an eighth fewer."""
    rng = random.Random(1)
    out = []
    for i in range(PROMPTS):
        words: list[str] = []
        text = ""
        while len(tokenizer.encode(chat := CHAT.format(" ".join(words)))) <= length - i * (length // 64):
            text = chat
            words.append("".join(rng.choices("abcdefghiklmnoprstuvz", k=rng.randint(2, 7))))
        out.append(text)
    return out


CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def reward_of(ids: Sequence[int]) -> float:
    return sum(i % 2 for i in ids) / len(ids)


# -- text: one process a side -----------------------------------------------------------------------------------------


class Meter:
    """Waits for a line on stdin, measures until `stop`, and answers with a line of JSON."""

    def __init__(self, model: nn.Module):
        self.model = model

    def start(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        if not sys.stdin.readline():
            raise SystemExit
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self.idle = _status("VmRSS")
        self.cpu, self.wall = _cpu_seconds(), time.perf_counter()

    def stop(self, tokens: int) -> None:
        wall, cpu = time.perf_counter() - self.wall, _cpu_seconds() - self.cpu
        peak = _status("VmHWM")
        result = {"wall": wall, "cpu": cpu, "above": peak - self.idle, "peak": peak, "tokens": tokens}
        print("RESULT", json.dumps(result), flush=True)


def _status(field: str) -> float:
    """A size of this process in MiB, from /proc/self/status."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match.group(1)) / 1024


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def audiorl_side(length: int, beta: float, steps: int, micro_batch_tokens: int) -> None:
    tokenizer = tokenizer_of_words()
    policy = AudioPolicy(text_model(), tokenizer, None, TextDecoder(tokenizer), ModelConfig())
    policy.stop_ids = (int(tokenizer.convert_tokens_to_ids("<never>")),)
    samples = []
    for i, text in enumerate(prompt_texts(tokenizer, length)):
        question = text.removeprefix(CHAT.split("{}")[0]).removesuffix(CHAT.split("{}")[1])
        samples.append(Sample(str(i), (Message("user", (question,)),)))
        assert policy.prompt(samples[-1]).ids.tolist() == tokenizer.encode(text)
    config = RLConfig(
        steps=steps, prompts_per_step=PROMPTS, group_size=GROUP, kl_beta=beta, micro_batch_tokens=micro_batch_tokens
    )
    sampling = SamplingConfig(max_new_tokens=ANSWER)
    worker = Trainer(policy, config, OptimConfig(lr=LR), sampling.temperature, sampling.max_new_tokens)
    engine = HFEngine(policy, sampling)

    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(reward_of(r.segments[0].ids.tolist())) for r in rollouts]

    meter = Meter(policy.model)
    for step in range(steps):
        meter.start()
        batch = collect(engine, samples, reward, step, config, seed=0)
        output = worker.step(TrainBatch(scored_experiences(batch, config)))
        assert output.metrics["policy/logprob_gap"] < 1e-5, "log-probs of engine and trainer differ"
        engine.update_weights(worker.weights(), step + 1)
        meter.stop(sum(r.num_sampled for r in batch.rollouts))


def trl_side(length: int, beta: float, steps: int, parts: int, checkpointing: bool) -> None:
    """`parts`: micro batches that a step is accumulated over."""
    tokenizer, model = tokenizer_of_words(), text_model()
    meter = Meter(model)
    sampled = 0

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal sampled
        sampled = sum(map(len, completion_ids))
        return [reward_of(ids) for ids in completion_ids]

    train_with_trl(
        model, tokenizer, prompt_texts(tokenizer, length), reward, meter.start, lambda: meter.stop(sampled),
        per_device_train_batch_size=PROMPTS * GROUP // parts, gradient_accumulation_steps=parts, num_generations=GROUP,
        max_completion_length=ANSWER, max_steps=steps, beta=beta, learning_rate=LR, bf16=False, use_cpu=True,
        gradient_checkpointing=checkpointing, dataloader_pin_memory=False,
    )  # fmt: skip


# -- text: the comparison ---------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One measured process. `values` by quantity, the warm-up step left out."""

    name: str
    process: subprocess.Popen[str]
    values: dict[str, list[float]]

    def step(self, keep: bool) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                assert result.pop("tokens") == PROMPTS * GROUP * ANSWER, "an answer ended early"
                if keep:
                    for name, value in result.items():
                        self.values.setdefault(name, []).append(value)
                return
        raise RuntimeError(f"{self.name}: the process ended with {self.process.wait()}")

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])


def compare_text(args: argparse.Namespace, beta: float, console: Console) -> None:
    with_trl = importlib.util.find_spec("trl") is not None
    kinds = {"audiorl": "audiorl"}
    if with_trl:
        kinds |= {f"TRL, {n} x {PROMPTS * GROUP // n}": f"trl-{n}" for n in (1, 8, 32)}
        if args.checkpointing:
            kinds["TRL, 32 x 2, checkpointed"] = "trl-32-checkpointed"
    sides = [Side(name, _child(args, kind, beta), {}) for name, kind in kinds.items()]
    try:
        for repeat in range(args.warmup + args.repeats):
            for side in sides:
                side.step(keep=repeat >= args.warmup)
    finally:
        for side in sides:
            side.process.kill()
            side.process.wait()
    table = Table(title=f"GRPO step, KL {beta:g}, {PROMPTS} prompts of up to {args.prompt} tokens x {GROUP} x {ANSWER}")
    for column in ("", "wall s", "CPU s", "above idle MiB", "peak MiB", "wall", "CPU", "memory"):
        table.add_column(column, justify="left" if not column else "right")
    ours = sides[0]
    for side in sides:
        ratios = [f"{ours.median(n) / side.median(n):.2f}x" for n in ("wall", "cpu", "above")]
        figures = [f"{side.median(n):.{d}f}" for n, d in (("wall", 2), ("cpu", 2), ("above", 0), ("peak", 0))]
        table.add_row(side.name, *figures, *ratios)
    console.print(table)
    if not with_trl:
        console.print(
            "TRL is not installed here; the head of bench/grpo_step.py says how to install it next to audiorl."
        )


def _child(args: argparse.Namespace, kind: str, beta: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.grpo_step", "--side", kind, "--beta", str(beta)]
    command += ["--threads", str(args.threads), "--steps", str(args.warmup + args.repeats)]
    command += ["--prompt", str(args.prompt), "--micro-batch-tokens", str(args.micro_batch_tokens)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# -- audio ------------------------------------------------------------------------------------------------------------

AUDIO_SECONDS, BETA, UNCLIPPED, STANDSTILL = 20.0, 0.04, 1e9, 1e-12


def long_clips(count: int) -> list[AudioClip]:
    """Recordings laid end to end until a clip has 20 s."""
    clips: list[AudioClip] = []
    waves: list[np.ndarray] = []
    for u in bundled_speech(("en",)):
        waves.append(u.clip.load(16_000))
        if sum(map(len, waves)) >= AUDIO_SECONDS * 16_000:
            array = np.concatenate(waves)[: int(AUDIO_SECONDS * 16_000)]
            clips.append(AudioClip(array=array, sample_rate=16_000))
            waves = []
        if len(clips) == count:
            break
    return clips


def prepared(policy: AudioPolicy, clips: Sequence[AudioClip]) -> list[Experience]:
    """Groups of random answers with engine and reference log-probs, scores and advantages: ready for the update."""
    generator = torch.Generator().manual_seed(0)
    experiences = []
    for k, clip in enumerate(clips):
        sample = Sample(str(k), (Message("user", (clip, "What is said?")),))
        prompt = policy.prompt(sample).ids
        for _ in range(GROUP):
            ids = torch.cat([prompt, torch.randint(0, 200, (ANSWER,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            near = torch.where(mask, -6.4 + 0.3 * torch.randn(len(ids), generator=generator), 0.0)
            experiences.append(
                Experience(
                    ids,
                    mask,
                    len(prompt),
                    sample.audio,
                    group_id=sample.id,
                    rollout_logprobs=near,
                    ref_logprobs=near,
                    rewards=torch.zeros(len(ids)),
                    score=float(torch.rand((), generator=generator)),
                )
            )
    return compute_advantages(experiences, RLConfig(), BETA)


def padded_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Experience],
    features: Mapping[str, Features],
    rows: int,
) -> None:
    """The update in its usual form, in plain PyTorch, `rows` at a time. `features`: by clip, equally long."""
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(batch), rows):
        part = batch[start : start + rows]
        ids = pad_sequence([e.ids for e in part], batch_first=True)  # [B, L]
        lengths = torch.tensor([len(e) for e in part])
        attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        inputs = {
            name: torch.cat([features[e.audio[0].key][name] for e in part]) for name in features[part[0].audio[0].key]
        }
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **inputs).logits  # [B, L, V]
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        mask = pad_sequence([e.loss_mask for e in part], batch_first=True)[:, 1:].float()
        advantages, ref = (
            pad_sequence([getattr(e, name) for e in part], batch_first=True)[:, 1:]
            for name in ("advantages", "ref_logprobs")
        )
        ratio = (logprobs - logprobs.detach()).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        kl = (ref - logprobs).exp() - (ref - logprobs) - 1
        per_sample = (((BETA * kl - surrogate) * mask).sum(1)) / mask.sum(1)
        (per_sample.sum() / len(batch)).backward()
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], UNCLIPPED)
    optimizer.step()


class EncodesAgain(AudioEncoder):
    """Encodes a clip again wherever it stands, as trainers do that cache nothing."""

    @contextmanager
    def once(self) -> Iterator[None]:
        yield

    def encoder_output(self, clip: AudioClip) -> Tensor:
        self.cache.clear()
        return super().encoder_output(clip)


def audio_updates(batch: Sequence[Experience], base: AudioPolicy, rows: int) -> dict[str, Callable[[], float]]:
    """Seconds of one update each, by form, from fresh optimizers and empty caches; the gradients stay on the model."""
    extractor = base.extractor
    assert extractor is not None
    taken = {"input_features", "input_features_mask", "feature_attention_mask"}
    features = {e.audio[0].key: {n: x for n, x in base.audio.features(e.audio[0]).items() if n in taken} for e in batch}
    if isinstance(base.backbone, QwenOmni):
        for clip in features.values():
            clip["feature_attention_mask"] = torch.ones(1, clip["input_features"].shape[-1], dtype=torch.long)
    longest = batch[0].prompt_length

    def padded() -> float:
        trainable = list(base.trainable().values())
        optimizer = torch.optim.AdamW(trainable, lr=STANDSTILL, weight_decay=0.0)
        began = time.perf_counter()
        padded_update(base.model, optimizer, batch, features, rows)
        return time.perf_counter() - began

    def packed(kind: type[AudioEncoder], share: bool) -> float:
        policy = AudioPolicy(base.model, base.tokenizer, extractor, base.backbone, base.config)
        policy.audio = kind(base.model, extractor, base.backbone, base.config)
        # a pack as long as a shared group in either form
        config = RLConfig(kl_beta=BETA, share_prompts=share, micro_batch_tokens=longest + GROUP * ANSWER)
        worker = Trainer(policy, config, OptimConfig(lr=STANDSTILL, max_grad_norm=UNCLIPPED), 1.0, ANSWER)
        base.model.zero_grad(set_to_none=True)
        worker.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]  # a step would free them
        began = time.perf_counter()
        worker.step(TrainBatch(batch))
        return time.perf_counter() - began

    return {
        "padded": padded,
        "packed": lambda: packed(EncodesAgain, False),
        "packed, audio encoded once": lambda: packed(AudioEncoder, False),
        "packed, encoded once, prompt shared": lambda: packed(AudioEncoder, True),
    }


def compare_audio(args: argparse.Namespace, audio: Any, console: Console) -> None:
    config = ModelConfig(audio=audio)
    policy = qwen_omni.tiny([u.text for u in bundled_speech()], config=config)
    batch = prepared(policy, long_clips(args.clips))
    updates = audio_updates(batch, policy, GROUP)
    times: dict[str, list[float]] = {name: [] for name in updates}
    worst = {name: 0.0 for name in updates}
    for repeat in range(1 + args.audio_repeats):
        usual: dict[str, Tensor] = {}
        for name, update in updates.items():
            seconds = update()
            gradients = {n: p.grad for n, p in policy.trainable().items() if p.grad is not None}
            usual = usual or gradients
            assert gradients.keys() == usual.keys()
            scale = max(float(g.abs().max()) for g in usual.values())
            error = max(float((gradients[n] - usual[n]).abs().max()) for n in usual) / scale
            assert error < 1e-4, f"{name}: another gradient, off by {error:.1e} of the largest entry"
            worst[name] = max(worst[name], error)
            if repeat:
                times[name].append(seconds)
    prompt = batch[0].prompt_length
    title = f"Update, audio tower {audio}, {args.clips} x {AUDIO_SECONDS:g} s ({prompt} tokens) x {GROUP} x {ANSWER}"
    table = Table(title=title)
    for column in ("", "wall s", "padded / this", "gradient's error"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in times.items():
        seconds = statistics.median(values)
        ratio = statistics.median(times["padded"]) / seconds
        table.add_row(name, f"{seconds:.2f}", f"{ratio:.2f}x", f"{worst[name]:.1e}" if name != "padded" else "")
    console.print(table)


def compare_families(args: argparse.Namespace, console: Console) -> None:
    title = f"Update, frozen encoder, {args.clips} x {AUDIO_SECONDS:g} s x {GROUP} x {ANSWER}"
    table = Table(title=title)
    columns = (
        "family",
        "prompt",
        "padded CPU s",
        "packed CPU s",
        "ratio",
        "padded MiB",
        "packed MiB",
        "gradient's error",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "family" else "right")
    for kind in args.families:
        policy = generic.tiny(kind, [u.text for u in bundled_speech()], hidden=256, layers=4, window=30)
        batch = prepared(policy, long_clips(args.clips))
        updates = audio_updates(batch, policy, GROUP)
        found: dict[str, list[tuple[float, float]]] = {"padded": [], "packed, encoded once, prompt shared": []}
        for repeat in range(1 + args.audio_repeats):
            usual: dict[str, Tensor] = {}
            for name, measured in found.items():
                policy.model.zero_grad(set_to_none=True)
                gc.collect()
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")
                idle, cpu = _status("VmRSS"), _cpu_seconds()
                updates[name]()
                measured += [(_cpu_seconds() - cpu, _status("VmHWM") - idle)] if repeat else []
                gradients = {n: p.grad for n, p in policy.trainable().items() if p.grad is not None}
                usual = usual or gradients
                assert gradients.keys() == usual.keys()
                scale = max(float(g.abs().max()) for g in usual.values())
                error = max(float((gradients[n] - usual[n]).abs().max()) for n in usual) / scale
                assert error < 1e-4, f"{kind}: another gradient, off by {error:.1e} of the largest entry"
        (padded, padded_mib), (packed, packed_mib) = (
            [statistics.median(column) for column in zip(*measured, strict=True)] for measured in found.values()
        )
        row = f"{padded:.2f}", f"{packed:.2f}", f"{padded / packed:.1f}x", f"{padded_mib:.0f}", f"{packed_mib:.0f}"
        table.add_row(kind, str(batch[0].prompt_length), *row, f"{error:.1e}")
    console.print(table)


# -- command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", choices=("text", "audio"))
    parser.add_argument("--families", nargs="+", metavar="MODEL_TYPE", help="audio updates of these families alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest text prompt")
    parser.add_argument("--betas", type=float, nargs="+", default=[0.0, 0.04])
    parser.add_argument("--micro-batch-tokens", type=int, default=384, help="audiorl's")
    parser.add_argument("--checkpointing", action="store_true", help="TRL also with its default, checkpoints")
    parser.add_argument("--clips", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="for both parts; the first round is left out")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--beta", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    if args.side == "audiorl":
        return audiorl_side(args.prompt, args.beta, args.steps, args.micro_batch_tokens)
    if args.side:
        parts = int(args.side.split("-")[1])
        return trl_side(args.prompt, args.beta, args.steps, parts, args.side.endswith("checkpointed"))
    args.warmup = 1
    args.audio_repeats = args.repeats or (1 if args.quick else 3)
    args.repeats = args.repeats or (2 if args.quick else 5)
    console = Console(width=120)
    if args.families:
        return compare_families(args, console)
    if args.only != "audio":
        for beta in args.betas:
            compare_text(args, beta, console)
    if args.only != "text":
        for audio in ("frozen", "full"):
            compare_audio(args, audio, console)


if __name__ == "__main__":
    main()
