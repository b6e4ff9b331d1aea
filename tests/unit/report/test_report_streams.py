"""Streams on the page: where texts, sound and rewards stand in time, what plays, and quality against latency."""

import json
import re
from html import unescape

import numpy as np
import pytest
import soundfile
from matplotlib.figure import Figure

from audiorl.report.audio import Players
from audiorl.report.charts import LIGHT, draw_tradeoff
from audiorl.report.run import load_run
from audiorl.report.streams import Band, stream
from audiorl.report.summary import Point, headline, sentence
from tests.support.reports import EVIL, Checker, report, write_lines

RATE = 16_000
ENDS = [1.0, 2.0, 3.0, 3.5]


def turns(texts=("", "uno dos", "", " tres"), ends=ENDS):
    return [
        {
            "end": end,
            "reference": text,
            "source": f"said {text}" if text else "",
            "reference_seconds": 0.8 if text else None,
        }
        for end, text in zip(ends, texts, strict=True)
    ]


def sample(name="s1", clip="audio/talk.wav", **changes):
    audio = [{"path": clip, "start": 0.0, "duration": 3.5}]
    made = {"id": name, "prompt": "Translate.", "references": ["uno dos tres"], "task": "en-es"}
    return {**made, "audio": audio, "turns": turns(), **changes}


def rollout(index=0, texts=("", "uno", "dos", ""), total=1.0, advantage=0.5, name="s1", **changes):
    segments = [
        {"text": t, "stop_reason": "eos", "num_tokens": len(t), "source_time": end, "emit_time": end / 10}
        for t, end in zip(texts, ENDS, strict=True)
    ]
    score = {"total": total, "parts": {"quality": 0.4, "stream_quality": 0.7}, "per_segment": [0.1, -0.4, 0.0, 1.2]}
    score["segment_parts"] = {"quality": [None, 0.25, None, 0.0], "detection": [1.0, 0.0, 0.0, 0.0]}
    made = {
        "step": 1,
        "group_id": name,
        "index": index,
        "sample": sample(name),
        "segments": segments,
        "text": "uno dos",
    }
    return {**made, "score": score, "advantage": advantage, **changes}


@pytest.fixture
def simul_dir(run_dir):
    """A run of interpretation: two streams, two evaluations."""
    wav = np.zeros(round(3.5 * RATE), np.float32)
    wav[RATE : 2 * RATE] = 0.5 * np.sin(np.arange(RATE) * 0.2)  # only the second chunk is loud
    soundfile.write(run_dir / "audio" / "talk.wav", wav, RATE)
    for file in (run_dir / "rollouts").glob("*.jsonl"):
        file.unlink()
    rows = [rollout(0, total=1.0), rollout(1, total=3.0), rollout(2, total=2.0)]
    write_lines(run_dir / "rollouts/step_000001.jsonl", rows)
    entry = {
        "laal": 2.5,
        "stream_laal": 2.25,
        "chrf": 21.0,
        "n": 12,
        "low": 18.0,
        "high": 24.0,
        "scores": {"LAAL": 1.0},
    }
    (run_dir / "eval.json").write_text(
        json.dumps({"before": entry, "after": {**entry, "laal": 1.5, "chrf": 30.0}, "wait-3": {**entry, "laal": 3.0}})
    )
    for name, texts in (("before", ("eh", "", "", "")), ("after", ("", "uno dos", "", "tres")), ("wait-3", ("",) * 4)):
        write_lines(run_dir / f"eval/{name}.jsonl", [rollout(texts=texts, name=s) for s in ("s1", "s2")])
    return run_dir


def drawn(run_dir, row, **changes):
    html = stream({**row["sample"], **changes}, [Band(row, "head", "one")], Players(run_dir))
    Checker(html)
    return html


