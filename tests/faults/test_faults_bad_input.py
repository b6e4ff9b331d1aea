"""Everything a user can get wrong ends with exit code 2 and one line that says where, and leaves nothing in the way."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from filelock import FileLock

from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.run.metrics_log import read_metrics
from tests.conftest import make_omni
from tests.support.forks import start
from tests.support.training_runs import one_thread

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "audiorl" / "recipes" / "audio_qa.py")


__all__ = ["one_thread"]

Fails = Callable[..., str]
Row = dict[str, Any]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs a command that must end with exit code 2 and one line on stderr; returns that line."""

    def run(*args: str) -> str:
        capsys.readouterr()
        assert main(list(args)) == 2
        error = capsys.readouterr().err
        assert error.startswith("audiorl: ") and error.count("\n") == 1, error
        return error

    return run


@pytest.fixture
def train_fails(fails: Fails, tmp_path: Path) -> Fails:
    """The same for a training run; its folder must not be in the way of a second try."""

    def run(*options: str, recipe: str = RECIPE) -> str:
        error = fails("train", recipe, "--tiny", *options, "--out", str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        return error

    return run


# ------------------------------------------------------------------------------------------- commands and recipes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tran"], "unknown command 'tran'"),
        (["train"], "name a recipe first"),
        (["train", "recipes/none.py", "--out", "x"], "recipes/none.py: no such recipe"),
        (["train", RECIPE, "--tiny"], "--out runs/audio_qa"),
        (["resume"], "name one run folder"),
        (["resume", "nowhere"], "nowhere: not a run folder"),
        (["resume", "docs"], "docs: not a run folder"),
        (["report", "nowhere"], "nowhere"),
        (["rewards", "score", "one.py"], "name a reward file and recorded rollouts"),
        (["doctor", "now"], "takes no arguments"),
    ],
)
def test_commands(fails: Fails, args: list[str], message: str) -> None:
    assert message in fails(*args)


@pytest.mark.parametrize(
    "options",
    [["--nope", "3"], ["--seed"], ["--rl.group-size", "many"], ["--rl.epochs", "0"], ["--on-error", "ignore"]],
)
def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """An option that does not exist is one line; tyro explains wrong values in a box of its own, and exits."""
    command = ["train", RECIPE, "--tiny", *options, "--out", str(tmp_path / "out")]
    if options[0] == "--nope":
        assert main(command) == 2
    else:
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 2
    error = capsys.readouterr().err
    assert all(part in error for part in options[0].lstrip("-").split(".")) and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_fails_leaves_no_folder(train_fails: Fails, tmp_path: Path) -> None:
    config = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine:\n    seed: int = 0\n"
    body = "def tiny():\n    return Mine()\ndef main(config, run):\n    raise ValueError('not today')\n"
    (tmp_path / "mine.py").write_text(config + body)
    assert "not today" in train_fails(recipe=str(tmp_path / "mine.py"))


