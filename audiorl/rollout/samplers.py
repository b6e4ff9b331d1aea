"""Sampling the next step of a rollout: a token from the text head, or in speech a frame of codes.

A sampler holds the state of the rollouts of one decoding loop. `TextSampler` serves models that write text,
`SpeechSampler` those that also speak, where every rollout is in one of three modes::

    text    a token is sampled; `begin_id` opens speech
    frame   the delay pattern's next frame: its open codes are sampled, the rest is forced (`tokenizers_audio.delay`)
    end     `end_id` is forced after the frame that is all EOS, then text again

Speech that reaches `max_frames` ends as if EOS had been sampled there. A rollout has its own random numbers, one per
token and one per code, so it does not depend on its batch. Each choice inverts the cumulative distribution at one.

Shapes: R rollouts, B of them in a step, H decoder width, V vocabulary, Q codebooks, W frames of a window.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from audiorl.config import SamplingConfig
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import Prompt
from audiorl.models.speech import TalkerLayout
from audiorl.types import Segment, StopReason
from tokenizers_audio import delay

if TYPE_CHECKING:
    from audiorl.models.families.talker import TalkerPolicy

# -- distributions -----------------------------------------------------------------------------------------------------


def filtered_logprobs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return the log-probs [B, V] of the sampled distribution: temperature (0: the model's own), top-k, then top-p."""
    logits = logits.float()
    if config.temperature not in (0, 1):
        logits = logits / config.temperature
    if config.top_k and config.top_k < logits.shape[-1]:
        kth = logits.topk(config.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if config.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= config.top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)


def choose(logprobs: Tensor, uniform: Tensor, greedy: Tensor | bool) -> Tensor:
    """Choose token ids [B] from log-probs [B, V] by inverting the cumulative distribution at `uniform` [B] in [0, 1);
    where `greedy` [B], or one truth for all rows, is true: the most probable."""
    if isinstance(greedy, Tensor):
        return torch.where(greedy, logprobs.argmax(-1), choose(logprobs, uniform, False))
    if greedy:
        return logprobs.argmax(-1)
    cumulative = logprobs.double().exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    # Rounding must not reach the total itself: beyond it there is no token.
    target = torch.minimum(uniform[:, None].to(cumulative) * total, total.nextafter(torch.zeros_like(total)))
    # right=True: a token of probability 0 has an empty interval and is never chosen
    # Of a row that is NaN it gives V, which no table of embeddings has; `SegmentBuffer.add` refuses the log-prob.
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)


