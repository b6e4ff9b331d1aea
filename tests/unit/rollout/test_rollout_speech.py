"""Writing speech: the delay pattern by hand, transformers' own generation, and log-probs that the trainer shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import HiggsAudioV2ForConditionalGeneration

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy, dualize
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import repetition_aware
from audiorl.rollout.streams import LiveStream
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.types import Message, Rollout, Sample
from tests.conftest import TEXTS, make_omni, make_text
from tests.support.speaking_models import codec
from tests.support.streams import stream

__all__ = ["codec"]

Q, BOS, EOS = 4, 64, 65


def make_higgs() -> AudioPolicy:
    return higgs.tiny(TEXTS)


def make_dual_text() -> AudioPolicy:
    return dualize(make_text(), Q, 64)


def make_dual_omni() -> AudioPolicy:
    return dualize(make_omni(), Q, 64)


def question(name: str, text: str, speech: bool) -> Sample:
    return Sample(name, (Message("user", (text,)),), metadata={"respond": "speech" if speech else "text"})


ASKED = [
    question("a", "What is said?", True),
    question("b", "Why?", False),
    question("c", "who speaks, and why?", True),
]


def chatty(policy: AudioPolicy, samples: Sequence[Sample], share: float = 0.5) -> AudioPolicy:
    """The text head changed so that speech is about this probable as the first token of an answer."""
    assert policy.speech is not None
    head = policy.backbone.head(policy.model)
    prompts = [policy.prompt(s) for s in samples]
    with torch.no_grad():
        states = torch.stack(
            [
                policy.hidden(pack_experiences([Experience(p.ids, torch.zeros(len(p)).bool(), len(p), p.audio)]))[-1]
                for p in prompts
            ]
        )
        others = head(states).logsumexp(-1)
        wanted = others + torch.logit(torch.tensor(share))
        head.weight[policy.speech.begin_id] = torch.linalg.lstsq(states, wanted[:, None]).solution[:, 0]
    return policy


def run(policy: AudioPolicy, samples: Sequence[Sample], n: int = 1, **sampling: object) -> list[Rollout]:
    config = SamplingConfig(**({"max_new_tokens": 8, "max_frames": 12} | sampling))  # type: ignore[arg-type]
    return HFEngine(policy, config).generate([Request(s, n, seed=4) for s in samples])


def written(rollouts: Sequence[Rollout]) -> list[object]:
    return [[(s.ids.tolist(), None if s.codes is None else s.codes.tolist()) for s in r.segments] for r in rollouts]


def test_trainer_log_probs_are_the_engines() -> None:
    """Of text and of all codebooks, at a temperature of their own, with and without a shared prompt."""
    for make, of_codes in ((make_higgs, (1.2,)), (make_dual_text, (1.2, 0.8))):
        policy = chatty(make(), ASKED[1:2], share=0.2)
        sampling: dict[str, Any] = dict(temperature=0.9, audio_temperature=9.0, codebook_temperature=of_codes)
        rollouts = run(policy, ASKED, n=4, **sampling)
        said = [s for r in rollouts for s in r.segments if s.codes is not None]
        assert len(said) > 8 and any(s.codes is None for r in rollouts for s in r.segments)  # type: ignore[union-attr]
        mixed = [s for r in rollouts if r.sample.id == "b" for s in r.segments if s.codes is not None]
        assert mixed and all(s.codes[0, 0] == -1 and s.code_mask[0, 0] for s in mixed)  # type: ignore[index]
        batch = [Experience.from_rollout(r) for r in rollouts]
        engine = torch.cat([wide(e.rollout_logprobs)[e.loss_mask] for e in batch])
        for share in (True, False):
            out = policy.forward(
                pack_experiences(batch, share),
                0.9,
                audio_temperature=SamplingConfig(**sampling).training_temperatures[1],
            )
            assert out.code_logprobs is not None
            torch.testing.assert_close(out.code_logprobs.detach(), engine, atol=1e-5, rtol=0)
        code_mask = torch.cat([e.code_mask[e.loss_mask] for e in batch if e.code_mask is not None])
        assert (code_mask.sum(0) > 20).all()


def wide(logprobs: Tensor | None) -> Tensor:
    assert logprobs is not None
    return logprobs if logprobs.dim() == 2 else torch.nn.functional.pad(logprobs[:, None], (0, Q - 1))


@pytest.mark.parametrize("make", [make_higgs, make_dual_omni])
def test_a_rollout_depends_on_its_seed_and_not_on_its_batch(make: Callable[[], AudioPolicy]) -> None:
    policy = chatty(make(), ASKED[1:2])
    together = run(policy, ASKED, n=3)
    alone = [r for s in ASKED for r in run(policy, [s], n=3)]
    assert written(together) == written(alone)
    assert written(run(policy, ASKED, n=3, max_batch_tokens=1)) == written(alone)
    assert len({str(w) for w in written(together)}) == len(together)


def test_a_spoken_answer_is_the_speech() -> None:
    """It follows the prompt's opening token, ends with the closing one, and every code has its place."""
    policy = make_higgs()
    layout = policy.speech
    assert layout is not None
    for rollout in run(policy, ASKED[:1], n=6, max_frames=30):
        (segment,) = rollout.segments
        assert segment.codes is not None and segment.code_mask is not None and segment.text == ""
        assert int(segment.prompt_ids[-1]) == layout.begin_id and segment.stop_reason in ("eos", "length")
        assert int(segment.ids[-1]) == layout.end_id and (segment.codes[-1] == -1).all()
        (codes,) = layout.speeches(segment.codes)
        frames = segment.codes[:-1]
        assert len(frames) == codes.shape[1] + Q + 1 and codes.max() < BOS
        assert (segment.stop_reason == "length") == (codes.shape[1] == 30)
        assert segment.ids[:-1].tolist() == layout.ids(frames).tolist()
        assert (segment.logprobs[~segment.code_mask] == 0).all() and (segment.logprobs[segment.code_mask] < 0).all()


