"""`import audiorl`: what it exports, its examples, and training on what is in memory."""

from __future__ import annotations

import contextlib
import doctest
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

import audiorl
from audiorl import api
from audiorl.data.corpus import bundled_speech
from audiorl.models.families.qwen_omni import tiny
from audiorl.recipes._loader import resume
from audiorl.report.run import load_run
from audiorl.rewards import AnswerAccuracy
from audiorl.types import Message, Rollout, Sample

SHORT: dict[str, Any] = {"steps": 1, "group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "eval_tokens": 4}


def examples() -> Iterator[tuple[str, doctest.DocTest]]:
    for name in (*audiorl.__all__, "as_reward"):
        value = getattr(api if name == "as_reward" else audiorl, name)
        yield name, doctest.DocTestParser().get_doctest(value.__doc__, {}, name, None, None)


@pytest.mark.parametrize(("name", "test"), list(examples()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_has_an_example_that_runs(name: str, test: doctest.DocTest) -> None:
    assert test.examples, name
    space: dict[str, Any] = {}
    for example in test.examples:
        with contextlib.redirect_stdout(io.StringIO()):  # training prints how far it is
            if example.want:
                found = eval(example.source, space)
            else:
                exec(example.source, space)
        assert not example.want or f"{found!r}\n" == example.want, example.source


def test_importing_is_light_and_lists_what_there_is() -> None:
    code = "import sys, audiorl; print([m for m in ('torch', 'numpy', 'tyro') if m in sys.modules], dir(audiorl))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ") and all(repr(name) in done.stdout for name in audiorl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian_grpo'"):
        audiorl.trian_grpo  # noqa: B018


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"q{i}", "audio": u.clip.path, "question": "Which phrase?", "choices": [u.text, "none"]}
        | {"answer": u.text, "level": i}
        for i, u in enumerate(bundled_speech(("en",), max_seconds=2)[:count])
    ]


def test_rows_a_policy_and_a_function_of_trl(tmp_path: Path) -> None:
    """Columns come by name; the policy is trained in place; a run folder is written where one is named."""
    calls: list[tuple[Any, ...]] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], level: list[int]) -> list[float]:
        calls.append((len(prompts), set(map(type, completions)), set(answer), set(level)))
        return [float(len(text)) for text in completions]

    policy = tiny(whisper=False)
    result = audiorl.train_grpo(
        policy, rows(4), reward, held_out=datasets.Dataset.from_list(rows(6)[4:]), out=tmp_path / "run", **SHORT
    )
    assert result.policy is policy and result.evaluation["after"]["n"] == 2
    assert {n for n, *_ in calls} == {2, 4}
    answers = {row["answer"] for row in rows(6)}
    assert all(texts == {str} and of <= answers and levels <= set(range(6)) for _, texts, of, levels in calls)
    assert repr(result).endswith(f"on 2; {tmp_path / 'run'})")
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "run" / "checkpoints" / "grpo").is_dir()
    assert load_run(tmp_path / "run").command == "", "no command repeats it"
    with pytest.raises(ValueError, match="exists already"):
        audiorl.train_grpo(policy, rows(4), reward, out=tmp_path / "run", **SHORT)
    with pytest.raises(
        ValueError, match="in Python with the model and the reward and data and held-out data in memory"
    ):
        resume(tmp_path / "run")
    held_out = datasets.Dataset.from_list(rows(6)[4:])
    again = audiorl.train_grpo(policy, rows(4), reward, held_out=held_out, out=tmp_path / "run", resume=True, **SHORT)
    assert again.metrics == result.metrics and again.evaluation == result.evaluation
    with pytest.raises(ValueError, match="the run has other options"):
        audiorl.train_grpo(policy, rows(4), reward, held_out=held_out, out=tmp_path / "run", resume=True, **SHORT, lr=1)


def test_a_temporary_folder_goes_with_the_result() -> None:
    result = audiorl.train_dpo("tiny", "bundled", steps=1, batch_size=2, held_out_count=2, eval_tokens=4)
    folder = result.folder
    assert folder.is_dir() and load_run(folder).command == ""
    del result
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grup_size": 3}, "^no option is called grup_size; near ones: rl__group_size"),
        ({"rl__kl_betta": 1}, r"^no option is called rl\.kl_betta; near ones: rl\.kl_beta"),
        ({"group_size": "eight"}, r"^rl\.group_size: expected int, got str, given 'eight'"),
        ({"rl": {"group_size": 0}}, "^group_size is 0; it must be at least 1"),
        ({"steps": 3, "epochs": 2}, "^steps: leave out epochs and max_steps"),
        ({"reward": 3}, "^reward: 3 is no function"),
        ({"reward": lambda a, b: 0}, r"^reward, function '<lambda>': must take one argument, a rollout"),
        ({"model": tiny(whisper=False), "control": True}, "^control: it starts from the model as it was before"),
        ({"data": []}, "name what to train on"),
        ({"data": [{"audio": "gone.wav", "question": "?", "answer": "a"}]}, r"rows: row 1, .*gone\.wav"),
    ],
)
def test_what_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        audiorl.train_grpo(**{"model": "tiny", "data": "bundled"} | options)


def test_names_of_options() -> None:
    config = api.audio_qa.AudioQAConfig()
    places = {
        "lr": "optim.lr",
        "temperature": "sampling.temperature",
        "rl__kl_beta": "rl.kl_beta",
        "critic": "rl.critic",
    }
    assert {name: ".".join(api._place(config, name)) for name in (*places, "seed")} == places | {"seed": "seed"}
    with pytest.raises(ValueError, match="coef is an option of several groups: rl__critic__coef, rl__distill__coef"):
        api._place(config, "coef")


def test_functions_of_trl_skip_and_are_counted() -> None:
    sample = Sample("q", (Message("user", ("Which?",)),), ("a",), metadata={"level": 2})
    rollouts = [Rollout(sample, (), "g", i) for i in range(2)]
    assert api.as_reward(AnswerAccuracy()) == AnswerAccuracy()

    def f(completions: list[str], **columns: list[Any]) -> list[float | None]:
        assert columns["level"] == [2, 2] and columns["prompts"] == ["Which?"] * 2
        return [None, 1.0]

    first, second = api.as_reward(f)(rollouts)
    assert first is None and second is not None and second.total == 1.0
    with pytest.raises(ValueError, match="returned 1 scores for 2 rollouts"):
        api.as_reward(lambda completions: [1.0])(rollouts)


HELD = """
import atexit, gc, sys
def infos(): return {id(o): sys.getrefcount(o) for o in gc.get_objects() if type(o).__name__ == "StructInfo"}
atexit.register(lambda: print(len(before) > 0 and infos() == {key: count + 1 for key, count in before.items()}))
import audiorl.data.schema, msgspec
class Row(msgspec.Struct):
    tags: list[str]
msgspec.json.decode(b'{"tags": []}', type=Row)
before = infos()
"""


def test_the_last_garbage_collection_leaves_types_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("python", ["grpo 2/2", "TrainResult(2 steps; reward"]),
        ("quickstart", ["before", "control", "text/html", "audio controls"]),
    ],
)
def test_a_notebook_trains(name: str, shown: list[str], tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(Path(__file__).parents[2] / "docs" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('["--seed", "0"]', '["--tiny"]')
    done = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = "".join(str(output) for cell in done.cells for output in cell.get("outputs", []))
    assert [text for text in shown if text not in outputs] == []
