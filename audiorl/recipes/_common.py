"""Parts that recipes share: read and split data, load the policy, measure before and after training, report.

A recipe is its settings and one training call between two measurements. Those that train on the scores of a reward
share all of it, `train_with_reward`; the others call `evaluate_around_training` themselves::

    reward = answer_reward(think=True)
    check = RowCheck.of(config, reward, eval_tokens=config.eval_tokens, trained=lambda s: [Example(s, turn_of(s))])
    samples, held_out = read_questions(config, think=True, check=check)
    policy = check.policy()
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, think=True, check=check)
    with evaluate_around_training(run, policy, evaluation):
        sft(policy, examples, run, config=config.with_steps_for(config.sft, len(examples)), optim=config.optim)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from audiorl.audio import AudioError
from audiorl.config import ModelConfig, RLConfig, SFTConfig, torch_device
from audiorl.config.recipe import ControlOptions, HeldOutOptions, HotwordOptions, RecipeConfig, RewardOptions
from audiorl.data.bundled import bundled_set
from audiorl.data.hotwords import read_hotwords, with_context
from audiorl.data.manifest import Loaded, check_clip, column_names, read_samples
from audiorl.data.preferences import read_pairs, read_pairs_and_judged
from audiorl.data.schema import FieldError
from audiorl.data.sets import first_drawn, identity, parse_set, split_held_out, weighted
from audiorl.data.text import BUNDLED, TextQuestion, read_passages
from audiorl.data.text import read_questions as read_text_questions
from audiorl.eval._phases import ErrorRate, Evaluation
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models import AudioPolicy, dualize, load_policy
from audiorl.models.examples import Example, check_example
from audiorl.models.families.qwen_omni import tiny as tiny_qwen_omni
from audiorl.models.lora import is_adapter
from audiorl.protocols import Reward
from audiorl.report import write_report
from audiorl.rewards import AnswerAccuracy, AnswerFormat, StandardisedSum, Term, ThinkFormat, WeightedSum, load_reward
from audiorl.rewards.combine import check_sample
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.train.rl.hooks import Evaluate
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from audiorl.types import Sample
from tokenizers_audio import load as load_codec

T = TypeVar("T")
C = TypeVar("C", bound=Any)  # A dataclass
Sum = TypeVar("Sum", bound=WeightedSum | StandardisedSum)


@dataclass(frozen=True)
class Given:
    """Parts that a Python caller has in memory; each that is None or empty is read as the options say."""

    policy: AudioPolicy | None = None
    reward: Reward | None = None
    """Replaces the recipe's own reward."""
    data: tuple[Any, ...] = ()
    """Row dictionaries in lists, or `datasets.Dataset`s, read like the files of `data`."""
    held_out: tuple[Any, ...] = ()


NOTHING = Given()

# -- data --------------------------------------------------------------------------------------------------------------


def of_row(item: Any) -> Iterable[Sample | Example]:
    """Return the prompt of a sample, pair or other row."""
    return [getattr(item, "sample", item)]


@dataclass(frozen=True)
class RowCheck:
    """Asks the model and the reward of every row, before step 1, whether they can use it; see `PromptEncoder.check`."""

    policy: Callable[[], AudioPolicy]
    """Loads the model, once: it is called after the files have been read, so that a mistake in them shows at once."""
    reward: Reward | None = None
    """Asked about what is prompted; see `audiorl.protocols.Reward`."""
    new_tokens: int = 0
    """Most tokens that are written after a training prompt, of a spoken answer codec frames."""
    eval_tokens: int = 0
    """Most tokens that are written after a held-out prompt, likewise."""
    trained: Callable[[Any], Iterable[Sample | Example]] = of_row
    """The prompts and the examples to learn that training makes of a row; it may raise ValueError itself."""
    measured: Callable[[Any], Iterable[Sample | Example]] = of_row
    """Likewise of a held-out row."""

    @classmethod
    def of(
        cls, config: RecipeConfig, reward: Reward | None = None, policy: AudioPolicy | None = None, **options: Any
    ) -> RowCheck:
        """Make it for the model of the options, or one in memory."""
        return cls(cache(lambda: policy or policy_from(config)), reward, **options)

    def train(self, item: Any) -> None:
        self._ask(self.trained(item), self.new_tokens)

    def held_out(self, item: Any) -> None:
        self._ask(self.measured(item), self.eval_tokens)

    def _ask(self, uses: Iterable[Sample | Example], new_tokens: int) -> None:
        policy = self.policy()
        for use in uses:
            if isinstance(use, Example):
                check_example(policy, use)
            else:
                policy.prompts.check(use, new_tokens)
                if self.reward is not None:
                    check_sample(self.reward, use)


