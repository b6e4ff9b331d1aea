"""Train from Python, by the recipes of the command line: `audiorl.train_grpo`, `train_ppo`, `train_sft`, `train_dpo`.

All four take the same arguments:

model     a folder, a run, a hub id, `"tiny"` for a small random model, or a policy of `load_policy`, trained in place
data      files, folders, `"bundled"` speech, a list of row dictionaries, a `datasets.Dataset`, or several of these;
          docs/reference/data.md shows the formats
held_out  what to measure before and after, likewise; by default `held_out_count` rows of `data`
steps     training steps; by default `epochs` passes over the data
out       the run folder; by default a temporary one, which is deleted with the result
resume    True continues an interrupted run in `out`, by the same call that began it
options   every option of the recipe: `seed=1`, its group by two underscores (`rl__kl_beta=0.0`) or as a dictionary
          (`rl={"kl_beta": 0.0}`), or its last name where only one group has it (`lr=1e-5`, `group_size=4`)

They raise ValueError in one line that names the option, or the file, row and field, that cannot be used.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from audiorl.config import to_json
from audiorl.config.recipe import RecipeConfig
from audiorl.distributed import processes
from audiorl.models import AudioPolicy
from audiorl.options import names, with_values
from audiorl.protocols import Reward
from audiorl.recipes import audio_qa, dpo_audio_qa, sft_audio
from audiorl.recipes._common import Given
from audiorl.rewards import FunctionReward
from audiorl.run.folder import Run, newest_checkpoint
from audiorl.run.metrics_log import read_metrics
from audiorl.run.records import FROM_PYTHON, IN_MEMORY, RunConfig, read_record

Model = str | Path | AudioPolicy
RewardFunction = Callable[..., Any]
"""A `Reward`, or a function of one rollout, or one as TRL calls it."""
ENDLESS = 1e9
"""Passes over the data that no number of steps exhausts."""


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What a training made.

    >>> import audiorl
    >>> audiorl.train_sft(model="tiny", data="bundled", steps=1, batch_size=2, held_out_count=4)
    TrainResult(1 step; accuracy 0.000 → 0.000 on 4)
    """

    policy: AudioPolicy
    """The trained policy."""
    metrics: list[dict[str, Any]]
    """A row for each step: `phase`, `step`, and the metrics of docs/reference/metrics.md by name."""
    evaluation: dict[str, dict[str, Any]]
    """Measurements by name, `before` and `after` among them: means, `n`, and the 95 % interval `low` to `high`."""
    folder: Path
    """The run folder, with checkpoints, recorded rollouts and report.html."""
    _temporary: TemporaryDirectory[str] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        text = f"{len(self.metrics)} step{'' if len(self.metrics) == 1 else 's'}"
        if {"before", "after"} <= self.evaluation.keys():
            before, after = self.evaluation["before"], self.evaluation["after"]
            name = next(iter(before))
            text += f"; {name} {before[name]:.3f} → {after[name]:.3f} on {after['n']}"
        return f"TrainResult({text}{'' if self._temporary else f'; {self.folder}'})"


def train_grpo(
    model: Model,
    data: Any,
    reward: RewardFunction | None = None,
    *,
    steps: int | None = None,
    held_out: Any = (),
    out: str | Path | None = None,
    **options: Any,
) -> TrainResult:
    """Train a policy by GRPO on audio prompts; see `audiorl.recipes.audio_qa`.

    reward: a reward of `audiorl.rewards`; a function of one rollout that returns a number (`None` skips the rollout);
    or a function as TRL calls it, `f(prompts, completions, **columns)`, that returns a number for each completion. By
    default the right answer and the format of thoughts, 2 to 1.

    >>> import audiorl
    >>> def brief(rollout):
    ...     return -len(rollout.text)
    >>> settings = dict(group_size=4, prompts_per_step=2, max_new_tokens=8, held_out_count=4)
    >>> result = audiorl.train_grpo("tiny", "bundled", brief, steps=2, **settings)
    >>> [row["step"] for row in result.metrics]
    [1, 2]
    >>> sorted(result.evaluation)
    ['after', 'before']
    """
    return _train(audio_qa, audio_qa.AudioQAConfig(), model, data, held_out, steps, out, options, reward)


def train_ppo(
    model: Model,
    data: Any,
    reward: RewardFunction | None = None,
    *,
    steps: int | None = None,
    held_out: Any = (),
    out: str | Path | None = None,
    **options: Any,
) -> TrainResult:
    """Train a policy by PPO with a critic on audio prompts; see `train_grpo` for the reward.

    >>> import audiorl
    >>> from audiorl.rewards import AnswerAccuracy
    >>> settings = dict(prompts_per_step=4, mini_batches=2, max_new_tokens=8, held_out_count=4)
    >>> result = audiorl.train_ppo("tiny", "bundled", AnswerAccuracy(), steps=1, critic={"warmup_steps": 0}, **settings)
    >>> "critic/loss" in result.metrics[0]
    True
    """
    return _train(audio_qa, audio_qa.ppo(), model, data, held_out, steps, out, options, reward)


def train_sft(
    model: Model,
    data: Any,
    *,
    steps: int | None = None,
    held_out: Any = (),
    out: str | Path | None = None,
    **options: Any,
) -> TrainResult:
    """Fine-tune a policy on the rows' answers, or with `task="transcripts"` on transcripts (`recipes.sft_audio`).

    >>> import audiorl
    >>> from audiorl.data.corpus import bundled_speech
    >>> rows = [{"id": u.id, "audio": u.clip.path, "text": u.text} for u in bundled_speech(("en",), max_seconds=2)[:8]]
    >>> result = audiorl.train_sft("tiny", rows, task="transcripts", steps=2, batch_size=2, held_out_count=2)
    >>> result.metrics[-1]["phase"], result.evaluation["after"]["n"]
    ('sft', 2)
    """
    return _train(sft_audio, sft_audio.SFTAudioConfig(), model, data, held_out, steps, out, options)


