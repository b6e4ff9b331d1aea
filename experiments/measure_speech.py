"""What reinforcement learning adds to a model that speaks, against the best sampling of its start.

    audiorl train tts-quickstart --judge recogniser --rl.steps 1 --out runs/start
    python experiments/measure_speech.py runs/start --judge judges/whisper-base --out runs/speech

The start is the supervised model of a run of `tts-quickstart`. All arms sample at the temperature and top-p at which
the start is understood best, chosen on texts of the practice split, in training and when they are measured:

  start     nothing is trained; best4, best16: of so many samples the one that the reward's recogniser prefers
  text      GRPO: the share of characters that the reward's recogniser understands, length, finishing
  raft      supervised steps on the best of the samples for each practice text (RAFT, Dong et al. 2023, 2304.06767)
  voices    the same, with each text in several voices (`--raft-voices`)
  balanced  as `raft`, but the best under the condition that all together have the prosody of all samples
  alike     as `voices`, but the best by errors and by likeness to the voice of the prompt (of spectra: `voice_lda.py`)
  dpo       DPO on the best and the worst of the samples, by errors and with voices in the prompts by likeness as
            `alike`; dpo2, dpo3: further rounds
  raft2     a second round, on samples of `raft`; raft3: a third; voices2, alike2, alike3: the same of `voices`, `alike`
  word      as `text`, with the characters of each word credited to its frames
  gdpo      as `text` with likeness to the voice of the prompt, each term normalised within the group (GDPO, Liu et al.
            2026, 2601.05242), and each text in several voices (`--raft-voices`)
  first     as `text`, but only the codes of the first codebook are trained
  cer       the share of characters alone: nothing guards length and prosody
  nll       as `cer`, and how probable the recogniser finds the text, which goes on rising where there are no errors
  guarded   as `cer`, with prosody distributed as in the start's samples
  sft       further supervised steps on recordings, for as much CPU time as the longest of the others with its rounds

The texts of the test split are then said once and transcribed by `--judge`, which took no part in training. Where they
are said in several voices, `--speaker` also decides whether each is nearest to its own.
OUT/table.md has means with 95 % bootstrap intervals over texts, and paired changes against `start`; OUT/listen.html
plays some texts as every arm says them, with their pitch. Arms that are finished are not trained again. With
`--best-of-arms` the best of so many samples is measured after training, too, and compared with that of the start.
With `--pool` table.md has the texts of several seeds together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import cpu_seconds, markdown, number, timed
from speech_start import Choice, Start, StoredSamples, voice_likeness

from audiorl.audio import AudioClip
from audiorl.config import LossOptions, OptimConfig, PreferenceConfig, SamplingConfig, SFTConfig
from audiorl.errors import Interrupted
from audiorl.eval._common import Judges, read_rows
from audiorl.eval._speech import measure_speech, say, speech_measures
from audiorl.eval.metrics.speech import cosine
from audiorl.models import AudioPolicy
from audiorl.protocols import Reward
from audiorl.report.listening import Card, Take, listening_page
from audiorl.rewards import Term, WeightedSum
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import ComputeTime, Run
from audiorl.run.records import read_record, write_json
from audiorl.speech_models import SpeakerEncoder
from audiorl.speech_models.loading import load_quality_model
from audiorl.tasks.tts.prosody import ProsodyBins, ProsodyDistribution
from audiorl.tasks.tts.rewards import Intelligibility, Likelihood
from audiorl.train.preference import prefer
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from corpora.recipes import tts_quickstart as quick

ROUNDS = {
    **{"raft": "", "voices": "", "balanced": "", "raft2": "raft", "raft3": "raft2", "voices2": "voices"},
    **{"alike": "", "alike2": "alike", "alike3": "alike2", "dpo": "", "dpo2": "dpo", "dpo3": "dpo2"},
}
"""The rounds of RAFT and DPO, each with the one that it goes on from."""
SEVERAL_VOICES = ("gdpo", *(arm for arm in ROUNDS if arm.startswith(("voices", "alike", "dpo"))))
"""The arms that say each text in several voices. All but DPO need a start with `--clone`."""
ARMS = ("text", "word", "gdpo", "first", "cer", "nll", "guarded", *ROUNDS, "sft")
ADVANTAGES = {"word": "step-index", "gdpo": "gdpo"}
"""Of the arms of GRPO that do not have `group`."""
ALIKE_WEIGHT = 0.5
"""Of likeness to the voice of the prompt in `gdpo`; the share of characters has 1."""
RAFT_EPOCHS = 3
DPO = PreferenceConfig(beta=0.1, sft_coef=0.2, batch_size=16, micro_batch_tokens=4000, save_every=25)
"""For one pass over the pairs, whose number gives the steps."""
COLUMNS = {
    "accuracy": ("understood %", 100),
    "mos": ("100 x DNSMOS", 100),
    "similarity": ("100 x similarity", 100),
    "own_voice": ("own voice %", 100),
    "seconds": ("seconds", 1),
    "f0_range": ("F0 range", 1),
    "energy_range": ("level range", 1),
    "pauses": ("pauses %", 100),
}
MEASURED = "measured.json"
"""The columns of each arm by text, in the folder of the arms."""
RATE = 16_000
PLAYED = 12
"""Texts on the page."""
TEMPERATURES, TOP_PS = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.15), (1.0, 0.9)
SPEECH = SamplingConfig(max_new_tokens=8, max_frames=90)
GPU_BATCH_TOKENS = 1_000_000
"""`max_batch_tokens` on a GPU."""


def choose_sampling(run: Run, start: Start, given: tuple[float, float] | None) -> SamplingConfig:
    """The temperature and top-p at which the start is understood best, or those that are given."""
    speech = replace(SPEECH, max_batch_tokens=GPU_BATCH_TOKENS) if torch.cuda.is_available() else SPEECH
    if given is not None:
        return replace(speech, temperature=given[0], audio_top_p=given[1])
    if not run.finished("sampling"):
        policy, rows = start.policy(), []
        for temperature in TEMPERATURES:
            for top_p in TOP_PS:
                sampling = replace(speech, temperature=temperature, audio_top_p=top_p)
                shares = start.understood(policy, say(policy, start.validation_prompts, sampling))
                rows.append({"temperature": temperature, "audio_top_p": top_p, "understood": float(np.mean(shares))})
                print(rows[-1], flush=True)
        run.finish("sampling", rows)
    best = max(run.result("sampling"), key=lambda row: row["understood"])
    return replace(speech, temperature=best["temperature"], audio_top_p=best["audio_top_p"])


def reward_of(arm: str, start: Start, policy: AudioPolicy, spoken: Callable[[], ProsodyBins]) -> Reward:
    """The reward of an arm; `spoken`: the prosody of the start."""
    if arm == "gdpo":
        judges = start.judges(policy, start.encoder)
        of_text = quick.reward_of(quick.TTSQuickstartConfig(credit="text"), judges)
        return WeightedSum((*of_text.terms, Term("alike", voice_likeness(judges), ALIKE_WEIGHT)))
    judges = start.judges(policy)
    understood = Intelligibility(judges, "cer")
    if arm == "cer":
        return WeightedSum.of(understood=understood)
    if arm == "nll":
        return WeightedSum.of(understood=understood, likelihood=Likelihood(judges))
    if arm == "guarded":
        return WeightedSum.of(understood=understood, prosody=ProsodyDistribution(judges, spoken()))
    return quick.reward_of(quick.TTSQuickstartConfig(credit="word" if arm == "word" else "text"), judges)


def train_arm(
    arm: str, start: Start, policy: AudioPolicy, run: Run, sampling: SamplingConfig, args: argparse.Namespace
) -> None:
    if run.finished(arm):
        run.load_result(arm, policy)
        return
    optim = OptimConfig(lr=args.sft_lr, warmup_steps=3, schedule=args.schedule)
    config = SFTConfig(steps=100_000, batch_size=32, micro_batch_tokens=4000, save_every=50)
    if arm == "sft":
        limit = None if args.sft_steps else time_of_longest_arm(run.dir)
        config = replace(config, steps=args.sft_steps or config.steps)
        sft(policy, start.supervised(), run, config=config, optim=optim, seed=args.seed, limit=limit)
        return
    several = start.config.clone and arm in SEVERAL_VOICES
    prompts = start.reward_prompts(args.raft_texts, args.raft_voices if several else 1)
    if args.raft_sampling:
        temperature, top_p = args.raft_sampling
        sampling = replace(sampling, temperature=temperature, audio_top_p=top_p)
    stored_samples = partial(
        StoredSamples, run, start=start, policy=policy, sampling=sampling, seed=args.seed, count=args.raft_samples
    )
    if arm in ROUNDS:
        samples = stored_samples(ROUNDS[arm] or "start")
        if arm.startswith("dpo"):
            pairs = samples.pairs(prompts)
            one_pass = replace(DPO, steps=-(-len(pairs) // DPO.batch_size))
            optim = replace(optim, lr=args.dpo_lr)
            prefer(policy, pairs, run, config=one_pass, optim=optim, seed=args.seed, phase=arm)
            return
        choice: Choice = "balanced" if arm == "balanced" else "alike" if arm.startswith("alike") else "errors"
        examples = samples.best(prompts, choice)
        config = replace(config, steps=-(-RAFT_EPOCHS * len(examples) // config.batch_size))
        sft(policy, examples, run, config=config, optim=optim, seed=args.seed, phase=arm)
        return
    spoken = partial(stored_samples("start").prosody_bins, start.practice_prompts[:80])
    rl = replace(
        quick.TTSQuickstartConfig().rl,
        steps=args.steps,
        prompts_per_step=args.prompts,
        group_size=args.group,
        advantage=ADVANTAGES.get(arm, "grpo"),
        loss_options=LossOptions(
            codebook_weights=(1.0, *[0.0] * (start.codec.num_codebooks - 1)) if arm == "first" else ()
        ),
    )
    train_rl(
        policy,
        prompts,
        reward_of(arm, start, policy, spoken),
        run,
        config=rl,
        optim=OptimConfig(lr=args.lr, betas=(0.9, 0.95), warmup_steps=3),
        sampling=sampling,
        seed=args.seed,
        phase=arm,
        speech_decoder=CodecSpeechDecoder.of(policy),
    )


def seconds_of_arms(folder: Path) -> dict[str, float]:
    """CPU seconds of each arm, with the rounds that it goes on from."""
    seconds = cpu_seconds(folder)

    def total(arm: str) -> float:
        return seconds.get(arm, 0.0) + (total(before) if (before := ROUNDS.get(arm)) else 0.0)

    return {arm: total(arm) for arm in seconds}


def time_of_longest_arm(folder: Path) -> ComputeTime:
    """What `sft` may take. Raises ValueError where no other arm is trained."""
    others_cpu_s = [seconds for arm, seconds in seconds_of_arms(folder).items() if arm != "sft"]
    if not others_cpu_s:
        raise ValueError(
            "sft takes as much time as the longest other arm: train another one first, or give --sft-steps"
        )
    return ComputeTime(max(others_cpu_s), "cpu")


Rows = Sequence[Mapping[str, Any]]


def cached_scores(file: Path, rows: Rows, score: Callable[[Rows], list[float]]) -> dict[str, float]:
    """What `score` gives for each row, by its id; kept in `file`, so that later calls compute only what is new."""
    scores = read_record(file, dict[str, float]) if file.exists() else {}
    if missing := [row for row in rows if row["id"] not in scores and row["seconds"]]:
        write_json(file, scores := scores | dict(zip([row["id"] for row in missing], score(missing), strict=True)))
    return scores


def speech_of(folder: Path, row: Mapping[str, Any]) -> np.ndarray:
    """[T] at RATE Hz."""
    return AudioClip(path=str(folder / row["spoken_audio"]["path"])).load(RATE)


def opinion_scores(folder: Path, rows: Rows) -> list[float]:
    """DNSMOS of each."""
    return load_quality_model("dnsmos").rate([speech_of(folder, row) for row in rows], RATE)


def in_own_voice(folder: Path, start: Start, encoder: SpeakerEncoder, rows: Rows) -> list[float]:
    """1 where the speech is nearer to its own speaker's recording of the text than to those of all other voices."""
    shares = []
    for row in rows:
        words = tuple(row["id"].split())
        own = quick.speakers_of(words, start.test_voices)[0]
        recordings = {name: quick.joined(words, recorded) for name, recorded in start.test_voices.items()}
        spoken, *voices = encoder.embed([speech_of(folder, row), *recordings.values()], RATE)
        nearness = {name: cosine(spoken, voice) for name, voice in zip(recordings, voices, strict=True)}
        shares.append(float(max(nearness, key=nearness.__getitem__) == own))
    return shares


