"""Preference optimisation: pairs of answers to one audio prompt (DPO and its family), or single ones (KTO).

The reference's log-probs are computed once, before the first update, by the policy itself; no second model is held. The
two answers of a pair share their prompt, audio included. With `audio_coef` the chosen answer is read a second time
after the same prompt with parts of its audio silenced. Shapes: P pairs of a pack, tokens of one answer [n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.algos.preference import (
    PAIR_LOSSES,
    WITHOUT_REFERENCE,
    PairLogprobs,
    anchored,
    dpo,
    kto,
    kto_baseline,
    kto_weights,
    sum_each,
)
from audiorl.audio import AudioClip
from audiorl.config import OptimConfig, PreferenceConfig
from audiorl.config.checks import pass_tokens
from audiorl.data.augment import silence_pieces
from audiorl.data.formats import Answer
from audiorl.data.preferences import Judged, Pair
from audiorl.distributed.local import Group
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_example, answer_logprobs, experience
from audiorl.models.weights import read_tensors
from audiorl.pictures import Picture
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.train.batches import check_finite, counts, group_packs
from audiorl.train.fit import Learner, PackLoss, fit, learners, training_indices
from audiorl.types import Message, Sample

REFERENCE_CHUNK = 32  # Groups of answers whose reference log-probs a trainer computes per call


@dataclass(frozen=True, eq=False)
class Compared:
    """A pair or a judged answer, the answers that its loss compares, and the reference's log-probs [n] of each.

    A pair has the answers chosen, rejected and, with `audio_coef`, chosen after silenced audio. A judged answer has
    itself and a mismatched one to the same prompt, for KTO's baseline. No log-probs where the loss needs none.
    """

    item: Pair | Judged
    answers: tuple[Example, ...]
    refs: tuple[Tensor, ...] = ()


# -- the losses of a batch ---------------------------------------------------------------------------------------------


def preference_loss(
    learner: Learner, config: PreferenceConfig, items: Sequence[Compared]
) -> tuple[list[list[int]], PackLoss]:
    """Compute the loss that `config` names, the mean over the items of all ranks."""
    return (_kto_loss if config.loss == "kto" else _pair_loss)(learner, config, items)


def _pair_loss(
    learner: Learner, config: PreferenceConfig, items: Sequence[Compared]
) -> tuple[list[list[int]], PackLoss]:
    world, count = learner.world, sum(learner.world.gather(len(items)))
    learner.policy.encode_ahead(e.sample for i in items for e in i.answers)
    groups = [[experience(learner.policy, e, str(k)) for e in i.answers] for k, i in enumerate(items)]
    chosen_tokens = sum(world.gather(sum(counts([g[0] for g in groups]))))
    # dpo-norm's scales means over tokens; the anchor and the pairs of audio are of sums.
    beta = {} if config.beta is None or config.loss == "dpo-norm" else {"beta": config.beta}
    each = 3 if config.audio_coef else 2
    # SamPO's draw depends on the update and the pair's place in the batch of all ranks, which take pairs in turns, not
    # on how the batch is packed.
    seeds = [learner.optimizer.updates * 1_000_003 + p * world.size + world.rank for p in range(len(items))]

    def loss(places: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        experiences = [e for p in places for e in groups[p]]
        answers = _logprobs(learner.policy, experiences)
        refs = [ref.to(answers[0], non_blocking=True) for p in places for ref in items[p].refs]
        parts = answers[::each], answers[1::each], refs[::each], refs[1::each]
        pairs = PairLogprobs(*parts, [seeds[p] for p in places])
        good, bad = pairs.sums()
        losses, margin = PAIR_LOSSES[config.loss](pairs, **config.options())
        total = losses.sum() / count
        if config.sft_coef:
            total = total - config.sft_coef * torch.cat(list(pairs.chosen)).sum() / chosen_tokens
        if config.anchor_coef:
            each_anchored = anchored(good, sum_each(pairs.ref_chosen), **beta)
            total = total + config.anchor_coef * each_anchored.sum() / count
        metrics = {"accuracy": (margin > 0).float().sum(), "margin": margin.sum()}
        metrics |= {"chosen_logprob": good.sum(), "rejected_logprob": bad.sum()}
        if config.audio_coef:
            on_audio = PairLogprobs(pairs.chosen, answers[2::each], pairs.ref_chosen, refs[2::each])
            losses, margins = dpo(on_audio, **beta)
            total = total + config.audio_coef * losses.sum() / count
            metrics |= {"audio_margin": margins.sum(), "audio_accuracy": (margins > 0).sum()}
        means = {f"preference/{name}": x.double() / count for name, x in metrics.items()}
        return experiences, total, {"preference/loss": total, **means}, torch.cat(answers)

    return group_packs(groups, pass_tokens(config)), loss


def _kto_loss(
    learner: Learner, config: PreferenceConfig, items: Sequence[Compared]
) -> tuple[list[list[int]], PackLoss]:
    policy, count = learner.policy, sum(learner.world.gather(len(items)))
    answers = [[experience(policy, i.answers[0], str(k))] for k, i in enumerate(items)]
    others = [experience(policy, i.answers[1]) for i in items]
    # Before the update begins: ranks need not have equally many passes here.
    to_others = answer_logprobs(policy, others, pass_tokens(config))
    if others:
        check_finite(others, torch.cat(to_others), "the log-prob")
    drifts, _ = learner.world.gather_list([float(x.sum()) for x in to_others])
    refs, _ = learner.world.gather_list([float(i.refs[1].sum()) for i in items])
    baseline = kto_baseline(torch.tensor(drifts), torch.tensor(refs)).to(policy.device)

    def loss(places: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        part = [answers[p][0] for p in places]
        by_answer = _logprobs(policy, part)
        logprobs = sum_each(by_answer)
        ref = sum_each([items[p].refs[0] for p in places]).to(logprobs, non_blocking=True)
        desirable = [isinstance(item := items[p].item, Judged) and item.desirable for p in places]
        wanted = torch.tensor(desirable).to(logprobs.device, non_blocking=True)
        total = kto(logprobs, ref, wanted, baseline, **config.options()).sum() / count
        right = ((logprobs - ref > baseline) == wanted).sum()
        means = {"accuracy": right.double() / count, "baseline": len(places) * baseline.double() / count}
        metrics = {f"preference/{name}": x for name, x in {"loss": total, **means}.items()}
        return part, total, metrics, torch.cat(by_answer)

    return group_packs(answers, pass_tokens(config)), loss


def _logprobs(policy: AudioPolicy, experiences: Sequence[Experience]) -> list[Tensor]:
    """Return the log-probs [n] of each answer's tokens."""
    return list(policy.forward(pack_experiences(experiences)).logprobs.split(counts(experiences)))


