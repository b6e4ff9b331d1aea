"""Parts that recipes of interpretation share: the rewards of two stages, and segmented PPO in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.eval._streams import probe_streams
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.run.folder import Run
from audiorl.tasks.simul.quality import Metric
from audiorl.tasks.simul.rewards import TimeCompliance, Waits, hpo, multi_turn, single_turn
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.train.rl.train import train_rl

StageName = Literal["stage1", "stage2"]


@dataclass(frozen=True)
class StreamRewards:
    """Rewards of the two stages; see `audiorl.tasks.simul.rewards`."""

    quality: Metric = "word_f1"
    """How a translation is compared with its reference. `word_f1` and `ter` weigh what is missing and what is too much
    alike; chrF weighs what is missing more."""
    time: bool = False
    """Time compliance: the translation should last as long as its reference does when spoken."""
    longest_wait: float = 1.0
    """Acceptable wait of a translation, in chunks."""
    waits: Waits = "silence"
    """How waits are counted: the silent chunks before a translation (the paper's), or with `available` only those since
    something could be said."""
    hinge: float | None = None
    """Reward speed only where a sentence's quality is at least this, in [0, 1], as HPO does (arXiv 2604.21045); None:
    the penalty on waits, whatever the quality."""
    guards: bool = True
    """Penalise output that is longer or shorter than the reference, or that repeats itself: parts `length` and
    `repetition`. Without them and with chrF as `quality` it pays to say more than the reference."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of rewards by name; 1 for those that are not named."""
    hpo: bool = False
    """Reward both stages by HPO instead: the quality of the stream, and promptness above `hinge` (0.5 where
    it is None). It wants the advantage `gdpo`, several rollouts of a stream, and the KL in the loss."""

    def refuse_unused(self, defaults: StreamRewards) -> None:
        """Raise ValueError for an option other than its default that another one leaves without effect."""
        unused = [("hinge", name) for name in ("longest_wait", "waits") if self.hinge is not None]
        unused += [("hpo", name) for name in ("weights", "time", "guards", "longest_wait", "waits") if self.hpo]
        for cause, name in unused:
            if getattr(self, name) != getattr(defaults, name):
                option = name.replace("_", "-")
                raise ValueError(f"--rewards.{option}: has no effect with --rewards.{cause}; leave one of them out")

    def of_stages(
        self, frame_rate: float | None = None
    ) -> tuple[StandardisedSum, StandardisedSum] | tuple[WeightedSum, WeightedSum]:
        """Return the rewards of stage 1 and of stage 2; `frame_rate` of a codec, where the policy speaks."""
        if self.hpo:
            reward = hpo(self.quality, 0.5 if self.hinge is None else self.hinge)
            return reward, reward
        time: bool | TimeCompliance = self.time
        if time and frame_rate is not None:
            time = TimeCompliance(frame_rate)
        of_turns = {name: w for name, w in self.weights.items() if name not in ("latency", "stream_quality")}
        single = single_turn(self.quality, time, of_turns, guards=self.guards)
        both = multi_turn(
            self.quality,
            time,
            self.longest_wait,
            self.weights,
            waits=self.waits,
            guards=self.guards,
            hinge=self.hinge,
        )
        return single, both


@dataclass(frozen=True)
class SimulStage:
    """A phase of the run, its reward, and the name of the evaluation after it."""

    name: StageName
    reward: Reward
    config: RLConfig
    measured_as: str


def train_stages(
    policy: AudioPolicy,
    streams: Sequence[Stream],
    held_out: Sequence[Stream],
    run: Run,
    stages: Sequence[SimulStage],
    *,
    chunks: ChunkConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    measure: Callable[[str], object],
    seed: int = 0,
    supervised: Sequence[Example] = (),
    speech_decoder: SpeechDecoder | None = None,
) -> None:
    """Train `policy` in place, stage after stage.

    The KL of all stages is measured from the policy as it is now, and an adaptive β starts at the last value of an
    adaptive one before it; a `kl_beta` of 0 stays 0, no KL. `supervised`: the examples of the ptx term.
    `speech_decoder`: of a policy that speaks.
    """
    start = policy.reference()
    beta: float | None = None
    samples = [interpretation_sample(s, chunks) for s in streams]
    for number, stage in enumerate(stages):
        config = stage.config
        adaptive = config.kl_beta > 0 and config.kl.control != "fixed"
        if beta is not None and adaptive:
            config = replace(config, kl_beta=beta)
        train_rl(
            policy,
            samples,
            stage.reward,
            run,
            config=config,
            optim=optim,
            sampling=sampling,
            seed=seed + number,
            phase=stage.name,
            evaluate=probe_streams(policy, held_out, chunks, sampling),
            supervised=supervised,
            reference=start,
            speech_decoder=speech_decoder,
        )
        beta = run.result(stage.name)["kl_beta"] if adaptive else None
        measure(stage.measured_as)