def rl_check(
    config: Any, reward: Reward, eval_tokens: int, *, tags: bool = True, policy: AudioPolicy | None = None
) -> RowCheck:
    """Return the check of rows for `train_with_reward`, whose control learns answers in <answer> tags if `tags`."""

    def trained(sample: Sample) -> list[Sample | Example]:
        control = isinstance(config, ControlOptions) and config.control
        return [sample, *([Example(sample, supervised_turn(sample, tags))] if control else [])]

    new_tokens = config.sampling.max_new_tokens
    return RowCheck.of(config, reward, policy, new_tokens=new_tokens, eval_tokens=eval_tokens, trained=trained)


def read_split(
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    read: Callable[..., Loaded[T]],
    given: Given = NOTHING,
    check: RowCheck | None = None,
    **options: Any,
) -> tuple[list[T], list[T]]:
    """Return the (training, held-out) rows of `data` and `held_out`; see `read_sets` and `split_held_out`.

    Without a set to measure on, a row may come to either use: there is to be room for the longer answer.
    """
    train = _loaded(given.data or config.data, config, bundled, read, **options)
    held_out = _loaded(given.held_out or config.held_out, config, bundled, read, **options)
    if check is not None:
        check.policy()  # a model that does not load is no fault of the first row
        if not held_out:
            check = replace(check, new_tokens=max(check.new_tokens, check.eval_tokens))
    trained = _usable(train, config, None if check is None else check.train)
    measured = _usable(held_out, config, None if check is None else check.held_out)
    return split_held_out(trained, measured, config.held_out_count, config.data_seed)


def read_questions(
    config: RecipeConfig, *, think: bool, given: Given = NOTHING, check: RowCheck | None = None, **options: Any
) -> tuple[list[Sample], list[Sample]]:
    """Return (training, held-out) questions about audio, whose prompts ask for thoughts if `think`."""
    bundled = partial(bundled_set, think=think, seed=config.seed)
    return read_split(config, bundled, read_samples, given, check, think=think, **options)


def read_sets(
    sets: Sequence[Any],
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    read: Callable[..., Loaded[T]],
    check: Callable[[T], None] | None = None,
    **options: Any,
) -> list[tuple[str, list[T]]]:
    """Return (name, rows) of each set: a path, rows in memory, or `bundled(name)` for a name that begins so.

    `read` is `read_samples`, `read_pairs` or another reader with their options; `options` are passed on to it. A row
    that `check` refuses by a ValueError cannot be used: `on_error` says what then. A row whose id occurs in an earlier
    set gets the set's number before its id: answers are told apart by id. Prints what was read and skipped.
    """
    return _usable(_loaded(sets, config, bundled, read, **options), config, check)


def _loaded(
    sets: Sequence[Any],
    config: RecipeConfig,
    bundled: Callable[[str], Sequence[T]],
    read: Callable[..., Loaded[T]],
    **options: Any,
) -> list[tuple[str, Loaded[T], bool]]:
    """(name, content, whether clips are still to be decoded, those of drawn rows only) of each set."""
    if config.columns:
        if read not in (read_samples, read_pairs, read_pairs_and_judged):
            raise ValueError("--columns: this recipe's data has columns of one name only; rename them in the file")
        options |= {"columns": column_names(config.columns)}
    found: list[tuple[str, Loaded[T], bool]] = []
    for number, source in enumerate(sets, 1):
        name = source if isinstance(source, str) else f"rows {number}"
        path, count, _ = parse_set(name)
        if path.startswith("bundled"):
            loaded = Loaded(tuple(bundled(path)), (), path)
            found.append((name, _with_hotwords(loaded, config), False))
            continue
        check_drawn = config.check_audio and count is not None and read is read_samples
        loaded = read(
            path if isinstance(source, str) else source,
            audio_root=config.audio_root,
            on_error=config.on_error,
            check_audio=config.check_audio and not check_drawn,
            **options,
        )
        found.append((name, _with_hotwords(loaded, config) if read is read_samples else loaded, check_drawn))
    return found