# -- the delay pattern by hand -------------------------------------------------------------------------------------


def dictated(policy: AudioPolicy, rows: list[list[int]]) -> AudioPolicy:
    """The code head writes these codes, row by row from the first; after the last, the last again."""
    head, calls = policy.code_head, [0]

    def dictate(_: object, args: object, out: Tensor) -> Tensor:
        row = rows[min(calls[0], len(rows) - 1)]
        calls[0] += 1
        logits = out.new_zeros(len(out), Q, 66)
        logits[:, torch.arange(Q), torch.tensor(row)] = 1e4
        return logits.flatten(1)

    head.register_forward_hook(dictate)
    return policy


B, E = BOS, EOS


@pytest.mark.parametrize(
    ("dictation", "codes", "code_mask"),
    [
        (  # EOS of codebook 0: two frames
            [[9, 9, 9, 9], [1, 9, 9, 9], [2, 11, 9, 9], [E, 12, 21, 9], [9, 9, 22, 31], [9, 9, 9, 32]],
            [[B, B, B, B], [1, B, B, B], [2, 11, B, B], [E, 12, 21, B], [E, E, 22, 31], [E, E, E, 32], [E, E, E, E]],
            ["0000", "1000", "1100", "1110", "0011", "0001", "0000"],
        ),
        (  # EOS of codebook 2 in row 4 is one of codebook 0 in row 2: one frame; below it draws count for nothing
            [[9, 9, 9, 9], [1, 9, 9, 9], [2, 11, 9, 9], [3, 12, 21, 9], [4, 13, E, 31]],
            [[B, B, B, B], [1, B, B, B], [2, 11, B, B], [3, 12, 21, B], [E, E, E, 31], [E, E, E, E]],
            ["0000", "1000", "1100", "1110", "0011", "0000"],
        ),
        (  # EOS of codebook 0, then one of codebook 3 that comes before it on the diagonal
            [[9, 9, 9, 9], [1, 9, 9, 9], [2, 11, 9, 9], [E, 12, 21, 9], [9, 9, 22, E]],
            [[B, B, B, B], [1, B, B, B], [2, 11, B, B], [E, 12, 21, B], [E, E, E, E]],
            ["0000", "1000", "1100", "1110", "0001"],
        ),
        (  # EOS at once: nothing is said
            [[9, 9, 9, 9], [E, 9, 9, 9]],
            [[B, B, B, B], [E, B, B, B], [E, E, B, B], [E, E, E, B], [E, E, E, E]],
            ["0000", "1000", "0000", "0000", "0000"],
        ),
    ],
)
def test_endings_by_hand(dictation: list[list[int]], codes: list[list[int]], code_mask: list[str]) -> None:
    (rollout,) = run(dictated(make_higgs(), dictation), ASKED[:1])
    (segment,) = rollout.segments
    assert segment.stop_reason == "eos" and segment.codes is not None and segment.code_mask is not None
    assert segment.codes[:-1].tolist() == codes
    assert ["".join(str(int(d)) for d in row) for row in segment.code_mask[:-1]] == code_mask
    assert not segment.code_mask[-1].any()