def train_dpo(
    model: Model,
    data: Any,
    *,
    steps: int | None = None,
    held_out: Any = (),
    out: str | Path | None = None,
    **options: Any,
) -> TrainResult:
    """Train a policy on pairs of a chosen and a rejected answer by DPO or a relative (`recipes.dpo_audio_qa`).

    >>> import audiorl
    >>> result = audiorl.train_dpo("tiny", "bundled", loss="ipo", steps=1, batch_size=2, held_out_count=4)
    >>> result.metrics[0]["phase"]
    'ipo'
    """
    return _train(dpo_audio_qa, dpo_audio_qa.DPOConfig(), model, data, held_out, steps, out, options)


def _train(
    recipe: ModuleType,
    config: RecipeConfig,
    model: Model,
    data: Any,
    held_out: Any,
    steps: int | None,
    out: str | Path | None,
    options: Mapping[str, Any],
    reward: RewardFunction | None = None,
) -> TrainResult:
    options = dict(options)
    resume = bool(options.pop("resume", False))
    if resume and out is None:
        raise ValueError("resume: give the run's folder as out, too")
    values: dict[str, Any] = {}
    for name, value in options.items():
        *groups, last = _place(config, name)
        inner = values
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = to_json(value) if is_dataclass(value) else value
    values["path"] = "a policy in memory" if isinstance(model, AudioPolicy) else newest_checkpoint(model)
    if steps is not None:
        if {"epochs", "max_steps"} & values.keys():
            raise ValueError("steps: leave out epochs and max_steps, which say the same")
        values |= {"max_steps": steps, "epochs": ENDLESS}
    given: dict[str, tuple[Any, ...]] = {}
    for name, sets in (("data", _sets(data)), ("held_out", _sets(held_out))):
        # The configuration, which the run folder records, names what is in files; `Given` carries it all.
        values[name], given[name] = [s for s in sets if isinstance(s, str)], sets
    config = with_values(config, values, lambda place: "")
    temporary = TemporaryDirectory(prefix="audiorl-") if out is None else None
    folder = Path(temporary.name) / "run" if temporary else Path(str(out))
    policy = model if isinstance(model, AudioPolicy) else None
    if policy is not None and getattr(config, "control", False):
        raise ValueError("control: it starts from the model as it was before training; give the model's folder instead")
    score = None if reward is None else as_reward(reward)
    held = {"the model": policy, "the reward": score, "data": [s for s in given["data"] if not isinstance(s, str)]}
    held["held-out data"] = [s for s in given["held_out"] if not isinstance(s, str)]
    memory = [part for part, value in held.items() if value]
    argv = [IN_MEMORY, *memory] if memory else [FROM_PYTHON]
    with Run.open(folder) if resume else Run.create(folder, str(recipe.__file__), argv, config) as run:
        if resume and read_record(folder / "config.json", RunConfig).config != to_json(config):
            raise ValueError(f"{folder}: the run has other options; give those that it began with")
        try:
            with processes():
                trained = recipe.main(config, run, Given(policy, score, **given))
        except Exception:
            run.discard_if_empty()
            raise
    evaluation = read_record(folder / "eval.json", dict[str, Any])
    return TrainResult(trained, read_metrics(folder / "metrics.jsonl"), evaluation, folder, temporary)


def _sets(data: Any) -> tuple[Any, ...]:
    """Return data sets as a tuple of paths and of rows."""
    if isinstance(data, str | Path):
        return (str(data),)
    if isinstance(data, list | tuple) and not all(isinstance(row, Mapping) for row in data):
        return tuple(str(part) if isinstance(part, Path) else part for part in data)
    return () if isinstance(data, list | tuple) and not data else (data,)


def _place(config: RecipeConfig, name: str) -> list[str]:
    """Return the groups and the name of an option. Raises ValueError for none, and for options in two groups."""
    if "__" in name or hasattr(config, name):
        return name.split("__")
    paths = [path.replace("-", "_") for path, _ in names(type(config))]
    # The control repeats options of the training that it is compared with.
    own = [path for path in paths if not path.startswith("control_")]
    found = [path for path in own if path.rpartition(".")[2] == name]
    shortest = [path for path in found if path.count(".") == min(p.count(".") for p in found)]
    if len(shortest) == 1:
        return shortest[0].split(".")
    if shortest:
        spelled = ", ".join(path.replace(".", "__") for path in shortest)
        raise ValueError(f"{name} is an option of several groups: {spelled}")
    by_last = {path.rpartition(".")[2]: path.replace(".", "__") for path in reversed(own)}
    near = ", ".join(by_last[last] for last in difflib.get_close_matches(name, by_last, 3, 0.5))
    raise ValueError(f"no option is called {name}; near ones: {near or 'none'}")


def as_reward(reward: RewardFunction) -> Reward:
    """Return a reward of rollouts as it is, and a function of a rollout, or one as TRL calls it, as a `FunctionReward`.

    Raises ValueError for anything else.

    >>> from audiorl.api import as_reward
    >>> as_reward(lambda rollout: 1.0).takes
    'rollout'
    """
    if not callable(reward) or isinstance(reward, type):
        raise ValueError(f"reward: {reward!r} is no function and no reward object")
    if "rollouts" in inspect.signature(reward).parameters:
        return reward
    return FunctionReward(reward, "reward")