# -- training ----------------------------------------------------------------------------------------------------------


def prefer(
    policy: AudioPolicy,
    items: Sequence[Pair] | Sequence[Judged],
    run: Run,
    *,
    config: PreferenceConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "preference",
    evaluate: Callable[[], Mapping[str, float]] | None = None,
) -> None:
    """Optimise `policy` in place on preferences, against the policy as it is when the phase begins.

    `kto` takes judged answers, every other loss pairs.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    if not items:
        raise ValueError("nothing to train on: the data is empty")
    judged = [i for i in items if isinstance(i, Judged)]
    if len(judged) != (len(items) if config.loss == "kto" else 0):
        raise ValueError(f"the loss {config.loss!r} learns from {'Judged' if config.loss == 'kto' else 'Pair'} rows")
    if judged:
        desirable = sum(j.desirable for j in judged)
        good, bad = kto_weights(desirable, len(judged) - desirable)
        own_good, own_bad = config.desirable_weight, config.undesirable_weight
        ratio = bad / good  # which a weight that is not set has to the other, unless that is 0
        good, bad = (
            (own_bad / ratio if own_bad else good) if own_good is None else own_good,
            (own_good * ratio if own_good else bad) if own_bad is None else own_bad,
        )
        config = replace(config, desirable_weight=good, undesirable_weight=bad)
    indices = training_indices(items, config, seed)
    compared = _compared(items, config, indices)
    trainers = learners(run, phase, preference_loss, policy, config, optim)
    if config.loss not in WITHOUT_REFERENCE:
        # Answers after silenced audio are groups of their own: they do not share the pair's prompt.
        groups = [c.answers[:2] for c in compared] + [c.answers[2:] for c in compared if config.audio_coef]
        needed = [i + start for start in range(0, len(groups), len(items)) for i in indices]
        refs = reference_logprobs(trainers, groups, run, phase, needed)
        compared = [replace(c, refs=sum(refs[k :: len(items)], ())) for k, c in enumerate(compared)]

    options: dict[str, Any] = {"evaluate": evaluate, "eval_every": config.eval_every}
    fit(trainers, policy, compared, run, config, phase=phase, seed=seed, **options)


def _compared(items: Sequence[Pair | Judged], config: PreferenceConfig, indices: Sequence[int]) -> list[Compared]:
    """Return the items with the answers that their loss compares, without the reference's log-probs.

    Silenced audio stays in memory: only items of `indices` get it, once for each prompt.
    """
    out, learned, silenced = [], set(indices), dict[str, Sample]()
    for i, item in enumerate(items):
        if isinstance(item, Pair):
            answers: tuple[Example, ...] = pair_examples(item)
            if config.audio_coef and i in learned:
                sample = item.sample
                if sample.id not in silenced:
                    silenced[sample.id] = silenced_prompt(sample, config.silenced)
                answers += (answer_example(silenced[sample.id], item.chosen),)
        else:
            answers = answer_example(item.sample, item.answer), answer_example(item.sample, _mismatched(items, i))
        out.append(Compared(item, answers))
    return out


def _mismatched(items: Sequence[Pair | Judged], i: int) -> Answer:
    """Return the next answer after item i, spoken or written alike, to another prompt: one as good, if there is any.

    Neighbours often answer the same prompt, one well and one badly in turns; the baseline is of both kinds.
    """
    item = items[i]
    assert isinstance(item, Judged)
    other: Answer | None = None
    for j in (items[(i + step) % len(items)] for step in range(1, len(items))):
        if not isinstance(j, Judged) or j.sample.id == item.sample.id or type(j.answer) is not type(item.answer):
            continue
        if j.desirable == item.desirable:
            return j.answer
        other = j.answer if other is None else other
    if other is None:
        what = "written" if isinstance(item.answer, str) else "spoken"
        raise ValueError(f"kto compares with answers to other prompts; all {what} answers are to one prompt")
    return other


def pair_examples(pair: Pair) -> tuple[Example, Example]:
    """Return the prompt with the chosen answer, and with the rejected one."""
    return answer_example(pair.sample, pair.chosen), answer_example(pair.sample, pair.rejected)


def silenced_prompt(sample: Sample, share: float) -> Sample:
    """Return the sample with a `share` of every user's clip silenced, always the same pieces.

    Raises ValueError for a prompt without audio.
    """
    if not sample.audio:
        raise ValueError(f"sample {sample.id!r}: audio_coef compares with silenced audio, but the prompt has none")

    def silenced(content: str | AudioClip | Picture) -> str | AudioClip | Picture:
        if not isinstance(content, AudioClip):
            return content
        rng = np.random.default_rng(list(f"{sample.id}/{share:g}".encode()))
        return AudioClip(array=silence_pieces(content.load(16_000), share, rng), sample_rate=16_000)

    messages = tuple(
        m if m.role == "assistant" else Message(m.role, tuple(silenced(c) for c in m.content)) for m in sample.messages
    )
    return replace(sample, id=f"{sample.id}/silenced", messages=messages)


def reference_logprobs(
    trainers: Group, groups: Sequence[tuple[Example, ...]], run: Run, phase: str, needed: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Compute per group one tensor [n] for each of its answers, which share a prompt; empty ones outside `needed`.

    Every trainer computes a part. The run folder keeps the results: an interrupted pass continues there, and a resumed
    phase finds them. `trainers` must not have made an update yet, unless everything is on disk.
    """
    path = run.dir / "checkpoints" / phase / "reference.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    logprobs = read_tensors(path) if path.exists() else {}
    answers = [(e.sample.id, e.target, *(clip.key for clip in e.speech)) for group in groups for e in group]
    digest = torch.tensor(list(sha256(repr(answers).encode()).digest()), dtype=torch.uint8)
    if logprobs and not torch.equal(logprobs.pop("items", torch.empty(0)), digest):
        raise ValueError(f"{path}: holds the log-probs of other answers; the data has changed since, start a new run")
    missing = [i for i in needed if f"{i}/0" not in logprobs]
    if missing and run.has_checkpoint(phase):
        raise ValueError(f"{path}: log-probs of item {missing[0]} are missing although training has begun; start again")
    size = trainers.size
    with run.interruptible(), Progress(f"{phase} reference", len(needed), len(needed) - len(missing)) as progress:
        try:
            for start in range(0, len(missing), REFERENCE_CHUNK * size):
                if run.asked_to_stop:
                    raise Interrupted(f"stopped before {phase} step 1; continue with 'audiorl resume {run.dir}'")
                parts = [missing[start : start + REFERENCE_CHUNK * size][r::size] for r in range(size)]
                found = trainers.each(Learner.logprobs, [[groups[i] for i in part] for part in parts])
                for part, values in zip(parts, found, strict=True):
                    logprobs |= {
                        f"{i}/{k}": x for i, group in zip(part, values, strict=True) for k, x in enumerate(group)
                    }
                progress.update(len(needed) - len(missing) + start + sum(map(len, parts)), {})
        finally:
            if missing:
                save_file(logprobs | {"items": digest}, path.with_suffix(".partial"))
                path.with_suffix(".partial").replace(path)
    empty = torch.empty(0)
    return [tuple(logprobs.get(f"{i}/{k}", empty) for k in range(len(group))) for i, group in enumerate(groups)]