def test_speech_that_never_ends_is_ended() -> None:
    """As if EOS had been drawn at the cap; nothing there was, and text of the same turn does not go on."""
    rows = [[9] * Q, *([i, i + 10, i + 20, i + 30] for i in range(9))]
    (rollout,) = run(dictated(make_higgs(), rows), ASKED[:1], max_frames=3)
    (segment,) = rollout.segments
    assert segment.stop_reason == "length" and segment.codes is not None and segment.code_mask is not None
    assert segment.codes[:-1].tolist() == [
        [B, B, B, B],
        [0, B, B, B],
        [1, 11, B, B],
        [2, 12, 22, B],
        [E, 13, 23, 33],
        [E, E, 24, 34],
        [E, E, E, 35],
        [E, E, E, E],
    ]
    assert segment.code_mask.sum(0).tolist() == [3, 3, 3, 3]
    policy = dictated(make_dual_text(), rows)
    assert policy.speech is not None
    opened = torch.zeros(policy.backbone.head(policy.model).weight.shape[0])
    opened[policy.speech.begin_id] = 1e4
    policy.backbone.head(policy.model).register_forward_hook(lambda module, args, out: out + opened)
    (rollout,) = run(policy, ASKED[1:2], max_frames=3)
    assert [s.stop_reason for s in rollout.segments] == ["length"]
    assert rollout.segments[0].ids.tolist()[-1] == policy.speech.end_id and rollout.num_sampled == 1 + 8 + 1


def test_text_goes_on_after_speech() -> None:
    """begin, speech, end, then tokens until the turn's end; the frames that are left bound a second speech."""
    policy = dictated(make_dual_text(), [[9] * Q, [1, 9, 9, 9], [E, 11, 9, 9], *[[9] * Q] * 3, [7] * Q])
    layout = policy.speech
    assert layout is not None
    script, calls = [layout.begin_id, 70, layout.begin_id], [0]

    def dictate(_: object, args: object, out: Tensor) -> Tensor:
        logits = torch.zeros_like(out)
        logits[:, script[calls[0] % 3]] = 1e4
        calls[0] += 1
        return logits

    policy.backbone.head(policy.model).register_forward_hook(dictate)
    (rollout,) = run(policy, ASKED[1:2], max_frames=8)
    (segment,) = rollout.segments
    assert segment.codes is not None and segment.stop_reason == "length"
    text = segment.ids[segment.codes[:, 0] < 0].tolist()
    assert text == [layout.begin_id, layout.end_id, 70, layout.begin_id, layout.end_id]
    first, second = layout.speeches(segment.codes)
    assert first.tolist() == [[1], [11], [9], [9]]
    assert second.tolist() == [[7, 7]] * Q  # six rows of the eight were used up
    assert segment.code_mask is not None
    assert segment.code_mask[segment.codes[:, 0] < 0].tolist() == [
        [i in (0, 2, 3), False, False, False] for i in range(5)
    ]


