"""The options that recipes share. Each recipe adds its own; `audiorl.recipes._common` reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from audiorl.config.checks import require_ranges
from audiorl.config.flow import FlowConfig
from audiorl.config.model import LoraConfig, ModelConfig
from audiorl.config.optim import OptimConfig
from audiorl.config.rl import RLConfig
from audiorl.config.sampling import SamplingConfig
from audiorl.config.supervised import SFTConfig

Training = TypeVar("Training")


@dataclass(frozen=True)
class RecipeConfig:
    """Options of all recipes on a user's own model and data."""

    counts_steps: ClassVar[tuple[str, ...]] = ()
    """Groups whose `steps` are followed; those of all others follow from `epochs`, and giving them is refused."""
    path: str = "Qwen/Qwen2.5-Omni-3B"
    """The model: a local folder, a hub id, or `tiny` for a small random one."""
    data: tuple[str, ...] = ()
    """What to train on: files, folders, or the bundled speech by name. PATH:COUNT draws so many rows of a set;
    PATH:xWEIGHT or PATH:COUNTxWEIGHT shows its rows WEIGHT times an epoch (2.5: twice, and a drawn half once more)."""
    held_out: tuple[str, ...] = ()
    """Sets to measure on, named like `data`; without any, `held_out_count` training rows are held out."""
    held_out_count: int | None = None
    """Rows held out of `data` without `held_out`: of every set, task and frequent answer in proportion. None: 200, or a
    fifth of the rows where these are fewer."""
    data_seed: int = 0
    """Seed of which rows are held out and which a PATH:COUNT or a weight draws: the same rows for every `seed`."""
    audio_root: str | None = None
    """Folder from which relative audio paths start; by default the folder of each data file."""
    columns: tuple[str, ...] = ()
    """Columns of the data that have other names, as WANTED=NAME: `audio=wav question=prompt`."""
    on_error: Literal["raise", "skip"] = "raise"
    """`skip` counts and lists unusable rows instead of stopping at the first."""
    check_audio: bool = True
    """Decode every clip before training, so that a broken one does not stop a run in its third hour."""
    seed: int = 0
    """Seed of sampling, of the order of the data, and of new weights."""
    epochs: float = 1.0
    """Passes over the training rows."""
    max_steps: int | None = None
    """Most training steps, whatever `epochs` gives; None: no limit."""
    keep_checkpoints: int = 2
    """Checkpoints of each phase that stay; older ones are removed."""
    lora: bool = False
    """Train low-rank adapters instead of all decoder weights: of rank 16, or of `--model.lora.rank`."""
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing="auto")
    """How the model is loaded, and what of it is trained."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("epochs", "max_steps", "keep_checkpoints"), not_negative=("held_out_count",))
        if not self.adapted.lora.rank and self.model.lora != ModelConfig().lora:
            raise ValueError("model.lora: there are no adapters to be shaped; add --lora, or give --model.lora.rank")
        given = {type(value): value for value in vars(self).values()}
        sampling = given.get(SamplingConfig, given.get(FlowConfig))
        if RLConfig in given and sampling is not None:  # before a model is loaded
            given[RLConfig].check_sampling(sampling)

    @property
    def adapted(self) -> ModelConfig:
        """Return `model` with the adapters that `lora` asks for."""
        lora = self.model.lora
        rank = lora.rank or (LoraConfig().rank if self.lora else 0)
        return replace(self.model, lora=replace(lora, rank=rank))

    def with_steps_for(self, training: Training, items: int) -> Training:
        """Return `training` with the steps that show each of `items` rows `epochs` times, at most `max_steps`."""
        config: Any = training
        if config.steps != type(config)().steps:
            name = next((f.name for f in fields(self) if getattr(self, f.name) == training), "")
            raise ValueError(f"--{name}.steps: the steps of this recipe follow from its epochs; leave it out")
        per_step = config.prompts_per_step if isinstance(config, RLConfig) else config.batch_size
        # The last batch of a sorted epoch is a short one; it may be any of them.
        per_epoch = -(-items // per_step) if getattr(config, "sort", False) else items / per_step
        steps = max(round(self.epochs * per_epoch), 1)
        return replace(config, steps=min(steps, self.max_steps or steps))


@dataclass(frozen=True)
class HotwordOptions:
    """Options of recognition with hotwords: words that may be said, such as names, in the column `hotwords` or here."""

    hotwords: str | None = None
    """A text file with one hotword a line, for rows without a column `hotwords`."""
    distractors: int | None = None
    """Give each row so many hotwords that nobody says there, and of the file only those that are said there: half sound
    like the row's own, half are drawn at random, from the file and all rows' own. None: the list as it is."""
    prompt_hotwords: bool = True
    """Write the hotwords into the prompt. False: they are only counted."""

    @property
    def changes_hotwords(self) -> bool:
        """Return whether rows get other hotwords, or another prompt, than their column says."""
        return self.hotwords is not None or self.distractors is not None or not self.prompt_hotwords


@dataclass(frozen=True)
class RewardOptions:
    """Options of recipes whose reward the user can add to."""

    reward_file: str | None = None
    """A Python file that defines `reward`, added to the recipe's own reward as the part `user`; None adds none."""
    reward_weight: float = 1.0
    """Weight of `reward_file`."""


@dataclass(frozen=True)
class HeldOutOptions:
    """Options of recipes that also measure what no phase optimises or trains on."""

    unseen: tuple[str, ...] = ()
    """Sets of speakers that no phase trains on, named like `data`, measured before and after like `held_out`."""
    outside_file: str | None = None
    """A Python file that defines `reward`: a measure, higher is better, that is never optimised, only reported."""
    retention_text: str | None = None
    """Text without audio, measured before and after: `bundled`, a .txt file, or rows with `text`."""


@dataclass(frozen=True)
class ControlOptions:
    """Options of recipes that can compare reinforcement learning with SFT from the same start."""

    control: bool = False
    """Also train the control: SFT on the rows' reference answers from the same start, for as much compute."""
    control_sft: SFTConfig = SFTConfig(batch_size=8, save_every=100)
    """The batches of the control."""
    control_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=10)
    """The optimizer of the control."""


@dataclass(frozen=True)
class PtxOptions:
    """Options of recipes whose updates can add a supervised loss (PPO-ptx, arXiv 2203.02155)."""

    ptx_data: tuple[str, ...] = ()
    """Supervised rows for `ptx.coef`, named like `data` and read like those of sft_audio."""