def cells(html, name):
    """(first column, columns, text) of every cell of a row that is not empty; column 0 begins at 0 s."""
    rows = re.search(rf"<tr[^>]*><th scope='row'( rowspan='(\d+)')?>{name}</th>(.*)", html, re.S)
    assert rows
    found = []
    for row in rows[3].split("</tr>")[: int(rows[2] or 1)]:
        column = 0
        for span, inner in re.findall(r"<td(?: colspan='(\d+)')?>(.*?)</td>", row, re.S):
            text = unescape(re.sub(r"<[^>]+>", "|", inner)).strip("|")
            if text:
                found.append((column, int(span or 1), re.sub(r"\|+", "|", text)))
            column += int(span or 1)
        assert column == 5, "four chunks and what follows the end"
    return sorted(found)


# -------------------------------------------------------------------------------------------------------- the timeline


def test_texts_begin_at_the_end_of_their_chunk(simul_dir):
    html = drawn(simul_dir, rollout())
    assert cells(html, "seconds") == [(0, 1, "0"), (1, 1, "1"), (2, 1, "2"), (3, 1, "3"), (4, 1, "3.5")]
    # The second chunk ends at 2 s, where the third column begins.
    assert cells(html, "reference") == [(2, 2, "uno dos|said uno dos"), (4, 1, "tres|said  tres")]
    assert cells(html, "wrote") == [(2, 1, "uno"), (3, 2, "dos")]
    assert "available from 2 s on, 0.8 s when spoken" in html
    assert "written after 2 s of source, complete after 0.20 s of wall-clock time, 3 tokens, stopped by eos" in html


def test_rewards_stand_below_what_they_reward(simul_dir):
    html = drawn(simul_dir, rollout())
    assert cells(html, "quality") == [(2, 1, "0.25"), (4, 1, "0")]
    assert cells(html, "detection") == [(1, 1, "1"), (2, 1, "0"), (3, 1, "0"), (4, 1, "0")]
    assert cells(html, "reward") == [(1, 1, "0.1"), (2, 1, "-0.4"), (3, 1, "0"), (4, 1, "1.2")]
    assert "title='quality of chunk 2, at 2 s: 0.25'" in html
    for sign, name, value in (("minus", "reward", "-0.4"), ("zero", "quality", "0"), ("plus", "reward", "1.2")):
        assert re.search(rf"cell {sign}' [^>]*title='{name} of chunk \d, [^>]*: {value}'", html)


def test_reads_and_writes_with_their_delay(simul_dir):
    row = rollout()
    html = drawn(simul_dir, row)
    assert cells(html, "policy") == [(1, 1, "READ"), (2, 1, "WRITE"), (3, 1, "WRITE"), (4, 1, "READ")]
    assert "delay (s)" not in html, "written before the chunk had been heard in real time"
    ends = [turn["end"] for turn in row["sample"]["turns"]]
    late = [s | {"emit_time": end + 0.25} for s, end in zip(row["segments"], ends, strict=True)]
    html = drawn(simul_dir, row | {"segments": late})
    assert cells(html, r"delay \(s\)") == [(1, 1, "0.25"), (2, 1, "0.25"), (3, 1, "0.25"), (4, 1, "0.25")]


def test_long_texts_in_a_row_get_rows_of_their_own(simul_dir):
    long = "palabras que no caben en una sola columna de la tabla"
    html = drawn(simul_dir, rollout(texts=(long, "corto", long, "")))
    assert "rowspan='2'>wrote" in html
    assert cells(html, "wrote") == [(1, 2, long), (2, 3, "corto"), (3, 2, long)]


