"""What recipes do around their training call: read and split data, load the policy, measure before and after, report.

A recipe is its settings and one training call between two measurements::

    samples, held_out = read_questions(config, think=True)
    policy, reward = policy_from(config), answer_reward(think=True)
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, think=True)
    with measured(run, policy, evaluation) as evaluate:
        train_rl(policy, samples, reward, run, config=config.scheduled(config.grpo, len(samples)), evaluate=evaluate, …)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from audiorl.audio import AudioError
from audiorl.config import (
    CTCConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PreferenceConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    require_ranges,
    torch_device,
)
from audiorl.data.bundled import bundled_set
from audiorl.data.manifest import Loaded, check_clip, read_samples
from audiorl.data.sets import first_drawn, identity, parse_set, split_held_out, weighted
from audiorl.data.text import BUNDLED, TextQuestion, read_passages
from audiorl.data.text import read_questions as read_text_questions
from audiorl.eval._phases import UNSEEN, Evaluation
from audiorl.models import AudioPolicy, dualize, load_policy
from audiorl.models.examples import Example
from audiorl.models.families.qwen_omni import tiny as tiny_qwen_omni
from audiorl.protocols import Reward
from audiorl.report import write_report
from audiorl.rewards import AnswerAccuracy, AnswerFormat, StandardisedSum, Term, ThinkFormat, WeightedSum, load_reward
from audiorl.rollout.speech_decoder import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.train.rl.hooks import Evaluate
from audiorl.train.sft import sft
from audiorl.types import Sample
from tokenizers_audio import load as load_codec

T = TypeVar("T")
Training = TypeVar("Training", RLConfig, SFTConfig, CTCConfig, PreferenceConfig, RewardModelConfig, ProcessRewardConfig)
Sum = TypeVar("Sum", WeightedSum, StandardisedSum)


@dataclass(frozen=True)
class RecipeConfig:
    """The options that all recipes on a user's own model and data share."""

    path: str = "Qwen/Qwen2.5-Omni-3B"
    """The model: a local folder, a hub id, or `tiny` for a small random one."""
    data: tuple[str, ...] = ()
    """What to train on: files, folders, or the bundled speech by name. PATH:COUNT draws so many rows of a set, for
    example `avqa.jsonl:5000 musicbench.jsonl:5000`; PATH:xWEIGHT or PATH:COUNTxWEIGHT shows its rows WEIGHT times an
    epoch (2.5: all rows twice and a drawn half once more; 0.5: a drawn half)."""
    held_out: tuple[str, ...] = ()
    """Sets to measure on, named like `data`; without any, `held_out_count` training rows are held out."""
    held_out_count: int = 200
    """Rows held out of `data` where no `held_out` is given, drawn from every set, task and frequent answer in
    proportion. Other rows about their recordings are left out of training."""
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
    lora: bool = False
    """Train low-rank adapters instead of all decoder weights: of rank 16, or of `--model.lora.rank`."""
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing=True)
    """How the model is loaded, and what of it is trained."""

    def __post_init__(self) -> None:
        require_ranges(self, positive=("epochs", "max_steps"), not_negative=("held_out_count",))
        if not self.adapted.lora.rank and self.model.lora != ModelConfig().lora:
            raise ValueError("model.lora: there are no adapters to be shaped; add --lora, or give --model.lora.rank")

    @property
    def adapted(self) -> ModelConfig:
        """`model` with the adapters that `lora` asks for."""
        lora = self.model.lora
        rank = lora.rank or (LoraConfig().rank if self.lora else 0)
        return replace(self.model, lora=replace(lora, rank=rank))

    def scheduled(self, training: Training, items: int) -> Training:
        """`training` with the steps that show each of `items` rows `epochs` times, at most `max_steps`.

        Raises ValueError where the options set the steps themselves: they would be ignored.
        """
        if training.steps != type(training)().steps:
            name = next((f.name for f in fields(self) if getattr(self, f.name) == training), "")
            raise ValueError(f"--{name}.steps: the steps of this recipe follow from its epochs; leave it out")
        per_step = training.prompts_per_step if isinstance(training, RLConfig) else training.batch_size
        steps = max(round(self.epochs * items / per_step), 1)
        return replace(training, steps=min(steps, self.max_steps or steps))


