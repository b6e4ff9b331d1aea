"""What the server answers, and what it refuses."""

from __future__ import annotations

import io
import re
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import soundfile
from starlette.testclient import TestClient

from audiorl.cli import main
from audiorl.cli.sound import edited
from audiorl.report.view.server import make_app
from audiorl.report.view.sound import FRAMES
from tests.support.flows import add_scene, write_flow_run
from tests.support.reports import EVIL, Checker, rollout, write_lines, write_run
from tests.support.views import TOKEN, append_line, client, viewed


def test_the_token_is_needed_once(run_dir: Path) -> None:
    stranger = TestClient(make_app(viewed(run_dir), TOKEN), base_url="http://127.0.0.1:8310")
    for path in ("/", "/?token=wrong", "/state", "/rollouts", "/assets/app.js", "/events", "/state?token=" + TOKEN):
        assert stranger.get(path).status_code == 401, path
    first = stranger.get(f"/?token={TOKEN}", follow_redirects=False)
    assert first.status_code == 303 and first.headers["location"] == "/"
    assert all(word in first.headers["set-cookie"] for word in ("HttpOnly", "SameSite=strict"))
    assert stranger.get("/state").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8310", "127.0.0.1.evil.example", ""])
def test_other_host_names_are_refused(run_dir: Path, host: str) -> None:
    assert client(viewed(run_dir)).get("/state", headers={"Host": host}).status_code == 403
    assert client(viewed(run_dir)).get("/state", headers={"Host": "localhost:99"}).status_code == 200


def test_every_answer_forbids_foreign_scripts(run_dir: Path) -> None:
    requests = client(viewed(run_dir))
    for path in ("/", "/state", "/rollouts", "/missing"):
        headers = requests.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"


def test_pages_and_assets(run_dir: Path) -> None:
    requests = client(viewed(run_dir))
    page = requests.get("/").text
    fetched = Checker(page).fetched
    assert all(requests.get(f"/{path}").status_code == 200 for path in fetched if not path.startswith(("#", "data:")))
    for module in ("app.js", "curves.js", "edits.js", "pages.js", "players.js"):
        source = requests.get(f"/assets/{module}").text
        assert "http:" not in source and "https:" not in source
    for path in ("/assets/../server.py", "/assets/%2e%2e%2fserver.py", "/assets/server.py"):
        assert requests.get(path).status_code == 404


def test_a_group_with_its_rewards_and_audio(run_dir: Path) -> None:
    requests = client(viewed(run_dir))
    page = requests.get("/rollouts/0/1/1").text
    Checker(page)
    for words in (
        "Which number?",
        "total <b>1</b>",
        "accuracy <b>1</b>",
        "advantage <b>+1.00</b>",
        "data-rollout='0/1/0'",
    ):
        assert words in page
    (source,) = set(re.findall(r'<audio[^>]* src="([^"]+)"', page))
    answer = requests.get(f"/{source}")
    assert answer.headers["content-type"] == "audio/wav" and len(soundfile.read(io.BytesIO(answer.content))[0]) == 8000
    part = requests.get(f"/{source}", headers={"Range": "bytes=100-199"})
    assert part.status_code == 206 and part.content == answer.content[100:200]
    assert part.headers["content-range"] == f"bytes 100-199/{len(answer.content)}"
    assert requests.get(f"/{source}", headers={"Range": "bytes=999999-"}).status_code == 200
    assert requests.get("/rollouts/0/1/7").status_code == requests.get("/rollouts/5/1/0").status_code == 404


