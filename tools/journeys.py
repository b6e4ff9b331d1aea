"""Ten ways in which somebody meets audiorl for the first time, run as they would be: what fails, and how long it takes.

    python tools/journeys.py                   # all, in a temporary folder: some ten minutes on two cores
    python tools/journeys.py 1 8 --keep DIR    # some of them, whose files stay

Each line of a journey is a command in a process of its own, or a Python program. A journey is right if all commands end
as they should: with 0, or, where a mistake is tried, with 2 and a few lines. Exit code 1 if one does not. `before` is
what a user who knows TRL, ms-swift and datasets met at commit a5b8efe.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--max-steps 2 --rl.group-size 2 --rl.prompts-per-step 2 --rl.rollouts-every 1 --sampling.max-new-tokens 8"
QA = f"train mmau-grpo --path tiny {SMALL} --eval-tokens 8"


@dataclass(frozen=True)
class Journey:
    """What is tried, what came at first, and the commands: words of `audiorl`, or a program in Python.

    A command that begins with `!` is a mistake: it has to end with exit code 2 and a few lines of stderr. Of one
    that begins with `~` the CPU time counts: it has to end within a second.
    """

    name: str
    before: str
    commands: tuple[str, ...]


TRL = """
import audiorl

def brief(completions, **columns):
    return [-len(text) / 100 for text in completions]

result = audiorl.train_grpo("tiny", "qa.jsonl", brief, steps=2, group_size=2, max_new_tokens=8, held_out_count=4,
                            eval_tokens=8, out="runs/api")
print(result)
"""
SPLITS = """
import datasets
from audiorl.data.manifest import read_samples
rows = datasets.load_dataset("json", data_files="qa.jsonl", cache_dir="cache")
print(len(read_samples(rows["train"], audio_root=".").samples))
print(len(read_samples([dict(row) for row in rows["train"]], audio_root=".").samples))
"""
REWARD = """
def reward(rollout):
    return rollout.sample.audio[0].load(16_000).std() - len(rollout.text) / 100
