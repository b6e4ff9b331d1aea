"""Training of the small tagger of `audiorl.speech_models.taggers` on scenes, whose events say what is heard.

Frames are computed once; each step shifts them in level and pitch and mixes some scenes with others. Two taggers of
different seeds and widths are two judges: let the reward ask one and the evaluation another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from audiorl.config import torch_device
from audiorl.speech_models.taggers import HOP, RATE, SoundTagger, TaggerNetwork, log_mel
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import events_of
from audiorl.types import Sample

PLACE = 16
"""Frames of one place of the network's logits."""


def train_tagger(
    scenes: Sequence[Sample],
    *,
    steps: int = 1500,
    batch_size: int = 24,
    width: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
) -> SoundTagger:
    """Return a tagger of the classes of these scenes, all of one length. Raises ValueError for scenes without audio and
    for fewer than two classes."""
    labels = tuple(sorted({e.name for scene in scenes for e in events_of(scene)}))
    if len(labels) < 2:
        raise ValueError(f"a tagger needs scenes of two classes or more, got {', '.join(labels) or 'none'}")
    device = torch_device("auto")
    frames_NFB = frames_of(scenes)
    targets_NPC = targets_of(scenes, labels, frames_NFB.shape[1] // PLACE)
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TaggerNetwork(len(labels), width).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    half = batch_size // 2
    for _ in track(range(steps), description="tagger"):
        batch = rng.choices(range(len(scenes)), k=batch_size + half)
        frames, targets = _varied(frames_NFB[batch], targets_NPC[batch], rng)
        # Half of the batch is two scenes at once, so that sounds are known among others.
        mixed = torch.logaddexp(frames[:half], frames[batch_size:])
        frames = torch.cat([mixed, frames[half:batch_size]])
        targets = torch.cat([torch.maximum(targets[:half], targets[batch_size:]), targets[half:batch_size]])
        logits, _ = network(frames.to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return SoundTagger(network.eval().requires_grad_(False), labels)


def frames_of(scenes: Sequence[Sample]) -> Tensor:
    """Return the frames [N, PLACE · places, BANDS] of scenes of one length."""
    frames = []
    for scene in track(scenes, description="reading scenes"):
        audio = scene.metadata.get("audio")
        if audio is None:
            raise ValueError(f"sample {scene.id!r}: no audio; a tagger learns from the scenes' sounds")
        frames.append(torch.from_numpy(log_mel(audio.load(RATE))))
        if frames[-1].shape != frames[0].shape:
            raise ValueError(f"sample {scene.id!r}: {len(frames[-1])} frames, others {len(frames[0])}; give one length")
    return torch.stack(frames)[:, : len(frames[0]) // PLACE * PLACE]


def targets_of(scenes: Sequence[Sample], labels: Sequence[str], places: int) -> Tensor:
    """Return which classes are heard in each place of 0.16 s, [N, places, C] of 0 and 1."""
    targets = torch.zeros(len(scenes), places, len(labels))
    for n, scene in enumerate(scenes):
        for event in events_of(scene):
            first, last = (int(t * RATE / HOP / PLACE) for t in (event.start, event.end))
            targets[n, first : last + 1, labels.index(event.name)] = 1.0
    return targets


def _varied(frames: Tensor, targets: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Return frames and targets at other levels and pitches (up to two bands), and turned in time."""
    out, turned = [], []
    for one, target in zip(frames, targets, strict=True):
        bands, places = rng.randint(-2, 2), rng.randrange(len(target))
        out.append(torch.roll(torch.roll(one, PLACE * places, 0), bands, 1) + rng.uniform(-1.5, 1.0))
        turned.append(torch.roll(target, places, 0))
    return torch.stack(out), torch.stack(turned)


def right(tagger: SoundTagger, scenes: Sequence[Sample]) -> float:
    """Return the share of events that are among the most probable classes, of as many as a scene has."""
    hits = []
    for scene in scenes:
        asked = {e.name for e in events_of(scene)}
        tags = tagger.tag([scene.metadata["audio"].load(RATE)], RATE)[0]
        hits.append(np.mean([tagger.labels[i] in asked for i in np.argsort(-tags)[: len(asked)]]))
    return float(np.mean(hits))


def run(scenes: Path, out: Path, steps: int, width: int, seed: int) -> None:
    """Train on scenes/train.jsonl, write the tagger to the new folder `out`; print how it does on the others."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: not empty; name a new folder or empty this one first")
    tagger = train_tagger(read_sounds(scenes / "train.jsonl", scenes=True).samples, steps=steps, width=width, seed=seed)
    tagger.save(out)
    for name in ("new_files", "new_combinations"):
        if (scenes / f"{name}.jsonl").is_file():
            held_out = read_sounds(scenes / f"{name}.jsonl", scenes=True).samples
            print(f"{name}: {right(tagger, held_out):.1%} of the events of {len(held_out)} scenes are right")
    print(out)
