"""A prompt and an answer, as text, as speech, as tokens, and how probable a policy finds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.audio import AudioClip
from audiorl.data.schema import FieldError
from audiorl.models import AudioPolicy
from audiorl.models.prompts import Prompt, wants_speech
from audiorl.types import Rollout, Sample, Segment


@dataclass(frozen=True)
class Example:
    """A prompt and the assistant's turn to learn: text, recordings of speech after it, or both.

    For a stream the references of its turns and their recordings are learned instead.
    """

    sample: Sample
    target: str = ""
    speech: tuple[AudioClip, ...] = ()


def answer_example(sample: Sample, answer: str | AudioClip) -> Example:
    """Make an example of a written answer or the recording of a spoken one."""
    return Example(sample, answer) if isinstance(answer, str) else Example(sample, speech=(answer,))


def answer_after(prompt: Prompt, ids: Tensor, answer: Experience | Rollout) -> Experience:
    """Lay the text tokens `ids` [N] that `answer` sampled after another prompt."""
    whole = prompt.followed_by(ids, ())
    sampled = torch.arange(len(whole)) >= len(prompt)
    start = Experience(whole.ids, sampled, len(prompt), prompt.audio, images=prompt.images)
    return start.replace(group_id=answer.group_id, name=answer.name)


def experience(policy: AudioPolicy, example: Example, group_id: str = "", *, sampled: bool = False) -> Experience:
    """Return the tokens of a prompt and an answer, with the loss on the answer and on the token that ends the turn.

    Speech is the token that opens it, the frames of its recordings in the policy's codec, and the token that closes it;
    where the prompt opens it already (`wants_speech`), it is the whole answer. Raises ValueError, naming the sample,
    for a reserved token in the answer, unless a policy `sampled` it, and for more tokens than the model reads.
    """
    try:
        return _experience(policy, example, group_id, sampled)
    except ValueError as error:
        name = repr(example.sample.id)
        raise error if name in str(error) else ValueError(f"sample {name}: {error}") from error


def check_example(policy: AudioPolicy, example: Example) -> None:
    """Raise FieldError where `experience` would refuse the example, as far as texts and headers tell."""
    turns, speaks = example.sample.turns, policy.speech is not None
    answers = [turn.reference for turn in turns] if turns else [example.target]
    speech = [turn.speech for turn in turns if speaks] if turns else [example.speech]
    prefix = policy.backbone.answer_prefix
    policy.prompts.check(example.sample, answers=[prefix + answer for answer in answers], speech=speech)
    if turns:
        return
    try:
        _check_speech(policy, example.target, example.speech, wants_speech(example.sample))
    except ValueError as error:
        raise FieldError("audio", str(error)) from error


def _experience(policy: AudioPolicy, example: Example, group_id: str, sampled: bool) -> Experience:
    sample, prompts = example.sample, policy.prompts
    for text in () if sampled else [turn.reference for turn in sample.turns] or [example.target]:
        prompts.check_learned(text)
    prompt = prompts.encode(sample)
    if sample.turns:
        segments = [
            replace(
                _answer(policy, turn.reference, turn.speech if policy.speech is not None else ()),
                prompt_ids=policy.chunk_ids(turn.audio),
                audio=(turn.audio,),
            )
            for turn in sample.turns
        ]
        first = segments[0]
        codes = prompt.codes
        if codes is not None:
            codes = torch.cat([codes, codes.new_full((len(first.prompt_ids), codes.shape[1]), -1)])
        segments[0] = replace(
            first,
            prompt_ids=torch.cat([prompt.ids, first.prompt_ids]),
            prompt_codes=codes,
            audio=(*prompt.audio, *first.audio),
        )
    else:
        answer = _answer(policy, example.target, example.speech, wants_speech(sample), prompt.text)
        answer = replace(answer, audio=prompt.audio, images=prompt.images)
        segments = [replace(answer, prompt_ids=prompt.ids, prompt_codes=prompt.codes)]
    laid_out = Experience.from_rollout(Rollout(sample, tuple(segments), group_id))
    placeholders = 0 if prompts.counts_audio else int(policy.is_audio(laid_out.ids, laid_out.loss_mask).sum())
    learned = int(laid_out.loss_mask.sum())
    prompts.check_length(len(laid_out.ids) - placeholders - learned, learned)
    return laid_out.replace(rollout_logprobs=None, name=repr(sample.id))


def _answer(
    policy: AudioPolicy, text: str, speech: tuple[AudioClip, ...], opened: bool = False, said: Tensor | None = None
) -> Segment:
    """Return the target of one turn as if it had been sampled; `said`: `Prompt.text`."""
    text = policy.backbone.answer_prefix + text
    written = torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
    end = torch.tensor([policy.end_id])
    nothing = torch.zeros(0, dtype=torch.long)
    _check_speech(policy, text, speech, opened)
    layout = policy.speech
    if not speech or layout is None:
        return Segment(nothing, torch.cat([written, end]), torch.zeros(len(written) + 1))
    rows = layout.tokens(torch.cat([policy.codes(clip) for clip in speech], 1), said)
    before = nothing if opened else torch.cat([written, torch.tensor([layout.begin_id])])
    after = nothing if opened else end
    ids = torch.cat([before, rows.ids, after])
    return Segment(
        nothing,
        ids,
        torch.zeros(len(ids), layout.codebooks),
        codes=nn.functional.pad(rows.codes, (0, 0, len(before), len(after)), value=-1),
        code_mask=torch.cat([_tokens(before, layout.codebooks), rows.code_mask, _tokens(after, layout.codebooks)]),
    )


def _check_speech(policy: AudioPolicy, text: str, speech: Sequence[AudioClip], opened: bool) -> None:
    """Raise ValueError for an answer that does not fit the model or its prompt, which opens speech already or not."""
    if opened and not speech:
        raise ValueError("an answer that is to be spoken needs a recording to learn from")
    if speech and policy.speech is None:
        raise ValueError("speech to learn from, but the model writes text only; dualize it")
    if opened and text:
        raise ValueError("an answer that is to be spoken has no text before its speech; leave the target out")


def _tokens(ids: Tensor, codebooks: int) -> Tensor:
    """`code_mask` [N, Q] of text tokens: column 0."""
    return nn.functional.pad(torch.ones(len(ids), 1, dtype=torch.bool), (0, codebooks - 1))


@torch.no_grad()
def answer_logprobs(
    policy: AudioPolicy, experiences: Sequence[Experience], budget: int = 8192, share_prompts: bool = False
) -> list[Tensor]:
    """Return the log-probs [N] of each one's sampled tokens, in nats, on the CPU; `budget` tokens in a pass."""
    logprobs = [torch.zeros(0)] * len(experiences)
    for indices in micro_batches(experiences, budget, share_prompts):
        part = [experiences[i] for i in indices]
        logprobs_N = policy.forward(pack_experiences(part, share_prompts)).logprobs.float().cpu()
        for i, values in zip(indices, logprobs_N.split([e.num_sampled for e in part]), strict=True):
            logprobs[i] = values
    return logprobs