"""
JOURNEYS = {
    "1": Journey(
        "my questions on my recordings",
        "13 of 13 files of other toolkits refused; a held-out set of 200 asked of 20 rows; nothing measures the result",
        (
            *(
                f"data show {name}"
                for name in ("qa.jsonl", "qa.csv", "qa.tsv", "swift.jsonl", "sharegpt.json", "trl.jsonl", "folder")
            ),
            f"{QA} --data qa.jsonl --out runs/qa",
            f"{QA} --data swift.jsonl --out runs/swift",
            "eval qa --model runs/qa --data qa.jsonl --max-new-tokens 8 --out evals/qa",
        ),
    ),
    "2": Journey("GRPO from Python", "twelve lines out of seven modules, in no page; bare TypeErrors", (TRL, SPLITS)),
    "3": Journey(
        "my own reward",
        "works; a mistake in it prints 70 lines and blocks the run's folder",
        (
            f"{QA} --data qa.jsonl --reward-file mine.py --out runs/reward",
            "rewards score mine.py runs/reward",
            "rewards study mine.py --rollouts runs/reward --probe 0 --out study.html",
            f"!{QA} --data qa.jsonl --reward-file wrong.py --out runs/wrong",
            f"{QA} --data qa.jsonl --reward-file mine.py --out runs/wrong",
        ),
    ),
    "4": Journey(
        "recognition on my recordings",
        "the training's report speaks of accuracy; no normaliser of my own",
        (
            f"train asr-grpo --path tiny --data asr.jsonl {SMALL} --out runs/asr",
            "eval asr --model runs/asr --data asr.jsonl --max-new-tokens 8 --normalizer mine.py:plain --out evals/asr",
        ),
    ),
    "5": Journey(
        "a log of SimulEval",
        "right, but 18 to 25 s for three lines",
        ("eval simul --score simul --language es --out evals/simul",),
    ),
    "6": Journey("the report", "opens at once; three defects on a phone and in legends", ("report runs/qa",)),
    "7": Journey(
        "trackers",
        "curves and recordings arrive, before and after do not",
        (f"{QA} --data qa.jsonl --log tensorboard --out runs/logged",),
    ),
    "8": Journey(
        "talk to it, export it",
        "export crashes, chat takes the control, 20 s for a plan",
        (
            "train quickstart --tiny --out runs/quickstart",
            'chat runs/quickstart --audio 0.wav "Which language is spoken: English, Spanish or French?"',
            "export runs/quickstart --out exported",
            "eval mmau --help",
            "doctor --plan qwen2.5-omni-3b --lora-rank 16",
            f"!{QA} --model.device cuda --data qa.jsonl --out runs/cuda",
        ),
    ),
    "9": Journey(
        "settings in a file, three seeds",
        "neither",
        (
            "~train audio-qa --config settings.yaml --print-config",
            f"{QA} --data qa.jsonl --seeds 0 1 2 --out runs/seeds",
            "report runs/seeds",
        ),
    ),
    "10": Journey(
        "help and typos",
        "10 to 26 s each",
        (
            "~--help",
            "~train mmau-grpo --help",
            "~eval asr --help",
            "!~train mmau-grpo --rl.group-sise 4 --out runs/typo",
            "!~train mmau-grop --out runs/typo",
            "!~train mmau-grpo --data qs.jsonl --out runs/typo",
        ),
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journeys", nargs="*", choices=[*JOURNEYS, []], help="all by default")
    parser.add_argument("--keep", type=Path, help="a folder for the files; by default one that is deleted")
    options = parser.parse_args(argv)
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {number: JOURNEYS[number] for number in options.journeys or JOURNEYS}
    table = Table("", "journey", "before", "commands", "wall s", "CPU s", "not right")
    wrong: list[str] = []
    try:
        prepare(folder)
        for number, journey in wanted.items():
            runs = [run(command, folder) for command in journey.commands]
            bad = [r.problem for r in runs if r.problem]
            wrong += bad
            totals = [f"{sum(r.wall for r in runs):.0f}", f"{sum(r.cpu for r in runs):.0f}"]
            table.add_row(number, journey.name, journey.before, str(len(runs)), *totals, "\n".join(bad) or "0")
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1 if wrong else 0


@dataclass(frozen=True)
class Ended:
    wall: float
    cpu: float
    problem: str | None


def run(command: str, folder: Path) -> Ended:
    """Run a command as a user's shell does, and say what is not as it should be."""
    program = "\n" in command
    mistake, quick = "!" in command[:2], "~" in command[:2]
    words = command if program else command.lstrip("!~")
    shell = [sys.executable, "-c", words] if program else ["bash", "-c", f"{sys.executable} -m audiorl {words}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    start, used = time.monotonic(), children()
    ended = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wall, cpu = time.monotonic() - start, children() - used
    shown = "a program" if program else f"audiorl {words[:60]}"
    print(f"{wall:6.1f} s wall, {cpu:6.1f} s CPU, exit code {ended.returncode}: {shown}", file=sys.stderr)
    lines = ended.stderr.strip().splitlines()
    if ended.returncode != (2 if mistake else 0):
        return Ended(wall, cpu, f"{shown}: exit code {ended.returncode}: {lines[-1] if lines else ''}")
    if mistake and (len(lines) > 12 or any("Traceback" in line for line in lines)):
        return Ended(wall, cpu, f"{shown}: {len(lines)} lines of errors")
    if quick and cpu > 1.0:
        return Ended(wall, cpu, f"{shown}: {cpu:.1f} s of CPU")
    return Ended(wall, cpu, None)


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare(folder: Path) -> None:
    """Write 20 recordings of the bundled speech, and the same rows as eight toolkits write them."""
    import soundfile

    from audiorl.data.corpus import bundled_speech

    spoken = [u for u in bundled_speech() if u.language in ("en", "es", "fr")]
    spoken = spoken[:: len(spoken) // 20][:20]
    names = {"en": "English", "es": "Spanish", "fr": "French"}
    question, choices = "Which language is spoken?", list(names.values())
    for i, u in enumerate(spoken):
        soundfile.write(folder / f"{i}.wav", u.clip.load(16_000), 16_000)
    rows = [(f"{i}.wav", question, names[u.language]) for i, u in enumerate(spoken)]

    def lines(name: str, make: Callable[[str, str, str], dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(make(*row)) + "\n" for row in rows))

    def separated(mark: str) -> Iterator[str]:
        yield mark.join(("audio", "question", "answer"))
        yield from (mark.join(row) for row in rows)

    lines("qa.jsonl", lambda a, q, s: {"audio": a, "question": q, "choices": choices, "answer": s})
    (folder / "qa.csv").write_text("\n".join(separated(",")) + "\n")
    (folder / "qa.tsv").write_text("\n".join(separated("\t")) + "\n")
    lines(
        "swift.jsonl",
        lambda a, q, s: {"messages": [{"role": "user", "content": f"<audio>{q}"}], "audios": [a], "solution": s},
    )
    said = [
        {"conversations": [{"from": "human", "value": f"<audio>{q}"}, {"from": "gpt", "value": s}], "audios": [a]}
        for a, q, s in rows
    ]
    (folder / "sharegpt.json").write_text(json.dumps(said))
    parts = [{"type": "audio"}, {"type": "text", "text": question}]
    lines("trl.jsonl", lambda a, q, s: {"prompt": [{"role": "user", "content": parts}], "audio": a, "solution": s})
    (folder / "folder").mkdir(exist_ok=True)
    for a, *_ in rows:
        shutil.copy(folder / a, folder / "folder" / a)
    header = "file_name,question,answer"
    (folder / "folder" / "metadata.csv").write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    texts = [{"audio": f"{i}.wav", "text": u.text, "language": u.language} for i, u in enumerate(spoken)]
    (folder / "asr.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (folder / "mine.py").write_text(REWARD + "\n\ndef plain(text):\n    return text.lower()\n")
    (folder / "wrong.py").write_text("def reward(rollout):\n    return rollout.sample.metadata['level']\n")
    (folder / "settings.yaml").write_text("path: tiny\nrl: {group_size: 2}\n")
    log = {
        "index": 0,
        "prediction": "hola mundo",
        "delays": [320.0, 640.0],
        "elapsed": [320.0, 640.0],
        "prediction_length": 2,
    }
    log |= {"reference": "hola mundo", "source": ["0.wav", "samplerate: 16000"], "source_length": 1000.0}
    (folder / "simul").mkdir(exist_ok=True)
    (folder / "simul" / "config.yaml").write_text("source_type: speech\ntarget_type: text\n")
    (folder / "simul" / "instances.log").write_text("".join(json.dumps(log | {"index": i}) + "\n" for i in range(3)))


if __name__ == "__main__":
    sys.exit(main())