@dataclass(frozen=True)
class RewardOptions:
    """The options of recipes whose reward the user can add to."""

    reward_file: str | None = None
    """A Python file that defines `reward`, added to the recipe's own reward as the part `user`; None adds none."""
    reward_weight: float = 1.0
    """Weight of `reward_file`."""

    def rewarded(self, reward: Sum) -> Sum:
        """`reward` with the part of `reward_file`."""
        if self.reward_file is None:
            return reward
        return type(reward)((*reward.terms, Term("user", load_reward(self.reward_file), self.reward_weight)))


@dataclass(frozen=True)
class OutsideOptions:
    """The options of recipes that also measure what no phase optimises or trains on."""

    unseen: tuple[str, ...] = ()
    """Sets of speakers that no phase trains on, named like `data`, measured before and after like `held_out`."""
    outside_file: str | None = None
    """A Python file that defines `reward`: a measure, higher is better, that is never optimised, only reported."""
    retention_text: str | None = None
    """Text without audio, measured before and after as the set `text`: `bundled` (passages of Python's documentation
    and simple questions), or passages, a .txt file divided by empty lines or rows with `text`."""


@dataclass(frozen=True)
class ControlOptions:
    """The options of recipes of reinforcement learning that can compare with SFT from the same start."""

    control: bool = False
    """Also train the control: SFT on the rows' reference answers from the same start, for as much compute: CPU seconds
    of all processes, or wall-clock seconds where a GPU computes."""
    control_sft: SFTConfig = SFTConfig(batch_size=8, save_every=100)
    """The batches of the control."""
    control_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=10)
    """The optimizer of the control."""


@dataclass(frozen=True)
class PtxOptions:
    """The options of recipes whose updates can add a supervised loss (PPO-ptx, arXiv 2203.02155)."""

    ptx_data: tuple[str, ...] = ()
    """Supervised rows for `ptx.coef`, named like `data` and read like those of sft_audio: questions with their answers,
    or speech with its transcripts."""


# -- data --------------------------------------------------------------------------------------------------------------


def read_split(
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    read: Callable[..., Loaded[T]],
    **options: Any,
) -> tuple[list[T], list[T]]:
    """(training rows, held-out rows) of `config.data` and `config.held_out`: see `read_sets` and `split_held_out`."""
    train, held_out = (read_sets(paths, config, bundled, read, **options) for paths in (config.data, config.held_out))
    return split_held_out(train, held_out, config.held_out_count, config.data_seed)


