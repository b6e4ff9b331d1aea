"""The view in a real browser, headless Chromium, which follows a run while it trains."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.data.preferences import read_pairs
from audiorl.models.tiny import tiny_tokenizer
from audiorl.report.view.sound import FRAMES
from tests.conftest import TEXTS
from tests.support.flows import add_scene, write_flow_run
from tests.support.reports import rollout, write_lines
from tests.support.views import browser_page, until, view_process

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]


def test_curves_and_rollouts_of_two_runs(run_dir: Path, recorded: Path) -> None:
    row = rollout("no task", 0, 0.0, 0.0)
    row["sample"]["task"] = ""
    write_lines(run_dir / "rollouts/step_000011.jsonl", [row])
    with view_process(run_dir, recorded) as (address, _), browser_page(address) as page:
        page.wait_for_selector(".chart[data-metric='reward/mean'] canvas")
        first = page.locator(".chart[data-metric='reward/mean']")
        values = first.locator(".u-series:not(.mean) .u-value")
        assert values.all_inner_texts() == ["", "0.9667"], "the last of 0, 1/30 … 29/30, not the mean of the last ones"
        final = page.locator(".chart[data-metric='eval/accuracy'] .u-value").all_inner_texts()
        assert final == ["", "0.7", "0.45"], "the last evaluation, and that of the control"
        held = [" ".join(row.split()) for row in page.locator(".results tbody tr").all_inner_texts()]
        assert held == ["my-run · accuracy 40.0% 70.0% 45.0% +30.0 points"]
        box = first.locator(".u-over").bounding_box()

        def value(share: float) -> list[str]:
            page.mouse.move(box["x"] + 1 + share * (box["width"] - 2), box["y"] + box["height"] / 2)
            return list(values.all_inner_texts())

        until(lambda: value(0) == ["step 1", "0"], 10)
        until(lambda: value(1) == ["step 30", "0.9667"], 10)
        value(0.2)
        page.mouse.down()
        value(0.6)
        page.mouse.up()
        until(lambda: value(1)[0] == "step 18", 10)  # dragging zooms
        page.fill("input[aria-label=metrics]", "^kl$")
        assert page.locator(".chart").count() == 1
        page.fill("input[aria-label=metrics]", "(")
        assert "regular expression" in page.locator("main .note").inner_text().lower()

        page.click("nav >> text=Rollouts")
        page.wait_for_selector(".hit")
        assert "101 rollouts" in page.locator(".count").inner_text()
        page.fill("input[aria-label=search]", "spanish reward>2")
        until(lambda: not page.locator(".count").inner_text().startswith("101"))
        shown = page.locator(".hit .written").all_inner_texts()
        assert shown and all("Spanish" in text for text in shown)
        page.fill("input[aria-label=search]", "nonsense>1")
        page.wait_for_selector(".error")
        assert "no field or reward part is called nonsense" in page.locator(".error").inner_text()
        page.fill("input[aria-label=search]", "spanish reward>2")
        until(lambda: page.locator(".hit .written").all_inner_texts() == shown)
        page.fill("input[aria-label=search]", "")
        until(lambda: "101 rollouts" in page.locator(".count").inner_text())
        page.select_option("[aria-label=task]", "(none)")
        until(lambda: page.locator(".hit").count() == 1)
        assert page.locator("[aria-label=task]").input_value() == "(none)"
        page.select_option("[aria-label=task]", "all tasks")
        until(lambda: "101 rollouts" in page.locator(".count").inner_text())
        page.fill("input[aria-label=search]", "in the middle")
        until(lambda: not page.locator(".count").inner_text().startswith("101"))
        until(lambda: "in the middle" in "".join(page.locator(".hit .written").all_inner_texts()))
        page.click(".hit .written")
        page.wait_for_selector(".member.chosen")
        page.go_back()
        page.wait_for_selector(".hit")

        page.click("nav >> text=Before and after")
        page.wait_for_selector(".flag.broken")
        assert page.locator("ins").first.inner_text() == "then"
        page.click(".run >> text=recorded")
        assert page.locator(".run[aria-pressed=false]").count() == 1


def test_the_final_evaluation_appears_in_the_curves(run_dir: Path) -> None:
    after, written = (run_dir / name for name in ("eval/after.jsonl", "eval.json"))
    rows, entries = after.read_text(), json.loads(written.read_text())
    after.unlink()
    written.write_text(json.dumps({"before": entries["before"]}))
    with view_process(run_dir) as (address, _), browser_page(address) as page:
        values = page.locator(".chart[data-metric='eval/accuracy'] .u-value")
        until(lambda: values.all_inner_texts() == ["", "0.69", "0.41"])
        after.write_text(rows)
        written.write_text(json.dumps(entries))
        until(lambda: values.all_inner_texts() == ["", "0.7", "0.45"])


def test_sound_plays_and_its_cursor_moves(recorded: Path) -> None:
    with view_process(recorded) as (address, _), browser_page(address) as page:
        page.goto(f"{page.url}#/rollout/0/1/0")
        page.wait_for_selector(".picture img")
        until(lambda: page.evaluate("document.querySelector('.picture img').naturalWidth"))
        page.evaluate("const a = document.querySelector('audio'); a.muted = true; a.play()")
        until(lambda: page.evaluate("document.querySelector('audio').currentTime") > 0.1)
        page.evaluate("document.querySelector('audio').pause()")
        assert float(page.locator(".picture i").evaluate("line => parseFloat(line.style.left)")) > 1


def test_a_line_follows_the_speech_of_a_stream(tmp_path: Path) -> None:
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio/stream.wav", 0.1 * np.sin(np.arange(64_000) / 10), 16_000)
    row = rollout("s", 0, 1.0, 0.5)
    row["sample"] |= {"turns": [{"end": end, "reference": ""} for end in (1.0, 2.0, 3.0, 4.0)]}
    row["sample"]["audio"] = [{"path": "audio/stream.wav", "start": 0.0, "duration": 4.0}]
    row["segments"] = [{"text": text, "stop_reason": "eos", "num_tokens": 1} for text in ("", "dos", "", "tres")]
    write_lines(tmp_path / "rollouts/step_000001.jsonl", [row])
    with view_process(tmp_path) as (address, _), browser_page(address) as page:
        page.goto(f"{page.url}#/rollout/0/1/0")
        page.wait_for_selector(".stream button[data-at]")
        assert page.locator(".grid .cell.write").count() == 2 and not page.locator(".playhead").is_visible()
        page.locator(".stream audio").evaluate("audio => { audio.muted = true; }")
        page.click("button[data-at='2.000']")
        until(lambda: page.locator(".stream audio").evaluate("audio => audio.currentTime") > 2.1)
        assert page.locator(".playhead").is_visible() and page.locator("button[data-now]").count() == 1
        first = page.locator(".playhead").bounding_box()["x"]
        until(lambda: page.locator(".playhead").bounding_box()["x"] > first)


def test_tokens_have_colours(recorded: Path) -> None:
    tiny_tokenizer(TEXTS, 400).save_pretrained(recorded / "checkpoints" / "grpo" / "step_000001")
    with view_process(recorded) as (address, _), browser_page(address) as page:
        page.goto(f"{page.url}#/rollout/0/1/0")
        page.wait_for_selector(".token[data-tone]", state="attached")
        assert page.locator("[aria-label='token colour'] option").all_inner_texts() == ["log-prob", "advantage", "none"]
        token = page.locator(".member.chosen .token").nth(3)
        logprob = float(token.get_attribute("data-log-prob"))
        strength = "token => Number(token.style.getPropertyValue('--strength'))"
        assert abs(token.evaluate(strength) - (1 - math.exp(logprob))) < 1e-3
        page.select_option("[aria-label='token colour']", "none")
        until(lambda: token.evaluate(strength) == 0)


def test_labels_by_keyboard(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    with view_process(recorded, "--labels", file) as (address, _), browser_page(address) as page:
        page.click("#to-label")
        page.wait_for_selector(".verdicts button")
        shown = page.locator(".option .written").all_inner_texts()
        page.keyboard.press("b")
        until(lambda: page.locator(".sub").first.inner_text().startswith("1 "))
        second = page.locator("[data-question]").get_attribute("data-question")
        page.keyboard.press("s")
        until(lambda: page.locator("[data-question]").get_attribute("data-question") != second)
        page.keyboard.press("a")
        until(lambda: page.locator(".sub").first.inner_text().startswith("2 "))
    pairs = read_pairs(file).samples
    assert len(pairs) == 2 and [pairs[0].rejected, pairs[0].chosen] == shown


def test_a_drag_over_a_sound_or_a_click_on_an_object_is_a_region_that_is_made_anew(tmp_path: Path) -> None:
    run = write_flow_run(tmp_path / "flow", 0.1 * np.sin(np.arange(8000) / 10))
    add_scene(run)
    with view_process(run) as (address, _), browser_page(address, 390) as page:
        page.click("#to-edits")
        page.wait_for_selector(".card .picture img")
        box = page.locator(".picture").first.bounding_box()
        for share, act in ((0.25, page.mouse.down), (0.5, lambda: None), (0.75, page.mouse.up)):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + 9)
            act()
        start, end = map(float, page.locator("[aria-label=regions]").input_value().split(":"))
        assert start < end and page.locator(".region").count() == 1
        until(lambda: page.evaluate("document.querySelector('.film').naturalWidth > 0"))
        film = page.locator(".film").bounding_box()
        page.fill("[aria-label=regions]", "")
        page.locator(".film").click(position={"x": film["width"] * (3 + 0.15) / FRAMES, "y": film["height"] / 2})
        assert (
            page.locator("[aria-label=regions]").input_value() == "0.10:0.30" and page.locator(".region").count() == 1
        )
        page.click("text=make")
        page.wait_for_selector(".error")
        page.fill("[aria-label=change]", "Add a voice.")
        page.click("text=make")
        page.wait_for_selector(".members .card audio")
        until(lambda: page.evaluate("document.querySelector('.members audio').duration > 0.1"))
        page.click("text=go on from this")
        assert page.locator("main > .card h3").inner_text() == "before: Add a voice."
        page.fill("[aria-label=regions]", "1:99")
        page.click("text=make")
        until(lambda: page.locator(".error").count())
        assert "past the end" in page.locator(".error").inner_text()


def test_a_live_run(tmp_path: Path) -> None:
    """Points and rollouts appear while a recipe trains, without a reload."""
    run = tmp_path / "live"
    command = [sys.executable, "-m", "audiorl.cli", "train", "mmau-grpo", "--tiny", "--out", str(run)]
    command += ["--max-steps", "40", "--rl.rollouts-every", "1"]
    log = (tmp_path / "log").open("w")
    training = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while not list((run / "rollouts").glob("step_*.jsonl")):
            assert training.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.1)
        with view_process(run) as (address, _), browser_page(address) as page:
            page.wait_for_selector(".run.training")
            page.wait_for_selector("[data-metric='tokens_per_s'] canvas")
            last = page.locator("[data-metric='tokens_per_s'] .u-legend")
            before = last.inner_text()
            until(lambda: last.inner_text() != before)
            page.click("nav >> text=Rollouts")
            page.wait_for_selector(".hit")

            def count() -> int:
                return int(page.locator(".count b").first.inner_text().replace(",", ""))

            number = count()
            until(lambda: count() > number)
        assert training.poll() is None, "the run had ended before it was looked at"
    finally:
        training.kill()
        training.wait()
        log.close()
    assert json.loads((run / "config.json").read_text())["recipe"]