def test_a_spectrogram_shows_the_frequency(run_dir: Path) -> None:
    from matplotlib.image import imread

    requests = client(viewed(run_dir))
    source = re.findall(r'<audio[^>]* src="audio/([^"]+)"', requests.get("/rollouts/0/1/1").text)[0]
    picture = imread(io.BytesIO(requests.get(f"/spectrogram/{source}").content))
    brightest = picture[:, picture.shape[1] // 2, :3].sum(-1).argmax()
    assert picture.shape[0] == 257 and abs((256 - brightest) * 16_000 / 512 - 440) < 32  # the tone, lowest row at 0 Hz


def test_only_clips_that_a_record_names_are_sent(run_dir: Path) -> None:
    (run_dir / "secret.txt").write_text("secret")
    row = rollout("g", 0, 1.0, 0.0)
    row["sample"]["audio"] = [{"path": "secret.txt", "start": 0.0, "duration": None}]
    write_lines(run_dir / "rollouts/step_000030.jsonl", [row])
    requests = client(viewed(run_dir))
    page = requests.get("/rollouts/0/30/0").text
    (source,) = set(re.findall(r' src="([^"]+)"', page))
    answer = requests.get(f"/{source}")
    assert answer.status_code == 404 and "secret" not in answer.text.replace("secret.txt", "")
    for path in ("/audio/secret.txt", "/audio/..%2Fsecret.txt", "/spectrogram/x"):
        assert requests.get(path).status_code == 404


def test_text_is_never_markup(run_dir: Path) -> None:
    row = rollout(EVIL, EVIL, 0.5, 0.0, text=EVIL)
    row["sample"] |= {"id": EVIL, "prompt": EVIL, "task": EVIL, "references": [EVIL], "choices": [EVIL]}
    row["score"]["parts"] = {EVIL: 1.0}
    write_lines(run_dir / "rollouts/step_000040.jsonl", [row])
    for name in ("before", "after"):
        answer = {"id": EVIL, "prompt": EVIL, "text": EVIL + name, "correct": name == "after", "parts": {EVIL: 0.0}}
        write_lines(run_dir / f"eval/{name}.jsonl", [answer])
    requests = client(viewed(run_dir))
    for path in ("/rollouts?q=step:40", "/rollouts/0/40/0", "/evaluations?left=0/before&right=0/after"):
        page = requests.get(path)
        assert page.status_code == 200 and "alert(1)" in page.text
        assert "script" not in Checker(page.text).tags


def test_bad_requests_get_one_line(run_dir: Path) -> None:
    requests = client(viewed(run_dir))
    answer = requests.get("/rollouts", params={"q": "nonsense>1"})
    assert answer.status_code == 400 and answer.text.startswith("no field or reward part is called nonsense")
    assert requests.get("/rollouts", params={"order": "sideways"}).status_code == 400
    for side in ("0/missing", "7/before", "x/before", "0/../metrics", ""):
        assert requests.get("/evaluations", params={"left": side, "right": "0/after"}).status_code == 404, side
    assert requests.get("/question").status_code == 404 and requests.post("/labels", json={}).status_code == 404
    (run_dir / "eval/after.jsonl").write_text('{"id": 1, "correct": "maybe"}\n')
    damaged = requests.get("/evaluations", params={"left": "0/before", "right": "0/after"})
    assert damaged.status_code == 400 and "after.jsonl: row 1: edited or damaged" in damaged.text


def test_before_and_after(run_dir: Path) -> None:
    requests = client(viewed(run_dir))
    page = requests.get("/evaluations", params={"left": "0/before", "right": "0/after"}).text
    Checker(page)
    assert "Of <b>2</b> examples" in page and "wrong → right" in page and "right → wrong" in page
    assert "<del>first</del> a" in page and "<ins>then</ins> a" in page


def test_metrics_are_sent_once(run_dir: Path) -> None:
    view = viewed(run_dir)
    requests = client(view)
    everything = requests.get("/metrics/0").json()
    assert len(everything["rows"]) == 51 and everything["controls"] == ["control"]
    added = [(row["phase"], row["step"], row["eval/accuracy"]) for row in everything["added"]]
    assert added == [("grpo", 0, 0.4), ("grpo", 30, 0.7), ("control", 10, 0.45)], "what eval.json has of it"
    append_line(run_dir / "metrics.jsonl", {"seq": 51, "phase": "grpo", "step": 31, "reward/mean": 2.0})
    view.poll()
    more = requests.get("/metrics/0", params={"epoch": everything["epoch"], "since": 51}).json()
    assert more["start"] == 51 and [row["reward/mean"] for row in more["rows"]] == [2.0]
    write_lines(run_dir / "metrics.jsonl", [{"seq": 0, "phase": "sft", "step": 1, "loss": 9.0}])
    view.poll()
    again = requests.get("/metrics/0", params={"epoch": everything["epoch"], "since": 52}).json()
    assert again["start"] == 0 and again["epoch"] != everything["epoch"] and len(again["rows"]) == 1


def test_results_of_the_chosen_runs(run_dir: Path, recorded: Path) -> None:
    requests = client(viewed(run_dir, recorded))
    page = requests.get("/results", params={"runs": "0,1"}).text
    assert "my-run · accuracy" in page and all(value in page for value in ("40.0%", "70.0%", "45.0%", "+30.0 points"))
    assert requests.get("/results", params={"runs": "1"}).text == "", "it has no evaluation"
    (run_dir / "eval.json").write_text('{"before": {"by_task": 3}}')
    assert requests.get("/results", params={"runs": "0"}).text == "" and requests.get("/metrics/0").status_code == 200


def test_a_folder_of_seeds_is_its_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "exp" / f"seed_{seed}")
    assert [run.name for run in viewed(tmp_path / "exp").runs] == ["seed_0", "seed_1"]


