"""Which weights of a small model that speaks learn from 256 rewards a step? Compare the gradients of different texts.

    python tools/gradient_agreement.py runs/tts-0 [--texts 64] [--samples 16] [--temperature 0.7]

The supervised model of a run of `corpora/recipes/tts_quickstart.py` speaks texts of the practice split, `samples`
times each.
Their policy gradients, with group advantages, are summed in four parts of different texts. For each kind of weights
the mean cosine between the parts is printed with its standard error: near 0 is noise. The correlation, within groups,
of the reward with the mean log-prob of the answer's frames says how much reward a lower temperature could give.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.models import AudioPolicy, load_policy
from audiorl.protocols import Request
from audiorl.recipes._loader import load_recipe, parse_config
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.records import RunConfig, RunState, read_record
from audiorl.speech_models import load_recogniser
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.rewards import Intelligibility
from audiorl.train.batches import counts, repeat_each
from audiorl.types import Rollout
from tokenizers_audio.unified import load as load_tokenizer

PARTS = 4


def kind(name: str) -> str:
    if name.startswith("model.norm."):
        return "last norm"
    for part, title in (
        ("norm", "other norms"),
        ("self_attn", "attention"),
        ("audio_mlp", "speech FFNs"),
        ("mlp", "text FFNs"),
        ("embed", "embeddings"),
    ):
        if part in name:
            return title
    return "heads"


def gradients(
    policy: AudioPolicy, rollouts: Sequence[Rollout], advantages: Sequence[float], temperature: float
) -> Mapping[str, Tensor]:
    """The policy gradient of the rollouts by kind of weights, each one vector."""
    experiences = [Experience.from_rollout(r) for r in rollouts]
    policy.model.zero_grad()
    for indices in micro_batches(experiences, 6000, True):
        part = [experiences[i] for i in indices]
        logprobs = policy.forward(pack_experiences(part, True), 1.0, None, temperature).logprobs
        (-(repeat_each([advantages[i] for i in indices], counts(part)) * logprobs).sum()).backward()
    out: dict[str, list[Tensor]] = {}
    for name, p in policy.trainable().items():
        if p.grad is not None:
            out.setdefault(kind(name), []).append(p.grad.flatten().clone())
    return {name: torch.cat(parts) for name, parts in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.texts % PARTS or args.samples < 2:
        parser.error(f"--texts must be a multiple of {PARTS}, --samples at least 2")
    about = read_record(args.run / "config.json", RunConfig)
    recipe = load_recipe(about.recipe)
    config = parse_config(recipe, about.argv)
    torch.set_num_threads(config.threads)
    checkpoint = args.run / read_record(args.run / "state.json", RunState).checkpoints["sft"]
    policy = load_policy(checkpoint, codec=load_tokenizer(args.run / "codec"))

    recordings = recipe.recordings(config)
    texts = [recipe.prompt(words, recordings) for words in recipe.splits(config)[1][: args.texts]]
    engine = HFEngine(policy, replace(config.sampling, audio_temperature=args.temperature))
    recogniser = load_recogniser(args.run / "recogniser")
    reward = Intelligibility(SpeechModels(CodecSpeechDecoder.of(policy), recogniser=recogniser), "cer")
    rollouts: list[Rollout] = []
    scores: list[float] = []
    for number, text in enumerate(texts):
        group = engine.generate([Request(text, seed=number * args.samples + i) for i in range(args.samples)])
        rollouts += group
        scores += [score.total for score in reward(group)]
        print(f"\r{number + 1}/{len(texts)} texts", end="", flush=True)
    groups = np.array(scores).reshape(args.texts, args.samples)
    sure = np.array([float(r.segments[-1].logprobs.sum(-1).mean()) for r in rollouts]).reshape(groups.shape)
    advantages = groups - groups.mean(1, keepdims=True)
    sure -= sure.mean(1, keepdims=True)
    together = float((advantages * sure).sum() / np.sqrt((advantages**2).sum() * (sure**2).sum()))
    best = groups.max(1).mean()
    print(f"\rreward {groups.mean():.3f}, the best of {args.samples} {best:.3f}; with log-probs r = {together:.2f}")

    each = len(rollouts) // PARTS
    flat = advantages.flatten().tolist()
    gradients_of_parts = [
        gradients(policy, rollouts[at : at + each], flat[at : at + each], args.temperature)
        for at in range(0, len(rollouts), each)
    ]
    for name in sorted(gradients_of_parts[0], key=lambda n: len(gradients_of_parts[0][n])):
        cosines = [
            float(torch.cosine_similarity(a[name], b[name], dim=0)) for a, b in combinations(gradients_of_parts, 2)
        ]
        error = float(np.std(cosines)) / len(cosines) ** 0.5
        print(f"{name:12} {len(gradients_of_parts[0][name]):9,} weights  cosine {np.mean(cosines):6.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
