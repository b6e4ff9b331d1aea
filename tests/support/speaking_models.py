"""What tests of models that speak share: a codec, speech by hand, and rows to learn from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.models import AudioPolicy, Prompt
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.codecs import save_mimi
from tokenizers_audio import AudioTokenizer, load

_draw = torch.Generator().manual_seed(5)
CODES = [torch.randint(0, 64, (4, length), generator=_draw) for length in (5, 9, 1)]
"""Speech of four codebooks of 64 codes."""


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> AudioTokenizer:
    """A tiny Mimi: 4 codebooks of 64 codes, 12.5 frames a second."""
    folder = tmp_path_factory.mktemp("codec")
    save_mimi(folder)
    return load(folder)


def laid_out(policy: AudioPolicy, prompt: Prompt, codes: Tensor, text: str = "", after: str = "") -> Experience:
    """A prompt and its answer: text, speech, text. Without text before it, the prompt has opened speech."""
    layout = policy.speech
    assert layout is not None
    rows = layout.tokens(codes)

    def words(written: str) -> Tensor:
        return torch.tensor(policy.tokenizer.encode(written, add_special_tokens=False), dtype=torch.long)

    before = torch.cat([words(text), torch.tensor([layout.begin_id])]) if text else words("")
    ids = torch.cat([before, rows.ids, words(after)])
    tokens = torch.zeros(len(ids), layout.codebooks, dtype=torch.bool)
    tokens[:, 0] = True
    spoken = slice(len(before), len(before) + len(rows.ids))
    tokens[spoken] = rows.code_mask
    written = torch.full((len(ids), layout.codebooks), -1)
    written[spoken] = rows.codes
    segment = Segment(prompt.ids, ids, torch.zeros(written.shape), codes=written, code_mask=tokens)
    segment = Segment(**{**vars(segment), "prompt_codes": prompt.codes, "audio": prompt.audio})
    return Experience.from_rollout(Rollout(Sample("s", ()), (segment,), "g"))


def experiences(policy: AudioPolicy) -> list[Experience]:
    """Two groups; answers of text and speech, of speech that the prompt opens, and of text alone."""
    asked = Sample("a", (Message("user", ("What is said?",)),))
    prompt = policy.prompt(asked)
    mixed = [laid_out(policy, prompt, c, "yes", "no") for c in CODES[:2]]
    text = torch.tensor(policy.tokenizer.encode("who speaks?"))
    silent = Segment(prompt.ids, text, torch.zeros(len(text)))
    spoken = policy.prompt(Sample("b", (Message("user", ("why",)),), metadata={"respond": "speech"}))
    return [
        *(e.replace(group_id="a") for e in mixed),
        Experience.from_rollout(Rollout(asked, (silent,), "a")),
        *(laid_out(policy, spoken, c).replace(group_id="b") for c in CODES),
    ]