def uniforms(seed: int, sample_id: str, index: int, count: int) -> Tensor:
    """Return `count` uniform numbers for one rollout, fixed by (seed, sample, index)."""
    generator = torch.Generator().manual_seed(rollout_seed(seed, sample_id, index))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def rollout_seed(seed: int, sample_id: str, index: int) -> int:
    """Return the seed of one rollout, 63 bits."""
    digest = hashlib.blake2b(f"{seed}\0{sample_id}\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def repetition_aware(sampled: Tensor, plain: Tensor, often: Tensor, greedy: Tensor | bool) -> Tensor:
    """Return log-probs [N, size] of drawing from `sampled` and, where that gives a code of `often`, from `plain`:
    q(c) = p(c)·[c not often] + plain(c)·Σ p(often). Where `greedy`, p is the most probable code alone."""
    first = sampled.exp()
    if greedy is not False:
        peak = torch.zeros_like(first).scatter_(-1, sampled.argmax(-1, keepdim=True), 1.0)
        first = peak if greedy is True else torch.where(greedy[:, None], peak, first)
    again = (first * often).sum(-1, keepdim=True)
    return (first.masked_fill(often, 0.0) + plain.exp() * again).log()


# -- state -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutKey:
    """The random numbers of a rollout (fixed by seed, sample name, index), and how it is sampled."""

    seed: int
    name: str
    index: int
    greedy: bool = False
    spoken: bool = False
    """The prompt has opened speech; the answer then ends with it."""
    sampled: int = 0
    """Tokens that a paused rollout has sampled before."""
    prompt: Prompt | None = None
    """The prompt that it answers; None for a stream."""


@dataclass(frozen=True, eq=False)
class StepOutput:
    """A step of each rollout: ids [B], logprobs [B]; of a model that speaks logprobs [B, Q] and code_mask [B, Q], on
    the CPU, and codes [B, Q] (-1 where there is no frame), None without any frame."""

    ids: Tensor
    logprobs: Tensor
    codes: Tensor | None = None
    code_mask: Tensor | None = None
    embeds: Tensor | None = None
    """[B, 1, H]: the decoder's next inputs, where ids and codes do not say all of them."""

    def next_inputs(self, policy: AudioPolicy, rows: Tensor | None) -> dict[str, Any]:
        """Return rollouts `rows` [n] (None: all) as the decoder's next inputs: inputs_embeds [n, 1, H] and others."""
        if self.embeds is not None:
            return {"inputs_embeds": self.embeds if rows is None else self.embeds[rows.to(self.embeds.device)]}
        ids, codes = self.ids, self.codes
        if rows is not None:
            ids, codes = ids[rows.to(ids.device)], None if codes is None else codes[rows]
        ids, codes = ids[:, None], None if codes is None else codes[:, None]
        return {"inputs_embeds": policy.embed_tokens(ids, codes), **policy.decoder_arguments(ids, codes)}

    def rows(self) -> list[tuple[Any, ...]]:
        """Return (id, logprob), or (id, logprobs, codes or None, code_mask), of each rollout, as numbers."""
        if self.code_mask is None:
            sampled = to_cpu([self.ids, self.logprobs])
            return list(zip(*(x.tolist() for x in sampled), strict=True))
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        codes = [None] * len(ids) if self.codes is None else self.codes.tolist()
        return list(zip(ids, logprobs, codes, self.code_mask.tolist(), strict=True))


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors by one transfer: the host waits for the device once. Integers must be below 2**53."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    flat = torch.cat([x.flatten().double() for x in tensors]).cpu()
    pieces = flat.split([x.numel() for x in tensors])
    return [piece.to(x.dtype).view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


@dataclass
class SegmentBuffer:
    """The tokens and frames of a segment that is being sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    codes: list[list[int] | None] = field(default_factory=list)
    code_mask: list[list[bool]] = field(default_factory=list)

    @classmethod
    def from_segment(cls, segment: Segment) -> SegmentBuffer:
        """Continue a segment without frames."""
        return cls(segment.ids.tolist(), segment.logprobs.tolist())

    def add(self, id: int, logprob: Any, codes: list[int] | None = None, code_mask: list[bool] | None = None) -> None:
        """Append a token or a frame. Raises FloatingPointError for a log-prob that is NaN."""
        if any(map(math.isnan, logprob if isinstance(logprob, list) else [logprob])):
            raise FloatingPointError(f"token {len(self.ids) + 1}: the model's logits are not numbers, it has diverged")
        self.ids.append(id)
        self.logprobs.append(logprob)
        if code_mask is not None:
            self.codes.append(codes)
            self.code_mask.append(code_mask)

    def fields(self) -> dict[str, Any]:
        """Return ids, logprobs and, where there are frames, codes and code_mask: fields of a `Segment`."""
        ids, logprobs = torch.tensor(self.ids, dtype=torch.long), torch.tensor(self.logprobs)
        if not self.code_mask:
            return {"ids": ids, "logprobs": logprobs}
        nothing = [-1] * len(self.code_mask[0])
        codes = torch.tensor([nothing if c is None else c for c in self.codes])
        if not bool((codes >= 0).any()):
            return {"ids": ids, "logprobs": logprobs[:, 0]}
        return {"ids": ids, "logprobs": logprobs, "codes": codes, "code_mask": torch.tensor(self.code_mask)}


def max_rows(policy: AudioPolicy, config: SamplingConfig, spoken: bool = False) -> int:
    """Count the most tokens and frames of an answer or a turn; `spoken`: of one that is speech from the start."""
    if policy.speech is None:
        return config.max_new_tokens
    one_speech = policy.speech.rows(config.max_frames) + 1
    if spoken:
        return one_speech
    # Every token may open speech, which an `end_id` closes; one speech without frames ends the turn.
    return 2 * config.max_new_tokens + one_speech + policy.speech.delay + 1


class TextSampler:
    """State of the R rollouts of one decoding loop, of which the B selected ones take part in the next steps.

    All of it is on the policy's device. max_rows: the most tokens and frames that a rollout can have. Number R, one
    beyond the rollouts, is none of them: rows that are computed and never read sample as it.
    """

    def __init__(self, policy: AudioPolicy, config: SamplingConfig, keys: Sequence[RolloutKey]):
        device = policy.device
        self.max_rows = max_rows(policy, config)
        self._policy, self._config = policy, config
        noise = [uniforms(k.seed, k.name, k.index, config.max_new_tokens) for k in keys]
        self._noise = torch.stack([*noise, torch.zeros_like(noise[0])]).to(device)
        greedy = [config.temperature == 0 or k.greedy for k in keys]
        self._greedy = _shared_flag([*greedy, greedy[0]], device)
        self._sampled = torch.tensor([*(k.sampled for k in keys), 0], device=device)  # tokens of each rollout
        self._stop_ids = torch.tensor(policy.stop_ids, device=device)
        self.select(range(len(keys)))

    def select(self, rollouts: Sequence[int] | Tensor) -> None:
        """Choose the rollouts of the next steps, by number, in the order of their hidden states. At first it is all.

        A tensor is kept: what is written into it later is chosen then.
        """
        if not isinstance(rollouts, Tensor):
            rollouts = torch.tensor(rollouts, device=self._noise.device)
        self._selected = rollouts

    def step(self, hidden: Tensor, must_continue: Tensor | None = None) -> StepOutput:
        """Sample the next step of the selected rollouts from hidden states [B, H]. `must_continue` [B]: not to end."""
        # A rollout that has ended may still be in the batch; its rows are discarded.
        number = self._sampled[self._selected].clamp(max=self._config.max_new_tokens - 1)
        self._sampled[self._selected] = number + 1
        noise = self._noise[self._selected, number]
        greedy = self._greedy
        if isinstance(greedy, Tensor):
            greedy = greedy.index_select(0, self._selected)
        return StepOutput(
            *_token(self._policy.logits(hidden), self._config, noise, greedy, must_continue, self._stop_ids)
        )

    def ended(self, i: int, buffer: SegmentBuffer) -> StopReason | None:
        """Return why rollout i ends with the last step in its `buffer`; None if it does not."""
        if buffer.ids[-1] in self._policy.stop_ids:
            return "eos"
        return "length" if len(buffer.ids) >= self._config.max_new_tokens else None


def _shared_flag(flags: Sequence[bool], device: torch.device) -> Tensor | bool:
    """Return one truth where all flags agree, else [B] on the device."""
    return flags[0] if all(flag == flags[0] for flag in flags) else torch.tensor(flags, device=device)


def _token(
    logits: Tensor,
    config: SamplingConfig,
    noise: Tensor,
    greedy: Tensor | bool,
    must_continue: Tensor | None,
    stop_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample tokens [B] and log-probs [B] from logits [B, V]; where `must_continue` [B], no stop token, which log-probs
    ignore."""
    logprobs = filtered_logprobs(logits, config)
    allowed = logprobs
    if must_continue is not None:
        ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device).index_fill(0, stop_ids, True)
        stops = must_continue[:, None] & ends
        allowed = logprobs.masked_fill(stops, -torch.inf)
        if config.top_k or config.top_p < 1:  # they may leave nothing but stop tokens: then the model's own others
            nothing = allowed.isneginf().all(-1, keepdim=True)
            allowed = torch.where(nothing, logits.float().masked_fill(stops, -torch.inf).log_softmax(-1), allowed)
    tokens = choose(allowed, noise, greedy)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


class SpeechSampler:
    """The same for a model that speaks. The state of the modes is on the CPU, where the loop reads it; a step reads the
    device once."""

    def __init__(self, policy: AudioPolicy, config: SamplingConfig, keys: Sequence[RolloutKey]):
        assert policy.speech is not None and not any(k.sampled for k in keys), "speech is not paused"
        layout, device, count = policy.speech, policy.device, len(keys)
        self.max_rows = max(max_rows(policy, config, k.spoken) for k in keys)
        self._policy, self._config, self._layout = policy, config, layout
        self._code_head = policy.code_head
        self._code_configs = [config.of_codes(k) for k in range(layout.codebooks)]
        self._spoken = [k.spoken for k in keys]
        self._greedy = torch.tensor([config.temperature == 0 or k.greedy for k in keys])
        self._greedy_codes = torch.tensor([[c.temperature == 0 or k.greedy for c in self._code_configs] for k in keys])
        self._stop_ids = torch.tensor(policy.stop_ids, device=device)
        frame_rows = config.max_frames + layout.codebooks + 1
        self._noise = torch.stack([uniforms(k.seed, k.name, k.index, config.max_new_tokens) for k in keys]).to(device)
        draws = frame_rows * layout.codebooks
        noise = torch.stack([uniforms(k.seed, f"{k.name}\0codes", k.index, draws) for k in keys])
        self._code_noise = noise.view(count, frame_rows, layout.codebooks).to(device)
        self._tokens = torch.zeros(count, dtype=torch.long)  # sampled so far
        self._frames = torch.zeros(count, dtype=torch.long)  # rows of frames so far
        self._row = torch.full((count,), -1)  # the next row of this speech, -1 in text
        self._closing = torch.zeros(count, dtype=torch.bool)  # `end_id` is next
        self._limit = torch.zeros(count, dtype=torch.long)  # the row in which codebook 0 ends at the latest …
        self._end = torch.zeros(count, dtype=torch.long)  # … and in which it does, if no earlier EOS is sampled
        self._just_closed = torch.zeros(count, dtype=torch.bool)
        self._recent = torch.full((count, config.ras_window, layout.codebooks), -1)
        self._open(torch.tensor([i for i, k in enumerate(keys) if k.spoken], dtype=torch.long))
        self.select(range(count))

    def select(self, rollouts: Sequence[int]) -> None:
        self._active = torch.tensor(rollouts, dtype=torch.long)

    def step(self, hidden: Tensor, must_continue: Tensor | None = None) -> StepOutput:
        active = self._active
        count, width = len(active), self._layout.codebooks
        closing = self._closing[active]
        in_frame = (self._row[active] >= 0) & ~closing
        in_text = ~in_frame & ~closing
        text, frames = in_text.nonzero()[:, 0], in_frame.nonzero()[:, 0]
        tokens, of_tokens, draws, of_draws = to_cpu(
            [*self._sample_tokens(hidden, text, must_continue), *self._sample_codes(hidden, frames)]
        )
        ids = torch.full((count,), self._layout.end_id)
        logprobs = torch.zeros(count, width)
        code_mask = torch.zeros(count, width, dtype=torch.bool)
        codes = None
        if len(text):
            ids[text], logprobs[text, 0], code_mask[text, 0] = tokens, of_tokens.float(), True
        if len(frames):
            codes = torch.full((count, width), -1)
            codes[frames], code_mask[frames] = self._add_frames(active[frames], draws)
            logprobs[frames] = of_draws.masked_fill(~code_mask[frames], 0.0)
            ids[frames] = self._layout.ids(codes[frames])
        self._row[active[closing]], self._closing[active[closing]] = -1, False
        self._open(active[in_text & (ids == self._layout.begin_id)])
        self._just_closed[active] = closing
        return StepOutput(ids, logprobs, codes, code_mask)

    def ended(self, i: int, buffer: SegmentBuffer) -> StopReason | None:
        if self._row[i] >= 0:
            return None
        if self._just_closed[i]:
            if self._end[i] == self._limit[i]:
                return "length"  # no EOS was sampled
            if self._spoken[i]:
                return "eos"
        elif buffer.ids[-1] in self._policy.stop_ids:
            return "eos"
        return "length" if self._tokens[i] >= self._config.max_new_tokens else None

    # -- modes -----------------------------------------------------------------------------------------------------

    def _open(self, rollouts: Tensor) -> None:
        """Begin speech, with the frames that remain of `max_frames`."""
        self._row[rollouts] = 0
        self._limit[rollouts] = (self._config.max_frames - self._frames[rollouts]).clamp(min=0) + 1
        self._end[rollouts] = self._limit[rollouts]
        self._recent[rollouts] = -1

    def _sample_tokens(self, hidden: Tensor, text: Tensor, must_continue: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample tokens [n] and log-probs [n], on the device, at places `text` [n] of the step."""
        if not len(text):
            return torch.zeros(0, dtype=torch.long, device=hidden.device), hidden.new_zeros(0)
        rollouts = self._active[text]
        # A rollout that has ended may still be in the batch; its rows are discarded.
        number = self._tokens[rollouts].clamp(max=self._config.max_new_tokens - 1)
        self._tokens[rollouts] += 1
        rows, here, number = (x.to(hidden.device, non_blocking=True) for x in (text, rollouts, number))
        greedy = _shared_flag(self._greedy[rollouts].tolist(), hidden.device)
        noise = self._noise[here, number]
        must_continue = None if must_continue is None else must_continue[rows]
        logits = self._policy.logits(hidden[rows])
        return _token(logits, self._config, noise, greedy, must_continue, self._stop_ids)

    def _sample_codes(self, hidden: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Sample codes [n, Q] and log-probs [n, Q], on the device, at places `frames` [n] of the step."""
        layout = self._layout
        if not len(frames):
            nothing = hidden.new_zeros(0, layout.codebooks)
            return nothing.long(), nothing
        rollouts = self._active[frames]
        number = self._frames[rollouts].clamp(max=self._code_noise.shape[1] - 1)
        rows, here, number = (x.to(hidden.device, non_blocking=True) for x in (frames, rollouts, number))
        logits = self._code_head(hidden[rows]).float().view(-1, layout.size)
        bos = torch.arange(layout.size, device=logits.device) == layout.bos
        logits = logits.masked_fill(bos, -torch.inf)
        noise = self._code_noise[here, number].flatten()
        greedy = _shared_flag(self._greedy_codes[rollouts].flatten().tolist(), logits.device)
        first, *others = self._code_configs
        if all(config == first for config in others):
            sampled = filtered_logprobs(logits, first)
        else:
            each = zip(logits.view(-1, layout.codebooks, layout.size).unbind(1), self._code_configs, strict=True)
            sampled = torch.stack([filtered_logprobs(part, config) for part, config in each], 1).flatten(0, 1)
        if self._config.ras_window:
            # The codes that occur too often in the window of their codebook.
            window = self._recent[rollouts].transpose(1, 2)  # [n, Q, W]
            counted = (window >= 0) & (window != layout.bos) & (window != layout.eos)
            counts = torch.zeros(*window.shape[:2], layout.size, dtype=torch.long)
            counts.scatter_add_(2, window.clamp(min=0), counted.long())
            often = (counts >= self._config.ras_repeats).to(logits.device).flatten(0, 1)
            sampled, greedy = repetition_aware(sampled, logits.log_softmax(-1), often, greedy), False
        chosen = choose(sampled, noise, greedy)
        logprobs = sampled.gather(-1, chosen[:, None])
        return chosen.view(-1, layout.codebooks), logprobs.view(-1, layout.codebooks)

    def _add_frames(self, rollouts: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes [n, Q] and code_mask [n, Q] of `rollouts` [n] by the delay pattern; advance their state."""
        layout, row = self._layout, self._row[rollouts]
        codes, code_mask, end = delay.step(row[:, None], draws, self._end[rollouts], layout.bos, layout.eos)
        if self._config.ras_window:
            self._recent[rollouts, row % self._config.ras_window] = codes
        self._end[rollouts] = end
        self._row[rollouts] += 1
        self._frames[rollouts] += 1
        self._closing[rollouts] = row + 1 == end + layout.codebooks
        return codes, code_mask


class TalkerSampler:
    """The same for a talker: every row is a frame, codebook by codebook, or the row that stops, which is forced after
    `max_frames`."""

    def __init__(self, policy: TalkerPolicy, config: SamplingConfig, keys: Sequence[RolloutKey]):
        if config.ras_window:
            raise ValueError("sampling.ras_window: repetition-aware sampling is not for a talker; leave it out")
        self._policy, self._layout, device = policy, policy.speech, policy.device
        self.max_rows = config.max_frames + 1
        self._config = [config.of_codes(k) for k in range(self._layout.codebooks)]
        self._greedy = torch.tensor([[c.temperature == 0 or k.greedy for c in self._config] for k in keys])
        draws = self.max_rows * self._layout.codebooks
        noise = torch.stack([uniforms(k.seed, f"{k.name}\0codes", k.index, draws) for k in keys])
        self._noise = noise.view(len(keys), self.max_rows, self._layout.codebooks).to(device)
        texts: dict[int, tuple[Tensor, Tensor]] = {}
        for prompt in (k.prompt for k in keys):
            assert prompt is not None and prompt.text is not None
            if id(prompt) not in texts:
                states = policy.thinker.states(torch.cat([prompt.ids, prompt.text]))[len(prompt) :]
                texts[id(prompt)] = prompt.text, states
        own = [texts[id(k.prompt)] for k in keys]
        self._last = torch.tensor([len(ids) - 1 for ids, _ in own])
        self._ids = pad_sequence([ids for ids, _ in own], batch_first=True)
        self._states = pad_sequence([states for _, states in own], batch_first=True)
        self._rows = torch.zeros(len(keys), dtype=torch.long)
        self._first = policy.first_codes().to(device)
        self.select(range(len(keys)))

    def select(self, rollouts: Sequence[int]) -> None:
        self._active = torch.tensor(rollouts, dtype=torch.long)

    def step(self, hidden: Tensor, must_continue: Tensor | None = None) -> StepOutput:
        policy, active, device = self._policy, self._active, hidden.device
        # A rollout that has ended may still be in the batch; its rows are discarded.
        number = self._rows[active].clamp(max=self.max_rows - 1)
        self._rows[active] = number + 1
        noise = self._noise[active.to(device), number.to(device)]
        chosen, logprobs = self._choose(policy.code_head(hidden)[:, self._first], 0, noise)
        codes = [self._first[chosen]]
        predictor, tables = policy.backbone.predictor(policy.model), policy.backbone.code_embeddings(policy.model)
        if predictor is not None:
            cache = DynamicCache(config=predictor.config)
            inputs = policy.predictor_inputs(hidden, codes[0][:, None])
            columns = [logprobs]
            for k, head in enumerate(predictor.lm_head, 1):
                out = predictor.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True).last_hidden_state
                chosen, logprobs = self._choose(head(out[:, -1]), k, noise)
                codes.append(chosen)
                columns.append(logprobs)
                inputs = tables[k](chosen)[:, None]
            rows, of_rows = to_cpu([torch.stack(codes, 1), torch.stack(columns, 1)])
        else:
            rows, of_rows = to_cpu([codes[0][:, None], logprobs[:, None]])
        forced = number == self.max_rows - 1
        rows[forced, 0] = self._layout.stops[-1]
        rows[rows[:, 0] >= self._layout.size, 1:] = -1
        code_mask = self._layout.mask(rows) & ~forced[:, None]
        at = number.minimum(self._last[active])
        states = self._states[active.to(device), at.to(device)]
        return StepOutput(
            self._ids[active, at],
            of_rows.float().masked_fill(~code_mask, 0.0),
            rows,
            code_mask,
            policy.embed_states(states, rows)[:, None],
        )

    def _choose(self, logits: Tensor, codebook: int, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample codes [n] of a codebook and their log-probs [n] from logits [n, codes]."""
        logprobs = filtered_logprobs(logits, self._config[codebook])
        greedy = _shared_flag(self._greedy[self._active, codebook].tolist(), logits.device)
        chosen = choose(logprobs, noise[:, codebook], greedy)
        return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]

    def ended(self, i: int, buffer: SegmentBuffer) -> StopReason | None:
        codes = buffer.codes[-1]
        if codes is None or not self._layout.closes(codes):
            return None
        return "length" if len(buffer.codes) == self.max_rows else "eos"


Sampler = TextSampler | SpeechSampler | TalkerSampler


def sampler_for(policy: AudioPolicy, config: SamplingConfig, keys: Sequence[RolloutKey]) -> Sampler:
    """Make a sampler for rollouts of a policy."""
    if isinstance(policy.speech, TalkerLayout):
        return TalkerSampler(cast("TalkerPolicy", policy), config, keys)
    return TextSampler(policy, config, keys) if policy.speech is None else SpeechSampler(policy, config, keys)
