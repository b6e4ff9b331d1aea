"""GRPO of an Omni model's thinker and talker together: a text reward for the one, a speech reward for the other.

    audiorl train omni-grpo --out runs/omni --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 --lora \\
        --data avqa.jsonl --held-out mmau-test-mini.json --voice Chelsie --judge openai/whisper-large-v3

The questions are divided among `--rounds`. In a round the thinker answers its questions and learns as in mmau-grpo;
then the talker says the answers that the thinker gives now, reads their states from the thinker as it is now, and
learns as in tts-grpo. An answer that cannot be said, such as an empty one, is replaced by the row's. Both KLs are to
the models that the run began with; their optimizers begin anew in each round. RUN/omni is the whole checkpoint with
both, for transformers and vLLM. `--tiny` tries the recipe.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from audiorl.config import KLConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.recipe import RecipeConfig, RewardOptions
from audiorl.data.schema import FieldError
from audiorl.eval._common import Judges
from audiorl.eval._phases import Evaluation, answer
from audiorl.eval._speech import measure_speech
from audiorl.models.export import export
from audiorl.models.families.talker import TalkerPolicy
from audiorl.recipes._common import RowCheck, answer_reward, read_questions, with_user_reward
from audiorl.recipes._speech import SpeechConfig, speaking_policy, tiny_part
from audiorl.report import write_report
from audiorl.rewards.answers import final_text
from audiorl.rewards.asr import references_of
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.tasks.tts.rewards import SpeechRewards, speech_reward
from audiorl.train.rl.train import train_rl
from audiorl.types import Sample


@dataclass(frozen=True)
class OmniGRPOConfig(RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, which are not said, and reward their format."""
    rounds: int = 4
    """How often thinker and talker take turns."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer."""
    voice: str | None = None
    """The talker's voice, by name; None: its first one."""
    codec: str | None = None
    """The decoder of its codes; None: the frozen one of the checkpoint."""
    judge: str | None = None
    """A recogniser by path or hub id that transcribes spoken held-out answers before and after; None measures none."""
    language: str | None = None
    """Language for multilingual recognisers, such as en; None: they guess."""
    speech: SpeechRewards = SpeechRewards(similarity=0.0, duration=0.0)
    """Rewards of the talker."""
    rl: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, save_every=50)
    """GRPO of the thinker. The steps of all rounds follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The thinker's optimizer."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How the thinker's answers are sampled."""
    talker_rl: RLConfig = RLConfig(
        group_size=8, prompts_per_step=8, aggregation="token-mean", kl=KLConfig(kind="k3"), kl_beta=0.04, save_every=50
    )
    """GRPO of the talker, for as many steps."""
    talker_optim: OptimConfig = OptimConfig(lr=1e-6)
    """The talker's optimizer."""
    talker_sampling: SamplingConfig = SamplingConfig(temperature=0.9, max_frames=750)
    """How answers are said."""

    def __post_init__(self) -> None:
        super().__post_init__()  # which looks at the talker's groups, the last of their kinds
        self.rl.check_sampling(self.sampling)
        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}; give at least 1")
        if self.talker_rl.eval_every:
            raise ValueError("--talker-rl.eval-every: spoken answers are measured before and after; leave it out")
        if self.judge is not None and self.judge == self.speech.asr and self.judge != "tiny":
            raise ValueError(f"--judge {self.judge}: the reward asks it, too; measure with another, or with none")


def tiny() -> OmniGRPOConfig:
    rl = RLConfig(prompts_per_step=2, group_size=2, save_every=1)
    return OmniGRPOConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=2,
        max_steps=2,
        rounds=2,
        eval_tokens=8,
        judge="tiny",
        model=ModelConfig(),
        speech=SpeechRewards(similarity=0.0, duration=0.0, asr="tiny", metric="cer"),
        rl=rl,
        talker_rl=rl,
        sampling=SamplingConfig(max_new_tokens=8),
        talker_sampling=SamplingConfig(max_new_tokens=2, max_frames=12),
    )