# -- transformers' generation --------------------------------------------------------------------------------------


def generated(stock: HiggsAudioV2ForConditionalGeneration, ids: Tensor, rows: int) -> Tensor:
    """Rows [N, Q] of transformers' greedy generation for a prompt of text."""
    assert len(ids) >= 8
    out = stock.generate(input_ids=ids[None], attention_mask=torch.ones(1, len(ids)).long(), max_new_tokens=rows)
    return out[0]


def test_greedy_speech_equals_transformers(tmp_path: Path) -> None:
    """Frame by frame up to the end; then a model that writes EOS along the diagonal ends in the same row, too."""
    policy = make_higgs()
    with torch.no_grad():  # transformers may sample BOS, we never do
        policy.code_head.weight.view(Q, 66, -1)[:, [BOS, EOS]] = 0.0
    policy.save(tmp_path / "endless")
    stock = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "endless").eval()
    segments = [r.segments[0] for r in run(policy, ASKED, temperature=0.0, max_frames=20) if r.sample.id != "b"]
    for segment in segments:
        theirs = generated(stock, segment.prompt_ids, 21)
        assert segment.codes is not None and torch.equal(segment.codes[:21], theirs)
        assert len(torch.unique(theirs[5:], dim=0)) > 2

    # Now each codebook's EOS is what fits the hidden state where the diagonal wants it best.
    prompt, ends = segments[0].prompt_ids, 9
    for k in range(Q):
        (rollout,) = run(policy, ASKED[:1], temperature=0.0, max_frames=ends - 1)
        e = Experience.from_rollout(rollout)
        with torch.no_grad():
            hidden = policy.hidden(pack_experiences([e]))[len(prompt) - 1 :][: ends + Q]
            logits = policy.code_head(hidden).view(len(hidden), Q, 66)[:, k].amax(-1)
            target = logits - 1.0
            target[ends + k] = logits[ends + k] + 1.0
            policy.code_head.weight.view(Q, 66, -1)[k, EOS] = torch.linalg.lstsq(hidden, target[:, None]).solution[:, 0]
    policy.save(tmp_path / "ending")
    stock = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "ending").eval()
    (segment,) = (r.segments[0] for r in run(policy, ASKED[:1], temperature=0.0, max_frames=40))
    theirs = generated(stock, prompt, 40)
    assert segment.stop_reason == "eos" and len(theirs) == ends + Q
    assert segment.codes is not None and torch.equal(segment.codes[:-1], theirs)


# -- repetition-aware sampling -------------------------------------------------------------------------------------


def test_repetition_aware_by_hand() -> None:
    sampled = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0]]).log()
    plain = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(3, -1)
    often = torch.tensor([[True, False, False, True], [False] * 4, [True, False, False, False]])
    out = repetition_aware(sampled, plain, often, torch.tensor([False, False, True])).exp()
    expected = torch.tensor([[0.2, 0.3 + 0.15, 0.2 + 0.1, 0.05], [0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.2, 0.1]])
    torch.testing.assert_close(out, expected)
    greedy = repetition_aware(sampled, plain, torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, dtype=torch.bool))
    assert greedy.exp().tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3


