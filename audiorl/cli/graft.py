"""Make a speech model from a text model and a Whisper encoder, before any training.

audiorl graft --llm Qwen/Qwen2.5-0.5B-Instruct --encoder openai/whisper-base --family qwen2.5-omni --out grafted
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from audiorl.options import parse


@dataclass(frozen=True)
class GraftOptions:
    """Join a text model and a Whisper encoder into a Qwen2.5-Omni or Qwen2-Audio checkpoint, to be trained on speech.

    Both models keep their weights: on text the result gives the text model's logits. Only the projector between them
    is new and random. transformers and vLLM load the folder.
    """

    llm: str
    """The text model: a folder or hub id of a Llama, Qwen2 or Qwen3 model that has a chat template, or a .gguf file
    (pip install gguf)."""
    encoder: str
    """The audio encoder: a folder or hub id of any Whisper model, such as openai/whisper-base."""
    family: Literal["qwen2.5-omni", "qwen2-audio"]
    """The class of the checkpoint. qwen2.5-omni: a clip costs as much as it is long; holds Llama and Qwen2
    models without scaled positions. qwen2-audio: every clip is encoded as 30 s, as Whisper does; holds Llama, Qwen2 and
    Qwen3 models."""
    out: Path
    """The new folder."""
    encoder_layers: int = 0
    """New transformer layers after Whisper's own, each the identity at first. The projector of both classes is one
    linear layer after pooling to 25 frames a second; such layers are how a deeper, nonlinear one stays loadable by
    transformers and vLLM. An MLP after the pooling or stacked frames would load nowhere else, and are not offered."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the saved weights; auto is the text model's."""
    seed: int = 0
    """Seed of the new weights."""


def main(args: list[str]) -> int:
    """Write the checkpoint; return the exit code.

    Raises ValueError for models that the family cannot hold and for an `out` that exists.
    """
    options = parse(GraftOptions, args or ["--help"], prog="audiorl graft")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out {options.out}: exists already; give a new folder")
    from audiorl.models.graft import graft, vllm_problem

    policy = graft(
        options.llm,
        options.encoder,
        options.family,
        encoder_layers=options.encoder_layers,
        dtype=options.dtype,
        seed=options.seed,
    )
    policy.save(options.out)
    problem = vllm_problem(policy)
    if problem:
        print(f"note: transformers loads {options.out}, vLLM does not: {problem}")
    print(options.out)
    return 0