def _with_hotwords(loaded: Loaded[Any], config: RecipeConfig) -> Loaded[Any]:
    """Return samples with the hotwords that the options ask for."""
    if not (isinstance(config, HotwordOptions) and config.changes_hotwords):
        return loaded
    words = read_hotwords(config.hotwords) if config.hotwords else ()
    samples = with_context(
        loaded.samples, words, config.distractors, prompt=config.prompt_hotwords, seed=config.data_seed
    )
    return replace(loaded, samples=tuple(samples))


def _usable(
    sets: Sequence[tuple[str, Loaded[T], bool]], config: RecipeConfig, check: Callable[[T], None] | None
) -> list[tuple[str, list[T]]]:
    """Return the rows that can be used, of a large set those that are drawn: only they are checked."""
    found: list[tuple[str, list[T]]] = []
    ids: set[str] = set()
    for number, (name, loaded, check_drawn) in enumerate(sets, 1):
        path, count, _ = parse_set(name)
        if count is None and check is not None:
            loaded = loaded.checked(check, config.on_error)
        if loaded.skipped or not path.startswith("bundled"):
            print("\n".join([loaded.summary(), *([loaded.listing()] if loaded.skipped else [])]), flush=True)
        items = list(loaded.samples)
        if count is not None:

            def usable(index: int, loaded: Loaded[T] = loaded, decode: bool = check_drawn) -> bool:
                fault = loaded.fault(index, partial(_use, check, decode))
                if fault and config.on_error == "raise":
                    raise ValueError(str(fault))
                if fault:
                    print(f"  skipped {identity(loaded.samples[index])[0]}: {fault}", flush=True)
                return not fault

            items = first_drawn(name, items, count, config.data_seed, usable)
        if any(identity(item)[0] in ids for item in items):
            items = [_with_id(item, f"{number}:{identity(item)[0]}") for item in items]
        ids |= {identity(item)[0] for item in items}
        found.append((name, items))
    return found


def _use(check: Callable[[Any], None] | None, decode: bool, item: Any) -> None:
    """Check a row that is drawn, if `decode` after its clips have been decoded."""
    try:
        for clip in item.audio if decode else ():
            check_clip(clip)
    except AudioError as error:
        raise FieldError("audio", str(error)) from error
    if check is not None:
        check(item)


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


def ptx_examples(
    config: RecipeConfig, paths: Sequence[str], *trainings: RLConfig, check: RowCheck | None = None
) -> list[Example]:
    """Return the rows of `ptx_data` with the turn to learn, for the phases `trainings`; see `check_ptx`.

    An answer is in tags where its prompt has choices or asks for them.
    """
    check_ptx(paths, *trainings)

    def learned(sample: Sample) -> list[Example]:
        prompt = "".join(part for m in sample.messages for part in m.content if isinstance(part, str))
        return supervised_turns(sample, bool(sample.choices) or "<answer>" in prompt)

    bundled = partial(bundled_set, think=False, seed=config.seed)
    asked = None if check is None else replace(check, trained=learned).train
    source: dict[str, Any] = {"think": False, "keep_conversations": True}
    samples = weighted(read_sets(paths, config, bundled, read_samples, asked, **source), config.data_seed)
    return [example for sample in samples for example in learned(sample)]


def supervised_turns(sample: Sample, tags: bool = True, thought: str | None = None) -> list[Example]:
    """Return what SFT learns of a row: `supervised_turn`, and before it the earlier turns of a conversation, each after
    the turns that precede it."""
    numbers: Sequence[int] = sample.metadata.get("learned_turns", ())
    earlier = [(replace(sample, messages=sample.messages[:i]), sample.messages[i].content) for i in numbers]
    turns = [Example(before, "".join(map(str, content))) for before, content in earlier]
    return [*turns, Example(sample, supervised_turn(sample, tags, thought))]


def supervised_turn(sample: Sample, tags: bool = True, thought: str | None = None) -> str:
    """Return the first reference, in <answer> tags if `tags`, after the row's field `thought` in <think> tags; of a
    conversation that stays as it is its last turn.

    Raises ValueError naming a sample without a reference or a thought.
    """
    if not sample.references:
        raise FieldError("answer", f"sample {sample.id!r}: no reference to learn")
    answer = f"<answer>{sample.references[0]}</answer>" if tags else sample.references[0]
    if thought is None:
        return str(sample.metadata.get("last_turn", answer))
    text = sample.metadata.get(thought)
    if not isinstance(text, str) or not text.strip():
        raise FieldError(thought, f"sample {sample.id!r}: its row has no text in the field {thought!r}")
    return f"<think>{text.strip()}</think>{answer}"


