"""The page and the picture: complete, self-contained, safe against what is in the data."""

import base64
import io
import json
import re
import shutil
from html import unescape
from itertools import pairwise

import numpy as np
import pytest
import soundfile

from audiorl.report.audio import Players, allowed_audio
from audiorl.report.kit import marked
from audiorl.report.summary import evaluation_rows
from tests.support.reports import EVIL, Checker, report, rollout, write_lines, write_run


def test_a_complete_run(run_dir):
    text, page = report(run_dir)
    assert page.tags.count("audio") == 5  # two changed answers, three steps with one group of rollouts each
    assert page.tags.count("svg") == 8  # the bars, six main panels (no length, no clipping here), the loss
    for words in ("rose from 40.0%", "Wrong → right", "then a", "first b", "at the last step", "grpo.lr", "2e-05"):
        assert words in text
    assert "Not in this report" not in text
    assert f"audiorl train recipes/think_qa.py --rl.lr 2e-5 --title 'it'\"'\"'s' --out {run_dir}" in unescape(text)


def test_sounds_are_heard_beside_the_recording_before_and_after(run_dir):
    tone = np.sin(np.arange(1600) / 5)
    for name, lift in (("before", 0.0), ("after", 0.5)):
        rows = []
        for i in range(3):
            file = f"eval/{name}/{i}.wav"
            (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(run_dir / file, tone * (1 + i) / 4, 16_000)
            rows.append({"id": f"s{i}", "text": f"a bell {i}", "reward": 0.25 + lift * i, "events/recall": 0.125})
            rows[i] |= {"spoken_audio": {"path": file}, "reference_audio": {"path": "eval/before/0.wav"}}
            rows[i] |= {"transcript": "hello", "si_sdr": 7.25} if i == 0 else {}
        write_lines(run_dir / "eval" / f"{name}.jsonl", rows)
    text, _ = report(run_dir)
    section = text[text.index("<h2>Held-out sounds") : text.index("<h2>Rollouts")]
    assert "Answers that changed" not in text and section.count("<audio") == 9
    assert re.findall("a bell (.)", section) == ["2", "1", "0"], "the largest change first"
    shown = re.sub("<[^>]+>", " ", section)
    assert "1.25" in shown and "0.125" not in shown and "7.25" in shown and "CER" not in shown


def test_a_number_that_is_not_finite_has_no_bar(run_dir):
    entries = {"before": {"loss": float("inf")}, "after": {"loss": 2.0}}
    (run_dir / "eval.json").write_text(json.dumps(entries))
    text, _ = report(run_dir)
    assert "fell from inf to 2" in text
    (run_dir / "eval.json").write_text(json.dumps({"before": entries["before"]}))
    assert "Held-out loss, before: inf" in report(run_dir)[0]


def test_the_table_marks_what_got_worse(run_dir):
    evals = json.loads((run_dir / "eval.json").read_text())
    evals["before"]["by_task"] |= {"English": {"accuracy": 0.95, "n": 40}}
    evals["after"]["by_task"] |= {"English": {"accuracy": 0.87, "n": 40}}
    (run_dir / "eval.json").write_text(json.dumps(evals))
    text, _ = report(run_dir)
    rows = re.findall(r"<tr class='([^']*)'><th scope='row'>([^<]*)<.*?<td data-name='change'>([^<]*)</td></tr>", text)
    assert ("task worse", "accuracy, English", "▼ −8.0 points") in rows
    assert ("task", "accuracy, digits", "+30.0 points") in rows
    block = re.sub(r"<[^>]+>", "", text[text.index("<div class='doubts'>") : text.index("</header>")])
    assert "What did not get better, and why that matters" in block and "Parts that lost" in block
    assert "accuracy, English 95.0% → 87.0% −8.0 points" in block and "digits" not in block


def test_a_held_out_curve_ends_with_the_final_evaluation(run_dir):
    """The fixture's last probes are 69.0% (grpo) and 41.0% (control); eval.json says 70.0% and 45.0%."""

    def legend():
        text = report(run_dir)[0]
        return re.sub(r"<[^>]+>", "", text[text.index("<h3>Held-out accuracy</h3>") :].split("<svg")[0])

    assert "final evaluation 70.0%control final evaluation 45.0%" in legend()
    (run_dir / "eval.json").unlink()
    assert "last probe 69.0%control last probe 41.0%" in legend()


def test_every_recorded_step_can_be_chosen(run_dir):
    text, page = report(run_dir)
    assert re.findall(r"<option value='(\d+)'( selected)?>", text) == [("1", ""), ("5", ""), ("10", " selected")]
    steps = dict(re.findall(r"<div class='step' data-step='(\d+)'( hidden)?>", text))
    assert steps == {"1": " hidden", "5": " hidden", "10": ""}
    assert "in the middle" in text and page.tags.count("script") == 1


def test_a_long_run_is_thinned_out_evenly_and_says_so(run_dir, monkeypatch):
    for step in range(1, 65):
        write_lines(run_dir / f"rollouts/step_{step:06d}.jsonl", [rollout("g", 0, 1.0, 0.0, text="word " * 2000)])
    monkeypatch.setattr("audiorl.report.page._BYTES", 60_000)
    text, _ = report(run_dir)
    shown = [int(step) for step in re.findall(r"<option value='(\d+)'", text)]
    gaps = [later - earlier for earlier, later in pairwise(shown)]
    assert (shown[0], shown[-1]) == (1, 64) and 8 <= len(shown) <= 16 and max(gaps) <= 8
    assert f"{64 - len(shown)} more recorded steps are left out to keep the page small: rollouts/step_*.jsonl" in text
    assert "… 6000 more characters" in text


def test_the_page_fetches_nothing_and_runs_no_scripts_for_a_single_step(run_dir):
    for step in (1, 5):
        (run_dir / f"rollouts/step_{step:06d}.jsonl").unlink()
    text, page = report(run_dir)
    assert all(link.startswith("#") for link in page.fetched)
    assert "script" not in page.tags
    assert "@import" not in text and "url(http" not in text


@pytest.mark.parametrize(
    ("absent", "said"),
    [
        ("eval.json", "no held-out evaluation has finished"),
        ("config.json", "the resolved configuration is unknown"),
        ("metrics.jsonl", "there are no curves"),
        ("eval/after.jsonl", "changed answers cannot be shown"),
    ],
)
def test_without_a_file_the_rest_is_shown(run_dir, tmp_path, absent, said):
    (run_dir / absent).unlink()
    (run_dir / "rollouts" / "step_000020.jsonl").write_text('{"step": 20, "gro')  # torn
    text, _ = report(run_dir)
    assert "Not in this report" in text and said in text and "at the last step" in text
    (tmp_path / "empty").mkdir()
    text, page = report(tmp_path / "empty")
    assert "No held-out evaluation has been recorded yet." in text and "svg" not in page.tags


def test_nothing_from_data_becomes_markup(run_dir):
    def poison(value):
        if isinstance(value, dict):
            return {EVIL if k in ("digits", "accuracy_", "grpo", "torch") else k: poison(v) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v) for v in value]
        return value + EVIL if isinstance(value, str) and not value.startswith("audio/") else value

    for path in [*run_dir.glob("*.json"), *run_dir.rglob("*.jsonl")]:
        lines = [json.dumps(poison(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
    evals = json.loads((run_dir / "eval.json").read_text())
    evals[EVIL] = {"accuracy": 0.1, "n": 5, EVIL: 1.5}
    (run_dir / "eval.json").write_text(json.dumps(evals))
    text, page = report(run_dir)
    assert page.tags.count("script") == 1, "the selector's"
    assert text.count("&lt;script&gt;") > 20


def test_seeds_are_shown_as_one_experiment(tmp_path):
    """Mean 0.75, standard deviation 0.05: 4.303 · 0.05 / √3 = 0.124 to both sides."""
    for seed, accuracy in ((0, 0.7), (10, 0.75), (9, 0.8)):
        run = write_run(tmp_path / "exp" / f"seed_{seed}")
        for name, change in (
            ("eval.json", {"after": {"accuracy": accuracy}}),
            ("config.json", {"config": {"seed": seed}}),
        ):
            held = json.loads((run / name).read_text())
            (run / name).write_text(
                json.dumps({k: v | change.get(k, {}) if k in change else v for k, v in held.items()})
            )
    report(tmp_path / "exp" / "seed_9")
    text, page = report(tmp_path / "exp")
    shown = re.sub(r"<[^>]+>", " ", text)
    assert "rose from 40.0% (40.0–40.0%) to 75.0% (62.6–87.4%)" in shown and "Means of 3 seeds" in shown
    assert [m for m in re.findall(r"seed_\d+", shown) if m][:3] == ["seed_0", "seed_9", "seed_10"]
    assert [link for link in page.fetched if not link.startswith("#")] == ["seed_9/report.html"]
    assert "+35.0 points (+22.6 to +47.4)" in shown and "the runs differ in" not in shown
    assert evaluation_rows(tmp_path / "exp")[0].values["after"] == pytest.approx(0.75)
    write_run(tmp_path / "exp" / "seed_11")
    (tmp_path / "exp" / "seed_11" / "eval.json").unlink()  # it still trains
    assert "Means of 3 seeds" in report(tmp_path / "exp")[0]
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"config": config["config"] | {"grpo": {"lr": 1.0}}}))
    assert "one experiment: the runs differ in grpo.lr" in report(tmp_path / "exp")[0]
    (run / "config.json").write_text(json.dumps(config | {"recipe": "other"}))
    with pytest.raises(ValueError, match="exp: name one run folder: its runs are of several recipes, other, think_qa"):
        report(tmp_path / "exp")


