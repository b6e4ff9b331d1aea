"""GRPO on questions about speech, sounds and music: with and without thinking, and blind, from one start.

    audiorl data build corpus && audiorl data build-qa qa --speech corpus
    python experiments/measure_audio_qa.py --qa qa --out runs/audio-qa             # continues where it stopped
    python experiments/measure_audio_qa.py --qa qa --out runs/try --quick          # minutes: every part once
    python experiments/measure_audio_qa.py --qa qa --out runs/smol --path aligned --steps 150 80 80   # from
    another model
    python experiments/measure_audio_qa.py --qa qa --out runs/reads --path models/whisper-base-10s --reading 100

The start is the quickstart's model with new weights behind Whisper's encoder, or with `--path` a model that understands
speech already: Whisper, all of whose decoder is trained, or one of `align-speech`, which gets adapters; both compute in
bfloat16 where the processor has instructions for it. With `--reading` it first learns to read choices, so many steps
and without audio (`qa_reading.py`), and half of what SFT learns later is read, too. The training questions are halved.
Three forms of the task are learned from the first half by SFT:

  answers   the answer alone, from the audio
  think     "i hear ANSWER" in <think> tags, then the answer, from the audio
  blind     the answer alone, from the question and its choices, without the audio (Whisper: from silence)

On the second half each then trains by GRPO (NAME_grpo), rewarded for right answers and the format, and by more SFT
(NAME_sft) for about the same CPU time: `Settings` has the steps. Greedy answers to the held-out questions, of which no
speaker, sound file or piece of music is in training, are measured with the audio and without it, and what the right
audio adds to the labels (`audiorl.eval._listening`); to every fourth question also the answers where the prompt
says in words what the audio would. *Compared* is how often the right choice is the most probable of the four, which a
model may know that does not write it. OUT/table.md has means over seeds with 95 % bootstrap intervals over questions.
`--only` names forms, `--seeds` seeds.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from arms import (
    check_listening,
    cpu_seconds,
    hits,
    listening_table,
    markdown,
    percent,
    places,
    seeds_with,
    spaced,
    timed,
)
from qa_reading import in_words, reading_questions
from safetensors.torch import save_file
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.data.manifest import read_samples
from audiorl.data.rows import write_json_lines
from audiorl.data.views import RATE, views_of, with_clips
from audiorl.errors import Interrupted
from audiorl.eval._common import read_rows
from audiorl.eval._phases import Evaluation, measure_phase
from audiorl.eval._questions import most_probable_choices
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.attention import emulates_bfloat16
from audiorl.models.audio_encoder import ClipCache
from audiorl.models.examples import Example
from audiorl.models.families.qwen_omni import tiny
from audiorl.models.weights import read_tensors
from audiorl.recipes._common import answer_reward
from audiorl.rewards.answers import extract_answer, extract_think
from audiorl.run.folder import Run
from audiorl.speech_models.loading import model_type
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from audiorl.types import Sample

FORMS = ("answers", "think", "blind")
TRAINED = ("", "_grpo", "_sft")
"""What follows a form in the names of its models: the supervised start, after GRPO, after more SFT."""
NO_AUDIO, IN_WORDS, COMPARED = "no_audio", "in_words", "compared"
"""The evaluations of a model without the audio, with the right answer in words instead, and by its most probable
choice."""
BATCH = 24
"""Questions of a step of SFT."""
MOST_TOKENS = {"answers": 20, "think": 36, "blind": 20}
"""Of an answer, by form."""


@dataclass(frozen=True)
class Settings:
    """The size of the experiment. GRPO and more SFT take about as much CPU time."""

    reading_steps: int = 0
    start_steps: int = 400
    grpo_steps: int = 240
    sft_steps: int = 400
    start_lr: float = 1e-3
    sft_lr: float = 3e-4
    grpo_lr: float = 3e-5
    questions: int | None = None
    """Most training questions; None: all."""
    held_out: int | None = None
    """Most questions to measure on; None: all."""
    micro_batch_tokens: int = 3000
    path: str | None = None
    """The model to start from; None: the quickstart's, with new weights."""
    model: ModelConfig = ModelConfig(audio="projector", audio_cache_mb=3000)
    silent: bool = False
    """Whether a second of silence stands for no audio, as for Whisper, which reads no prompt without a recording."""

    @classmethod
    def of_path(cls, path: str) -> Settings:
        autocast = not emulates_bfloat16(torch.cpu.get_capabilities())
        if model_type(path) == "whisper":
            model = ModelConfig(audio="frozen", audio_cache_mb=12_000, autocast=autocast)
            return cls(
                path=path, model=model, start_lr=1e-4, sft_lr=3e-5, grpo_lr=1e-5, micro_batch_tokens=40_000, silent=True
            )
        lora = LoraConfig(rank=32, alpha=64)
        model = ModelConfig(audio="projector", audio_cache_mb=3000, autocast=autocast, lora=lora)
        return cls(path=path, model=model, start_lr=3e-4, sft_lr=1e-4)

    def without_audio(self, samples: Sequence[Sample]) -> list[Sample]:
        silence = AudioClip(array=np.zeros(RATE, np.float32), sample_rate=RATE)
        return [with_clips(s, lambda *_: silence) for s in samples] if self.silent else views_of(samples, "text")


