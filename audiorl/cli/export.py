"""Write the model of a checkpoint to a folder that transformers and vLLM load, with a model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from audiorl.options import parse


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a checkpoint to a folder that transformers and vLLM load, with a model card."""

    checkpoint: Positional[Path]
    """A checkpoint, such as RUN/checkpoints/grpo/step_000100, or a run folder (its newest checkpoint)."""
    out: Path
    """The new folder."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    merge: bool = False
    """Add a low-rank adapter to the weights of its base model, instead of exporting the adapter."""
    push: str | None = None
    """Repository on the Hugging Face hub to upload to, such as me/my-model; by default nothing is uploaded."""
    scores: tuple[Path, ...] = ()
    """Folders that `audiorl eval asr` wrote of this model: their results by language and speaker go into the card."""


def main(args: list[str]) -> int:
    """Export the model; return the exit code."""
    options = parse(ExportOptions, args or ["--help"], prog="audiorl export")
    from audiorl.eval.asr import model_card_section
    from audiorl.models.export import export
    from audiorl.run.folder import newest_checkpoint

    checkpoint = Path(newest_checkpoint(options.checkpoint, options.phase))
    sections = [model_card_section(folder) for folder in options.scores]
    print(export(checkpoint, options.out, options.merge, options.push, sections))
    return 0