def read_questions(config: RecipeConfig, *, think: bool) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out) questions about audio; `think`: their prompts ask for thoughts."""
    return read_split(config, partial(bundled_set, think=think, seed=config.seed), read_samples, think=think)


def read_sets(
    paths: Sequence[str],
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    read: Callable[..., Loaded[T]],
    **options: Any,
) -> list[tuple[str, list[T]]]:
    """The rows of each set, `bundled(name)` for a name that begins with `bundled`. Prints what was read and skipped.

    `read` is `read_samples`, `read_pairs` or another reader with their options; `options` are passed on to it. A row
    whose id occurs in an earlier set gets the set's number before its id: answers are told apart by id.
    """
    sets: list[tuple[str, list[T]]] = []
    ids: set[str] = set()
    if config.columns:
        options |= {"columns": column_names(config.columns, read)}
    for number, given in enumerate(paths, 1):
        path, count, _ = parse_set(given)
        check_drawn = False
        if path.startswith("bundled"):
            items = list(bundled(path))
        else:
            # Of a large set only the clips of the rows that are drawn are decoded.
            check_drawn = config.check_audio and count is not None and read is read_samples
            loaded = read(
                path,
                audio_root=config.audio_root,
                on_error=config.on_error,
                check_audio=config.check_audio and not check_drawn,
                **options,
            )
            print(loaded.summary(), flush=True)
            if loaded.skipped:
                print(loaded.listing(), flush=True)
            items = list(loaded.samples)
        if count is not None:
            usable = partial(_usable, on_error=config.on_error) if check_drawn else lambda item: True
            items = first_drawn(given, items, count, config.data_seed, usable)
        if any(identity(item)[0] in ids for item in items):
            items = [_with_id(item, f"{number}:{identity(item)[0]}") for item in items]
        ids |= {identity(item)[0] for item in items}
        sets.append((given, items))
    return sets


def column_names(given: Sequence[str], read: Callable[..., Any]) -> dict[str, str]:
    """{wanted: name in the data} of WANTED=NAME. Raises ValueError for another form, and where `read` takes none."""
    if "columns" not in inspect.signature(read).parameters:
        raise ValueError("--columns: this recipe's data has columns of one name only; rename them in the file")
    names: dict[str, str] = {}
    for pair in given:
        wanted, equals, name = pair.partition("=")
        if not (wanted and equals and name) or wanted in names:
            raise ValueError(f"--columns {pair!r}: give WANTED=NAME once for each column, such as audio=wav")
        names[wanted] = name
    return names


def _usable(item: Any, on_error: str) -> bool:
    """Whether the clips of a sample decode; where they do not, raise AudioError or print the reason."""
    try:
        for clip in item.audio:
            check_clip(clip)
    except AudioError as error:
        if on_error == "raise":
            raise
        print(f"  skipped {item.id}: {error}", flush=True)
        return False
    return True


def _with_id(item: Any, new: str) -> Any:
    if hasattr(item, "sample"):
        return replace(item, sample=replace(item.sample, id=new))
    return replace(item, **{"id" if hasattr(item, "id") else "name": new})


def check_ptx(paths: Sequence[str], *trainings: RLConfig) -> None:
    """Raise ValueError for rows of `ptx_data` that no phase uses, and for a phase that uses them but has none."""
    used = any(training.ptx.coef for training in trainings)
    if used and not paths:
        raise ValueError("ptx.coef is set, but there are no supervised rows for it; name them: --ptx-data FILE …")
    if paths and not used:
        raise ValueError("--ptx-data: nothing learns from these rows; set the weight of their loss, ptx.coef")


def ptx_examples(config: RecipeConfig, paths: Sequence[str], *trainings: RLConfig) -> list[Example]:
    """The rows of `ptx_data` with the turn to learn, for the phases `trainings`; see `check_ptx`.

    An answer is in tags where its prompt has choices or asks for them.
    """
    check_ptx(paths, *trainings)
    bundled = partial(bundled_set, think=False, seed=config.seed)
    samples = weighted(read_sets(paths, config, bundled, read_samples, think=False), config.data_seed)
    return [Example(s, supervised_turn(s, tags=bool(s.choices) or "<answer>" in _prompt_text(s))) for s in samples]


def _prompt_text(sample: Sample) -> str:
    return "".join(part for m in sample.messages for part in m.content if isinstance(part, str))


def supervised_turn(sample: Sample, tags: bool = True, thought: str | None = None) -> str:
    """The turn to learn: the first reference, in <answer> tags if `tags`, after the row's field `thought` in <think>.

    Raises ValueError naming a sample without a reference or a thought.
    """
    if not sample.references:
        raise ValueError(f"sample {sample.id!r}: no reference to learn")
    answer = f"<answer>{sample.references[0]}</answer>" if tags else sample.references[0]
    if thought is None:
        return answer
    text = sample.metadata.get(thought)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"sample {sample.id!r}: its row has no text in the field {thought!r}")
    return f"<think>{text.strip()}</think>{answer}"


# -- model and reward --------------------------------------------------------------------------------------------------


def policy_from(config: RecipeConfig) -> AudioPolicy:
    """The policy of a local folder or hub id, `tiny` for a small random one, with the adapters that are asked for."""
    model = config.adapted
    if config.path == "tiny":
        require_no_adapters(model)
    torch.manual_seed(config.seed)  # adapters and value heads start at random
    if config.path != "tiny":
        return load_policy(config.path, model)
    policy = tiny_qwen_omni(whisper=False, config=model)
    policy.model.to(torch_device(model.device))
    return policy


def require_no_adapters(model: ModelConfig) -> None:
    """Raise ValueError for adapters on a random model, which is in no folder that their checkpoints could name."""
    if model.lora.rank:
        raise ValueError("the random model `tiny` is in no folder that an adapter could name; save one, or leave lora")


def with_voice(policy: AudioPolicy, codec: str | Path, seed: int = 0) -> CodecSpeechDecoder:
    """The policy's speech decoder for the codec at `codec`; a policy that writes text only is dualized first."""
    loaded = load_codec(codec)
    if policy.speech is None:
        dualize(policy, loaded.num_codebooks, loaded.codebook_size, seed)
    policy.set_codec(loaded)
    return CodecSpeechDecoder.of(policy)


