"""lmms-eval's own evaluator with our model on a task of its own format. lmms-eval is not part of the tests' packages:

python -m venv lmms && lmms/bin/pip install lmms-eval==0.7.3 pytest hypothesis && lmms/bin/pip install -e .
lmms/bin/python -m pytest -m slow tests/unit/eval/test_eval_lmms.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import load_policy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import make_omni, make_whisper

pytest.importorskip("lmms_eval", reason="lmms-eval is installed in an environment of its own")
pytestmark = pytest.mark.slow

TASK = Path(__file__).parents[2] / "support" / "lmms_task"


@pytest.fixture
def rows(speech: list[Utterance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Utterance]:
    """Three recordings as the data of the task."""
    chosen = speech[:120:40]
    lines = [json.dumps({"audio": str(u.clip.path), "text": u.text}) for u in chosen]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    return chosen


def evaluated(model: Path, arguments: str = "") -> dict[str, Any]:
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    return simple_evaluate(
        model="audiorl",
        model_args=f"model={model}{arguments}",
        tasks=["audiorl_words"],
        task_manager=TaskManager(include_path=str(TASK), include_defaults=False),
        batch_size=2,
        device="cpu",
        log_samples=True,
    )


def test_the_evaluator_scores_the_engines_answers(rows: list[Utterance], tmp_path: Path) -> None:
    make_omni().save(tmp_path / "model")
    results = evaluated(tmp_path / "model")
    engine = HFEngine(load_policy(tmp_path / "model"), SamplingConfig(temperature=0, max_new_tokens=12))
    samples = [Sample(str(i), (Message("user", (u.clip, "What is said?")),)) for i, u in enumerate(rows)]
    texts = [r.text.partition("\n\n")[0] for r in engine.generate([Request(s) for s in samples])]
    logged = sorted(results["samples"]["audiorl_words"], key=lambda row: row["doc_id"])
    assert [row["filtered_resps"] for row in logged] == [[text] for text in texts] and len(set(texts)) > 1
    score = results["results"]["audiorl_words"]["characters,none"]
    assert score == pytest.approx(sum(sum(map(ord, text)) for text in texts) / 1000 / len(texts))


def test_whisper_is_asked_for_transcripts(rows: list[Utterance], tmp_path: Path) -> None:
    make_whisper().save(tmp_path / "model")
    assert len(evaluated(tmp_path / "model", ",language=es")["samples"]["audiorl_words"]) == 3


def test_what_cannot_be_given(rows: list[Utterance], tmp_path: Path) -> None:
    from audiorl.eval._lmms_eval_model import AudioRL, _clip

    with pytest.raises(ValueError, match="name the model"):
        AudioRL()
    with pytest.raises(ValueError, match="no model argument is called 'think'"):
        AudioRL("m", think=True)
    with pytest.raises(ValueError, match="--batch_size auto: give a number"):
        AudioRL("m", batch_size="auto")
    with pytest.raises(ValueError, match="task, row 3: a object is no audio"):
        _clip(object(), "task, row 3")
    stereo = _clip({"array": np.zeros((2, 16_000)), "sampling_rate": 16_000, "path": None}, "task, row 0")
    assert stereo.load().shape == (16_000,)
    assert isinstance(_clip({"path": "a.wav", "bytes": None}, "row 0"), AudioClip)
