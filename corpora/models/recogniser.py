"""Training of the small recogniser of `audiorl.speech_models.character_ctc`, in a minute.

    recogniser = train_character_ctc(clips, texts, sample_rate=16_000, steps=400, seed=0)
    recogniser.transcribe([wav], sample_rate=24_000)      # ["the conference is now locked"]
    recogniser.save("prompts");  audiorl.speech_models.load_recogniser("prompts")

Only the head learns; the encoder's frames are computed once for each clip.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from audiorl.config import torch_device
from audiorl.speech_models.character_ctc import (
    BLANK,
    WIDTHS,
    CharacterCTC,
    Features,
    Head,
    encode_clips,
    labels_of,
    plain,
)
from audiorl.speech_models.protocol import Waveform


def train_character_ctc(
    waveforms: Sequence[Waveform],
    texts: Sequence[str],
    sample_rate: int,
    *,
    steps: int = 400,
    batch_size: int = 32,
    lr: float = 2e-3,
    seed: int = 0,
    features: Features = "whisper",
) -> CharacterCTC:
    """Return a recogniser of clips like these.

    Raises ValueError for a text without letters and for one that is longer than its clip allows.
    """
    device = torch_device("auto")
    targets = [torch.tensor(labels_of(plain(text)), device=device) for text in texts]
    frames_of_clips = encode_clips(waveforms, sample_rate, features, device)
    for text, target, frames in zip(texts, targets, frames_of_clips, strict=True):
        if not len(target):
            raise ValueError(f"text {text!r} has no letters to recognise; leave its clip out")
        needed = len(target) + int((target[1:] == target[:-1]).sum())
        if needed > 2 * len(frames):
            raise ValueError(f"text {text!r} is too long for its clip of {len(frames) / 25:.2f} s; leave it out")
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(WIDTHS[features]).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        batch = rng.choices(range(len(frames_of_clips)), k=batch_size)
        labels = head(pad_sequence([frames_of_clips[i] for i in batch], batch_first=True)).log_softmax(-1)
        loss = nn.functional.ctc_loss(
            labels.transpose(0, 1),
            torch.cat([targets[i] for i in batch]),
            torch.tensor([2 * len(frames_of_clips[i]) for i in batch]),
            torch.tensor([len(targets[i]) for i in batch]),
            blank=BLANK,
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return CharacterCTC(head.eval().requires_grad_(False), features=features)