@dataclass(frozen=True)
class Data:
    """The questions of one form."""

    start: list[Sample]
    more: list[Sample]
    held_out: list[Sample]

    @classmethod
    def load(cls, folder: Path, form: str, size: Settings) -> Data:
        sets = [read_samples(str(folder / f"{name}.json"), think=form == "think") for name in ("train", "held_out")]
        train, held_out = (list(loaded.samples) for loaded in sets)
        random.Random(0).shuffle(train)
        train = train[: size.questions]
        half = len(train) // 2
        parts = [train[:half], train[half:], spaced(held_out, size.held_out)]
        return cls(*(size.without_audio(part) if form == "blind" else part for part in parts))


def written(choice: str, form: str) -> str:
    """What a model of the form is to write for a choice."""
    thought = f"<think>i hear {choice}</think>" if form == "think" else ""
    return f"{thought}<answer>{choice}</answer>"


def labelled(samples: list[Sample], form: str) -> list[Example]:
    return [Example(s, written(s.references[0], form)) for s in samples]


def first_model(out: Path, folder: Path, seed: int, size: Settings) -> AudioPolicy:
    """The same for every form: `new_model`, after it has learned to read choices where `size` says so."""
    policy = new_model(folder, seed, size)
    if not size.reading_steps:
        return policy
    run = open_run(out / "reading" / f"seed_{seed}", size)
    examples = reading_examples(folder, ("answers", "think"), BATCH * size.reading_steps, seed, size)
    timed(
        run,
        "reading",
        lambda: supervise(
            policy, examples, run=run, size=size, seed=seed, phase="reading", steps=size.reading_steps, lr=size.start_lr
        ),
    )
    return policy


def reading_examples(folder: Path, forms: Sequence[str], count: int, seed: int, size: Settings) -> list[Example]:
    """So many questions that are read, in each of the forms in turn, with choices of the training questions."""
    questions = {}
    for form in forms:
        data = Data.load(folder, form, size)
        questions[form] = data.start + data.more
    rows = reading_questions(questions, count, seed)
    return [labelled(size.without_audio([sample]), form)[0] for sample, form in rows]


def new_model(folder: Path, seed: int, size: Settings) -> AudioPolicy:
    """The model to start from. A new one's tokenizer knows the words of all prompts and answers of the training
    questions."""
    if size.path:
        return load_policy(size.path, size.model)
    texts = []
    for form in ("answers", "think"):
        samples = read_samples(str(folder / "train.json"), think=form == "think").samples
        texts += [part for s in samples for m in s.messages for part in m.content if isinstance(part, str)]
        texts += [example.target for example in labelled(list(samples), form)] * 2
    return tiny(texts, seed=seed, config=size.model)


