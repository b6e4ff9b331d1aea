"""Distillation: what the teacher reads, what it says of each response, and the loss or the advantages made of that.

The formulas are in `audiorl.algos.distill`; here `DistillConfig` chooses among them. Shapes: L tokens of an experience,
N sampled tokens, H decoder width, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from audiorl.algos.distill import bucket_logits, divergence, fused_divergence, top_ids
from audiorl.algos.experience import Experience, PolicyOutput, TeacherOutput
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import DistillConfig, LoraConfig, RLConfig
from audiorl.config.checks import pass_tokens
from audiorl.data.views import SWAP, views_of
from audiorl.distributed.local import World
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import answer_after
from audiorl.models.policy import Reference
from audiorl.run.folder import newest_checkpoint
from audiorl.train.batches import check_finite, counts
from audiorl.train.rl.minibatch import MicroBatch
from audiorl.types import Sample

UNCHANGED = "none"  # The view that leaves the prompt as it is


def with_teacher_prompts(
    experiences: Sequence[Experience], samples: Sequence[Sample], config: DistillConfig
) -> list[Experience]:
    """Return each experience with its sample as the teacher reads it. Raises ValueError for what `views_of` refuses."""
    unique = list({s.id: s for s in samples}.values())
    views = unique if config.view == UNCHANGED else views_of(unique, config.view)
    by_id = {s.id: view for s, view in zip(unique, views, strict=True)}
    return [e.replace(teacher_prompt=by_id[s.id]) for e, s in zip(experiences, samples, strict=True)]


def check_teacher_prompts(samples: Sequence[Sample], config: DistillConfig) -> None:
    """Raise ValueError naming the first sample that the teacher cannot read, before the first step."""
    for sample in samples:
        if sample.turns:
            raise ValueError(f"sample {sample.id!r} is a stream; distillation is of answers to single prompts")
        if config.view not in (UNCHANGED, SWAP):
            views_of([sample], config.view)


# -- the teacher ---------------------------------------------------------------------------------------------------


def load_teacher(path: str, policy: AudioPolicy) -> AudioPolicy:
    """Return the model at `path`, frozen, on the policy's device and in its precision.

    Raises ValueError for what is neither a model nor the name of a teacher.
    """
    config = replace(policy.config, device=str(policy.device), lora=LoraConfig(rank=0), audio="frozen", only=())
    try:
        teacher = load_policy(newest_checkpoint(path), replace(config, gradient_checkpointing=False))
    except ValueError as error:
        raise ValueError(f"distill.teacher: give reference, policy, or the folder of a model: {error}") from error
    teacher.requires_grad_(False)
    return teacher


def shared_vocabulary(teacher: AudioPolicy, policy: AudioPolicy, name: str) -> int:
    """Return how many tokens, from id 0 on, both models have in common: one may have further ones behind the other's.

    Raises ValueError where an id is another token: distillation compares tokens by their ids.
    """
    theirs, ours = ({i: token for token, i in m.tokenizer.get_vocab().items()} for m in (teacher, policy))
    size = min(max(theirs), max(ours)) + 1
    other = next((i for i in range(size) if theirs.get(i) != ours.get(i)), None)
    if other is not None:
        raise ValueError(
            f"distill.teacher {name}: token {other} is {theirs.get(other)!r} there and {ours.get(other)!r} in the "
            "policy; distillation compares tokens, so the teacher needs the policy's tokenizer"
        )
    rows = [len(m.text_head) for m in (teacher, policy)]
    return rows[0] if rows[0] == rows[1] and len(theirs) == len(ours) else min(size, *rows)


class Teacher:
    """Says once for each response what it would have said: a reference, the live policy, or another model.

    `outputs` is called before the updates of a step. Of the live policy, several updates of a step compare with its
    head as it was then.
    """

    def __init__(self, model: AudioPolicy | Reference, policy: AudioPolicy, config: RLConfig, temperature: float):
        self._model = model
        self._runs_on = model.runs_on if isinstance(model, Reference) else model
        self._config, self._temperature = config, temperature
        self.vocabulary = shared_vocabulary(self._runs_on, policy, config.distill.teacher)
        self._snapshots_head = model is policy and config.epochs * config.mini_batches > 1
        self.weight, self.softcap = self._runs_on.text_head, self._runs_on.softcap

    @torch.no_grad()
    def outputs(self, experiences: Sequence[Experience]) -> list[TeacherOutput]:
        """Return what it says of experiences with a `teacher_prompt`, which its own tokenizer and chat format lay out.

        Raises ValueError naming a response that is not text after a single prompt.
        """
        config, distill, model = self._config, self._config.distill, self._runs_on
        head = model.backbone.head(model.model)
        if head.bias is not None:
            self.weight = model.text_head  # a copy, which does not follow an update
        elif self._snapshots_head and head.weight.requires_grad:
            self.weight = head.weight.detach().clone()
        laid_out = self._laid_out(experiences)
        outputs: dict[int, TeacherOutput] = {}
        for indices in micro_batches(laid_out, pass_tokens(config), config.share_prompts):
            members = [laid_out[i] for i in indices]
            out = self._model.forward(pack_experiences(members, config.share_prompts), self._temperature)
            assert out.hidden is not None
            check_finite(members, out.logprobs, "the teacher's log-prob")
            fields = {"logprobs": out.logprobs.float(), "entropy": out.entropy.float()}
            if distill.loss_kind is not None and (not distill.top_k or distill.top_k_of == "student"):
                fields["hidden"] = out.hidden
            elif distill.loss_kind is not None:
                with model.autocast():
                    ids = top_ids(out.hidden, self.weight[: self.vocabulary], min(distill.top_k, self.vocabulary))
                    logits = bucket_logits(out.hidden, self.weight, ids, self._temperature, softcap=model.softcap)
                fields |= {"top_ids": ids, "top_logits": logits}
            by_member = {name: x.cpu().split(counts(members)) for name, x in fields.items()}
            for k, (i, e) in enumerate(zip(indices, members, strict=True)):
                selected = selected_tokens(model.decode, e.ids[e.loss_mask], distill.tokens)
                outputs[i] = TeacherOutput(counts=selected, **{name: x[k].clone() for name, x in by_member.items()})
        return [outputs[i] for i in range(len(laid_out))]

    def _laid_out(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the sampled tokens of each after the teacher's own prompt."""
        prompts = {id(e.teacher_prompt): e.teacher_prompt for e in experiences}
        encoded = {key: self._runs_on.prompt(sample) for key, sample in prompts.items() if sample is not None}
        rows = self._runs_on.backbone.decoder(self._runs_on.model).get_input_embeddings().weight.shape[0]
        laid_out = []
        for e in experiences:
            prompt, ids = encoded[id(e.teacher_prompt)], e.ids[e.loss_mask]
            if e.codes is not None or prompt.codes is not None or not bool(e.loss_mask[e.prompt_length :].all()):
                raise ValueError(f"{e.name}: distillation is of answers in text to single prompts")
            if len(ids) and int(ids.max()) >= rows:
                raise ValueError(f"{e.name}: token {int(ids.max())} is none of the teacher's {rows}")
            laid_out.append(answer_after(prompt, ids, e))
        return laid_out


