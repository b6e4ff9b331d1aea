"""OPA-DPO: DPO on the policy's own answers and an expert's corrections of them (Yang et al. 2025, arXiv 2501.09695).

    audiorl train opa-dpo --out runs/opa --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json --expert my_expert.py

The policy answers every prompt; the expert revises the answer as little as it must; supervised fine-tuning on gold and
revised answers brings both onto the policy's own distribution; then DPO prefers them to the first answers, with the
fine-tuned model as start and reference. As in the paper, DPO also compares each preferred answer with itself after a
prompt whose audio is partly silenced (weight 0.2, 30 % of the audio), and an anchor keeps preferred answers at least as
likely as under the reference (weight 1); `--dpo.audio-coef 0 --dpo.anchor-coef 0` leaves both out.

An expert is a Python file with `revise(sample, text) -> str`. Without one the right answer replaces what the policy
wrote between its <answer> tags. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig, SFTConfig
from audiorl.config.recipe import HeldOutOptions, RecipeConfig
from audiorl.data.preferences import Pair
from audiorl.eval._common import generate_all
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    answer_reward,
    evaluate_around_training,
    evaluation_of,
    read_questions,
    rl_check,
    supervised_turn,
)
from audiorl.rewards.answers import extract_think
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.fit import training_indices
from audiorl.train.preference import prefer
from audiorl.train.sft import sft
from audiorl.types import Sample
from audiorl.user_files import load_function


@dataclass(frozen=True)
class OPADPOConfig(HeldOutOptions, RecipeConfig):
    think: bool = False
    """Ask for thoughts before the answer."""
    lora: bool = True
    """Train low-rank adapters instead of all decoder weights: of rank 16, or of `--model.lora.rank`."""
    expert: str | None = None
    """A Python file that defines revise(sample, text) -> str; None: see `correct`."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    sft: SFTConfig = SFTConfig(batch_size=32)
    """Supervised fine-tuning. Its steps follow from `epochs` and `max_steps`."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-5)
    """The optimizer of supervised fine-tuning."""
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32, audio_coef=0.2, anchor_coef=1.0)
    """The preference loss, with the paper's pairs of audio and its anchor. Its steps follow from `epochs` and
    `max_steps`."""
    dpo_optim: OptimConfig = OptimConfig(lr=1e-6)
    """The optimizer of preference learning."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How the policy's own answers are sampled."""


def tiny() -> OPADPOConfig:
    return OPADPOConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        lora=False,
        eval_tokens=8,
        model=ModelConfig(),
        sft=SFTConfig(batch_size=4, save_every=1),
        dpo=PreferenceConfig(batch_size=2, save_every=1, audio_coef=0.2, anchor_coef=1.0),
        sampling=SamplingConfig(max_new_tokens=8, max_batch_tokens=20_000),
    )


def main(config: OPADPOConfig, run: Run) -> None:
    reward = answer_reward(config.think)

    def uses(sample: Sample) -> list[Sample | Example]:
        return [sample, Example(sample, supervised_turn(sample))]

    check = replace(rl_check(config, reward, config.eval_tokens), trained=uses)
    samples, held_out = read_questions(config, think=config.think, check=check)
    if config.max_steps is not None:  # answers to what will not be trained on are not needed
        most = SFTConfig(config.max_steps, max(config.sft.batch_size, config.dpo.batch_size))
        samples = [samples[i] for i in training_indices(samples, most, config.seed)]
    revise: Callable[[Sample, str], str] = correct if config.expert is None else load_function(config.expert, "revise")
    policy = check.policy()
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, check=check, think=config.think)
    with evaluate_around_training(run, policy, evaluation) as evaluate:
        engine, path = HFEngine(policy, config.sampling), run.dir / "answers" / "own.jsonl"
        rows = generate_all(engine, samples, path, batch_size=16, seed=config.seed)
        examples, pairs = learned(samples, [str(row["text"]) for row in rows], revise, config.think)
        if not examples:
            raise ValueError(
                "no answer to learn: none of the revised ones has a thought; give an --expert that writes it"
            )
        # An answer may spell a reserved token in letters; learned as a text it would be that token.
        spelled = policy.prompts.reserved.search
        examples = [e for e in examples if not spelled(e.target)]
        pairs = [p for p in pairs if not any(spelled(str(text)) for text in (p.chosen, p.rejected))]
        print(f"{len(examples)} answers to learn, {len(pairs)} pairs", flush=True)
        training = config.with_steps_for(config.sft, len(examples))
        sft(policy, examples, run, config=training, optim=config.sft_optim, seed=config.seed)
        evaluation.measure(run, "after_sft", policy)
        dpo = config.with_steps_for(config.dpo, len(pairs))
        prefer(policy, pairs, run, config=dpo, optim=config.dpo_optim, seed=config.seed, phase="dpo", evaluate=evaluate)


def learned(
    samples: Sequence[Sample], answers: Sequence[str], revise: Callable[[Sample, str], str], think: bool = False
) -> tuple[list[Example], list[Pair]]:
    """(gold and revised answers to learn, pairs that prefer them to the policy's own answers).

    think: leave out texts without a thought, which would teach not to think.
    """
    examples, pairs = [], []
    for sample, answer in zip(samples, answers, strict=True):
        gold = f"<answer>{sample.references[0]}</answer>"
        texts = dict.fromkeys((gold, revise(sample, answer)))
        for text in [text for text in texts if not think or extract_think(text) is not None]:
            examples.append(Example(sample, text))
            if answer.strip() and text.strip() != answer.strip():
                pairs.append(Pair(sample, text, answer))
    return examples, pairs


def correct(sample: Sample, text: str) -> str:
    """Return the policy's text with the right answer in its last <answer> tags; the right answer alone where it has
    none."""
    right = f"<answer>{sample.references[0]}</answer>"
    answers = list(re.finditer(r"<answer>(?:(?!<answer>).)*?</answer>", text, re.DOTALL))
    return right if not answers else text[: answers[-1].start()] + right + text[answers[-1].end() :]