class StoredClips(ClipCache):
    """What the audio encoder, which no phase trains, makes of each clip: in memory, and in files of `folder`, so that
    every form, seed and process has it from the first one that encodes the clip."""

    def __init__(self, folder: Path, max_bytes: int):
        super().__init__(max_bytes)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def get(self, key: str) -> Tensor | None:
        if (tensor := super().get(key)) is None and (file := self._file(key)).exists():
            tensor = read_tensors(file)["output"]
            super().put(key, tensor)
        return tensor

    def put(self, key: str, tensor: Tensor) -> None:
        super().put(key, tensor)
        partial_file = self._file(key).with_suffix(f".{os.getpid()}")
        save_file({"output": tensor.contiguous()}, partial_file)
        partial_file.replace(self._file(key))


def encoded_folder(out: Path, qa: Path, path: str | None) -> Path:
    """Of `StoredClips`: another model or other questions, whose files may have the names of these, have another one."""
    digest = sha256(str(path).encode())
    for name in ("train", "held_out"):
        digest.update((qa / f"{name}.json").read_bytes())
    return out / "encoded" / digest.hexdigest()[:16]


def train_form(out: Path, qa: Path, seed: int, form: str, size: Settings, clips: ClipCache) -> None:
    """A run folder of its own for the three models of one form; what is finished is not done again."""

    def sharing(policy: AudioPolicy) -> AudioPolicy:
        policy.audio.cache = clips
        return policy

    run = open_run(out / form / f"seed_{seed}", size)
    data = Data.load(qa, form, size)
    no_audio = data.held_out if form == "blind" else size.without_audio(data.held_out)
    sets = {IN_WORDS: [in_words(s) for s in no_audio[::4]]} | ({} if form == "blind" else {NO_AUDIO: no_audio})
    evaluation = Evaluation(answer_reward(form == "think"), data.held_out, MOST_TOKENS[form], sets)
    policy = sharing(first_model(out, qa, seed, size))
    supervised = partial(supervise, run=run, size=size, seed=seed)
    start_labels, more_labels = (labelled(part, form) for part in (data.start, data.more))
    if size.reading_steps:  # else it forgets to read
        read = reading_examples(qa, (form,), len(start_labels + more_labels), seed + 1, size)
        start_labels, more_labels = start_labels + read[::2], more_labels + read[1::2]
    begin = partial(supervised, phase="start", steps=size.start_steps, lr=size.start_lr)
    timed(run, "start", lambda: begin(policy, start_labels))
    measured = partial(measure, run=run, form=form, evaluation=evaluation, budget=size.micro_batch_tokens)
    measured(policy, form)
    start = str(run.checkpoint("start"))

    policy = sharing(load_policy(start, size.model))
    timed(run, "grpo", lambda: reinforce(policy, data.more, run, form, seed, size))
    measured(policy, f"{form}_grpo")

    policy = sharing(load_policy(start, size.model))
    timed(run, "sft", lambda: supervised(policy, more_labels, phase="sft", steps=size.sft_steps, lr=size.sft_lr))
    measured(policy, f"{form}_sft")


def open_run(folder: Path, size: Settings) -> Run:
    return Run.open(folder) if folder.exists() else Run.create(folder, "measure_audio_qa", [], size)


def supervise(
    policy: AudioPolicy,
    examples: list[Example],
    *,
    run: Run,
    size: Settings,
    seed: int,
    phase: str,
    steps: int,
    lr: float,
) -> None:
    config = SFTConfig(steps=steps, batch_size=BATCH, micro_batch_tokens=size.micro_batch_tokens, save_every=50)
    optim = OptimConfig(lr=lr, warmup_steps=20, schedule="cosine")
    sft(policy, examples, run, config=config, optim=optim, seed=seed, phase=phase)


def reinforce(policy: AudioPolicy, samples: list[Sample], run: Run, form: str, seed: int, size: Settings) -> None:
    train_rl(
        policy,
        samples,
        answer_reward(form == "think"),
        run,
        config=RLConfig(
            steps=size.grpo_steps,
            group_size=8,
            prompts_per_step=12,
            micro_batch_tokens=size.micro_batch_tokens,
            save_every=20,
        ),
        optim=OptimConfig(lr=size.grpo_lr, warmup_steps=5),
        sampling=SamplingConfig(max_new_tokens=MOST_TOKENS[form], max_batch_tokens=400_000),
        seed=seed,
        phase="grpo",
    )


def measure(policy: AudioPolicy, name: str, *, run: Run, form: str, evaluation: Evaluation, budget: int) -> None:
    """The evaluation `name` and those of `Evaluation.sets`, `compared_NAME`, and on every fourth question
    `listening_NAME`."""
    evaluation.measure(run, name, policy)
    compare_choices(run, f"{COMPARED}_{name}", policy, evaluation.held_out, form, budget)
    if form != "blind":
        check_listening(run, name, policy, labelled(list(evaluation.held_out[::4]), form))


def compare_choices(
    run: Run, phase: str, policy: AudioPolicy, samples: Sequence[Sample], form: str, budget: int
) -> None:
    """eval/PHASE.jsonl: the most probable choice of each question, and whether it is right."""

    def right() -> list[bool]:
        choices = most_probable_choices(policy, samples, partial(written, form=form), budget)
        are_right = [choice == s.references[0] for s, choice in zip(samples, choices, strict=True)]
        rows = [
            {"id": s.id, "choice": choice, "references": s.references, "parts": {"accuracy": float(hit)}}
            for s, choice, hit in zip(samples, choices, are_right, strict=True)
        ]
        write_json_lines(run.dir / "eval" / f"{phase}.jsonl", rows)
        return are_right

    measure_phase(run, phase, right)


# -- the tables --------------------------------------------------------------------------------------------------------


def accuracy_table(out: Path) -> str:
    header = (
        "",
        "CPU s",
        "accuracy %",
        "each seed",
        "change",
        "a choice %",
        "speech",
        "sound",
        "music",
        "without audio",
        "in words",
        "compared",
        "change",
    )
    rows = []
    for form in FORMS:
        for name in (form + suffix for suffix in TRAINED):
            if not (folders := seeds_with(out / form, name)):
                continue
            right, start = hits(folders, name), hits(folders, form)
            tasks = places(folders[0] / "eval" / f"{name}.jsonl", lambda row: row["id"].split("-")[0])
            phase = name.removeprefix(form).strip("_") or "start"
            cells = [name, f"{fmean(cpu_seconds(folder)[phase] for folder in folders):.0f}", percent(right)]
            cells += [", ".join(f"{100 * hits([folder], name).mean():.1f}" for folder in folders)]
            cells += ["" if name == form else percent(right - start, "+")]
            answers = [row for folder in folders for row in read_rows(folder / "eval" / f"{name}.jsonl")]
            cells += [f"{100 * np.mean([is_choice(row['text'], row['prompt']) for row in answers]):.0f}"]
            cells += [f"{100 * right[tasks[task]].mean():.1f}" for task in ("speech", "sound", "music")]
            cells += [percent(hits(folders, f"{NO_AUDIO}_{name}")) if form != "blind" else ""]
            cells += [f"{100 * hits(folders, f'{IN_WORDS}_{name}').mean():.1f}"]
            compared, first = (hits(folders, f"{COMPARED}_{which}") for which in (name, form))
            cells += [percent(compared), "" if name == form else percent(compared - first, "+")]
            rows.append(cells)
    return f"## Held-out questions\n\n{markdown(header, rows)}"


def is_choice(text: str, prompt: str) -> bool:
    """Whether the answer in a model's text is one of the choices in the prompt."""
    return f"\n- {extract_answer(text)}\n" in prompt


def kinds_table(out: Path) -> str:
    """Accuracy by kind of question, which ids begin with, of every model."""
    models = [(form, form + suffix) for form in FORMS for suffix in TRAINED if seeds_with(out / form, form + suffix)]
    form, name = models[0]
    answers = seeds_with(out / form, name)[0] / "eval" / f"{name}.jsonl"
    kinds = places(answers, lambda row: " ".join(row["id"].split("-")[:2]))  # the same questions for every model
    right = [hits(seeds_with(out / form, name), name) for form, name in models]
    rows = [(k, str(len(kinds[k])), *(f"{100 * r[kinds[k]].mean():.0f}" for r in right)) for k in sorted(kinds)]
    header = ("accuracy %", "questions", *(name for _, name in models))
    return f"## Kinds of questions\n\n{markdown(header, rows)}"


