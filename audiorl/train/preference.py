"""Preference optimisation: pairs of answers to one audio prompt (DPO and its family), or single ones (KTO).

The reference's log-probs are computed once, before the first update, by the policy itself; no second model is held. The
two answers of a pair share their prompt, audio included. With `audio_coef` the chosen answer is read a second time
after the same prompt with parts of its audio silenced.

Shapes: P pairs of a pack, tokens of one answer [n].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiorl.algos import preference as losses
from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import OptimConfig, PreferenceConfig
from audiorl.data.augment import silence_pieces
from audiorl.data.preferences import Answer, Judged, Pair
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import changes_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_example, experience
from audiorl.run.folder import Run
from audiorl.train.batches import counts, group_packs
from audiorl.train.checks import check_finite, read_pass
from audiorl.train.fit import fit, seen
from audiorl.train.learner import Learner, learners
from audiorl.train.reference import reference_logprobs
from audiorl.types import Message, Sample

WITHOUT_REFERENCE = ("simpo", "cpo", "orpo")


@dataclass(frozen=True, eq=False)
class Referenced:
    """A pair with the reference's log-probs [n] of the tokens of both answers; empty where the loss needs none."""

    pair: Pair
    chosen: Tensor
    rejected: Tensor
    silenced: Tensor | None = None
    """Those of the chosen answer after the prompt with silenced audio; None without `audio_coef`."""


@dataclass(frozen=True, eq=False)
class Contrasted:
    """A judged answer, and a mismatched one to the same prompt for KTO's baseline, with the reference's log-probs."""

    judged: Judged
    mismatched: Answer
    answer: Tensor
    other: Tensor


