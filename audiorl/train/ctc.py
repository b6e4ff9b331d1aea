"""Training of the audio side by CTC through the text model's embeddings; see `audiorl.models.ctc`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from audiorl.audio import AudioClip, seconds
from audiorl.config import CTCConfig, OptimConfig
from audiorl.distributed import trainer_group
from audiorl.distributed.local import World, changes_worker
from audiorl.errors import Interrupted
from audiorl.eval.metrics.text import word_errors
from audiorl.models import AudioPolicy
from audiorl.models.ctc import BLANK, CTCModel, fits
from audiorl.models.examples import Example
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter, ModelFile
from audiorl.train.fit import fit
from audiorl.train.optim.adamw import Optimizer


class CTCWorker(CheckpointedWorker):
    """Updates a policy's audio side from its share of every batch, for `fit`. ZeRO is not used: the weights are few."""

    def __init__(self, model: CTCModel, config: CTCConfig, optim: OptimConfig, seed: int, world: World | None = None):
        self.model, self.config, self.seed = model, config, seed
        self.world = world or World()
        self._writer = CheckpointWriter(model, self.world)
        self.optimizer = Optimizer(model.trainable(), optim, config.steps, self.world)

    @changes_worker
    def train(self, examples: Sequence[Example]) -> dict[str, float]:
        count = len(self.world.gather_list([len(e.target) for e in examples])[0])
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.optimizer.updates)
        vocabulary = self.model.token_ids.cpu()
        others = vocabulary[torch.randint(len(vocabulary), (self.config.negatives,), generator=generator)]
        self.optimizer.zero_grad()
        total = 0.0
        for part in by_seconds(examples, self.config.micro_batch_seconds):
            targets = [torch.tensor(target_ids(self.model.policy, e)) for e in part]
            frames = self.model.frames([e.sample.audio[0] for e in part])
            loss = self.model.losses(frames, targets, others).sum() / count
            if not bool(loss.isfinite()):
                names = ", ".join(repr(e.sample.id) for e in part)
                raise FloatingPointError(f"the loss of {names} is {float(loss)}; this update changed no weight")
            loss.backward()
            total += float(loss.detach())
        self.optimizer.gather_gradients()
        metrics = self.world.add_up({"ctc/loss": total}) | self.optimizer.step()
        self.model.weights_changed()
        return metrics


def train_ctc(
    policy: AudioPolicy,
    examples: Sequence[Example],
    run: Run,
    *,
    config: CTCConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "ctc",
    held_out: Sequence[Example] = (),
    start: CTCModel | None = None,
) -> CTCModel:
    """Train the audio side of `policy` in place, on transcripts that `fitting` left. Returns it with its blank.

    What of it is trained is `ModelConfig.audio` ("projector" or "full") and `ModelConfig.only`. `start`: the trained
    model of an earlier phase, from which blank and weights are copied first. `held_out`: transcripts whose token error
    rate, edits of the best path's tokens per token, is measured every `config.eval_every` steps.
    """
    ids = sorted({i for e in examples for i in target_ids(policy, e)})
    model = CTCModel(policy, ids, seed)
    if start is not None:
        model.load_weights(start.weights())
    if run.finished(phase):
        run.load_result(phase, model)
        return model
    blank = model.blank.detach().clone()
    if policy.config.audio != "full":
        encode_all(policy, [e.sample.audio[0] for e in examples], run, phase)
    trainers = trainer_group(
        lambda world: CTCWorker(model, config, optim, seed, world),
        lambda: (_worker, ModelFile.save(run, phase, "start", policy), blank, ids, config, optim, seed),
    )
    fit(
        trainers,
        model,
        examples,
        run,
        config,
        phase=phase,
        seed=seed,
        length=lambda e: round(100 * seconds(e.sample.audio[0])),
        evaluate=partial(token_errors, model, held_out) if held_out else None,
        eval_every=config.eval_every,
    )
    return model


def _worker(
    start: ModelFile, blank: Tensor, ids: Sequence[int], config: CTCConfig, optim: OptimConfig, seed: int
) -> CTCWorker:
    model = CTCModel(start.load(), ids, seed)
    model.load_weights({BLANK: blank})
    return CTCWorker(model, config, optim, seed, World.of_process_group())


@torch.no_grad()
def encode_all(policy: AudioPolicy, clips: Sequence[AudioClip], run: Run, phase: str, batch: int = 32) -> None:
    """Put the frozen encoder's outputs of all clips into its cache.

    Neighbours go through the encoder together, several times as fast on a CPU as one by one; the batches are the same
    in a resumed run.
    """
    audio = policy.audio
    with run.interruptible(), Progress(f"{phase} encoding", len(clips)) as progress, policy.autocast():
        for start in range(0, len(clips), batch):
            part = clips[start : start + batch]
            weight = next(policy.backbone.audio_encoder(policy.model).parameters())
            mels = [audio.mel(clip)[0].to(device=weight.device, dtype=weight.dtype) for clip in part]
            outputs = policy.backbone.encode_audio(policy.model, mels)
            for clip, output in zip(part, outputs, strict=True):
                audio.cache.put(clip.key, output.cpu())
            progress.update(start + len(part), {})
            if run.asked_to_stop:
                raise Interrupted(f"stopped while encoding; continue with 'audiorl resume {run.dir}'")


def target_ids(policy: AudioPolicy, example: Example) -> list[int]:
    """Return the token ids of an example's target, as an answer begins: without a token in front."""
    return list(policy.tokenizer.encode(example.target, add_special_tokens=False))


def fitting(
    policy: AudioPolicy, examples: Sequence[Example], on_error: Literal["raise", "skip"] = "raise"
) -> list[Example]:
    """Keep the examples whose text a CTC path fits: at most one token per audio frame.

    Raises ValueError naming the first of the others; with `on_error` "skip" they are left out, and a line says how
    many.
    """
    good: list[Example] = []
    first = ""
    for e in examples:
        frames = policy.backbone.tokens(policy.model, ceil(100 * seconds(e.sample.audio[0]) - 1e-6))
        ids = target_ids(policy, e)
        if ids and fits(ids, frames):
            good.append(e)
            continue
        problem = (
            f"sample {e.sample.id!r}: its text of {len(ids)} tokens fits no CTC path over {frames} audio frames; "
            "correct the text or the clip, or leave such rows out with --on-error skip"
        )
        if on_error == "raise":
            raise ValueError(problem)
        first = first or problem
    if first:
        print(f"ctc: {len(examples) - len(good)} of {len(examples)} transcripts left out (first: {first})", flush=True)
    if not good:
        raise ValueError("ctc: no transcript left to train on")
    return good


def token_errors(model: CTCModel, examples: Sequence[Example], batch: int = 16) -> dict[str, float]:
    """Measure the best paths: {"ctc_token_errors": edits per token of the texts}."""
    edits = tokens = 0
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        for e, read in zip(part, model.read([e.sample.audio[0] for e in part]), strict=True):
            ids = target_ids(model.policy, e)
            edits += word_errors(" ".join(map(str, ids)), " ".join(map(str, read))).errors
            tokens += len(ids)
    return {"ctc_token_errors": edits / max(tokens, 1)}


def by_seconds(examples: Sequence[Example], most: float) -> list[list[Example]]:
    """Put neighbours together, at most so many seconds of audio each, a longer clip alone."""
    parts: list[list[Example]] = []
    total = 0.0
    for e in examples:
        duration = seconds(e.sample.audio[0])
        if not parts or total + duration > most:
            parts.append([])
            total = 0.0
        parts[-1].append(e)
        total += duration
    return parts
