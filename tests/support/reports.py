"""Reading the HTML of a report."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import numpy as np
import soundfile

from audiorl.report import write_report

VOID = {"meta", "br", "img", "input", "link", "hr", "col"}


EVIL = "<script>alert(1)</script>\"'&$\\frac$"


class Checker(HTMLParser):
    """Fails on unbalanced tags; collects tag names and what is fetched from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.fetched = [], [], []
        self.feed(text)
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith(("data:", "#"))]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()


def report(run_dir):
    text = write_report(run_dir).read_text(encoding="utf-8")
    return text, Checker(text)


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rollout(group, index, total, advantage, text="<think>hm</think><answer>two</answer>", **more):
    sample = {"id": group, "prompt": "[audio] Which number?", "references": ["two"], "choices": [], "task": "digits"}
    sample["audio"] = [{"path": "audio/tone.wav", "start": 0.0, "duration": None}]
    segments = [{"text": text, "stop_reason": "eos", "num_tokens": 5, "source_time": None, "emit_time": None}]
    row = {"step": 1, "group_id": group, "index": index, "sample": sample, "segments": segments, "text": text}
    score = {"total": total, "parts": {"accuracy": total, "format": 0.0}}
    return {**row, "score": score, "advantage": advantage, **more}


def answer(name, correct, text):
    return {
        "id": name,
        "prompt": f"[audio] {name}?",
        "references": ["gold"],
        "text": text,
        "correct": correct,
        "audio": [{"path": "audio/tone.wav", "start": 0.0, "duration": None}],
    }


def write_run(run):
    """A small but complete run folder, written the way training writes it."""
    (run / "audio").mkdir(parents=True)
    tone = 0.3 * np.sin(np.arange(8000) * 2 * math.pi * 440 / 16_000)
    soundfile.write(run / "audio" / "tone.wav", tone, 16_000)
    config = {
        "recipe": "recipes/think_qa.py",
        "argv": ["--rl.lr", "2e-5", "--title", "it's"],
        "config": {"grpo": {"lr": 2e-5, "clip": [0.2, 0.28]}, "seed": 0},
        "versions": {"torch": "2.13.0"},
    }
    (run / "config.json").write_text(json.dumps(config))
    metrics = [{"seq": i, "phase": "sft", "step": i + 1, "time": i, "loss": 3 - i / 10} for i in range(20)]
    for i in range(30):
        row = {"seq": 20 + i, "phase": "grpo", "step": i + 1, "time": 20 + i, "reward/mean": i / 30, "kl": i / 1e4}
        row |= {"reward/accuracy": i / 40, "reward/format": 1.0, "policy/entropy": 1 - i / 60, "tokens_per_s": 900.0}
        metrics.append(row | ({"eval/accuracy": 0.4 + i / 100} if i % 10 == 9 else {}))
    metrics += [{"seq": 50, "phase": "control", "step": 10, "time": 60, "eval/accuracy": 0.41}]
    write_lines(run / "metrics.jsonl", metrics)
    before = {"accuracy": 0.4, "n": 100, "low": 0.31, "high": 0.5, "by_task": {"digits": {"accuracy": 0.4, "n": 100}}}
    after = {"accuracy": 0.7, "n": 100, "low": 0.6, "high": 0.78, "by_task": {"digits": {"accuracy": 0.7, "n": 100}}}
    control = {"accuracy": 0.45, "n": 100, "low": 0.36, "high": 0.55, "mean_length": 21.5}
    (run / "eval.json").write_text(json.dumps({"before": before, "after": after, "control": control}))
    write_lines(run / "eval/before.jsonl", [answer("a", False, "first a"), answer("b", True, "first b")])
    write_lines(run / "eval/after.jsonl", [answer("a", True, "then a"), answer("b", False, "then b")])
    write_lines(run / "rollouts/step_000001.jsonl", [rollout("g", 0, 0.0, -1.0), rollout("g", 1, 1.0, 1.0)])
    write_lines(run / "rollouts/step_000005.jsonl", [rollout("middle", 0, 0.0, 0.0, text="in the middle")])
    write_lines(run / "rollouts/step_000010.jsonl", [rollout("h", 0, 1.0, 0.0, text="at the last step")])
    return run
