"""What PPO, HPO and supervised training make of the same interpreter: arms from the start of simul-quickstart runs.

    for seed in 0 1 2; do
      audiorl train simul-quickstart --seed $seed --threads 1 --ks --late-steps 150 --source es --target en \\
          --unseen unseen_speakers --out runs/simul-$seed
    done
    python experiments/measure_interpretation.py runs/simul-0 runs/simul-1 runs/simul-2 --out runs/interpretation

The runs have the supervised start and both stages of PPO. From the start each arm trains as many steps as both stages
together, with as many rollouts a step, or supervised for as much CPU time:

  stage1    PPO with the rewards of single turns
  stage2    PPO with those and the latency and quality of the whole stream
  hpo       HPO's objective (arXiv 2604.21045): quality and hinged promptness, each normalised in a group of 8 rollouts
  kl-0.1, kl-0.25, kl-0.5
            both stages with the adaptive KL coefficient at this target
  kl-fixed  both stages with the KL coefficient that the run starts from
  sft       supervised training with the lag of the start
  on-time   supervised training without lag

And the start decoded by rules, without training: wait-1, wait-2, wait-3, wait-5, local-agreement-2, alignatt-4.

OUT/table.md: of known and of unseen speakers all runs taken together, and the changes from the start, or from the arm
that `--against` names, with 95 % intervals; streams are drawn, each with the translations of all runs. OUT/curve.png:
quality against latency. It continues where it stopped. `--arms` without a name trains nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from arms import markdown
from matplotlib.figure import Figure
from numpy.typing import NDArray

from audiorl.config import KLConfig, RLConfig
from audiorl.errors import Interrupted
from audiorl.eval._streams import laal_counts, measure_streams
from audiorl.eval.metrics.corpus import UNSEEN, Estimate, Score, estimate, ratio
from audiorl.models import AudioPolicy, load_policy
from audiorl.protocols import Schedule
from audiorl.recipes._loader import parse_config
from audiorl.recipes._simul import SimulStage, StageName, train_stages
from audiorl.report.charts import LIGHT, draw_tradeoff
from audiorl.report.summary import Point
from audiorl.run.folder import Run
from audiorl.run.records import RunConfig, RunState, read_record
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.logs import read_log
from audiorl.tasks.simul.quality import NAMES, Quality, default_quality, quality_counts
from audiorl.tasks.simul.schedules import AlignAtt, LocalAgreement, Reviewed, WaitK, words_per_chunk
from audiorl.tasks.simul.streams import Stream
from audiorl.train.sft import sft
from corpora.recipes import simul_quickstart

TOOL = "measure_interpretation"
PPO = ("stage1", "stage2")
"""Phases of the runs."""
START = "before"
OF_THE_RUNS = ("on time", "after stage1", "after")
"""Evaluations of the runs themselves; the first, before the phase `late`, where there is one."""
AFTER = "after"
"""The evaluation of an arm."""
GROUP_SIZE = 8
"""Rollouts of a stream in HPO."""

Config = simul_quickstart.SimulQuickstartConfig


def reinforce(
    arm: str, policy: AudioPolicy, run: Run, start: RunState, config: Config, streams: Sequence[Stream]
) -> None:
    train_stages(
        policy,
        streams,
        [],
        run,
        stages_of(arm, config),
        chunks=config.chunks,
        optim=config.optim,
        sampling=config.sampling,
        measure=lambda name: None,
        seed=config.seed,
    )


def stages_of(arm: str, config: Config) -> list[SimulStage]:
    """Both stages of the run with another KL, or one stage with the steps of both."""
    single, both = config.rewards.of_stages()
    if arm in KL:
        stages = [("stage1", single, KL[arm](config.stage1)), ("stage2", both, KL[arm](config.stage2))]
    else:
        name, reward, training = {
            "stage1": ("stage1", single, config.stage1),
            "stage2": ("stage2", both, config.stage2),
            "hpo": ("stage2", replace(config.rewards, hpo=True).of_stages()[1], in_groups(config.stage2)),
        }[arm]
        stages = [(name, reward, replace(training, steps=config.stage1.steps + config.stage2.steps))]
    return [
        SimulStage(cast(StageName, name), reward, replace(training, eval_every=0), AFTER)
        for name, reward, training in stages
    ]


def in_groups(ppo: RLConfig) -> RLConfig:
    """HPO's advantages, of about as many rollouts a step."""
    prompts = -(-ppo.prompts_per_step * ppo.group_size // GROUP_SIZE)
    return replace(ppo, advantage="gdpo", prompts_per_step=prompts, group_size=GROUP_SIZE, kl=KLConfig(kind="k3"))


def supervise(
    arm: str, policy: AudioPolicy, run: Run, start: RunState, config: Config, streams: Sequence[Stream]
) -> None:
    """As many steps as the start takes in the CPU time of both stages."""
    late = arm == "sft" and bool(config.late_steps)
    examples = simul_quickstart.supervised(
        streams, config if arm == "sft" else replace(config, lag=0, least_lag=0), late
    )
    times = start.cpu_seconds if start.cpu_seconds.keys() >= set(PPO) else start.seconds
    steps = max(round(config.sft.steps * sum(times[stage] for stage in PPO) / times["sft"]), 1)
    optim = replace(config.sft_optim, lr=config.sft_optim.lr / 2)
    sft(policy, examples, run, config=replace(config.sft, steps=steps), optim=optim, seed=config.seed)


def kl_target(target: float, ppo: RLConfig) -> RLConfig:
    return replace(ppo, kl=replace(ppo.kl, control="log-space", target=target))


KL: dict[str, Callable[[RLConfig], RLConfig]] = {
    **{f"kl-{target:g}": partial(kl_target, target) for target in (0.1, 0.25, 0.5)},
    "kl-fixed": lambda ppo: replace(ppo, kl=replace(ppo.kl, control="fixed")),
}

ARMS: dict[str, Callable[[str, AudioPolicy, Run, RunState, Config, Sequence[Stream]], None]] = {
    "stage1": reinforce,
    "stage2": reinforce,
    "hpo": reinforce,
    **dict.fromkeys(KL, reinforce),
    "sft": supervise,
    "on-time": supervise,
}

LABELS = {
    "stage1": "single turns alone",
    "stage2": "whole stream alone",
    "hpo": "HPO",
    **{arm: f"KL {arm.removeprefix('kl-')}" for arm in KL},
    "sft": "more SFT",
    "on-time": "SFT on time",
}
"""How tables and the picture call the arms that are trained."""

RULES: dict[str, Callable[[float, str], Schedule]] = {
    **{f"wait-{k}": partial(WaitK, k) for k in (1, 2, 3, 5)},
    "local-agreement-2": lambda rate, language: Reviewed(LocalAgreement(2), language),
    "alignatt-4": lambda rate, language: Reviewed(AlignAtt(4), language),
}
"""Schedules by the words per chunk of the training streams and the language."""


def config_of(folder: Path) -> Config:
    record = read_record(folder / "config.json", RunConfig)
    if Path(record.recipe).stem != "simul_quickstart":
        raise ValueError(f"{folder}: a run of {record.recipe}; give runs of simul-quickstart")
    return cast(Config, parse_config(simul_quickstart, record.argv))


def streams_of(folder: Path, *names: str) -> list[Stream]:
    return [s for name in names for s in read_streams(folder / "streams" / name).samples]


def sets_of(folder: Path) -> dict[str, str]:
    """The prefix of evaluations by the folder of their streams: known speakers, and unseen ones if there are any."""
    return {"test": ""} | ({UNSEEN: f"{UNSEEN}_"} if (folder / "streams" / UNSEEN).exists() else {})


def train_arm(folder: Path, out: Path, arm: str) -> None:
    """One arm in a run folder of its own; what is finished is not done again."""
    config = config_of(folder)
    _, reward = config.rewards.of_stages()
    start, phase = read_record(folder / "state.json", RunState), simul_quickstart.start_of(config)
    for needed in (phase, *PPO):
        if needed not in start.finished:
            raise ValueError(f"{folder}: {needed} has not ended; audiorl resume {folder} continues it")
    with Run.open(out) if out.exists() else Run.create(out, TOOL, [arm], config) as run:
        policy = load_policy(str(folder / start.checkpoints[phase]), config.model)
        streams, rule = streams_of(folder, "robots", "train"), None
        if arm in RULES:
            rule = RULES[arm](words_per_chunk(streams, config.chunks.seconds), config.target)
        else:
            ARMS[arm](arm, policy, run, start, config, streams)
        for split, prefix in sets_of(folder).items():
            measure_streams(
                run,
                prefix + AFTER,
                policy,
                streams_of(folder, split),
                config.chunks,
                config.sampling,
                reward,
                rule,
                optimised=config.rewards.quality,
                baseline=prefix + AFTER,
            )


@dataclass(frozen=True)
class Row:
    """One arm on one set of streams, all runs that have it taken together."""

    runs: int
    values: dict[str, float]
    changes: dict[str, Estimate]
    """From the baseline, by metric."""


def results(runs: Sequence[Path], out: Path, prefix: str, baseline: str) -> dict[str, Row]:
    """By arm; `prefix` of the set's evaluations."""
    language = config_of(runs[0]).target
    logs = {name: [run / "eval" / f"{prefix}{name}" for run in runs] for name in (START, *OF_THE_RUNS)}
    logs |= {arm: [out / run.name / arm / "eval" / f"{prefix}{AFTER}" for run in runs] for arm in (*ARMS, *RULES)}
    rows = {}
    for arm, of_arm in logs.items():
        pairs = [(old, new) for old, new in zip(logs[baseline], of_arm, strict=True) if old.exists() and new.exists()]
        if not pairs:
            continue
        before, after = (all_counts(list(of), language) for of in zip(*pairs, strict=True))
        values = {metric: score(counts_NK.sum(0)) for metric, (counts_NK, score) in after.items()}
        changes = {m: estimate(after[m][0], after[m][1], baseline_NK=before[m][0]) for m in after}
        rows[LABELS.get(arm, arm)] = Row(len(pairs), values, {} if arm == baseline else changes)
    return rows


def table(rows: Mapping[str, Row]) -> str:
    """A row an arm, and below it the changes with their intervals."""
    lines: list[tuple[str, ...]] = []
    for arm, row in rows.items():
        lines.append((f"{arm}, {row.runs} runs", *(f"{value:.2f}" for value in row.values.values())))
        if row.changes:
            lines.append(("", *(f"{c.value:+.2f} ({c.low:+.2f} to {c.high:+.2f})" for c in row.changes.values())))
    return markdown(("", *(NAMES.get(cast(Quality, m), m) for m in next(iter(rows.values())).values)), lines)


def draw(rows: Mapping[str, Mapping[str, Row]], png: Path) -> None:
    """Word F1 against LAAL, a panel for each set of streams; the stages alone are left to the table."""
    figure = Figure(figsize=(6.4 * len(rows), 5.6), dpi=120, facecolor="white", layout="constrained")
    for ax, (title, arms) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
        points = [
            Point(arm, row.values["laal"], row.values["word_f1"])
            for arm, row in arms.items()
            if not arm.endswith("alone") and not arm.startswith("KL")
        ]
        ax.set_title({"test": "known speakers", UNSEEN: "unseen speakers"}[title], color=LIGHT.ink, size=11, pad=16)
        draw_tradeoff(ax, points, LIGHT, "word F1")
    figure.savefig(png)


def all_counts(logs: Sequence[Path], language: str) -> dict[str, tuple[NDArray[Any], Score]]:
    """By metric counts [N, K] of the streams, summed over the logs, and their score."""
    read = [read_log(log) for log in logs]
    texts = [([i.prediction for i in log], [i.reference or "" for i in log]) for log in read]
    counts: dict[str, tuple[NDArray[Any], Score]] = {}
    counts["laal"] = (np.sum([laal_counts(log, language) for log in read], axis=0), ratio)
    for metric in dict.fromkeys((*default_quality(language), "length_ratio", "repetition")):
        each = [quality_counts(metric, *pair, language) for pair in texts]
        counts[metric] = (np.sum([counts_NK for counts_NK, _ in each], axis=0), each[0][1])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs of simul-quickstart, with the same streams")
    parser.add_argument("--out", type=Path, required=True, help="folder of the arms, OUT/RUN/ARM, and of table.md")
    parser.add_argument(
        "--arms", nargs="*", choices=(*ARMS, *RULES), default=[*ARMS, *RULES], help="arms to train or decode"
    )
    parser.add_argument(
        "--against", default=START, choices=(START, *OF_THE_RUNS, *ARMS), help="baseline of the changes"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        for arm in args.arms:
            for run in args.runs:
                train_arm(run, args.out / run.name / arm, arm)
    except Interrupted:
        sys.exit("stopped; the same command continues")
    except ValueError as error:
        sys.exit(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    sets = sets_of(args.runs[0]).items()
    rows = {name: results(args.runs, args.out, prefix, args.against) for name, prefix in sets}
    text = "\n".join(f"## {name}\n\n{table(of_set)}" for name, of_set in rows.items())
    (args.out / "table.md").write_text(text)
    draw(rows, args.out / "curve.png")
    print(text)


if __name__ == "__main__":
    main()