def test_existing_out_is_left_alone(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.txt"):
        error = fails("train", RECIPE, "--tiny", "--out", str(out))
        assert f"{out} exists already" in error and "audiorl resume" in error
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    assert "config.json" in fails("resume", str(tmp_path / "out"))


# --------------------------------------------------------------------------------------------------------- manifests


@pytest.fixture(scope="module")
def speech() -> list[Path]:
    return [Path(u.clip.path or "") for u in bundled_speech(("en",), min_seconds=1.0, max_seconds=2.0)[:8]]


def good(path: Path, name: str) -> Row:
    choices = ["a dog", "a bell"]
    return {"id": name, "audio": str(path), "question": "What sounds here?", "choices": choices, "answer": "a dog"}


def lines_of(folder: Path, speech: list[Path]) -> tuple[list[bytes], list[str]]:
    """Six good rows with three bad ones after the fourth; what errors say of the bad ones."""
    wav, rate = soundfile.read(speech[6])
    soundfile.write(folder / "cut.wav", wav, rate)
    cut(folder / "cut.wav")
    bad = [b'{"id": "x", "audio": ', {**good(speech[6], "none"), "answer": None}, good(folder / "cut.wav", "cut")]
    rows = [*(good(speech[i], f"good-{i}") for i in range(4)), *bad, *(good(speech[i], f"good-{i}") for i in (4, 5))]
    said = ["row 5: not valid JSON", "row 6, field 'answer': ", "row 7, field 'audio': "]
    return [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows], said


def test_a_bad_row_is_named(train_fails: Fails, tmp_path: Path, speech: list[Path]) -> None:
    data = tmp_path / "data.jsonl"
    lines, said = lines_of(tmp_path, speech)
    for number, message in enumerate(said, 4):
        data.write_bytes(b"\n".join([b""] * number + lines[number : number + 1] + lines[:3]) + b"\n")
        error = train_fails("--data", str(data), "--held-out-count", "1")
        assert error.startswith(f"audiorl: {data}: {message}"), error


def test_bad_rows_are_skipped_counted_and_listed(
    tmp_path: Path, speech: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    lines, said = lines_of(tmp_path, speech)
    data.write_bytes(b"\n".join(lines) + b"\n")
    options = ["--data", str(data), "--held-out-count", "2", "--on-error", "skip", "--rl.rollouts-every", "1"]
    assert main(["train", RECIPE, "--tiny", *options, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert f"{data}: 6 samples, 3 rows skipped (first: {data}: row 5: not valid JSON" in shown
    listed = [line.removeprefix("  skipped ") for line in shown.splitlines() if line.startswith("  skipped ")]
    assert all(line.startswith(f"{data}: {message}") for line, message in zip(listed, said, strict=True))
    files = (tmp_path / "out" / "rollouts").iterdir()
    sampled = {json.loads(line)["sample"]["id"] for file in files for line in file.read_text().splitlines()}
    assert len(sampled) == 4 and sampled < {f"good-{i}" for i in range(6)}  # two prompts a step; two are held out
    assert [m["step"] for m in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2]


def test_data_that_leaves_nothing(train_fails: Fails, tmp_path: Path, speech: list[Path]) -> None:
    for skip in ("raise", "skip"):
        error = train_fails("--data", str(tmp_path / "none.jsonl"), "--on-error", skip)
        assert error.startswith(f"audiorl: --data {tmp_path}/none.jsonl: no such file or folder")
    data = tmp_path / "three.jsonl"
    data.write_text("".join(json.dumps(good(path, path.stem)) + "\n" for path in speech[:3]))
    assert "nothing left to train on: 3 rows" in train_fails("--data", str(data), "--held-out-count", "3")
    assert "no such folder" in train_fails("--data", str(data), "--audio-root", str(tmp_path / "none"))
    assert "name what to train on" in train_fails("--data")


# ------------------------------------------------------------------------------------------------------ model folders


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_omni().save(folder)
    return folder


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = config["thinker_config"]["text_config"] | values
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    config["thinker_config"]["text_config"] = text
    (folder / "config.json").write_text(json.dumps(config))


def cut(file: Path, share: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])


def spoil_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


MODEL_FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "another architecture": (lambda d: (d / "config.json").write_text('{"model_type": "bert"}'), "", "'bert'"),
    "config is cut": (lambda d: cut(d / "config.json"), "config.json", "not valid JSON"),
    "no config": (lambda d: (d / "config.json").unlink(), "", "no config.json there"),
    "last byte is missing": (lambda d: cut(d / "model.safetensors", 0.99999), "model.safetensors", "damaged"),
    "weights are garbage": (lambda d: spoil_header(d / "model.safetensors"), "model.safetensors", "damaged"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "", "no file named model.safetensors"),
    "weights of a smaller model": (lambda d: edit_config(d, num_hidden_layers=3), "", "is missing from the checkpoint"),
    "weights of a wider model": (lambda d: edit_config(d, hidden_size=32), "", "of another shape"),
    "no tokenizer": (lambda d: [f.unlink() for f in d.glob("tokenizer*")], "", "tokenizer"),
    "no preprocessor": (lambda d: (d / "preprocessor_config.json").unlink(), "", "preprocessor_config.json"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_model_folders(train_fails: Fails, tmp_path: Path, model: Path, fault: str) -> None:
    spoil, file, message = MODEL_FAULTS[fault]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    spoil(folder)
    error = train_fails("--path", str(folder))
    assert str(folder / file) in error and message in error, error


# ------------------------------------------------------------------------------------------------------------ rewards


def test_a_reward_that_fails_in_a_run_is_named(train_fails: Fails, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(rollout):\n    return float('nan')\n")
    error = train_fails("--reward-file", str(file))
    assert "returned nan" in error and str(file) in error, error


# ------------------------------------------------------------------------------------------------------- run folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a recipe of its own."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(RECIPE, folder / "mine.py")
    assert main(["train", str(folder / "mine.py"), "--tiny", "--out", str(folder / "run")]) == 0
    return folder / "run"


def resume(run: Path) -> list[str]:
    """The command that continues a copy of `finished`, whose recipe is not an installed one."""
    config = run / "config.json"
    recipe = re.search(r'"recipe": "([^"]+)"', config.read_text(errors="replace")) if config.is_file() else None
    return ["resume", str(run), *(["--trust", recipe[1]] if recipe else [])]


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run as if it had been killed after the last step of GRPO."""
    shutil.copytree(finished, tmp_path / "stopped")
    state = json.loads((tmp_path / "stopped" / "state.json").read_text())
    state["finished"] = {"before": state["finished"]["before"]}
    (tmp_path / "stopped" / "state.json").write_text(json.dumps(state))
    return tmp_path / "stopped"


def flip_bit(file: Path) -> None:
    """Of the last weight: nothing but its value changes."""
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def becomes(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def changes(**fields: object) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | fields))


STEP = "checkpoints/grpo/step_000002"
RUN_FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weights are cut": (f"{STEP}/model.safetensors", cut, "damaged, it is not what was written"),
    "weights are garbage": (f"{STEP}/model.safetensors", spoil_header, "damaged"),
    "one bit of a weight": (f"{STEP}/model.safetensors", flip_bit, "remove the checkpoint's folder"),
    "trainer is missing": (f"{STEP}/trainer.safetensors", Path.unlink, "is missing"),
    "step is cut": (f"{STEP}/trainer.json", cut, "damaged"),
    "manifest is missing": (f"{STEP}/manifest.json", Path.unlink, "is missing"),
    "manifest is empty": (f"{STEP}/manifest.json", becomes("{}"), "model.safetensors is not in it"),
    "manifest without numbers": (f"{STEP}/manifest.json", becomes('{"x": [1, "x"]}'), "Expected `int`, got `str`"),
    "checkpoints are gone": ("checkpoints/grpo", shutil.rmtree, "is missing"),
    "state is cut": ("state.json", cut, "damaged, not valid JSON"),
    "state counts below 0": ("state.json", changes(seq=-1), "at `$.seq`"),
    "state with a checkpoint elsewhere": (
        "state.json", changes(checkpoints={"grpo": "../elsewhere"}), "'../elsewhere' lies outside of the run folder"
    ),
    "state with half a character": ("state.json", changes(checkpoints={"grpo": "a\ud800"}), "surrogates not allowed"),
    "config without recipe": ("config.json", becomes("{}"), "missing required field `recipe`"),
    "config is a number": ("config.json", changes(config=3), "at `$.config`"),
    "metrics of NUL bytes": ("metrics.jsonl", lambda f: f.write_bytes(bytes(f.stat().st_size)), "damaged: 0 of"),
    "evaluations are cut": ("eval.json", cut, "damaged, not valid JSON"),
    "no state": ("state.json", Path.unlink, "not a run folder"),
}  # fmt: skip


@pytest.mark.parametrize("fault", RUN_FAULTS)
def test_damaged_runs(fails: Fails, stopped: Path, fault: str) -> None:
    name, spoil, message = RUN_FAULTS[fault]
    spoil(stopped / name)
    kept = [*stopped.glob("checkpoints/**/*"), *stopped.glob("rollouts/*"), stopped / "metrics.jsonl"]
    before = {p: p.read_bytes() for p in kept if p.is_file()}
    error = fails(*resume(stopped))
    part = Path(name).name.partition(".")[0]
    assert message in error and str(stopped) in error and part in error.replace("not a run folder", "state"), error
    assert all(p.read_bytes() == content for p, content in before.items()), "a failed resume changed the run"


def test_two_processes_do_not_train_in_one_folder(fails: Fails, stopped: Path) -> None:
    with FileLock(stopped / ".lock"):
        error = fails(*resume(stopped))
    assert f"{stopped}: another process works in this folder" in error
    assert main(resume(stopped)) == 0


def test_a_removed_checkpoint_is_made_again_from_the_one_before(finished: Path, stopped: Path) -> None:
    last = Path("checkpoints/grpo/step_000002")
    shutil.rmtree(stopped / last)
    assert main(resume(stopped)) == 0
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (stopped / last / name).read_bytes() == (finished / last / name).read_bytes()
    assert [m["step"] for m in read_metrics(stopped / "metrics.jsonl")] == [1, 2]


def test_resume_after_the_recipe_changed(finished: Path, tmp_path: Path, fails: Fails) -> None:
    recipe = finished.parent / "mine.py"
    original = recipe.read_text()
    try:
        recipe.write_text(original.replace("max_steps=2", "max_steps=3"))
        assert main(resume(finished)) == 0, "what counts are the recorded options"
        recipe.write_text(original.replace("    think: bool = True\n", ""))
        assert f"{finished}/config.json" in (error := fails(*resume(finished))) and "think" in error
        recipe.unlink()
        assert f"{recipe}: no such recipe" in fails(*resume(finished))
    finally:
        recipe.write_text(original)
    assert main(resume(finished)) == 0


# ---------------------------------------------------------------------------------------------------------- full disk


def assert_same_weights(run: Path, expected: Path) -> None:
    for name in ("model.safetensors", "trainer.safetensors"):
        file = Path("checkpoints/grpo/step_000003") / name
        assert (run / file).read_bytes() == (expected / file).read_bytes()
    assert [m["step"] for m in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert not [p for p in run.rglob("*") if p.name.endswith(".partial")]


@pytest.fixture(scope="module")
def with_room(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An undisturbed run, and how to start it again. The reward is one that even a random model gets something of."""
    folder = tmp_path_factory.mktemp("room")
    (folder / "mine.py").write_text("def reward(rollout):\n    return len(rollout.text) / 100\n")
    train = ["train", RECIPE, "--tiny", "--max-steps", "3", "--optim.lr", "1e-3", "--reward-file"]
    train.append(str(folder / "mine.py"))
    assert main([*train, "--out", str(folder / "run")]) == 0
    assert all(m["grad_norm"] > 0 for m in read_metrics(folder / "run" / "metrics.jsonl"))
    return folder / "run", train


def test_file_size_limit_while_saving(fails: Fails, tmp_path: Path, with_room: tuple[Path, list[str]]) -> None:
    expected, train = with_room
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # Python ignores SIGXFSZ: a write fails
    try:
        error = fails(*train, "--out", str(tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "disk full while saving" in error and "resume" in error
    assert main(["resume", str(tmp_path / "run"), "--trust", train[-1]]) == 0
    assert_same_weights(tmp_path / "run", expected)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., int]]]:
    """A folder, and what mounts a small file system of memory there."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> int:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True).returncode

    if os.geteuid() != 0 or shutil.which("mount") is None or mount("size=1g") != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder, mount
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_while_saving(
    fails: Fails, disk: tuple[Path, Callable[..., int]], with_room: tuple[Path, list[str]]
) -> None:
    """A file system with room for one checkpoint and a half, then for all."""
    (expected, train), (folder, mount) = with_room, disk
    checkpoint = sum(p.stat().st_size for p in (expected / "checkpoints/grpo/step_000003").iterdir())
    assert mount("remount", f"size={3 * checkpoint // 2}") == 0
    error = fails(*train, "--out", str(folder / "run"))
    assert "disk full while saving" in error and "step_000002" in error and "resume" in error
    assert mount("remount", f"size={10 * checkpoint}") == 0
    assert main(["resume", str(folder / "run"), "--trust", train[-1]]) == 0
    assert_same_weights(folder / "run", expected)


def rewound(expected: Path, run: Path) -> Path:
    """A copy of the undisturbed run as it was after its second step."""
    shutil.copytree(expected, run)
    shutil.rmtree(run / "checkpoints/grpo/step_000003")
    state = json.loads((run / "state.json").read_text())
    state |= {"finished": {"before": state["finished"]["before"]}, "seq": 2}
    state["checkpoints"]["grpo"] = "checkpoints/grpo/step_000002"
    (run / "state.json").write_text(json.dumps(state))
    return run


def test_read_only_file_system(
    fails: Fails, disk: tuple[Path, Callable[..., int]], with_room: tuple[Path, list[str]]
) -> None:
    (expected, train), (folder, mount) = with_room, disk

    def content() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}

    run = rewound(expected, folder / "run")
    before = content()
    assert mount("remount", "ro") == 0
    error = fails("resume", str(run), "--trust", train[-1])
    assert "Read-only file system" in error and str(run) in error
    assert mount("remount", "rw") == 0
    assert content() == before
    assert main(["resume", str(run), "--trust", train[-1]]) == 0
    assert_same_weights(run, expected)


def test_a_clock_that_was_set_back(
    tmp_path: Path, with_room: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ten days: what the run wrote so far lies in the future."""
    expected, train = with_room
    run = rewound(expected, tmp_path / "run")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 864_000)
    for path in run.rglob("*"):
        os.utime(path, (now() + 864_000, now() + 864_000))
    assert main(["resume", str(run), "--trust", train[-1]]) == 0
    assert_same_weights(run, expected)


def test_two_resumes_at_once(tmp_path: Path, with_room: tuple[Path, list[str]]) -> None:
    """One trains; the other one says so, or finds the run finished."""
    expected, train = with_room
    run = rewound(expected, tmp_path / "run")
    said = [tmp_path / "one", tmp_path / "other"]
    both = [start(["-m", "audiorl.cli", "resume", str(run), "--trust", train[-1]], file) for file in said]
    for process in both:
        process.join(300)
    ends = [(process.exitcode, file.read_text()) for process, file in zip(both, said, strict=True)]
    assert 0 in [code for code, _ in ends], ends
    assert all(code == 0 or (code == 2 and "another process works in this folder" in text) for code, text in ends)
    assert_same_weights(run, expected)