@pytest.mark.parametrize("slope", [0.0, 0.02])
def test_the_reward_of_several_seeds_is_that_of_their_mean(tmp_path, slope):
    """Seeds that train at other levels of the reward are no rise from the first to the last."""
    for seed in range(3):
        run = write_run(tmp_path / "exp" / f"seed_{seed}")
        steps = [{"seq": i, "phase": "grpo", "step": i, "reward/mean": seed + slope * i} for i in range(20)]
        write_lines(run / "metrics.jsonl", steps)
        before = {"accuracy": 0.5, "n": 9, "outside": ["accuracy"]}
        (run / "eval.json").write_text(json.dumps({"before": before, "after": before | {"accuracy": 0.4 + seed / 10}}))
    rise = "The mean reward rose by +0.3 (+0.261 to +0.339)"  # ± 1.96 · 0.02 · sqrt(2 · 2.5 / 5)
    text, _ = report(tmp_path / "exp")
    assert [rise in text, "mean reward rose" in text] == [slope > 0] * 2


# ----------------------------------------------------------------------------------------------------------- audio


def embedded(html):
    mime, data = re.search(r'src="data:([^;]+);base64,([^"]+)"', html).groups()
    return mime, base64.b64decode(data)


def test_players(run_dir):
    """Small whole files are embedded as they are, parts are encoded again, and what cannot be played says why."""
    players = Players(run_dir, max_clips=3)
    mime, content = embedded(players.player({"path": "audio/tone.wav", "start": 0.0, "duration": None}))
    assert (mime, content) == ("audio/wav", (run_dir / "audio/tone.wav").read_bytes())
    for clip in ({"start": 0.1, "duration": 0.2}, {"duration": 0.2}):
        mime, content = embedded(players.player({"path": str(run_dir / "audio/tone.wav"), **clip}))
        samples, rate = soundfile.read(io.BytesIO(content))
        assert mime == "audio/ogg" and len(samples) / rate == pytest.approx(0.2, abs=0.03)
        assert np.abs(samples).max() > 0.1
    assert "not embedded to keep the page small: tone.wav" in players.player({"path": "audio/tone.wav"})
    tone = soundfile.read(run_dir / "audio/tone.wav")[0]
    soundfile.write(run_dir / "audio/two.wav", np.stack([tone, np.zeros_like(tone)], 1), 16_000)
    for channel, loud in ((0, True), (1, False), ([0, 1], True)):
        html = Players(run_dir).player({"path": "audio/two.wav", "channel": channel})
        assert (np.abs(soundfile.read(io.BytesIO(embedded(html)[1]))[0]).max() > 0.1) == loud
        assert 'title="two.wav, channel ' in html
    assert (players.embedded, players.skipped) == (3, 1)
    players = Players(run_dir)
    (run_dir / "audio/secret.wav").write_text("password\n")
    assert "was not kept" in players.player({"path": None})
    assert "not found: gone.wav" in players.player({"path": "audio/gone.wav"})
    assert "cannot be played" in players.player({"path": "audio/secret.wav"})
    assert "cannot be played" in players.player({"path": "audio/secret.wav", "start": 0.5})