def measures(row: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of a row of `measure_speech` and the further scores by name and text the columns of the table: shares in percent,
    the ranges in semitones and dB."""
    values = {**speech_measures(row), "seconds": row["seconds"]}
    values |= {name: by_text[row["id"]] for name, by_text in scores.items() if row["id"] in by_text}
    return {title: scale * values[name] for name, (title, scale) in COLUMNS.items() if name in values}


Measured = Mapping[str, Mapping[str, float]]
"""The columns of the table by text."""


def measured_arms(
    run: Run, start: Start, opinions: int, encoder: SpeakerEncoder | None
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Measured]]:
    """The rows of `measure_speech` by arm, in the order of measuring, and the columns; `opinions` texts have DNSMOS."""
    files = sorted((run.dir / "eval").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    rows_of: dict[str, list[dict[str, Any]]] = {}
    columns_of: dict[str, Measured] = {}
    for file in files:
        rows, scores = list(read_rows(file)), {}
        if opinions:
            scores["mos"] = cached_scores(
                file.with_suffix(".dnsmos.json"), rows[:opinions], partial(opinion_scores, run.dir)
            )
        if encoder is not None and len(start.test_voices) > 1:
            score = partial(in_own_voice, run.dir, start, encoder)
            scores["own_voice"] = cached_scores(file.with_suffix(".voices.json"), rows, score)
        arm = file.stem.removeprefix("after_")
        rows_of[arm], columns_of[arm] = rows, {row["id"]: measures(row, scores) for row in rows}
    return rows_of, columns_of


def pooled(folders: Sequence[Path]) -> tuple[dict[str, Measured], dict[str, float]]:
    """The columns of the arms that all these have measured, by folder and text, and the mean CPU seconds."""
    columns = [read_record(folder / MEASURED, dict[str, dict[str, dict[str, float]]]) for folder in folders]
    seconds = [seconds_of_arms(folder) for folder in folders]
    arms = [arm for arm in columns[0] if all(arm in of_folder for of_folder in columns)]
    return (
        {
            arm: {f"{f}/{id}": row for f, of_f in zip(folders, columns, strict=True) for id, row in of_f[arm].items()}
            for arm in arms
        },
        {arm: float(np.mean([of_folder[arm] for of_folder in seconds])) for arm in arms if arm in seconds[0]},
    )


def tables(arms: Mapping[str, Measured], seconds: Mapping[str, float]) -> str:
    """Every arm against `start`, and the best of n samples of each trained arm against the best of n of the start."""
    parts = [markdown(*table(arms, seconds, "start"))]
    for best in (name for name in arms if name.startswith("best")):
        if of_arms := [name for name in arms if name.endswith(f"_{best}")]:
            parts.append(markdown(*table({name: arms[name] for name in (best, *of_arms)}, {}, best)))
    return "\n".join(parts)


def table(
    arms: Mapping[str, Measured], seconds: Mapping[str, float], baseline: str
) -> tuple[tuple[str, ...], list[list[str]]]:
    """The head and a line for each arm: CPU seconds of training, means, and the paired changes against `baseline`."""
    before = arms[baseline]
    columns = list(dict.fromkeys(name for row in before.values() for name in row))
    lines = []
    for arm, measured in arms.items():
        cells = [arm, f"{seconds[arm]:.0f}" if arm in seconds else ""]
        for name in columns:
            values = {id: row[name] for id, row in measured.items() if name in row}
            changes = [value - before[id][name] for id, value in values.items() if name in before[id]]
            cells.append(number(np.array(list(values.values()))) if values else "")
            cells.append(number(np.array(changes), "+") if changes and arm != baseline else "")
        lines.append(cells)
    return ("", "CPU s", *(head for name in columns for head in (name, "change"))), lines


def page(
    rows_of: Mapping[str, Sequence[Mapping[str, Any]]],
    columns_of: Mapping[str, Measured],
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    folder: Path,
) -> str:
    """The table, and the first `PLAYED` texts as every arm says them, after the recording."""
    cards = []
    for row in rows_of["start"][:PLAYED]:
        takes = [Take("recording", row["reference_audio"]["path"])] if "reference_audio" in row else []
        for arm, rows in rows_of.items():
            said = next((r for r in rows if r["id"] == row["id"]), None)
            if said is not None:
                path = said["spoken_audio"]["path"] if said["seconds"] else None
                takes.append(Take(arm, path, columns_of[arm][row["id"]], said["transcript"]))
        cards.append(Card(row["text"], "", tuple(takes)))
    lead = f"The first {len(cards)} texts of the test split, by every arm."
    return listening_page("Speech before and after training", lead, head, lines, cards, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of tts-quickstart whose phase sft is finished")
    parser.add_argument("--out", type=Path, required=True, help="run folder of all arms, and of table.md")
    parser.add_argument("--judge", required=True, help="recogniser of the measurements: a folder or hub id")
    parser.add_argument("--speaker", help="speaker encoder: the cosine with the recordings of the words")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="arms to train (default: all that the start has voices for)"
    )
    parser.add_argument("--best-of", type=int, nargs="*", default=(4, 16), help="samples to choose from, of the start")
    parser.add_argument("--best-of-arms", type=int, nargs="*", default=(), help="the same, of the trained arms")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO")
    parser.add_argument("--prompts", type=int, default=16, help="texts of a step")
    parser.add_argument("--group", type=int, default=16, help="samples of a text")
    parser.add_argument("--only", nargs="*", default=[], help="regular expressions of the weights that GRPO trains")
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate of GRPO")
    parser.add_argument("--sft-lr", type=float, default=2e-4, help="learning rate of sft")
    parser.add_argument("--sft-steps", type=int, help="of sft (default: as much CPU time as the longest other arm)")
    parser.add_argument("--dpo-lr", type=float, default=5e-5, help="learning rate of dpo")
    parser.add_argument("--raft-texts", type=int, help="texts to say for rewards (default: the practice split)")
    parser.add_argument("--raft-voices", type=int, default=4, help="voices in which these arms say each text")
    parser.add_argument("--raft-samples", type=int, default=8, help="samples of which RAFT learns from the best")
    parser.add_argument(
        "--raft-sampling",
        type=float,
        nargs=2,
        metavar=("TEMPERATURE", "TOP_P"),
        help="how these arms sample to train (default: as they are measured)",
    )
    parser.add_argument(
        "--schedule",
        choices=("constant", "cosine"),
        default="constant",
        help="of the learning rate of sft, RAFT and DPO; cosine ends at 0 (default: %(default)s)",
    )
    parser.add_argument(
        "--sampling", type=float, nargs=2, metavar=("TEMPERATURE", "TOP_P"), help="instead of the best of the start"
    )
    parser.add_argument("--validation", type=int, default=80, help="texts on which sampling is chosen")
    parser.add_argument("--test", type=int, default=160, help="texts that are measured")
    parser.add_argument("--dnsmos", type=int, default=0, help="texts that DNSMOS rates, 1 to 2 s of a core each")
    parser.add_argument("--seed", type=int, default=0, help="seed of training")
    parser.add_argument(
        "--pool",
        type=Path,
        nargs="+",
        default=(),
        help="--out of other seeds, which are measured: table.md is then of all texts",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = Start(args.run, args.validation, args.test)
    clone, voices = start.config.clone, len(start.voices)
    impossible = SEVERAL_VOICES if clone else tuple(arm for arm in SEVERAL_VOICES if not arm.startswith("dpo"))
    if clone and 1 < args.raft_voices <= voices:
        impossible = ()
    arms = args.arms or [arm for arm in ARMS if arm not in impossible]
    if wrong := [arm for arm in arms if arm in impossible]:
        why = f"--raft-voices is {args.raft_voices}; the start has {voices} voices" if clone else "needs --clone"
        raise ValueError(f"--arms {wrong[0]}: {why}")
    if args.schedule != "constant" and "sft" in arms and not args.sft_steps:
        raise ValueError(
            f"--schedule {args.schedule}: how the rate falls in sft depends on its steps; give --sft-steps"
        )
    run = Run.open(args.out) if args.out.exists() else Run.create(args.out, "measure_speech", sys.argv[1:], vars(args))
    judges = Judges.load(args.judge, args.speaker, "en")
    measure = partial(measure_speech, run, judges=judges, samples=start.test_prompts, baseline="start")
    try:
        with run.interruptible():
            if not run.finished("losses"):
                run.finish("losses", start.losses(start.policy()))
            print(", ".join(f"{name}: {loss:.2f} nats a frame" for name, loss in run.result("losses").items()))
            sampling = choose_sampling(run, start, args.sampling)
            measure("start", start.policy(), sampling=sampling)
            for n in args.best_of:
                measure(f"best{n}", start.policy(), sampling=sampling, speak=partial(start.best_of, n))
            for arm in arms:
                before = ROUNDS.get(arm)
                if before and not run.finished(before):
                    raise ValueError(f"--arms: {arm} goes on from {before}, which is not trained; put it before {arm}")
                only = () if arm == "sft" else tuple(args.only)
                policy = start.policy(only, run.checkpoint(before) if before else None)
                timed(run, arm, partial(train_arm, arm, start, policy, run, sampling, args))
                measure(f"after_{arm}", policy, sampling=sampling)
                for n in args.best_of_arms:
                    measure(f"{arm}_best{n}", policy, sampling=sampling, speak=partial(start.best_of, n))
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(130)
    rows_of, columns_of = measured_arms(run, start, args.dnsmos, judges.encoder)
    write_json(run.dir / MEASURED, columns_of)
    head, lines = table(columns_of, seconds_of_arms(run.dir), "start")
    (run.dir / "listen.html").write_text(page(rows_of, columns_of, head, lines, run.dir), encoding="utf-8")
    text = tables(*pooled([run.dir, *args.pool]))
    (run.dir / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
