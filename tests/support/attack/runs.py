"""Targets that are what runs write: run folders, their reports and views, recorded rollouts, checkpoints, models."""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.config import to_json
from audiorl.data.rollout_rows import array_of, read_rollouts
from audiorl.models import load_policy
from audiorl.models.families.text import tiny
from audiorl.models.weights import copy_weights, read_tensors
from audiorl.recipes._loader import find_script, load_recipe, parse_config, recorded_recipe
from audiorl.report import write_report
from audiorl.report.view.labels import next_question
from audiorl.run.checkpoint import save_checkpoint
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.types import Message, Rollout, Sample, Score, Segment, Turn
from tests.support.attack.data import rows_of
from tests.support.attack.mutation import mutate_json, mutate_safetensors
from tests.support.attack.targets import Input, Target
from tests.support.checkpoints import load_checkpoint, save_run
from tests.support.reports import Checker
from tests.support.views import client, viewed


@dataclass
class Weights:
    """A model of two weights."""

    weights: dict[str, Tensor]

    def save(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors")

    def restore(self, folder: Path) -> None:
        copy_weights(self.weights, read_tensors(folder / "model.safetensors"), str(folder))

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(self.weights, weights, "weights")


def _weights() -> Weights:
    return Weights({"head.weight": torch.arange(12.0).view(3, 4) / 7, "norm": torch.ones(4)})


def _trainer() -> dict[str, dict[str, Tensor]]:
    moments = {"head.weight": torch.arange(12.0).view(3, 4) / 100}
    return {"optim": moments, "rng": {"cpu": torch.arange(9, dtype=torch.uint8)}}


@cache
def run_folder() -> Path:
    """A small run of an installed recipe, as training writes it, with a stream among its rollouts."""
    folder = Path(tempfile.mkdtemp()) / "run"
    file = find_script("recipes", "mmau-grpo")
    config = parse_config(load_recipe(file), ["--tiny"])
    run = Run.create(folder, str(file.resolve()), ["--tiny"], config)
    for step in range(1, 5):
        values = {"reward/mean": step / 4, "kl": step / 100, "policy/entropy": 1.5, "tokens_per_s": 90.0}
        run.log("grpo", step, values | ({"eval/accuracy": step / 5} if step % 2 else {}))
    wav = (0.3 * np.sin(np.arange(8000) * 0.2)).astype(np.float32)
    clip = AudioClip(array=wav, sample_rate=16_000)
    question = Sample("q", (Message("user", (clip, "Which?")),), ("x",), ("x", "y"), "qa", {"topic": "t", "n": 3})
    score = Score(1.5, {"accuracy": 1.0, "format": 0.5})
    rollouts = [Rollout(question, (_segment(f"answer {i}"),), "1/0", i, score) for i in range(2)]
    turns = tuple(
        Turn(
            AudioClip(array=wav[4000 * k : 4000 * k + 4000], sample_rate=16_000, duration=0.25), 0.25 * (k + 1), "hola"
        )
        for k in range(2)
    )
    stream = Sample("s", (Message("system", ("Interpret.",)),), ("hola",), task="en-es", turns=turns)
    segments = tuple(_segment("hola", source_time=t.end, emit_time=t.end + 0.1) for t in turns)
    more = Score(0.5, {"q": 0.5}, (0.2, 0.3), None, {"q": (0.2, math.nan)})
    run.write_rollouts("grpo", 1, [*rollouts, Rollout(stream, segments, "1/1", 0, more)], [0.5, -0.5, 0.0])
    results = {"accuracy": 0.4, "n": 2, "low": 0.3, "high": 0.5, "by_task": {"qa": {"accuracy": 0.4, "n": 2}}}
    for name in ("before", "after"):
        judged = [
            Rollout(question, r.segments, r.group_id, r.index, Score(1.0, {"accuracy": 1.0})) for r in rollouts[:1]
        ]
        run.write_eval(name, results, judged, [{"correct": True, "parts": {"accuracy": 1.0}} for _ in judged])
    save_run(run, "grpo", 4, _weights(), _trainer())
    run.finish("before")
    run.close()
    return folder


def _segment(text: str, **more: Any) -> Segment:
    ids = torch.tensor([3, 4, 5])
    return Segment(torch.arange(2), ids, torch.tensor([-0.1, -0.2, -0.3]), text, policy_version=1, **more)


def written(given: Input, folder: Path) -> Path:
    """A copy of the run in which one file is the input."""
    run = folder / "run"
    shutil.copytree(run_folder(), run)
    (run / given.name).write_bytes(given.data)
    return run


def _run_seeds(*names: str) -> Any:
    return lambda: [Input(name, (run_folder() / name).read_bytes()) for name in names]


# -- run folders -------------------------------------------------------------------------------------------------------


def _open(given: Input, folder: Path) -> Any:
    run = written(given, folder)
    _, config = recorded_recipe(run, [])
    model = _weights()
    with Run.open(run) as opened:  # a checkpoint that is gone is noted in state.json
        step, checkpoint = opened.last_checkpoint("grpo")
    trainer = None if checkpoint is None else load_checkpoint(checkpoint, model)[0]
    return {"config": config, "metrics": read_metrics(run / "metrics.jsonl"), "step": step, "seq": opened._seq,
            "trainer": trainer, "weights": model.weights}  # fmt: skip


def _judge_run(given: Input, result: Any) -> Iterator[str]:
    row = json.loads(given.data) if given.name.endswith(".json") else {}
    if given.name == "config.json":
        resolved = to_json(result["config"])
        for place, value in _leaves(row["config"]):
            held: Any = resolved
            for key in place:
                held = held.get(key, "nothing") if isinstance(held, dict) else "nothing"
            # An integer of an option with a fraction is its nearest float; null is an option that an old run left out.
            same = held == (float(value) if isinstance(held, float) and isinstance(value, int) else value)
            if not same and not (value is None and held == "nothing"):
                yield f"{'.'.join(map(str, place))}: recorded as {value!r}, runs as {held!r}"
    if given.name == "state.json":
        if type(row["seq"]) is not int or row["seq"] != result["seq"]:
            yield f"seq {row['seq']!r}"
        if "grpo" in row["checkpoints"] and result["step"] != 4:
            yield f"the checkpoint at step {result['step']}"
    first = result["seq"] - len(result["metrics"])
    if first < 0 or (first and given.name != "metrics.jsonl"):  # without its first lines: an earlier file was removed
        yield f"{len(result['metrics'])} lines of metrics for seq {result['seq']}"
    for number, line in enumerate(result["metrics"], first):
        if type(line.get("seq")) is not int or line["seq"] != number:
            yield f"line {number}: seq {line.get('seq')!r}"
    if result["trainer"] is not None:
        yield from _same(result["trainer"]["optim"] | result["weights"], _trainer()["optim"] | _weights().weights)


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, (*place, key))
    else:
        yield place, value