# -- model and reward --------------------------------------------------------------------------------------------------


def policy_from(config: RecipeConfig) -> AudioPolicy:
    """Load the policy of a folder or hub id, or make a small random one for `tiny`; with adapters if asked for."""
    torch.manual_seed(config.seed)  # adapters and value heads start at random
    if config.path != "tiny":
        policy = load_policy(config.path, config.adapted, talker=getattr(config, "talker", False))
        if is_adapter(config.path):
            lora = config.model.lora
            given = vars(replace(lora, target_modules=tuple(sorted({*lora.target_modules}))))
            for name, has in vars(policy.config.lora).items():
                if getattr(lora, name) != getattr(ModelConfig().lora, name) and given[name] != has:
                    option = f"--model.lora.{name.replace('_', '-')}"
                    raise ValueError(f"{option}: the adapter in {config.path} has {has} already; leave the option out")
        return policy
    return random_policy(config.adapted, whisper=False)


def random_policy(model: ModelConfig, *args: Any, **options: Any) -> AudioPolicy:
    """Return a small random Omni thinker on its device; its options are those of the family's `tiny`.

    Raises ValueError for adapters, whose checkpoints name the folder of their model: this one has none.
    """
    if model.lora.rank:
        raise ValueError("the random model `tiny` is in no folder that an adapter could name; save one, or leave lora")
    policy = tiny_qwen_omni(*args, config=model, **options)
    policy.model.to(torch_device(model.device))
    return policy


def passes_on_cpu(config: C, device: torch.device, **tokens: int) -> C:
    """Return a recipe's config whose trainers, by the names of their fields, take passes of so many tokens on a CPU,
    whose caches hold few. Numbers that are given stay, and so does everything on a GPU."""
    if device.type != "cpu":
        return config
    unset = {n: t for n, t in tokens.items() if getattr(config, n).micro_batch_tokens is None}
    return replace(config, **{n: replace(getattr(config, n), micro_batch_tokens=t) for n, t in unset.items()})


def with_voice(policy: AudioPolicy, codec: str | Path, seed: int = 0) -> CodecSpeechDecoder:
    """Return the policy's speech decoder for the codec at `codec`; a policy that writes text only is dualized first."""
    loaded = load_codec(codec)
    if policy.speech is None:
        dualize(policy, loaded.num_codebooks, loaded.codebook_size, seed)
    policy.set_codec(loaded)
    return CodecSpeechDecoder.of(policy)


def answer_reward(think: bool) -> WeightedSum:
    """Reward the right answer and the format, 2 to 1, as Ke-Omni-R does."""
    return WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=(ThinkFormat() if think else AnswerFormat(), 1.0))


def with_user_reward(options: RewardOptions, reward: Sum) -> Sum:
    """Return `reward` with the reward of `reward_file` as the part `user`."""
    if options.reward_file is None:
        return reward
    return type(reward)((*reward.terms, Term("user", load_reward(options.reward_file), options.reward_weight)))


# -- the run -----------------------------------------------------------------------------------------------------------


def evaluation_of(
    config: RecipeConfig,
    samples: Sequence[Any],
    held_out: Sequence[Sample],
    reward: Reward,
    max_new_tokens: int,
    *,
    check: RowCheck | None = None,
    think: bool = False,
    keep_conversations: bool = False,
    bundled: Callable[[str], Sequence[Sample]] | None = None,
    outside: WeightedSum | None = None,
    sets: Mapping[str, Sequence[Sample]] | None = None,
    metric: str = "accuracy",
    errors: ErrorRate | None = None,
) -> Evaluation:
    """Return what the run measures: `held_out`, `sets` by name, and the speakers of `--unseen`, read like questions and
    checked like held-out rows.

    `samples`: the training rows. Raises ValueError for a speaker of `--unseen` that they have too.
    """
    sets = dict(sets or {})
    passages: list[str] = []
    questions: list[TextQuestion] = []
    if isinstance(config, HeldOutOptions):
        reader = bundled or partial(bundled_set, think=think, seed=config.seed)
        asked = None if check is None else replace(check, measured=of_row).held_out
        source: dict[str, Any] = {"think": think, "keep_conversations": keep_conversations}
        rows_of = read_sets(config.unseen, config, reader, read_samples, asked, **source)
        unseen = [sample for _, items in rows_of for sample in items]
        if unseen:
            rows = [getattr(item, "sample", item) for item in samples]
            check_unseen_speakers(*([(s.id, s.metadata.get("speaker", "")) for s in part] for part in (rows, unseen)))
            sets = {UNSEEN: unseen, **sets}
        if config.outside_file is not None:
            term = Term(Path(config.outside_file).stem, load_reward(config.outside_file))
            outside = WeightedSum((*(outside.terms if outside else ()), term))
        if config.retention_text is not None:
            passages = read_passages(config.retention_text)
            questions = read_text_questions(BUNDLED) if config.retention_text == BUNDLED else []
    return Evaluation(reward, held_out, max_new_tokens, sets, outside, metric, errors, passages, questions)