def test_repetition_aware_log_probs_are_those_of_the_mixture() -> None:
    """Recomputed from the model's own logits, the codes before, and the rule in plain words."""
    policy = make_higgs()
    with torch.no_grad():
        policy.code_head.weight.mul_(8)  # peaked, so that codes do repeat
    options = {"audio_temperature": 0.5, "audio_top_k": 5, "ras_window": 5, "ras_repeats": 2, "max_frames": 25}
    again = 0
    for rollout in run(policy, ASKED[:1], n=4, **options):
        (segment,) = rollout.segments
        assert segment.codes is not None and segment.code_mask is not None
        with torch.no_grad():
            hidden = policy.hidden(pack_experiences([Experience.from_rollout(rollout)]))
        logits = policy.code_head(hidden).view(-1, Q, 66).detach()
        logits[..., BOS] = -torch.inf
        before = len(segment.prompt_ids) - 1
        for t, k in segment.code_mask.nonzero().tolist():
            plain = logits[before + t, k].softmax(-1)
            cold = logits[before + t, k] / 0.5
            cold = cold.masked_fill(cold < cold.topk(5).values[-1], -torch.inf).softmax(-1)
            window = segment.codes[max(t - 5, 0) : t, k].tolist()
            often = [c for c in set(window) if c < 64 and window.count(c) >= 2]
            code = int(segment.codes[t, k])
            p = (0.0 if code in often else cold[code]) + cold[often].sum() * plain[code]
            assert float(segment.logprobs[t, k]) == pytest.approx(float(p.log()), abs=1e-4)
            again += bool(often)
    assert again > 20


# -- voices and streams --------------------------------------------------------------------------------------------


def test_an_interpreter_that_speaks(speech: list[Utterance]) -> None:
    """Turns of text, of speech and of both; nothing depends on the batch, and the trainer sees what the engine saw."""
    policy = dualize(make_omni(), Q, 64)
    samples = [interpretation_sample(stream(speech, first, count)) for first, count in ((0, 2), (40, 3))]
    head, layout = policy.backbone.head(policy.model), policy.speech
    assert layout is not None
    likely = torch.zeros(head.weight.shape[0])
    likely[list(policy.stop_ids)], likely[layout.begin_id] = 4.5, 4.5
    hook = head.register_forward_hook(lambda module, args, out: out + likely)
    options = {"max_new_tokens": 5, "max_frames": 6}
    together = run(policy, samples, n=2, **options)
    assert written(together) == written([r for s in samples for r in run(policy, [s], n=2, **options)])
    segments = [s for r in together for s in r.segments]
    assert {s.codes is None for s in segments} == {True, False}
    assert all(len(layout.speeches(s.codes)) >= 1 for s in segments if s.codes is not None)
    assert {"eos", "length"} <= {s.stop_reason for s in segments}
    with_text = [s for s in segments if s.codes is not None and int((s.codes[:, 0] < 0).sum()) > 3]
    assert with_text
    for r in together:
        for one, two in zip(r.segments, r.segments[1:], strict=False):
            assert (int(two.prompt_ids[0]) == policy.end_id) == (one.stop_reason != "eos")
    # As it happens: the same, turn by turn.
    live = LiveStream(policy, SamplingConfig(**options), replace(samples[0], turns=()), seed=4)  # type: ignore[arg-type]
    for turn in samples[0].turns:
        live.observe(turn)
    assert written([live.rollout]) == written(together[:1])
    # What the hook added counts in the engine's log-probs of text alone.
    hook.remove()
    batch = [Experience.from_rollout(r) for r in together]
    out = policy.forward(pack_experiences(batch)).code_logprobs
    assert out is not None
    engine = torch.cat([wide(e.rollout_logprobs)[e.loss_mask] for e in batch])
    frames = torch.cat([frame_rows(e)[e.loss_mask] for e in batch])
    torch.testing.assert_close(out.detach()[frames], engine[frames], atol=1e-5, rtol=0)
    assert int(frames.sum()) > 20


def frame_rows(e: Experience) -> Tensor:
    return torch.zeros(len(e), dtype=torch.bool) if e.codes is None else e.codes[:, 0] >= 0


def test_a_stream_does_not_begin_with_speech(speech: list[Utterance]) -> None:
    policy = dualize(make_omni(), Q, 64)
    sample = replace(interpretation_sample(stream(speech, 0, 2)), metadata={"respond": "speech"})
    with pytest.raises(ValueError, match="turns begin with text"):
        run(policy, [sample])
