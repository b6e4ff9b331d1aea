"""Write a Whisper whose window is shorter than 30 s, so that its encoder and cross-attention take less time.

    python tools/shorten_whisper.py models/whisper-base models/whisper-base-10s --seconds 10

The encoder's positions after the window are cut off; all other weights stay. The folder loads like any other Whisper,
in transformers too. Clips longer than the window are refused. Whisper was trained with 30 s: train a shorter one before
you trust what it recognises.
"""

from __future__ import annotations

import argparse
import sys

from torch import nn
from transformers import WhisperForConditionalGeneration

from audiorl.models.weights import load_frontend, silent_transformers

FRAMES_PER_SECOND = 50
"""Of the encoder's output."""


def shorten(path: str, out: str, seconds: int) -> None:
    """Raises ValueError for a window that is not shorter than the model's."""
    with silent_transformers():
        model = WhisperForConditionalGeneration.from_pretrained(path, dtype="auto")
    tokenizer, extractor = load_frontend(path)
    positions, has = seconds * FRAMES_PER_SECOND, model.config.max_source_positions
    if not 0 < positions < has:
        raise ValueError(f"--seconds {seconds}: the window of {path} is {has // FRAMES_PER_SECOND} s; give less")
    encoder = model.get_encoder()
    encoder.embed_positions = nn.Embedding.from_pretrained(encoder.embed_positions.weight[:positions].clone())
    model.config.max_source_positions = positions
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = extractor.to_dict() | {"chunk_length": seconds}
    settings["n_samples"] = seconds * extractor.sampling_rate
    settings["nb_max_frames"] = settings["n_samples"] // extractor.hop_length
    type(extractor).from_dict(settings).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a Whisper: folder or hub id")
    parser.add_argument("out", help="the new folder")
    parser.add_argument("--seconds", type=int, default=10, help="the new window")
    args = parser.parse_args()
    try:
        shorten(args.path, args.out, args.seconds)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