def test_the_sound_is_drawn_chunk_by_chunk(simul_dir):
    html = drawn(simul_dir, rollout())
    heights = [
        max(1 - float(y) for y in re.findall(r",(-?[\d.]+)", path)) for path in re.findall(r"<path d='([^']+)'", html)
    ]
    assert heights == [pytest.approx(h, abs=0.025) for h in (0.0, 1.0, 0.0, 0.0)]
    assert re.findall(r"data-at='([\d.]+)' data-end='([\d.]+)'", html) == [
        ("0.000", "1.000"),
        ("1.000", "2.000"),
        ("2.000", "3.000"),
        ("3.000", "3.500"),
    ]
    assert html.count("<audio") == 1 and "aria-label='chunk 2, 1 to 2 s: play from here'" in html


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"audio": []}, "audio was not kept with the run"),
        ({"audio": [{"path": None, "start": 0.0, "duration": 1.0}] * 4}, "audio was not kept with the run"),
        ({"audio": [{"path": "audio/gone.wav", "start": 0.0, "duration": 3.5}]}, "audio file not found"),
    ],
)
def test_without_its_sound_a_stream_is_still_drawn(simul_dir, changes, said):
    html = drawn(simul_dir, rollout(), **changes)
    assert html.count(said) == 1 and "<button" not in html and "<audio" not in html
    assert cells(html, "wrote") == [(2, 1, "uno"), (3, 2, "dos")]


def test_text_from_data_stays_text(simul_dir):
    row = rollout(texts=(EVIL, "", "", ""))
    row["score"]["segment_parts"] = {EVIL: [1.0, None, None, None]}
    row["segments"][0]["stop_reason"] = EVIL
    html = stream(
        {**row["sample"], "id": EVIL, "turns": turns((EVIL, "", "", ""))}, [Band(row, "", EVIL)], Players(simul_dir)
    )
    assert "script" not in Checker(html).tags and html.count("&lt;script&gt;") >= 6


# ------------------------------------------------------------------------------------------------------------ the page


def test_rollouts_of_one_stream_share_its_time_axis(simul_dir):
    text, _ = report(simul_dir)
    rollouts = text[text.index("<h2>Rollouts") :]
    assert rollouts.count("class='stream'") == 1 and rollouts.count("<audio") == 1
    opened = re.findall(
        r"<details class='band'( open)?><summary><span class='chips'><span[^>]*>total <b>(\d)</b>", rollouts
    )
    assert opened == [(" open", "3"), ("", "2"), (" open", "1")], "the best and the worst are open"
    assert "reference <b>" not in rollouts, "it is in the timeline"
    assert "advantage <b>+0.50</b>" in rollouts


def test_held_out_streams_show_every_evaluation(simul_dir):
    text, _ = report(simul_dir)
    section = text[text.index("<h2>Held-out streams") : text.index("<h2>Rollouts")]
    assert section.count("class='stream'") == 2 and "Answers that changed" not in text
    names = re.findall(r"<details class='band'( open)?><summary><span class='chips'><b>([^<]+)</b>", section)
    assert names == [(" open", "before"), (" open", "after"), ("", "wait-3")] * 2
    assert ">reward</th>" not in section, "sums of standardised parts are no measure across evaluations"


# ----------------------------------------------------------------------------------------- quality against latency


def test_chrf_is_the_headline_of_interpreters(simul_dir):
    run = load_run(simul_dir)
    assert headline(run.evals) == "chrf"
    assert sentence(run.evals) == (
        "Held-out chrF rose from 21 (18–24) to 30 (18–24), and LAAL went from 2.50 s to 1.50 s, on n = 12."
    )


def test_points_lie_at_their_numbers():
    found = [
        Point("before", 2.5, 21.0),
        Point("after", 1.5, 30.0),
        Point("wait-5", 4.0, 26.0),
        Point("wait-1", 1.0, 12.0),
    ]
    axes = Figure().add_subplot()
    draw_tradeoff(axes, found, LIGHT)
    lines = [list(zip(*line.get_data(), strict=True)) for line in axes.lines]
    assert lines[:2] == [[(1.0, 12.0), (4.0, 26.0)], [(2.5, 21.0), (1.5, 30.0)]], "wait-k by k, training in its order"
    assert lines[2:] == [[(p.latency, p.quality)] for p in found]
    assert [t.get_text() for t in axes.texts] == [p.entry for p in found]