def selected_tokens(decode: Callable[[Tensor], str], ids: Tensor, tokens: str) -> Tensor:
    """[N] bool: all tokens of a response [N], its "thought" up to `</think>`, or its "answer" after it.

    Without `</think>` a response that opens `<think>` is all thought, another one all answer.
    """
    if tokens == "all":
        return torch.ones(len(ids), dtype=torch.bool)
    end = len(ids) if "<think>" in decode(ids) else 0
    if "</think>" in decode(ids):
        low, end = 0, len(ids)
        while low < end:  # the fewest tokens whose text has the tag
            middle = (low + end) // 2
            low, end = (low, middle) if "</think>" in decode(ids[:middle]) else (middle + 1, end)
    thought = torch.arange(len(ids)) < end
    return thought if tokens == "thought" else ~thought


# -- in the trainer ------------------------------------------------------------------------------------------------


class Distillation:
    """The distillation of one trainer. Without `teacher` other processes fill in the teacher's outputs."""

    def __init__(
        self, policy: AudioPolicy, config: RLConfig, temperature: float, world: World, teacher: Teacher | None
    ):
        self.config = config.distill
        self.reference_share = config.reference_prompts / config.prompts_per_step
        self._policy, self._temperature, self._world, self._teacher = policy, temperature, world, teacher

    def prepare(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Fill in the teacher's outputs where they are None."""
        missing = [e for e in experiences if e.teacher is None]
        assert self._teacher is not None or not missing, "the teacher is a process of its own"
        outputs = iter(self._teacher.outputs(missing) if self._teacher is not None and missing else ())
        return [e if e.teacher is not None else e.replace(teacher=next(outputs)) for e in experiences]

    def add_advantages(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Add coef·(log T - log S) to each token's advantage with `sampled`; others come back as they are.

        S is the policy before the step's updates. This is the policy gradient of the reverse KL in which each token
        answers for itself alone (Thinking Machines 2025, On-Policy Distillation).
        """
        if self.config.loss_kind is not None:
            return list(experiences)
        out = []
        for e in experiences:
            assert e.teacher is not None and e.advantages is not None
            advantages = e.advantages.clone()
            advantages[e.loss_mask] += self.config.coef * torch.where(self._used(e.teacher), -log_ratio(e), 0.0)
            out.append(e.replace(advantages=advantages))
        return out

    def loss(self, micro: MicroBatch, output: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of a micro-batch's divergences, and its share of their mean over the mini-batch."""
        used_N, divergence_N = self._divergence(micro.experiences, output)
        loss = (1 - self.reference_share) * self.config.coef * (micro.loss_weights[used_N] * divergence_N).sum()
        return loss, {"distill/divergence": (micro.mean_weights[used_N] * divergence_N.detach()).sum()}

    def answer_loss(self, answers: Sequence[Experience], output: PolicyOutput) -> Tensor:
        """Return the sum of the divergences over the tokens of reference answers."""
        return self._divergence(answers, output)[1].sum()

    def _divergence(self, experiences: Sequence[Experience], output: PolicyOutput) -> tuple[Tensor, Tensor]:
        """Return which sampled tokens count, [N] bool, and their divergences, in order."""
        config, kind = self.config, self.config.loss_kind
        outputs = [e.teacher for e in experiences if e.teacher is not None]
        assert output.hidden is not None and kind is not None and len(outputs) == len(experiences)
        device, weight, softcap = output.hidden.device, self._policy.text_head, self._policy.softcap
        used_N = torch.cat([self._used(t) for t in outputs]).to(device, non_blocking=True)
        hidden = output.hidden[used_N]

        def gathered(name: str) -> Tensor | None:
            tensors = [getattr(t, name) for t in outputs]
            return None if tensors[0] is None else torch.cat(tensors).to(device, non_blocking=True)[used_N]

        teacher_hidden, ids, teacher_logits = (gathered(name) for name in ("hidden", "top_ids", "top_logits"))
        with self._policy.autocast():
            if teacher_hidden is not None:
                assert self._teacher is not None
                size, teacher_weight = self._teacher.vocabulary, self._teacher.weight
                if not config.top_k:
                    models = hidden, weight[:size], teacher_hidden, teacher_weight[:size]
                    caps = softcap, self._teacher.softcap
                    return used_N, fused_divergence(*models, kind, config.beta, self._temperature, None, *caps)
                ids = top_ids(hidden.detach(), weight[:size], min(config.top_k, size))
                of_teacher = teacher_hidden, teacher_weight.detach(), ids, self._temperature
                teacher_logits = bucket_logits(*of_teacher, softcap=self._teacher.softcap)
            assert ids is not None and teacher_logits is not None
            student = bucket_logits(hidden, weight, ids, self._temperature, softcap=softcap).log_softmax(-1)
        return used_N, divergence(student, teacher_logits.log_softmax(-1), kind, config.beta)

    def _used(self, teacher: TeacherOutput) -> Tensor:
        """[N] bool: the tokens that count and at which the teacher is sure enough."""
        gate = self.config.entropy_gate
        return teacher.counts if gate is None else teacher.counts & (teacher.entropy <= gate)

    def metrics(self, experiences: Sequence[Experience], means: Mapping[str, float]) -> dict[str, float]:
        """distill/*, from the step's experiences and the trainer's means over all sampled tokens."""
        sums = dict.fromkeys(("all", "counted", "used", "entropy", "ratio"), 0.0)
        for e in experiences:
            assert e.teacher is not None
            used = self._used(e.teacher)
            sums["all"] += len(used)
            sums["counted"] += int(e.teacher.counts.sum())
            sums["used"] += int(used.sum())
            sums["entropy"] += float(e.teacher.entropy[e.teacher.counts].sum())
            if self.config.loss_kind is None:
                sums["ratio"] += float(log_ratio(e)[used].sum())
        sums = self._world.add_up(sums)
        counted, used_tokens = max(sums["counted"], 1.0), max(sums["used"], 1.0)
        by_loss = means.get("distill/divergence", 0.0) * sums["all"] / used_tokens
        return {
            "distill/coef": self.config.coef,
            "distill/divergence": sums["ratio"] / used_tokens if self.config.loss_kind is None else by_loss,
            "distill/skipped": 1 - sums["used"] / counted,
            "distill/teacher_entropy": sums["entropy"] / counted,
        }


def log_ratio(e: Experience) -> Tensor:
    """log S - log T [N] of the sampled tokens; its mean estimates the reverse KL."""
    assert e.old_logprobs is not None and e.teacher is not None
    return e.old_logprobs[e.loss_mask] - e.teacher.logprobs