def test_a_port_in_use(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["view", str(run_dir), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"audiorl: view: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port\n"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "view: name run folders"),
        (["missing"], "view: missing: no such folder"),
        (["EMPTY"], "not a run folder"),
        (["RUN", "RUN"], "is named twice"),
        (["RUN", "--port", "70000"], "--port 70000: not a port"),
        (["RUN", "--labels", "EMPTY"], "a folder; name a file"),
        (["RUN", "--labels", "missing/labels.jsonl"], "there is no folder"),
    ],
)
def test_bad_options_get_one_line(
    run_dir: Path, tmp_path: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    words = {"RUN": str(run_dir), "EMPTY": str(tmp_path / "empty")}
    assert main(["view", *(words.get(word, word) for word in arguments)]) == 2
    assert error in capsys.readouterr().err


def test_a_run_deleted_meanwhile(run_dir: Path) -> None:
    view = viewed(run_dir)
    requests = client(view)
    shutil.rmtree(run_dir)
    assert "not in the run folder any more" in requests.get("/rollouts").text
    assert requests.get("/rollouts/0/1/0").status_code == 404
    view.poll()
    assert requests.get("/state").json()["runs"][0]["deleted"] is True


def test_a_sound_with_a_video_has_its_frames_and_events(tmp_path: Path) -> None:
    from matplotlib.image import imread

    wave = (np.random.default_rng(0).integers(-(2**15), 2**15, 8000) / 2**15).astype(np.float32)
    flow = write_flow_run(tmp_path / "flow", wave)
    dog = add_scene(flow)
    requests = client(viewed(flow))
    (made,) = requests.get("/sounds/0").json()
    assert made["events"] == [asdict(dog)] and made["shown"] == FRAMES
    picture = imread(io.BytesIO(requests.get(f"/{made['film']}").content))[..., 0]
    assert picture.shape == (96, 96 * FRAMES)
    heard = picture[:90, 96 * 3 : 96 * 4]  # the fourth of twelve frames shows 0.15 s
    assert heard[:, :30].any() and not heard[:, 30:].any(), "it bounces at the left"
    np.save(flow / "scene.npy", np.zeros(5))
    other = client(viewed(flow))
    (made,) = other.get("/sounds/0").json()
    answer = other.get(f"/{made['film']}")
    assert answer.status_code == 400 and "scene.npy: no pictures" in answer.text
    assert other.get("/frames/other").status_code == 404


def test_sounds_are_edited(run_dir: Path, tmp_path: Path) -> None:
    wave = (np.random.default_rng(0).integers(-(2**15), 2**15, 8000) / 2**15).astype(np.float32)
    flow = write_flow_run(tmp_path / "flow", wave)
    requests = client(viewed(run_dir, flow, edit=edited))
    assert [run["edits"] for run in requests.get("/state").json()["runs"]] == [False, True]
    assert client(viewed(flow)).post("/edits", json={}).status_code == 404
    (made,) = requests.get("/sounds/1").json()
    assert made["name"] == "after/0000.wav" and made["seconds"] == 0.5
    content = (flow / "eval/after/0000.wav").read_bytes()
    sent = requests.post("/sounds?name=../../my%20dog.wav", content=content).json()
    for source in (made["source"], sent["source"]):
        asked = {"run": 1, "source": source, "regions": ["0.1:0.2"], "text": "Remove the dog."}
        reply = requests.post("/edits", json=asked).json()
        new, rate = soundfile.read(io.BytesIO(requests.get(f"/{reply['source']}").content), dtype="float32")
        assert rate == 16_000 and np.array_equal(np.delete(new, slice(1600, 3200)), np.delete(wave, slice(1600, 3200)))
        assert not np.allclose(new[1760:3040], wave[1760:3040], atol=0.1)
        assert requests.get(f"/{reply['source']}".replace("audio", "spectrogram")).content
    for wrong, status, message in (
        ({"regions": ["0.4:0.6"]}, 400, "past the end"),
        ({"regions": "all"}, 400, "'all'"),
        ({"regions": []}, 400, "nothing is to be made anew"),
        ({"text": " "}, 400, "say what is to change"),
        ({"source": "audio/other"}, 404, ""),
        ({"run": 7}, 404, "no such run"),
    ):
        answer = requests.post("/edits", json={**asked, **wrong})
        assert answer.status_code == status and message in answer.text
    assert requests.post("/sounds?name=a.wav", content=b"no sound").status_code == 404
    assert requests.post("/edits", content=b"x" * 2**17).status_code == 400
    other = requests.post("/edits", json=asked, headers={"Origin": "https://evil.example"})
    assert other.status_code == 403