def _same(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in expected.items():
        if not torch.equal(tensors[name], tensor):
            yield f"{name} is not what was saved"


# -- reports -----------------------------------------------------------------------------------------------------------


def _report(given: Input, folder: Path) -> Any:
    return write_report(written(given, folder)).read_text(encoding="utf-8")


def _judge_report(given: Input, result: Any) -> Iterator[str]:
    try:
        checked = Checker(result)
    except AssertionError as error:
        yield f"unbalanced tags: {error}"
        return
    if checked.fetched:
        yield f"fetches {checked.fetched[0]!r}"
    for line in given.data.split(b"\n") if given.name.endswith(".jsonl") else ():
        if b"/etc/passwd" in line and b"root:" in result.encode(errors="replace"):
            yield "embeds a file that is not the run's"


# -- recorded rollouts -------------------------------------------------------------------------------------------------


def _rollouts(given: Input, folder: Path) -> Any:
    path = folder / "run" / given.name
    path.parent.mkdir(parents=True)
    path.write_bytes(given.data)
    return read_rollouts(path)


def _judge_rollouts(given: Input, result: Sequence[Rollout]) -> Iterator[str]:
    rows = list(rows_of(given.data).values())
    if len(rows) != len(result):
        yield f"{len(result)} rollouts of {len(rows)} rows"
        return
    for row, rollout in zip(rows, result, strict=True):
        score = row.get("score")
        if (score is None) != (rollout.score is None):
            yield f"a score {score!r} became {rollout.score}"
        if rollout.score is not None and not _equal(rollout.score.total, score["total"]):
            yield f"a total {score['total']!r} became {rollout.score.total}"
        if len(row["segments"]) != len(rollout.segments):
            yield f"{len(rollout.segments)} of {len(row['segments'])} segments"
        for segment, held in zip(row["segments"], rollout.segments, strict=True):
            ids = array_of(segment["ids"])
            if held.ids.tolist() != ids.tolist() or len(held.logprobs) != len(ids) or held.text != segment["text"]:
                yield "other tokens than the row's"
            if type(segment["policy_version"]) is not int:
                yield f"policy_version {segment['policy_version']!r}"
        if type(row["index"]) is not int or rollout.index != row["index"] or rollout.group_id != row["group_id"]:
            yield f"index {row['index']!r}, group {row['group_id']!r}"


def _equal(held: float, given: Any) -> bool:
    return type(given) in (int, float) and math.isfinite(given) and held == given


# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINT = "checkpoints/grpo/step_000004"


def _checkpoint(given: Input, folder: Path) -> Any:
    """resigned/NAME: the manifest is written again, as by somebody who changes a checkpoint on purpose."""
    kind, _, name = given.name.rpartition("/")
    meta = json.loads((run_folder() / CHECKPOINT / "trainer.json").read_text())
    save_checkpoint(folder / "step", _weights(), _trainer(), meta)
    (folder / "step" / name).write_bytes(given.data)
    if kind == "resigned":
        manifest = json.loads((folder / "step" / "manifest.json").read_text())
        manifest[name] = [len(given.data), zlib.crc32(given.data)]
        (folder / "step" / "manifest.json").write_text(json.dumps(manifest))
    model = _weights()
    trainer, meta = load_checkpoint(folder / "step", model)
    return trainer, meta, model.weights


def _judge_checkpoint(given: Input, result: Any) -> Iterator[str]:
    trainer, meta, weights = result
    kind, _, name = given.name.rpartition("/")
    if kind != "resigned":
        yield from _same(trainer["optim"] | weights, _trainer()["optim"] | _weights().weights)
    for part, tensors in {**trainer, "model": weights}.items():
        for key, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                yield f"{part}/{key} is not finite"
    for key, tensor in _weights().weights.items():
        if weights[key].shape != tensor.shape or weights[key].dtype != tensor.dtype:
            yield f"{key}: {weights[key].dtype} {tuple(weights[key].shape)}"
    if name == "trainer.json":
        row = json.loads(given.data)
        for field in ("step", "seq"):
            if type(row.get(field, 0)) is not int or getattr(meta, field) != row.get(field, 0):
                yield f"{field}: {row.get(field)!r} became {getattr(meta, field)}"


@cache
def _checkpoint_seeds() -> tuple[Input, ...]:
    folder = run_folder() / CHECKPOINT
    names = ("trainer.json", "trainer.safetensors", "model.safetensors")
    seeds = [Input(name, (folder / name).read_bytes()) for name in (*names, "manifest.json")]
    return (*seeds, *(Input(f"resigned/{name}", (folder / name).read_bytes()) for name in names))


def _mutate_file(rng: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    return mutate_json(rng, data) if data[:1] == b"{" else mutate_safetensors(rng, data)


# -- model folders -----------------------------------------------------------------------------------------------------


@cache
def _model_folder() -> Path:
    folder = Path(tempfile.mkdtemp()) / "model"
    tiny(["a few words"] * 20, hidden=32, layers=1, vocab_size=300).save(folder)
    return folder


def _model(given: Input, folder: Path) -> Any:
    model = folder / "model"
    shutil.copytree(_model_folder(), model)
    (model / given.name).write_bytes(given.data)
    return load_policy(model)


def _judge_model(given: Input, policy: Any) -> Iterator[str]:
    for name, weight in policy.parameters_by_name().items():
        if not bool(weight.isfinite().all()):
            yield f"{name} is not finite"
    if given.name == "model.safetensors":
        original = load_file(_model_folder() / "model.safetensors")
        shapes = {name: tuple(weight.shape) for name, weight in policy.parameters_by_name().items()}
        if any(shapes.get(name, tuple(t.shape)) != tuple(t.shape) for name, t in original.items()):
            yield "other shapes than the model's"


def _model_seeds() -> list[Input]:
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files = [_model_folder() / name for name in names]
    return [Input(file.name, file.read_bytes()) for file in files if file.is_file()]


# -- views -------------------------------------------------------------------------------------------------------------

RECORDS = ("config.json", "state.json", "metrics.jsonl")
SHOWN = ("config.json", "metrics.jsonl", "eval.json", "eval/before.jsonl", "eval/after.jsonl")
ROLLOUTS = "rollouts/step_000001.jsonl"
LABELS = "labels.jsonl"
PAGES = ("/", "/state", "/metrics/0", "/rollouts", "/rollouts?q=reward>0 answer&order=reward ↓")
EVALUATIONS = "/evaluations?left=0/before&right=0/after&show=all"


def _views(given: Input, folder: Path) -> dict[str, Any]:
    """The answers to all pages. A damaged file of labels is refused as the view starts."""
    run = written(given, folder)
    view = viewed(run, labels=run / LABELS, mode="pairs")
    requests = client(view)
    paths = [*PAGES, EVALUATIONS, *(f"/rollouts/{place}" for place in view.index.search().places)]
    answers = {path: requests.get(path) for path in [*paths, "/question"]}
    assert view.labels is not None
    question = next_question(view.index, view.labels, random.Random(0))
    if question is not None:
        try:
            view.labels.add(question, "a", view.index)
        except ValueError as error:  # a row that the page shows, but that is no complete rollout
            assert str(error)
    return answers


def _judge_views(given: Input, answers: dict[str, Any]) -> Iterator[str]:
    for path, answer in answers.items():
        refused = 400 if path == EVALUATIONS and given.name.startswith("eval/") else 404
        if answer.status_code not in (200, refused):
            yield f"{path}: {answer.status_code} {answer.text[:200]}"
        if answer.status_code == 200 and path.startswith(("/rollouts", "/evaluations")):
            try:
                if "script" in Checker(answer.text).tags:
                    yield f"{path}: a script"
            except AssertionError as error:
                yield f"{path}: unbalanced tags: {error}"
        if b"root:" in answer.content:
            yield f"{path}: a file that is not the run's"


def _view_seeds() -> list[Input]:
    run = run_folder()
    label = b'{"verdict": "a", "prompt": [], "chosen": "x", "rejected": "y", "label_of": ["0", "1"], "time": 1.0}\n'
    names = (*SHOWN, "state.json", ROLLOUTS, ROLLOUTS, ROLLOUTS)
    return [*(Input(name, (run / name).read_bytes()) for name in names), Input(LABELS, label * 2)]


TARGETS = [
    Target("run folders", _open, _judge_run, mutate_json, 1.5, _run_seeds(*RECORDS)),
    Target("reports", _report, _judge_report, mutate_json, 0.4, _run_seeds(*SHOWN, ROLLOUTS, ROLLOUTS)),
    Target("rollouts", _rollouts, _judge_rollouts, mutate_json, 1.0, _run_seeds(ROLLOUTS)),
    Target("checkpoints", _checkpoint, _judge_checkpoint, _mutate_file, 1.0, _checkpoint_seeds),
    Target("models", _model, _judge_model, _mutate_file, 0.3, _model_seeds),
    Target("views", _views, _judge_views, mutate_json, 0.4, _view_seeds),
]
