"""Reading the HTML of a report."""

from __future__ import annotations

import json
from html.parser import HTMLParser

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
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("data:")]
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
