"""Recognisers with a CTC head (Wav2Vec2, HuBERT, WavLM, Data2Vec and others of transformers), and alignment by CTC.

Shapes: T frames of a clip, V labels with the blank, S labels of a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from audiorl.config import torch_device
from audiorl.eval.metrics.text import normalize
from audiorl.speech_models.protocol import (
    AlignedWord,
    ModelFolder,
    Wave,
    Waveform,
    batches_by_length,
    load_model,
    load_processor,
    padded,
    resampled,
)


def ctc_path(logprobs: Tensor, labels: Sequence[int], blank: int) -> list[tuple[int, int]] | None:
    """Return the first frame of each of the S `labels` on the most probable CTC path, and the frame after its last one.

    logprobs: [T, V]. None where no path exists: T is less than S, plus 1 for each pair of equal neighbours. Source: the
    states of Graves et al. 2006, section 4.1, with the maximum in place of the sum.
    """
    repeats = sum(a == b for a, b in pairwise(labels))
    if not labels or len(labels) + repeats > len(logprobs):
        return None
    states = torch.full((2 * len(labels) + 1,), blank)
    states[1::2] = torch.tensor(labels)
    skips = torch.zeros(len(states), dtype=torch.bool)  # from the label before, over the blank
    skips[3::2] = states[3::2] != states[1:-2:2]
    emitted_TS = logprobs.float().cpu()[:, states]
    best_S = torch.full((len(states),), -torch.inf)
    best_S[:2] = emitted_TS[0, :2]
    steps = torch.zeros(len(logprobs), len(states), dtype=torch.long)
    for t in range(1, len(logprobs)):
        one = torch.nn.functional.pad(best_S[:-1], (1, 0), value=-torch.inf)
        two = torch.nn.functional.pad(best_S[:-2], (2, 0), value=-torch.inf).masked_fill(~skips, -torch.inf)
        best_S, steps[t] = torch.stack([best_S, one, two]).max(0)
        best_S = best_S + emitted_TS[t]
    state = len(states) - 1 if best_S[-1] >= best_S[-2] else len(states) - 2
    spans = [(0, 0)] * len(labels)
    for t in range(len(logprobs) - 1, -1, -1):
        if state % 2:
            spans[state // 2] = (t, max(t + 1, spans[state // 2][1]))
        state -= int(steps[t, state])
    return spans


def ctc_log_probability(logprobs: Tensor, labels: Sequence[int], blank: int) -> float:
    """Return ln p(labels) by `logprobs` [T, V] of a clip, summed over all CTC paths; -inf where there is none.

    Source: Graves et al. 2006, equation 8.
    """
    if not len(logprobs):
        return -math.inf
    lengths = torch.tensor([len(logprobs)]), torch.tensor([len(labels)])
    emitted, target = logprobs.float().cpu()[:, None], torch.tensor([labels])
    return -float(torch.nn.functional.ctc_loss(emitted, target, *lengths, blank=blank, reduction="sum"))


def align_words(
    logprobs: Tensor,
    words: Sequence[str],
    labels: Sequence[Sequence[int]],
    between: int | None,
    blank: int,
    seconds: float,
    read: Callable[[Tensor], str],
) -> list[AlignedWord]:
    """Return the `words` in a clip of `seconds`, whose frames are `logprobs` [T, V].

    labels: of each word; between: the label between two words, None for none. `read` gives the transcript of some of
    the frames. A text that is too long for the clip has no path: its words share the clip equally.
    """
    if not words:
        return []
    text: list[int] = []
    places = []
    for word in labels:
        text += [between] if text and between is not None else []
        places.append((len(text), len(text) + len(word)))
        text += word
    path = ctc_path(logprobs, text, blank) if all(labels) else None
    if path is None:
        edges = [round(i * len(logprobs) / len(words)) for i in range(len(words) + 1)]
    else:
        inner = [(path[b - 1][1] + path[c][0]) // 2 for (_, b), (c, _) in pairwise(places)]
        edges = [0, *inner, len(logprobs)]
    scale = seconds / max(len(logprobs), 1)
    return [
        AlignedWord(word, read(logprobs[a:b]) if b > a else "", a * scale, b * scale)
        for word, (a, b) in zip(words, pairwise(edges), strict=True)
    ]


class CTCHead:
    """What recognisers with a CTC head have in common: they are an `Aligner` and a `TextScorer`."""

    def clips(self, waveforms: Sequence[Waveform], sample_rate: int) -> Iterator[tuple[int, Tensor, float]]:
        """Yield (index, log-probs [T, V], seconds) of each clip with samples, in any order."""
        raise NotImplementedError

    def separators(self) -> tuple[int | None, int]:
        """Return the label between words, None for none, and the blank."""
        raise NotImplementedError

    def read(self, logprobs: Tensor) -> str:
        """Return the text of the most probable labels, repeats and blanks removed."""
        raise NotImplementedError

    def words(self, text: str) -> list[tuple[str, list[int]]]:
        """Return the words of a text, normalised, with their labels."""
        raise NotImplementedError

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        texts = [""] * len(waveforms)
        for i, logprobs, _ in self.clips(waveforms, sample_rate):
            texts[i] = self.read(logprobs)
        return texts

    def align(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[list[AlignedWord]]:
        words = [self.words(text) for text in texts]
        aligned: list[list[AlignedWord]] = [[] for _ in waveforms]
        for i, logprobs, seconds in self.clips(waveforms, sample_rate):
            spelled, labels = [w for w, _ in words[i]], [ids for _, ids in words[i]]
            aligned[i] = align_words(logprobs, spelled, labels, *self.separators(), seconds, self.read)
        return aligned

    def log_probabilities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        (between, blank), labels = self.separators(), list[list[int]]()
        for text in texts:
            words = [ids for _, ids in self.words(text)]
            if not words:
                raise ValueError(f"text {text!r} has no words; leave it out")
            space = [] if between is None else [between]
            labels.append(words[0] + [label for word in words[1:] for label in (*space, *word)])
        values = [-math.inf] * len(waveforms)
        for i, logprobs, _ in self.clips(waveforms, sample_rate):
            values[i] = ctc_log_probability(logprobs, labels[i], blank)
        return values


_INNER_APOSTROPHE = re.compile(r"(?<=[^\W\d_])['‘’ʼ′](?=[^\W\d_])")
_KEPT = "\ue000"
"""A character of private use, which normalisers leave alone."""
MIN_SAMPLES = 1600
"""Samples (0.1 s) to which shorter clips are padded with silence: the convolutions need some."""


@dataclass(frozen=True)
class CTC(ModelFolder, CTCHead):
    """The most probable label of each frame, repeats and blanks removed. Source: Graves et al. 2006.

    Models whose first convolution normalises over time (Wav2Vec2 base, HuBERT base) get one clip at a time, since the
    padding of a batch would change their output. The others get batches with a mask.
    """

    device: str = "auto"
    batch_size: int = 8

    @cached_property
    def parts(self) -> tuple[Any, Any, Any]:
        """Model, feature extractor and tokenizer."""
        from transformers import AutoModelForCTC, AutoTokenizer, Wav2Vec2FeatureExtractor

        model = load_model(AutoModelForCTC, self.path, torch_device(self.device))
        extractor = load_processor(Wav2Vec2FeatureExtractor, self.path, "feature extractor")
        return model, extractor, load_processor(AutoTokenizer, self.path, "tokenizer")

    @torch.no_grad()
    def clips(self, waveforms: Sequence[Waveform], sample_rate: int) -> Iterator[tuple[int, Tensor, float]]:
        model, extractor, _ = self.parts
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        padding_counts = getattr(model.config, "feat_extract_norm", "group") != "layer"
        for batch in batches_by_length(waves, 1 if padding_counts else self.batch_size):
            logits = model(**inputs(model, extractor, [waves[i] for i in batch], MIN_SAMPLES)).logits
            for i, row in zip(batch, logits, strict=True):
                logprobs = row[: int(frames(model, max(len(waves[i]), MIN_SAMPLES)))].float().log_softmax(-1)
                yield i, logprobs, len(waves[i]) / extractor.sampling_rate

    def separators(self) -> tuple[int | None, int]:
        return self.parts[2].word_delimiter_token_id, self.parts[2].pad_token_id

    def read(self, logprobs: Tensor) -> str:
        # The tokenizer removes repeats, then blanks; with skip_special_tokens it would drop blanks first.
        text: str = self.parts[2].decode(logprobs.argmax(-1)).strip()
        return text

    def words(self, text: str) -> list[tuple[str, list[int]]]:
        vocabulary = self.parts[2].get_vocab()
        if "'" in vocabulary:  # the normaliser parts a word at it, which the head writes as one
            text = _INNER_APOSTROPHE.sub(_KEPT, text)
        words = normalize(text, "basic").replace(_KEPT, "'").split()
        capitals = not any(label.islower() and len(label) == 1 for label in vocabulary)
        spelled = [word.upper() if capitals else word for word in words]
        if unknown := sorted({c for word in spelled for c in word} - set(vocabulary)):
            character = f"{text!r} has the character {unknown[0]!r}"
            raise ValueError(
                f"{self.path}: {character}, for which the recogniser has no label; spell it out, or leave the text out"
            )
        return [(word, [vocabulary[c] for c in letters]) for word, letters in zip(words, spelled, strict=True)]


def inputs(model: Any, extractor: Any, waves: Sequence[Wave], shortest: int) -> dict[str, Tensor]:
    """Return the keyword arguments of the model for clips of at least `shortest` samples."""
    filled = [padded(wav, shortest) for wav in waves]
    options = {"sampling_rate": extractor.sampling_rate, "padding": True, "return_tensors": "pt"}
    features = extractor(filled, return_attention_mask=len(filled) > 1, **options)
    return {key: t.to(model.device, model.dtype if t.is_floating_point() else None) for key, t in features.items()}


def frames(model: Any, samples: int) -> int:
    """Return how many frames the convolutions make of so many samples."""
    for kernel, stride in zip(model.config.conv_kernel, model.config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples
