"""The step time of GRPO against TRL's GRPOTrainer, where TRL is installed (bench/grpo_step.py says how).

    python -m bench.against_trl [--pretend]

On a GPU at the widths of a 3B decoder; with --pretend small on the CPU. grpo_step.py compares memory and time in
processes of their own on the CPU.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.gpu_check.setup import GPU_SCALE, PRETEND_SCALE, Outcome, Setup, at_least, full_width_policy
from audiorl.models import AudioPolicy
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Message, Rollout, Sample, Score

NEVER = -1
"""No token, so that all answers have equal lengths."""
LR = 1e-6


def step_against_trl(setup: Setup) -> Outcome:
    """Generation, reward, log-probs and update of one step without a KL, both with transformers' generation, bfloat16
    over float32 weights and checkpointed layers. TRL computes what audiorl does: entropies, but neither the old
    policy's log-probs nor a reference's. The two take turns in one process; the ratio is the median of neighbours,
    after one pair that is not timed. On a CPU seconds are CPU seconds."""
    if any(importlib.util.find_spec(package) is None for package in ("trl", "datasets", "accelerate")):
        return Outcome("skipped", "TRL is not installed")
    samples = _samples(setup)
    our_step = _our_step(setup, samples)
    our_times: list[float] = []
    trl_times = _trl_times(setup, samples, lambda: our_times.append(our_step()))[1:]
    del our_times[0]
    ratio = statistics.median(b / a for a, b in zip(our_times, trl_times, strict=True))
    seconds, trl_seconds = statistics.median(our_times), statistics.median(trl_times)
    scale = setup.scale
    sizes = f"{scale.groups} × {scale.group_size} answers of {scale.response} tokens"
    detail = f"{sizes}: {seconds:.3f} s, TRL {metadata.version('trl')} {trl_seconds:.3f} s: {ratio:.1f}× the time"
    return at_least(ratio, 1.0, detail, setup, ratio=ratio, seconds=seconds, trl_seconds=trl_seconds)


def _config(setup: Setup) -> ModelConfig:
    return ModelConfig(autocast=setup.is_gpu, gradient_checkpointing=True)


def _samples(setup: Setup) -> list[Sample]:
    """One question for each group, different in its first word, together of about the scale's length."""
    words = ("who", "what", "yes", "no", "English", "Spanish", "French", "why")
    return [
        Sample(str(k), (Message("user", (words[k % len(words)] + " said" * max(setup.scale.prompt - 20, 1),)),))
        for k in range(setup.scale.groups)
    ]


def _score(ids: Sequence[int]) -> float:
    return sum(i % 2 == 0 for i in ids) / len(ids)


def _steps(setup: Setup) -> int:
    return 1 + (setup.scale.repeats if setup.is_gpu else max(setup.scale.repeats, 9))


def _clock(setup: Setup) -> float:
    """Wall-clock seconds once the GPU has done what it was given; without one CPU seconds."""
    setup.wait()
    return time.perf_counter() if setup.is_gpu else time.process_time()


def _our_step(setup: Setup, samples: Sequence[Sample]) -> Callable[[], float]:
    """A function that runs the next step and returns its seconds."""
    from audiorl.train.rl.collect import collect, scored_experiences

    scale = setup.scale
    policy = full_width_policy(setup, _config(setup))
    policy.stop_ids = (NEVER,)
    config = RLConfig(
        steps=_steps(setup), prompts_per_step=scale.groups, group_size=scale.group_size, kl_beta=0.0,
        micro_batch_tokens=2**20,
    )  # fmt: skip
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=scale.response))
    trainer = Trainer(policy, config, OptimConfig(lr=LR), 1.0, scale.response)

    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_score(r.segments[0].ids.tolist())) for r in rollouts]

    def step() -> float:
        began = _clock(setup)
        batch = collect(engine, samples, reward, trainer.steps, config, seed=0)
        assert {r.num_sampled for r in batch.rollouts} == {scale.response}, "an answer ended early"
        trainer.step(TrainBatch(scored_experiences(batch, config)))
        return _clock(setup) - began

    return step


def _trl_times(setup: Setup, samples: Sequence[Sample], before_step: Callable[[], None]) -> list[float]:
    """Seconds of every step of TRL's; `before_step` is called before each."""
    scale = setup.scale
    policy = full_width_policy(setup, _config(setup))
    model, tokenizer = _stock(policy)
    began, seconds = 0.0, []
    lengths: set[int] = set()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.update(map(len, completion_ids))
        return [_score(ids) for ids in completion_ids]

    def begin_step() -> None:
        nonlocal began
        before_step()
        began = _clock(setup)

    train_with_trl(
        model, tokenizer, [tokenizer.decode(policy.prompt(sample).ids) for sample in samples], reward, begin_step,
        lambda: seconds.append(_clock(setup) - began), per_device_train_batch_size=scale.groups * scale.group_size,
        num_generations=scale.group_size, max_completion_length=scale.response,
        generation_kwargs={"min_new_tokens": scale.response}, max_steps=_steps(setup), beta=0.0, learning_rate=LR,
        bf16=setup.is_gpu, use_cpu=not setup.is_gpu, gradient_checkpointing=True,
    )  # fmt: skip
    assert lengths == {scale.response}, "an answer of TRL's ended early"
    return seconds


def train_with_trl(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    reward: Callable[..., list[float]],
    begin_step: Callable[[], None],
    end_step: Callable[[], None],
    **options: Any,
) -> None:
    """TRL's GRPO as audiorl's defaults compute it: the loss of DeepSeekMath, whole distributions, one learning rate.

    reward: TRL's `reward_funcs`. begin_step, end_step: called around each step. options: more fields of TRL's
    `GRPOConfig`.
    """
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begin_step()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            end_step()

    tokenizer.padding_side = "left"
    with tempfile.TemporaryDirectory() as folder:
        if options["beta"]:  # TRL loads its reference from the model's path
            model.save_pretrained(folder)
            model.config._name_or_path = folder
        config = GRPOConfig(
            output_dir=folder, temperature=1.0, top_k=0, loss_type="grpo", lr_scheduler_type="constant", report_to=[],
            logging_strategy="no", save_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
            callbacks=[Steps()],
        )  # fmt: skip
        trainer.train()


def _stock(policy: AudioPolicy) -> tuple[Any, Any]:
    """The model with transformers' own attention, and its tokenizer."""
    policy.model.config._attn_implementation = "sdpa"
    policy.model.requires_grad_(True)
    return policy.model, policy.tokenizer


if __name__ == "__main__":
    pretend = "--pretend" in sys.argv
    device = torch.device("cpu" if pretend else "cuda")
    print(step_against_trl(Setup(device, PRETEND_SCALE if pretend else GPU_SCALE)).detail)
