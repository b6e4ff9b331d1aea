"""Attack what reads files, requests and options with mutated inputs, and print the outcomes by target.

    python tools/attack.py                             1,500 inputs with a new seed
    python tools/attack.py --inputs 15000 --seed 7     more, and again
    python tools/attack.py --targets audio rows        some targets only
    python tools/attack.py --out failures              write each input that ended badly there, to keep as a seed

Exit code 1 if any input ended other than in acceptance that the judge agrees with, or in a clear error. The targets,
and what each judge compares, are in tests/support/attack.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.attack.process import Attacker
from tests.support.attack.targets import GOOD, OUTCOMES, all_targets, draw


def table(counts: dict[str, Counter[str]]) -> str:
    """The outcomes by target, as a table of Markdown."""
    heads = ("inputs", "accepted", "clear errors", "errors without a name", "tracebacks", "hangs", "deaths", "silent")
    lines = [f"| target | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for name, counted in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        cells = [sum(counted.values()), *(counted[kind] for kind in OUTCOMES)]
        lines.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1500, help="inputs over all targets, by their weights")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs; by default a new one, which is printed")
    parser.add_argument("--targets", nargs="*", default=None, help="names of targets; by default all")
    parser.add_argument("--out", type=Path, default=None, help="folder for inputs that ended badly")
    parser.add_argument("--show", type=int, default=3, help="details printed for each target and kind of bad outcome")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    targets = all_targets()
    names = options.targets or list(targets)
    if unknown := set(names) - set(targets):
        parser.error(f"no target is called {', '.join(unknown)}; they are {', '.join(targets)}")
    total = sum(targets[name].weight for name in names)
    print(f"seed {seed}", flush=True)
    counts: dict[str, Counter[str]] = {}
    with Attacker() as attacker:
        for name in names:
            counts[name] = Counter()
            rng = Random(f"{seed} {name}")
            for number in range(round(options.inputs * targets[name].weight / total)):
                given = draw(targets[name], rng)
                ended = attacker.attack(name, given)
                counts[name][ended.kind] += 1
                if ended.kind in GOOD:
                    continue
                if counts[name][ended.kind] <= options.show:
                    print(f"\n{name}, {given.name}: {ended.kind}\n{ended.detail}", flush=True)
                if options.out is not None:
                    path = options.out / name / re.sub(r"[^\w.-]", "_", f"{ended.kind}-{number}-{given.name}")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(given.data)
                    path.with_name(path.name + ".detail").write_text(ended.detail, errors="replace")
    print(f"\n{table(counts)}")
    return int(any(kind not in GOOD for counted in counts.values() for kind in counted))


if __name__ == "__main__":
    sys.exit(main())