def against_table(out: Path) -> str:
    """Differences between forms over the same questions and the seeds that both have."""
    rows = []
    for first, second in [("answers_grpo", "answers_sft"), ("think_grpo", "think_sft"), ("think_grpo", "answers_grpo")]:
        folders = [seeds_with(out / name.split("_")[0], name) for name in (first, second)]
        seeds = {f.name for f in folders[0]} & {f.name for f in folders[1]}
        if seeds:
            right = [
                hits([f for f in each if f.name in seeds], name)
                for each, name in zip(folders, (first, second), strict=True)
            ]
            rows.append((f"{first} - {second}", str(len(seeds)), percent(right[0] - right[1], "+")))
    return f"## Differences\n\n{markdown(('', 'seeds', 'points'), rows)}"


def thought_table(out: Path) -> str:
    """Whether thoughts name the answer that follows, and whether they name the right one."""
    rows = []
    for name in ("think" + suffix for suffix in TRAINED):
        if folders := seeds_with(out / "think", name):
            answers = [row for folder in folders for row in read_rows(folder / "eval" / f"{name}.jsonl")]
            named = [thought_names(row["text"], extract_answer(row["text"]) or "") for row in answers]
            right = [thought_names(row["text"], row["references"][0]) for row in answers]
            rows.append((name, f"{100 * np.mean(named):.1f}", f"{100 * np.mean(right):.1f}"))
    return f"## Thoughts\n\n{markdown(('', 'name the answer given %', 'name the right one %'), rows)}"


def thought_names(text: str, answer: str) -> bool:
    return bool(answer) and (extract_think(text) or "").strip().endswith(answer.strip())


def listening(out: Path) -> str:
    names = [(form, form + suffix) for form in ("answers", "think") for suffix in TRAINED]
    return listening_table({name: seeds_with(out / form, name) for form, name in names})


TABLES = (accuracy_table, kinds_table, against_table, thought_table, listening)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qa", type=Path, required=True, help="folder that `audiorl data build-qa` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, FORM/seed_N, and of table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the model and of training")
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS, help="forms to train")
    parser.add_argument("--path", help="model to start from; by default the quickstart's with new weights")
    parser.add_argument("--steps", type=int, nargs=3, metavar=("START", "GRPO", "SFT"), help="steps of each phase")
    parser.add_argument(
        "--reading", type=int, default=0, help="steps of reading choices without audio, before all else"
    )
    parser.add_argument("--questions", type=int, help="most training questions (default: all)")
    parser.add_argument("--grpo-lr", type=float, help="learning rate of GRPO")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    args = parser.parse_args()
    size = Settings.of_path(args.path) if args.path else Settings()
    size = replace(size, questions=args.questions, reading_steps=args.reading)
    if args.grpo_lr is not None:
        size = replace(size, grpo_lr=args.grpo_lr)
    steps = args.steps or ([2, 2, 2] if args.quick else None)
    if steps:
        size = replace(size, start_steps=steps[0], grpo_steps=steps[1], sft_steps=steps[2])
    if args.quick:
        size = replace(size, questions=32, held_out=16)
    torch.set_num_threads(1)
    clips = StoredClips(encoded_folder(args.out, args.qa, args.path), size.model.audio_cache_mb * 2**20)
    try:
        for seed in args.seeds[:1] if args.quick else args.seeds:
            for form in args.only:
                train_form(args.out, args.qa, seed, form, size, clips)
    except Interrupted:
        sys.exit("stopped; the same command continues")
    tables = "\n".join(table(args.out) for table in TABLES)
    (args.out / "table.md").write_text(tables)
    print(tables)


if __name__ == "__main__":
    main()