@pytest.fixture
def private(tmp_path, run_dir):
    """A recording outside of the run folder."""
    folder = tmp_path / "private"
    folder.mkdir()
    shutil.copy(run_dir / "audio/tone.wav", folder / "call.wav")
    return folder / "call.wav"


def shown_by(run_dir, path):
    """The number of players for a rollout's clip at `path`."""
    row = rollout("g", 0, 0.0, 0.0)
    row["sample"]["audio"] = [{"path": str(path), "start": 0.0, "duration": None}]
    write_lines(run_dir / "rollouts/step_000001.jsonl", [row])
    return report(run_dir)[1].tags.count("audio")


def names_data(run_dir, *data):
    config = json.loads((run_dir / "config.json").read_text())
    config["config"]["data"] = list(map(str, data))
    (run_dir / "config.json").write_text(json.dumps(config))


def test_audio_outside_of_the_run_and_its_data_is_not_embedded(run_dir, private, tmp_path):
    inside = shown_by(run_dir, "audio/tone.wav")
    (run_dir / "audio/link.wav").symlink_to(private)
    for path in (private, "../private/call.wav", "audio/link.wav"):
        assert shown_by(run_dir, path) == inside - 1
        assert "neither in the run folder nor in the run&#39;s data: " in report(run_dir)[0]
    assert "<audio" in Players(run_dir, allowed=allowed_audio(run_dir, {}, [private.parent])).player(
        {"path": str(private)}
    )
    # A data set of the run that names the file, or lies in its folder.
    manifest = tmp_path / "data" / "train.jsonl"
    write_lines(manifest, [{"audio": str(private)}])
    for data in (f"{manifest}:5x0.5", private.parent):
        names_data(run_dir, data)
        assert shown_by(run_dir, private) == inside
    write_lines(manifest, [{"audio": str(private) + "2"}])
    names_data(run_dir, manifest)
    assert shown_by(run_dir, private) == inside - 1


def test_a_configuration_cannot_open_the_home_folder_to_a_report(run_dir, private, monkeypatch):
    monkeypatch.setenv("HOME", str(private.parent))
    names_data(run_dir, private.parent, "/", "\0", "x" * 5000, "")
    shown = shown_by(run_dir, "audio/tone.wav")
    assert shown_by(run_dir, private) == shown - 1


# ------------------------------------------------------------------------------------------------------------ text


def plain(html):
    return re.sub(r"<[^>]+>", "", html).replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think> <answer>b</answer>",
        "<think>never closed",
        "</think> closed before it opened",
        "<think>a<think>b</answer>c</think>",
        "a <b> c",
        "",
    ],
)
def test_marking_adds_nothing_and_loses_nothing(text):
    Checker(marked(text))
    assert plain(marked(text)) == text


def test_half_a_character_is_shown_as_a_question_mark(run_dir):
    """What a model or a damaged file holds may be no text in UTF-8."""
    (run_dir / "rollouts/step_000010.jsonl").write_text(json.dumps(rollout("h", 0, 1.0, 0.0, text="a\ud800b")) + "\n")
    assert "a?b" in report(run_dir)[0]