def check_unseen_speakers(trained: Sequence[tuple[str, str]], unseen: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError for a speaker of `unseen` in the training rows; print how many rows name no speaker.

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
        if unnamed := sum(not speaker for _, speaker in rows):
            print(f"{unnamed} of {len(rows)} {name} name no speaker: whether both share one is not checked", flush=True)


@contextmanager
def evaluate_around_training(run: Run, policy: AudioPolicy, evaluation: Evaluation) -> Iterator[Evaluate]:
    """Measure `before`, train in the body of the `with` statement, measure `after`, write the report.

    Yields the evaluation for the training loop.
    """
    evaluation.measure(run, "before", policy)
    yield evaluation.probe(policy)
    evaluation.measure(run, "after", policy)
    print(write_report(run.dir))


def train_with_reward(
    config: Any,
    run: Run,
    policy: AudioPolicy,
    samples: Sequence[Sample],
    evaluation: Evaluation,
    *,
    phase: str,
    answers: Sequence[Example] = (),
    tags: bool = True,
) -> None:
    """Train `policy` in place by policy gradients on `evaluation.reward`, with all that is measured around it.

    config: a `RecipeConfig` with `PtxOptions` and the fields `rl`, `optim` and `sampling`. answers: the prompts with
    reference answers that distillation learns from. With `ControlOptions` the control is trained and measured too; it
    learns answers in <answer> tags if `tags`.
    """
    rl = config.with_steps_for(config.rl, len(samples))
    supervised = ptx_examples(config, config.ptx_data, config.rl, check=RowCheck(lambda: policy))
    with evaluate_around_training(run, policy, evaluation) as evaluate:
        train_rl(
            policy,
            samples,
            evaluation.reward,
            run,
            config=rl,
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase=phase,
            evaluate=evaluate,
            supervised=supervised,
            answers=answers,
        )
        control_wanted: bool = isinstance(config, ControlOptions) and config.control
        if control_wanted:
            control = policy_from(config)
            examples = [Example(s, supervised_turn(s, tags)) for s in samples]
            train_control(config, run, control, examples, evaluation, config.control_sft, rl.steps, phase)


def grpo_and_control(
    config: Any,
    run: Run,
    policy: AudioPolicy,
    samples: Sequence[Sample],
    evaluation: Evaluation,
    examples: Sequence[Example],
) -> None:
    """Train `policy` in place by GRPO after its phase `sft`, then the control from the same start, and measure each.

    config: with the fields `rl`, `rl_optim`, `sampling`, `seed`, `control`, `sft` and `control_optim`. examples: what
    the supervised start learned, which the control goes on with.
    """
    evaluation.measure(run, "before", policy)
    train_rl(
        policy,
        samples,
        evaluation.reward,
        run,
        config=config.rl,
        optim=config.rl_optim,
        sampling=config.sampling,
        seed=config.seed,
        phase="grpo",
        evaluate=evaluation.probe(policy),
        supervised=examples,
    )
    evaluation.measure(run, "after", policy)
    if config.control:
        if not run.finished("control_sft"):
            run.load_result("sft", policy)
        train_control(config, run, policy, examples, evaluation, config.sft, config.rl.steps, "grpo")


def train_control(
    config: Any,
    run: Run,
    control: AudioPolicy,
    examples: Sequence[Example],
    evaluation: Evaluation,
    training: SFTConfig,
    steps: int,
    phase: str,
) -> None:
    """Fine-tune the control for as much compute as `phase` took in its `steps`, and measure it."""
    sft(
        control,
        examples,
        run,
        config=replace(training, steps=100 * steps),  # the time limit ends it, not its steps
        optim=config.control_optim,
        seed=config.seed + 1,
        phase="control_sft",
        limit=run.compute_time(phase),
    )
    evaluation.measure(run, "control", control)
