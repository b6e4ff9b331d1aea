"""Does a model use its audio, and the right audio? The short form of audiorl eval audit --model MODEL."""

from __future__ import annotations

from audiorl.cli import eval as evaluations
from audiorl.options import HELP, first_word


def main(args: list[str]) -> int:
    """Run the audit; return the exit code."""
    first_word(args, "audit: name a model first: audiorl audit MODEL --data held_out.jsonl --out audits/one")
    return evaluations.main(["audit", *([] if args[0] in HELP else ["--model"]), *args])