def answer_reward(think: bool) -> WeightedSum:
    """Two to one for the right answer and the format, as in Ke-Omni-R."""
    return WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=(ThinkFormat() if think else AnswerFormat(), 1.0))


# -- the run -----------------------------------------------------------------------------------------------------------


def evaluation_of(
    config: RecipeConfig,
    samples: Sequence[Any],
    held_out: Sequence[Sample],
    reward: Reward,
    max_new_tokens: int,
    *,
    think: bool = False,
    bundled: Callable[[str], Sequence[Sample]] | None = None,
    outside: WeightedSum | None = None,
    sets: Mapping[str, Sequence[Sample]] | None = None,
) -> Evaluation:
    """What the run measures: `held_out`, `sets` by name, and those of `--unseen`, which are read like questions.

    `samples`: the training rows. Raises ValueError for a speaker of `--unseen` that they have too.
    """
    sets = dict(sets or {})
    passages: list[str] = []
    questions: list[TextQuestion] = []
    if isinstance(config, OutsideOptions):
        reader = bundled or partial(bundled_set, think=think, seed=config.seed)
        unseen = [s for _, items in read_sets(config.unseen, config, reader, read_samples, think=think) for s in items]
        if unseen:
            rows = [getattr(item, "sample", item) for item in samples]
            check_strangers(*([(s.id, s.metadata.get("speaker", "")) for s in part] for part in (rows, unseen)))
            sets = {UNSEEN: unseen, **sets}
        if config.outside_file is not None:
            term = Term(Path(config.outside_file).stem, load_reward(config.outside_file))
            outside = WeightedSum((*(outside.terms if outside else ()), term))
        if config.retention_text is not None:
            passages = read_passages(config.retention_text)
            questions = read_text_questions(BUNDLED) if config.retention_text == BUNDLED else []
    return Evaluation(reward, held_out, max_new_tokens, sets, outside, passages=passages, questions=questions)


def check_strangers(trained: Sequence[tuple[str, str]], unseen: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError for a speaker of `unseen` in the training rows; say how many rows name no speaker.

    Each row is (id, speaker), "" where it names none.
    """
    speakers = {speaker: id for id, speaker in trained if speaker}
    for id, speaker in unseen:
        if speaker in speakers:
            raise ValueError(
                f"--unseen: {id!r} is spoken by {speaker!r}, who is in the training row {speakers[speaker]!r} too; "
                "give speakers that nothing is trained on"
            )
    for rows, name in ((trained, "training rows"), (unseen, "rows of --unseen")):
        nameless = sum(not speaker for _, speaker in rows)
        if nameless:
            print(
                f"{nameless} of {len(rows)} {name} name no speaker: whether both share one is not checked", flush=True
            )


def train_control(
    config: RecipeConfig,
    run: Run,
    phase: str,
    training: RLConfig,
    samples: Sequence[Sample],
    evaluation: Evaluation,
    tags: bool = True,
) -> None:
    """If `config.control`: SFT of a new copy of the start for as much compute as `phase` took, measured as `control`.

    It learns the first reference of each of `samples`, in <answer> tags if `tags`. `training`: the
    phase's configuration. Raises ValueError for a sample without a reference.
    """
    if not isinstance(config, ControlOptions) or not config.control:
        return
    policy = policy_from(config)
    sft(
        policy,
        [Example(s, supervised_turn(s, tags)) for s in samples],
        run,
        config=replace(config.control_sft, steps=100 * training.steps),
        optim=config.control_optim,
        seed=config.seed + 1,
        phase="control_sft",
        limit=run.compute_time(phase),
    )
    evaluation.measure(run, "control", policy)


@contextmanager
def measured(run: Run, policy: AudioPolicy, evaluation: Evaluation) -> Iterator[Evaluate]:
    """Measure `before`, train in the body of the `with` statement, measure `after`, write the report.

    Yields the evaluation for the training loop.
    """
    evaluation.measure(run, "before", policy)
    yield evaluation.probe(policy)
    evaluation.measure(run, "after", policy)
    print(write_report(run.dir))
