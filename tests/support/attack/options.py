"""Command lines: the options of recipes and of commands."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from audiorl.cli.report import ReportOptions
from audiorl.cli.resume import ResumeOptions
from audiorl.cli.rewards import ServeRewardOptions
from audiorl.cli.view import ViewOptions
from audiorl.config.distributed import RuntimeConfig
from audiorl.eval.audit import AuditOptions
from audiorl.eval.passk import PassKOptions
from audiorl.options import parse
from audiorl.recipes._loader import load_recipe, parse_config
from audiorl.rewards.serve import _check
from corpora.cli import BuildCorpus, BuildQuestions, BuildScenes, GraftOptions, SplitCorpus, TrainTagger
from tests.support.attack.targets import Input, Target

COMMANDS = {
    "resume": ResumeOptions, "report": ReportOptions, "serve": ServeRewardOptions, "build": BuildCorpus,
    "split": SplitCorpus, "build-qa": BuildQuestions, "build-scenes": BuildScenes, "train-tagger": TrainTagger,
    "graft": GraftOptions, "view": ViewOptions,
    "audit": AuditOptions, "passk": PassKOptions,
}  # fmt: skip
LINES = {
    "mmau-grpo": "--tiny --data a.jsonl:5x2 --optim.lr 1e-4 --optim.betas 0.9 0.99 --rl.group-size 4 "
    "--rl.clip-low 0.1 --rl.kl-beta 0.01 --rl.estimator.gamma 0.9 --sampling.temperature 0.7 --sampling.top-p 0.9 "
    "--max-steps 5 --epochs 1.5 --seed 3 --held-out-count 2 --lora",
    "mmau-grpo more": "--tiny --rl.advantage gae --rl.critic.coef 0.5 --rl.critic.optim.lr 1e-4 "
    "--rl.loss-options.dual-clip 3 --rl.ema-decay 0.99 --rl.kl.target 0.1 --rl.save-every 2 --rl.rollouts-every 1 "
    "--model.audio full",
    "dpo-audio-qa": "--tiny --dpo.beta 0.1 --dpo.batch-size 2 --dpo.loss ipo --dpo.sft-coef 1",
    "tts-grpo": "--tiny --sampling.audio-temperature 0.9 --sampling.max-frames 20",
    "sound-grpo": "--tiny --sampling.steps 6 --sampling.window 3 --sampling.guidance-scale 2 --network.width 64",
    "quickstart": "--tiny --seed 0 --sft.steps 3 --rl.steps 2 --rl.group-size 4",
    "resume": "runs/q1 --log tensorboard --trust a.py --runtime.ranks 2",
    "report": "runs/q1 --audio-root data",
    "simul-ppo": "--tiny --stage1.steps 3 --stage2.steps 4 --max-steps 5 --max-seconds 8 --lag 1 --sft-epochs 0.5 "
    "--model.device cpu --seed 9223372036854775807",
    "build": "out --languages en es --bitrate 24000 --max-seconds 30 --synthetic-speakers 4 --synthetic-clips 2",
    "split": "corpus --out rows --held-out 0.1 --min-seconds 0.4 --max-seconds 8 --min-words 1 --seed 4294967296",
    "build-qa": "out --speech corpus --train 30 --held-out 6 --seed 1 --bitrate 6000",
    "build-scenes": "out --sources sonic-pi --train 30 --held-out 6 --edits 1 --seconds 2 --rate 16000 --max-events 2",
    "train-tagger": "scenes --out tagger --steps 2 --width 4 --seed 4294967296",
    "graft": "--llm a --encoder b --family qwen2-audio --out c --encoder-layers 2 --seed 9223372036854775807",
    "view": "runs/q1 --port 0 --labels labels.jsonl --label scores",
    "audit": "--model m --data d --batch-size 8 --max-new-tokens 32 --limit 64 --min-gain -0.05 --filter 2",
    "passk": "--model m --data d --samples 16 --ks 1 4 --temperature 0.7 --seed 5",
    "serve": "reward.py --host 127.0.0.1 --port 8300 --max-batch 16 --max-bytes 1000 --concurrency 2 --max-seconds 5",
}
POSITIVE = {
    "lr", "eps", "max_grad_norm", "clip_low", "clip_high", "ratio_cap", "tis_cap", "kl.target", "kl.horizon",
    "steps", "prompts_per_step", "group_size", "mini_batches", "save_every", "rollouts_every", "micro_batch_tokens",
    "batch_size", "max_new_tokens", "max_frames", "epochs", "max_batch", "max_bytes", "concurrency", "max_seconds",
    "ranks", "max_steps", "top_p", "audio_top_p", "alpha", "synthetic_speakers", "synthetic_clips", "bitrate", "train",
    "max_events", "max_event_seconds", "video_rate", "width",
}  # fmt: skip
NOT_NEGATIVE = {
    "kl_beta", "temperature", "audio_temperature", "top_k", "weight_decay", "warmup_steps", "coef", "rank", "port",
    "held_out_count", "estimator.eps", "eval_every", "audio_cache_mb", "dynamic_sampling", "seed", "data_seed",
    "held_out", "min_seconds", "min_words", "encoder_layers", "lag", "sft_epochs", "samples", "filter",
}  # fmt: skip
AT_MOST_ONE = ("gamma", "lam", "top_p", "audio_top_p", "ema_decay", "betas")
WORDS = (
    "nan", "inf", "-inf", "-1", "0", "1e400", "-0.5", "2", "", " ", "x", "True", "None", "--", "-", "--x", "\ud800",
    "1e-400", "99999999999999999999", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "cuda:99",
    "0x10", "1_000", "--help", "١", "-h", "a=b", "=", "..", "\x00", "--no-lora",
)  # fmt: skip


def _parse(given: Input, folder: Path) -> Any:
    words = [word for word in given.data.decode(errors="surrogateescape").split("\n") if word]
    name = given.name.partition(" ")[0]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        if set(words) & {"-h", "--help"}:
            raise ValueError("help")
        if name not in COMMANDS:
            return parse_config(load_recipe(name), words)
        options: Any = parse(COMMANDS[name], words, prog=name)
        if isinstance(options, ServeRewardOptions):
            _check(options)
        return options


def _judge(given: Input, options: Any) -> Iterator[str]:
    for name, value in _numbers(options, ""):
        short = name.rpartition(".")[2]
        names = {short, ".".join(name.split(".")[-2:])}
        too_small = value < 0 if names & NOT_NEGATIVE else value <= 0 if names & POSITIVE else False
        too_large = short in AT_MOST_ONE and not 0 <= value <= 1
        if (
            too_small
            or too_large
            or (isinstance(value, int) and abs(value) >= 2**63)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            yield f"{name} is {value}"


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, RuntimeConfig):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers(part, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _mutate(rng: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    """Words replaced, removed, inserted, or changed by a letter."""
    words = data.decode().split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(words)) if words else 0
        kind = rng.randrange(6)
        if kind < 4:
            words[place : place + (kind < 3)] = [rng.choice(WORDS)]
        elif kind == 4 or not words or not words[place]:
            del words[place : place + 1]
        else:
            letter = rng.randrange(len(words[place]))
            words[place] = words[place][:letter] + rng.choice("-=. 0159eE_aé\u202e") + words[place][letter + 1 :]
    return "\n".join(words).encode(errors="surrogatepass")


def _lines() -> list[Input]:
    return [Input(name, line.replace(" ", "\n").encode()) for name, line in LINES.items()]


TARGETS = [Target("options", _parse, _judge, _mutate, more_seeds=_lines, names=("",))]