def main(config: OmniGRPOConfig, run: Run) -> None:
    parts = run.dir / "tiny"
    config = replace(config, path=tiny_part(parts, "omni", config.path), judge=tiny_part(parts, "judge", config.judge))
    reward = with_user_reward(config, answer_reward(config.think))
    talker_of = cache(lambda: talker_from(config))

    def sayable(sample: Sample) -> list[Sample]:
        texts_to_say(config, talker_of(), [sample], [""])
        return [sample]

    tokens = config.sampling.max_new_tokens, config.eval_tokens
    check = RowCheck.of(config, reward, new_tokens=tokens[0], eval_tokens=tokens[1], trained=sayable, measured=sayable)
    train, held_out = read_questions(config, think=config.think, check=check)
    thinker, talker = check.policy(), talker_of()
    decoder = CodecSpeechDecoder.of(talker)
    options = replace(config.speech, asr=tiny_part(parts, "asr", config.speech.asr))
    spoken_reward = speech_reward(options, decoder, (), config.language, "speech")
    evaluation = Evaluation(reward, held_out, config.eval_tokens)
    judges = Judges.load(config.judge, None, config.language)
    said = texts_to_say(config, talker, held_out, [""] * len(held_out))

    def measure(when: str) -> None:
        evaluation.measure(run, when, thinker)
        if judges.recogniser is not None:
            spoken = f"spoken_{when}"
            measure_speech(run, spoken, talker, said, config.talker_sampling, judges, baseline="spoken_before")

    measure("before")
    start, spoken_start = thinker.reference(), talker.reference()
    before = spoken_start.runs_on
    assert isinstance(before, TalkerPolicy)
    steps = -(-config.with_steps_for(config.rl, len(train)).steps // config.rounds)
    rounds = min(config.rounds, len(train))
    for number in range(1, rounds + 1):
        part = train[number - 1 :: rounds]
        train_rl(
            thinker,
            part,
            reward,
            run,
            config=replace(config.rl, steps=steps),
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase=f"thinker_{number}",
            evaluate=evaluation.probe(thinker),
            reference=start,
        )
        texts: Sequence[Sample] = part
        phase, whole = f"talker_{number}", run.dir / f"thinker_{number}"
        if number == rounds or not run.finished(phase):
            if not whole.exists():
                export(run.checkpoint(f"thinker_{number}"), whole, merge=config.adapted.lora.rank > 0)
            shutil.rmtree(run.dir / f"thinker_{number - 1}", ignore_errors=True)
            talker.read_by(whole)  # the talker's start reads the same thinker: the KL is that of the talkers alone
            before.base, before.thinker = talker.base, talker.thinker
            asked = part[: steps * config.talker_rl.prompts_per_step]
            answers = answer(thinker, asked, reward, config.eval_tokens, "answers to say")
            texts = texts_to_say(config, talker, [a.sample for a in answers], [final_text(a.text) for a in answers])
        train_rl(
            talker,
            texts,
            spoken_reward,
            run,
            config=replace(config.talker_rl, steps=steps),
            optim=config.talker_optim,
            sampling=config.talker_sampling,
            seed=config.seed,
            phase=phase,
            reference=spoken_start,
            speech_decoder=decoder,
        )
    measure("after")
    if not (run.dir / "omni").exists():
        export(run.checkpoint(f"talker_{rounds}"), run.dir / "omni", merge=config.adapted.lora.rank > 0)
    print(write_report(run.dir))


def talker_from(config: OmniGRPOConfig) -> TalkerPolicy:
    same = {name: getattr(config, name) for name in ("path", "voice", "codec", "model", "lora", "seed")}
    policy = speaking_policy(SpeechConfig(talker=True, **same))
    assert isinstance(policy, TalkerPolicy)
    return policy


def texts_to_say(
    config: OmniGRPOConfig, talker: TalkerPolicy, samples: Sequence[Sample], answers: Sequence[str]
) -> list[Sample]:
    """Return the prompts to say answers; where one cannot be said, to say the row's own. Raises FieldError for a row
    whose own cannot be said, either."""
    why: object = "there is none"
    prompts = []
    for sample, own in zip(samples, answers, strict=True):
        for text in (own, *sample.references[:1]):
            try:
                prompt = speech_sample(sample.id, text)
                talker.prompts.check(prompt, config.talker_sampling.max_frames)
                references_of(prompt, config.speech.normalizer, config.language)
            except ValueError as error:
                why = error
                continue
            prompts.append(prompt)
            break
        else:
            raise FieldError("answer", f"sample {sample.id!r}: its answer cannot be said: {why}")
    return prompts