class PreferenceWorker(Learner[AudioPolicy]):
    """Updates a policy from pairs, or with `kto` from judged answers."""

    def __init__(
        self,
        policy: AudioPolicy,
        config: PreferenceConfig,
        optim: OptimConfig,
        kto_weights: tuple[float, float] = (1.0, 1.0),
        world: World | None = None,
    ):
        super().__init__(policy, optim, config.steps, world)
        self.policy = policy
        self.config = config
        self.kto_weights = kto_weights

    def logprobs(self, groups: Sequence[tuple[Example, ...]]) -> list[tuple[Tensor, ...]]:
        """The log-probs [n] of the tokens of every answer of each group, whose answers share a prompt; on the CPU."""
        tokens = [[experience(self.policy, e, str(k)) for e in group] for k, group in enumerate(groups)]
        logprobs: list[tuple[Tensor, ...]] = [()] * len(groups)
        for indices in group_packs(tokens, self.config.micro_batch_tokens):
            with torch.no_grad():
                answers = iter(self._answers([e for i in indices for e in tokens[i]]))
            for i in indices:
                logprobs[i] = tuple(next(answers).float().cpu() for _ in tokens[i])
        return logprobs

    @changes_worker
    def train(self, items: Sequence[Referenced | Contrasted]) -> dict[str, float]:
        """One update from the mean loss over the items of all ranks. Returns metrics, means over them."""
        sums: dict[str, float] = defaultdict(float)
        count = sum(self.world.gather(len(items)))
        with self.policy.encode_audio_once():
            if self.config.loss == "kto":
                self._kto([i for i in items if isinstance(i, Contrasted)], count, sums)
            else:
                self._pairs([i for i in items if isinstance(i, Referenced)], count, sums)
        return self.step(sums)

    # -- pairs ----------------------------------------------------------------------------------------------------

    def _pairs(self, items: Sequence[Referenced], count: int, sums: dict[str, float]) -> None:
        config = self.config
        groups = [
            [
                experience(self.policy, e, str(k))
                for e in (
                    *pair_examples(i.pair),
                    *([silenced_example(i.pair, config.silenced)] if config.audio_coef else []),
                )
            ]
            for k, i in enumerate(items)
        ]
        chosen_tokens = sum(self.world.gather(sum(counts([g[0] for g in groups]))))

        def loss(places: list[int]) -> Tensor:
            experiences = [e for p in places for e in groups[p]]
            answers = self._answers(experiences)
            each = 3 if config.audio_coef else 2
            chosen, rejected = answers[::each], answers[1::each]
            refs = [items[p] for p in places]
            total = self._losses(chosen, rejected, refs, places).sum() / count
            metrics: dict[str, Tensor] = {}
            if config.sft_coef:
                total = total - config.sft_coef * torch.cat(chosen).sum() / chosen_tokens
            if config.anchor_coef:
                total = total + config.anchor_coef * self._anchored(chosen, refs).sum() / count
            if config.audio_coef:
                on_audio, margins = self._on_audio(chosen, answers[2::each], refs)
                total = total + config.audio_coef * on_audio.sum() / count
                metrics |= {"audio_margin": margins.sum(), "audio_accuracy": (margins > 0).sum()}
            for name, values in _pair_metrics(chosen, rejected, refs).items():
                metrics[name] = values.sum()
            read = read_pass(experiences, total, {"loss": total, **metrics}, torch.cat(answers))
            sums["preference/loss"] += read.pop("loss")
            for name, number in read.items():
                sums[f"preference/{name}"] += number / count
            return total

        self.learn(group_packs(groups, self.config.micro_batch_tokens), loss)

    def _losses(
        self, chosen: Sequence[Tensor], rejected: Sequence[Tensor], items: Sequence[Referenced], places: Sequence[int]
    ) -> Tensor:
        """One loss a pair, [P]. `places`: each pair's place in this rank's part of the batch."""
        name = self.config.loss
        options: dict[str, Any] = dict(self.config.options())
        lengths = _lengths(chosen), _lengths(rejected)
        ref_chosen = [i.chosen.to(chosen[0]) for i in items]
        ref_rejected = [i.rejected.to(chosen[0]) for i in items]
        if name == "ld-dpo":
            return losses.ld_dpo(chosen, rejected, ref_chosen, ref_rejected, **options)
        if name == "sampo":
            return torch.cat(
                [
                    losses.sampo([c], [r], [rc], [rr], generator=self._draw(place), **options)
                    for c, r, rc, rr, place in zip(chosen, rejected, ref_chosen, ref_rejected, places, strict=True)
                ]
            )
        good, bad = _sums(chosen), _sums(rejected)
        if name == "cpo":
            return losses.cpo(good, bad, **options)
        if name == "simpo":
            return losses.simpo(good, bad, *lengths, **options)
        if name == "orpo":
            return losses.orpo(good, bad, *lengths, **options)
        ref_good, ref_bad = _sums(ref_chosen), _sums(ref_rejected)
        if self.config.length_normalized:
            good, ref_good = good / lengths[0], ref_good / lengths[0]
            bad, ref_bad = bad / lengths[1], ref_bad / lengths[1]
        if name == "r-dpo":
            return losses.r_dpo(good, bad, ref_good, ref_bad, *lengths, **options)
        loss = {"dpo": losses.dpo, "cdpo": losses.cdpo, "ipo": losses.ipo}[name]
        return loss(good, bad, ref_good, ref_bad, **options)

    def _anchored(self, chosen: Sequence[Tensor], items: Sequence[Referenced]) -> Tensor:
        """The anchor's loss of every pair, [P]."""
        return losses.anchored(
            _sums(chosen), _sums([i.chosen.to(chosen[0]) for i in items]), anchor=self.config.anchor, **self._beta()
        )

    def _on_audio(
        self, chosen: Sequence[Tensor], silenced: Sequence[Tensor], items: Sequence[Referenced]
    ) -> tuple[Tensor, Tensor]:
        """DPO of the chosen answer's audio against silenced audio: losses and margins [P]."""
        refs = [i.silenced for i in items]
        assert all(r is not None for r in refs), "the reference's log-probs after silenced audio are missing"
        good, bad = _sums(chosen), _sums(silenced)
        ref_good, ref_bad = (
            _sums([i.chosen.to(good) for i in items]),
            _sums([r.to(good) for r in refs if r is not None]),
        )
        margins = (good - ref_good) - (bad - ref_bad)
        return losses.dpo(good, bad, ref_good, ref_bad, **self._beta()), margins.detach()

    def _beta(self) -> dict[str, float]:
        return {} if self.config.beta is None else {"beta": self.config.beta}

    def _draw(self, place: int) -> torch.Generator:
        """SamPO's draw depends on the update and the pair's place in its batch, not on how the batch is packed.

        Ranks take the pairs of a batch in turns.
        """
        in_batch = place * self.world.size + self.world.rank
        return torch.Generator().manual_seed(self.optimizer.updates * 1_000_003 + in_batch)

    # -- judged answers -------------------------------------------------------------------------------------------

    def _kto(self, items: Sequence[Contrasted], count: int, sums: dict[str, float]) -> None:
        answers = [
            [experience(self.policy, answer_example(i.judged.sample, i.judged.answer), str(k))]
            for k, i in enumerate(items)
        ]
        others = [[experience(self.policy, answer_example(i.judged.sample, i.mismatched))] for i in items]
        drift = torch.zeros(len(items))
        with torch.no_grad():  # before the update begins: ranks need not have equally many passes here
            for places in group_packs(others, self.config.micro_batch_tokens):
                part = [others[p][0] for p in places]
                logprobs = torch.cat(self._answers(part)).cpu()
                check_finite(part, logprobs, "the log-prob")
                drift[places] = _sums(logprobs.split(counts(part))).float()
        drifts, _ = self.world.gather_list(drift.tolist())
        refs, _ = self.world.gather_list([float(i.other.sum()) for i in items])
        baseline = losses.kto_baseline(torch.tensor(drifts), torch.tensor(refs)).to(self.policy.device)

        def loss(places: list[int]) -> Tensor:
            part = [answers[p][0] for p in places]
            by_token = self._answers(part)
            logprobs = _sums(by_token)
            ref = _sums([items[p].answer for p in places]).to(logprobs)
            desirable = torch.tensor([items[p].judged.desirable for p in places], device=logprobs.device)
            total = losses.kto(logprobs, ref, desirable, baseline, **self._kto_options()).sum() / count
            correct = ((logprobs - ref > baseline) == desirable).sum()
            metrics = {"loss": total, "accuracy": correct, "baseline": baseline}
            read = read_pass(part, total, metrics, torch.cat(by_token))
            sums["preference/loss"] += read["loss"]
            sums["preference/accuracy"] += read["accuracy"] / count
            sums["preference/baseline"] += len(places) * read["baseline"] / count
            return total

        self.learn(group_packs(answers, self.config.micro_batch_tokens), loss)

    def _kto_options(self) -> dict[str, float]:
        desirable, undesirable = self.kto_weights
        return {"desirable_weight": desirable, "undesirable_weight": undesirable} | self.config.options()

    # -- shared ---------------------------------------------------------------------------------------------------

    def _answers(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """The log-probs [n] of each answer's tokens."""
        return list(self.policy.forward(pack_experiences(experiences)).logprobs.split(counts(experiences)))


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
    """Preference optimisation of `policy` in place, against the policy as it is when the phase begins.

    `kto` takes judged answers, every other loss pairs.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    wanted = Judged if config.loss == "kto" else Pair
    if not all(isinstance(item, wanted) for item in items):
        raise ValueError(f"the loss {config.loss!r} learns from {wanted.__name__} rows")
    if not items:
        raise ValueError("nothing to train on: the data is empty")
    desirable = sum(isinstance(i, Judged) and i.desirable for i in items)
    weights = losses.kto_weights(desirable, len(items) - desirable)
    trainers = learners(run, phase, policy, PreferenceWorker, config, optim, weights)
    prepared: Sequence[Referenced | Contrasted]
    if config.loss == "kto":
        judged = [i for i in items if isinstance(i, Judged)]
        _check_kto(judged, config)
        others = _mismatched(judged)
        examples = [
            (answer_example(j.sample, j.answer), answer_example(j.sample, o))
            for j, o in zip(judged, others, strict=True)
        ]
        refs = reference_logprobs(trainers, examples, run, phase, seen(items, config, seed))
        prepared = [Contrasted(j, o, *r) for j, o, r in zip(judged, others, refs, strict=True)]
    else:
        pairs = [i for i in items if isinstance(i, Pair)]
        if config.loss in WITHOUT_REFERENCE:
            prepared = [Referenced(p, torch.empty(0), torch.empty(0)) for p in pairs]
        else:
            groups: list[tuple[Example, ...]]
            groups = [pair_examples(p) for p in pairs]
            wanted_indices = seen(items, config, seed)
            if config.audio_coef:
                groups += [(silenced_example(p, config.silenced),) for p in pairs]
                wanted_indices = [*wanted_indices, *(len(pairs) + i for i in wanted_indices)]
            refs = reference_logprobs(trainers, groups, run, phase, wanted_indices)
            silenced = [r[0] for r in refs[len(pairs) :]] if config.audio_coef else [None] * len(pairs)
            prepared = [Referenced(p, r[0], r[1], s) for p, r, s in zip(pairs, refs, silenced, strict=False)]
    fit(
        trainers,
        policy,
        prepared,
        run,
        config,
        phase=phase,
        seed=seed,
        length=_rough_length,
        evaluate=evaluate,
        eval_every=config.eval_every,
    )


def pair_examples(pair: Pair) -> tuple[Example, Example]:
    """The prompt with the chosen answer, and with the rejected one."""
    return answer_example(pair.sample, pair.chosen), answer_example(pair.sample, pair.rejected)


def silenced_example(pair: Pair, share: float) -> Example:
    """The chosen answer after its prompt with a `share` of every user's clip silenced, the same pieces at every call.

    Raises ValueError for a prompt without audio.
    """
    sample = pair.sample
    if not sample.audio:
        raise ValueError(f"sample {sample.id!r}: audio_coef compares with silenced audio, but the prompt has none")
    messages = tuple(
        m if m.role == "assistant" else Message(m.role, tuple(_silenced(c, sample, share) for c in m.content))
        for m in sample.messages
    )
    return answer_example(replace(sample, id=f"{sample.id}/silenced", messages=messages), pair.chosen)


def _silenced(content: str | AudioClip, sample: Sample, share: float) -> str | AudioClip:
    if isinstance(content, str):
        return content
    rng = np.random.default_rng(list(f"{sample.id}/{share:g}".encode()))
    return AudioClip(array=silence_pieces(content.load(16_000), share, rng), sample_rate=16_000)


def _check_kto(judged: Sequence[Judged], config: PreferenceConfig) -> None:
    if config.sort and len(judged) % config.batch_size == 1:
        raise ValueError(
            f"kto compares the answers of a batch, and sorted batches of {config.batch_size} leave one of "
            f"{len(judged)} answers alone; choose another batch_size"
        )


def _mismatched(judged: Sequence[Judged]) -> list[Answer]:
    """For each answer the next one, spoken or written as it is, that was given to another prompt; neighbours often
    answer the same."""
    others = []
    for i, item in enumerate(judged):
        following = (judged[(i + k) % len(judged)] for k in range(1, len(judged)))
        kind = type(item.answer)
        others_of_kind = (j.answer for j in following if j.sample.id != item.sample.id and type(j.answer) is kind)
        if (other := next(others_of_kind, None)) is None:
            what = "written" if kind is str else "spoken"
            raise ValueError(f"kto compares with answers to other prompts; all {what} answers are to one prompt")
        others.append(other)
    return others


def _rough_length(item: Referenced | Contrasted) -> int:
    if isinstance(item, Contrasted):
        return rough_length(item.judged.sample, item.judged.answer)
    return rough_length(item.pair.sample, item.pair.chosen, item.pair.rejected)


def _lengths(answers: Sequence[Tensor]) -> Tensor:
    return torch.tensor([len(a) for a in answers], device=answers[0].device)


def _sums(answers: Sequence[Tensor]) -> Tensor:
    return torch.stack([a.sum() for a in answers])


def _pair_metrics(
    chosen: Sequence[Tensor], rejected: Sequence[Tensor], items: Sequence[Referenced]
) -> dict[str, Tensor]:
    """Per pair: whether the policy prefers the chosen answer (more than the reference does), and by how much."""
    good, bad = _sums(chosen), _sums(rejected)
    margin = good - bad
    if len(items[0].chosen):
        margin = margin - _sums([i.chosen for i in items]).to(good) + _sums([i.rejected for i in items]).to(good)
    return {"accuracy": (margin > 0).float(), "margin": margin, "chosen_logprob": good, "rejected_logprob": bad}
