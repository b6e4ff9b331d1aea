"""CTC on a speech model's projector, through the text model's own embeddings: alignment without the text model.

Connectionist temporal classification (Graves et al. 2006) over a policy's audio frames. A frame's score of a token is
the dot product of the projected frame with the token's embedding: frames learn to look like the tokens that are
said; a trained vector scores the blank. No layer of the text model runs: a step costs the audio encoder and a product.

Shapes: T frames of a clip, H decoder width, V candidate tokens, B clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.audio import AudioClip, seconds
from audiorl.config import OptimConfig
from audiorl.config.checks import require, require_counts
from audiorl.distributed import trainer_group
from audiorl.distributed.local import World, changes_worker
from audiorl.errors import Interrupted
from audiorl.eval.metrics.text import word_errors
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.models.features import to_weights
from audiorl.models.weights import copy_weights, read_tensors
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter, ModelFile
from audiorl.train.fit import fit
from audiorl.train.optim.adamw import Optimizer

WEIGHTS = "ctc.safetensors"
BLANK = "ctc.blank"
SCALE = 16.0
"""Scale of the logits: a frame equal to a token's embedding scores 16, and about 0 on unrelated tokens."""


@dataclass(frozen=True)
class CTCConfig:
    """Training of the audio side by CTC through the text model's embeddings."""

    steps: int = 1000
    """Optimizer updates."""
    batch_size: int = 32
    """Transcripts per update."""
    negatives: int = 2000
    """Random tokens of the training texts that compete with those of a batch; more sharpen the scores and cost time."""
    micro_batch_seconds: float = 120.0
    """Most seconds of audio in one forward pass; any value gives the same gradient but for rounding."""
    save_every: int = 200
    """Updates between checkpoints."""
    eval_every: int = 0
    """Updates between measurements of the token error rate on held-out transcripts; 0: none."""

    def __post_init__(self) -> None:
        require_counts(self, ("steps", "batch_size", "negatives", "save_every"))
        require(self.micro_batch_seconds > 0, "micro_batch_seconds", self.micro_batch_seconds, "greater than 0")


class CTCModel(nn.Module):
    """A policy's audio side and a blank. `token_ids`: the tokens that the texts consist of."""

    def __init__(self, policy: AudioPolicy, token_ids: Sequence[int], seed: int = 0):
        super().__init__()
        self._policy = (policy,)  # not a submodule: its weights have names of their own
        embeddings = self._embeddings()
        self.token_ids = torch.tensor(sorted(set(token_ids)), device=embeddings.device)
        if not len(self.token_ids):
            raise ValueError("CTC: the texts hold no token")
        self.size = float(embeddings[self.token_ids].float().norm(dim=1).mean())
        start = torch.randn(embeddings.shape[1], generator=torch.Generator().manual_seed(seed))
        self.blank = nn.Parameter((self.size * start / start.norm()).to(embeddings.device))

    @property
    def policy(self) -> AudioPolicy:
        return self._policy[0]

    def _embeddings(self) -> Tensor:
        policy = self.policy
        weight: Tensor = policy.backbone.decoder(policy.model).get_input_embeddings().weight
        return weight.detach()

    def frames(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """Return the projected frames [T, H] of each clip, differentiable in the trained weights.

        Clips go through a trained audio encoder together: the frames of one depend on the others in the last bits.
        """
        policy = self.policy
        audio = policy.audio
        with policy.autocast():
            if policy.config.audio != "full":
                return audio.encode(clips)
            weight = next(policy.backbone.audio_encoder(policy.model).parameters())
            features = [to_weights(audio.features(clip), weight) for clip in clips]
            encoded = policy.backbone.encode_audio(policy.model, features)
            return [policy.backbone.project(policy.model, h) for h in encoded]

    def logprobs(self, frames: Sequence[Tensor], candidates: Tensor) -> Tensor:
        """Return [all frames, 1 + V] float32: log-probs of the blank and of the `candidates` [V], token ids."""
        table = torch.cat([self.blank[None], self._embeddings()[candidates].to(self.blank.dtype)]) / self.size
        with self.policy.autocast():
            logits = (torch.cat(list(frames)) / self.size) @ table.T
        return (SCALE * logits.float()).log_softmax(-1)

    def losses(self, frames: Sequence[Tensor], targets: Sequence[Tensor], others: Tensor) -> Tensor:
        """Return [B]: -log P of each clip's token ids, divided by their number. `others`: competing ids."""
        candidates = torch.cat([*targets, others.cpu()]).unique()
        flat = self.logprobs(frames, candidates.to(self.blank.device))
        lengths = torch.tensor([len(f) for f in frames])
        padded = flat.new_zeros(int(lengths.max()) * len(frames), flat.shape[1])
        # One copy; the backward pass of pad_sequence makes one of the whole batch for every clip.
        rows = torch.cat([torch.arange(n) * len(frames) + clip for clip, n in enumerate(lengths.tolist())])
        padded = padded.index_copy(0, rows.to(flat.device), flat).view(-1, len(frames), flat.shape[1])
        places = torch.searchsorted(candidates, torch.cat(list(targets))) + 1
        counts = torch.tensor([len(t) for t in targets])
        losses = nn.functional.ctc_loss(padded, places.to(flat.device), lengths, counts, reduction="none")
        return losses / counts.to(flat.device)

    @torch.no_grad()
    def read(self, clips: Sequence[AudioClip]) -> list[list[int]]:
        """Return the token ids of the best path of each clip: repeats merged, blanks left out."""
        frames = self.frames(clips)
        best = self.logprobs(frames, self.token_ids).argmax(-1)
        texts = []
        for path in best.split([len(f) for f in frames]):
            merged = path.unique_consecutive()
            texts.append(self.token_ids[merged[merged > 0] - 1].tolist())
        return texts

    # -- what is trained and saved ---------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the blank as `ctc.blank`, and the policy's trainable weights of encoder and projector."""
        policy = self.policy
        modules = [policy.backbone.audio_encoder(policy.model), *policy.backbone.projector(policy.model)]
        audio = {id(p) for module in modules for p in module.parameters()}
        return {BLANK: self.blank} | {name: p for name, p in policy.trainable().items() if id(p) in audio}

    def weights_changed(self) -> None:
        self.policy.weights_changed()

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, by reference."""
        return {name: p.detach() for name, p in self.trainable().items()}

    def load_weights(self, weights: Mapping[str, Tensor], where: str = "weights") -> None:
        """Copy `weights` into the parameters of the same name, in place."""
        copy_weights({BLANK: self.blank} | self.policy.parameters_by_name(), weights, where)
        self.weights_changed()

    def save(self, folder: Path) -> None:
        """Write the trained weights alone."""
        save_file({name: w.contiguous() for name, w in self.weights().items()}, folder / WEIGHTS)

    def restore(self, folder: Path) -> None:
        """Copy what `save` wrote into this model. Raises ValueError for weights of another architecture."""
        self.load_weights(read_tensors(folder / WEIGHTS), str(folder / WEIGHTS))


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
            features = [to_weights(audio.features(clip), weight) for clip in part]
            outputs = policy.backbone.encode_audio(policy.model, features)
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
        frames = policy.audio.expected_tokens(e.sample.audio[0])
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


def fits(tokens: Sequence[int], frames: int) -> bool:
    """Tell if a CTC path exists: a frame per token, and a blank between two equal ones."""
    return len(tokens) + sum(a == b for a, b in pairwise(tokens)) <= frames


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
