"""GRPO steps of a Qwen2.5-Omni-3B thinker at its real sizes, with random weights: where do the seconds of a step go?

    python bench/gpu_step.py                     # 8 prompts of 20 s of audio x 8 answers of 256 tokens, three steps
    python bench/gpu_step.py --side eager fp32   # one of the sides, see SIDES
    python bench/gpu_step.py --tiny              # small, on a CPU too: it shows that the script runs

Prints seconds of the rollout and of the update, tokens/s, ms for each token of all answers, and the peak of memory. No
answer ends early, so every step samples the same number of tokens. Sides run one after the other in one process.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2_5OmniThinkerForConditionalGeneration, WhisperFeatureExtractor

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.families.qwen_omni import QwenOmni, thinker_config
from audiorl.models.tiny import SPECIAL, tiny_tokenizer
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.collect import collect, scored_experiences
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Message, Rollout, Sample, Score

CUDA = torch.cuda.is_available()
DTYPE = "bfloat16" if CUDA else "float32"
SIDES = {
    "captured": (ModelConfig(dtype=DTYPE, gradient_checkpointing=True), True),
    "eager": (ModelConfig(dtype=DTYPE, gradient_checkpointing=True), False),
    "fp32": (ModelConfig(dtype="float32", autocast=True, gradient_checkpointing=True), True),
    "no checkpointing": (ModelConfig(dtype=DTYPE), True),
}
"""By name: the model's options, and whether decoding steps are captured as CUDA graphs."""


def thinker(config: ModelConfig, tiny: bool) -> AudioPolicy:
    """A thinker of the real class. Its tokenizer knows few words; the embeddings have the real number of rows."""
    tokenizer = tiny_tokenizer(["What is said, and by whom?"] * 20, 400)
    hidden, heads = (64, 4) if tiny else (2048, 16)
    text = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 2}
    text |= {"intermediate_size": 128 if tiny else 11_008, "num_hidden_layers": 2 if tiny else 36}
    text |= {"vocab_size": 1000 if tiny else 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": False}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    third = hidden // heads // 6
    sections = [hidden // heads // 2 - 2 * third, third, third]
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}}
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    if not tiny:
        audio = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio |= {"num_mel_bins": 128, "n_window": 100, "max_source_positions": 1500}
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (*SPECIAL.values(), "user")}
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, config.dtype))
    with torch.device("cuda" if CUDA else "cpu"):
        model = Qwen2_5OmniThinkerForConditionalGeneration(thinker_config(audio, text, ids, ids["user"]))
    torch.set_default_dtype(torch.float32)
    extractor = WhisperFeatureExtractor(feature_size=128, n_fft=400, hop_length=160, chunk_length=300)
    policy = AudioPolicy(model, tokenizer, extractor, QwenOmni(), config)
    policy.stop_ids = (-1,)  # no answer ends early
    return policy


def reward(rollouts: Sequence[Rollout]) -> list[Score]:
    return [Score(sum(i % 2 for i in r.segments[0].ids.tolist()) / 256) for r in rollouts]


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", nargs="+", choices=SIDES, default=["eager", "captured"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    prompts, group, seconds, most = (2, 2, 2, 6) if options.tiny else (8, 8, 20, 256)
    rng = np.random.default_rng(0)
    table = Table("side", "step", "rollout s", "ms a token", "tokens/s", "update s", "step s", "peak GB")
    for side in options.side:
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        config, captured = SIDES[side]
        policy = thinker(config, options.tiny)
        rl = RLConfig(steps=options.steps, prompts_per_step=prompts, group_size=group, kl_beta=0.0)
        engine = HFEngine(policy, SamplingConfig(max_new_tokens=most, cuda_graphs=captured))
        trainer = Trainer(policy, rl, OptimConfig(), 1.0, most)
        for step in range(options.steps):
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            samples = []
            for i in range(prompts):
                noise = (0.1 * rng.standard_normal(16_000 * seconds)).astype(np.float32)
                clip = AudioClip(array=noise, sample_rate=16_000)
                samples.append(
                    Sample(f"{step}/{i}", (Message("user", (clip, "What is said, and by whom?")),), ("yes",))
                )
            began = now()
            batch = collect(engine, samples, reward, step, rl, seed=0)
            sampled = now()
            trainer.step(TrainBatch(scored_experiences(batch, rl)))
            done = now()
            rollout, update = sampled - began, done - sampled
            peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if CUDA else "-"
            numbers = (f"{rollout:.2f}", f"{1e3 * rollout / most:.1f}", f"{batch.num_sampled / rollout:,.0f}")
            table.add_row(side, str(step), *numbers, f"{update:.2f}", f"{done - began:.2f}", peak)
        del policy, engine, trainer
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
