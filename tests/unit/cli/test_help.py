"""Every command has help, which does not wait for torch, and every option says what it does."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from rich.console import Console

from audiorl import cli
from audiorl.cli import main
from audiorl.cli.completion import completions
from audiorl.cli.resume import ResumeOptions
from audiorl.cli.train import print_results
from audiorl.config import to_json
from audiorl.config.distributed import RuntimeConfig
from audiorl.eval._common import options_type
from audiorl.options import parse
from audiorl.recipes._loader import config_class, find_script, load_options, load_recipe, parse_config, scripts

COMMANDS = (
    "", "train", "resume", "report", "eval", "rewards", "rewards score", "rewards serve", "codec", "codec encode",
    "codec decode", "graft", "export", "chat", "say", "doctor", "completion",
)  # fmt: skip


def test_every_command_is_a_module_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    files = {file.stem for file in Path(cli.__file__).parent.glob("*.py") if not file.stem.startswith("_")}
    assert files - {"plan"} == set(cli.COMMANDS)
    lines = cli.usage().splitlines()
    for name in (*cli.COMMANDS, *cli.EXTENSIONS):
        assert any(re.fullmatch(rf"  {name} +\w.*", line) for line in lines), name
    assert main(["tran"]) == 2 and "unknown command 'tran'" in capsys.readouterr().err


def test_other_packages_add_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By entry points, as a distribution on the path has them."""
    monkeypatch.setattr(cli, "EXTENSIONS", {"louder": "Make it louder."})
    assert main(["louder"]) == 2
    assert "audiorl louder belongs to the package corpora, which is not installed" in capsys.readouterr().err
    (tmp_path / "louder.py").write_text("def run(args):\n    print(args)\n    return 7\n")
    folder = tmp_path / "louder-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: louder\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[audiorl.commands]\nlouder = louder:run\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["louder", "a.wav"]) == 7 and "['a.wav']" in capsys.readouterr().out


def test_every_command_has_help_that_loads_no_torch() -> None:
    code = f"""
import contextlib, io, sys
from audiorl.cli import main
from audiorl.cli.completion import completions
for command in {COMMANDS}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        assert main([*command.split(), "--help"]) == 0, command
    assert f"usage: audiorl {{command}}".rstrip() in out.getvalue(), command
print([m for m in ("torch", "transformers", "numpy", "fastapi", "matplotlib") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_options_of_recipes_and_evaluations_are_read_without_torch() -> None:
    """Help, of a recipe a page or two of the usual options, and now and then a wrong word; few modules are loaded."""
    code = """
import contextlib, io, re, sys
from audiorl.cli import main
from audiorl.cli.completion import completions
from audiorl.recipes._loader import scripts
for kind, command in (("recipes", "train"), ("eval", "eval")):
    for number, name in enumerate(scripts(kind)):
        wrong = ["--out", "x", "--sede"] if kind == "recipes" else ["--sede"]
        for words, said in ((["--help"], "usage: audiorl"), (wrong, "--sede"))[: 1 + (number % 8 == 0)]:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
                main([command, name, *words])
            assert said in out.getvalue(), (name, words, out.getvalue()[-2000:])
            usual = re.findall(r"^.{1,3}(--[a-z][\\w.-]*)", out.getvalue(), re.MULTILINE)
            if kind == "recipes" and words == ["--help"]:
                assert {"--out", "--seed"} <= {*usual} and len(usual) <= 38, (name, usual)
print([m for m in ("torch", "transformers", "datasets", "fastapi", "matplotlib") if m in sys.modules], len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded, _, count = done.stdout.strip().rpartition(" ")
    assert loaded == "[]" and int(count) < 1500, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("recipe", scripts("recipes"))
def test_options_read_so_are_those_that_train(recipe: str) -> None:
    light, whole = load_options(recipe), load_recipe(recipe)
    assert to_json(light.tiny()) == to_json(whole.tiny())
    assert to_json(config_class(light)()) == to_json(config_class(whole)())
    kinds = [get_type_hints(config_class(module), include_extras=True) for module in (light, whole)]
    assert [*kinds[0]] == [*kinds[1]] and light.__doc__ == whole.__doc__
    with pytest.raises(ValueError, match="--preset x"):
        parse_config(light, ["--preset", "x"])


def test_help_of_a_recipe_shows_its_options_and_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "mmau_grpo", "--tiny", "--help-all"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for option in (
        "--out",
        "--tiny",
        "--config",
        "--runtime.ranks",
        "--rl.kl-beta",
        "--think, --no-think",
        "--model.device",
    ):
        assert option in text
    assert "(default: tiny)" in text  # the path that tiny() sets
    for words in (["--preset", "ppo"], ["--preset=ppo"], []):
        with pytest.raises(SystemExit):
            main(["train", "audio-qa", *words, "--help-all"])
        assert ("(default: gae)" in capsys.readouterr().out) == bool(words)


def option_classes(options: Any) -> Iterator[type]:
    """The dataclass and those of its fields."""
    members = get_args(options) if get_origin(options) in (Union, types.UnionType, Annotated) else (options,)
    for kind in filter(dataclasses.is_dataclass, members):
        yield kind
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from option_classes(hint)


@functools.cache
def documented(kind: type) -> set[str]:
    """The fields with a docstring, in the class or one that it extends."""
    result = set()
    for base in filter(dataclasses.is_dataclass, kind.__mro__):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                result.add(ast.unparse(field.target))
    return result


def undocumented(options: Any) -> list[str]:
    """Fields without a description. Those that hold another dataclass have its description."""
    return [
        f"{kind.__name__}.{name}"
        for kind in option_classes(options)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        if name not in documented(kind) and not any(option_classes(hint))
    ]


@pytest.mark.parametrize("recipe", scripts("recipes"))
def test_every_option_of_a_recipe_is_described(recipe: str) -> None:
    assert undocumented(config_class(load_recipe(recipe))) == []


@pytest.mark.parametrize("evaluation", scripts("eval"))
def test_every_option_of_an_evaluation_is_described(evaluation: str) -> None:
    assert undocumented(options_type(import_module(f"audiorl.eval.{evaluation}").main)) == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_a_command_is_described(name: str) -> None:
    module = import_module(f"audiorl.cli.{name}")
    kinds = [
        kind
        for kind in vars(module).values()
        if getattr(kind, "__module__", "") == module.__name__ and kind.__name__.endswith("Options")
    ]
    assert name == "audit" or kinds
    assert [option for kind in kinds for option in undocumented(kind)] == []


def test_the_table_goes_from_before_to_after_to_control(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    print_results(tmp_path, console)
    assert console.export_text() == ""
    (tmp_path / "eval.json").write_text(
        '{"before": {"accuracy": 0.5, "n": 8, "by_task": {"English": {"accuracy": 0.95, "n": 8}}}, '
        '"after": {"accuracy": 0.75, "n": 8, "by_task": {"English": {"accuracy": 0.87, "n": 8}}}, '
        '"control": {"accuracy": 0.5, "n": 8}}'
    )
    print_results(tmp_path, console)
    lines = console.export_text().splitlines()
    heading, accuracy, english = (
        next(line for line in lines if word in line) for word in ("change", "accuracy ", "accuracy, E")
    )
    assert heading.index("before") < heading.index("after") < heading.index("control") < heading.index("change")
    assert [cell.strip() for cell in accuracy.split("│")[2:6]] == ["50.0%", "75.0%", "50.0%", "+25.0 points"]
    assert "8.0 points" in english


def test_seeds_are_one_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean 0.7, standard deviation 0.2: 4.303 · 0.2 / √3 = 0.497 to both sides of the change."""
    words = ["train", "sft-audio", "--tiny", "--seeds", "0", "1", "2", "--out", str(tmp_path)]
    for seed, after in ((0, 0.5), (1, 0.7), (2, 0.9)):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        entries = {name: {"accuracy": value, "n": 10} for name, value in (("before", 0.2), ("after", after))}
        (folder / "eval.json").write_text(json.dumps(entries))
        (folder / "config.json").write_text(
            json.dumps({"recipe": "sft_audio", "argv": [], "config": {"seed": seed}, "versions": {}})
        )
    assert main([*words, "--seed", "3"]) == 2 and "leave --seed out" in capsys.readouterr().err
    assert main(words) == 2 and "exists already" in capsys.readouterr().err
    (tmp_path / "seeds.json").write_text(json.dumps({"args": ["sft-audio", "--tiny"], "finished": [0, 1, 2]}))
    assert main(words) == 0, "nothing is left to train"
    printed = " ".join(capsys.readouterr().out.split())
    assert "20.0% │ 70.0% │ +50.0 points (+0.3 to +99.7)" in printed and "means of 3 seeds" in printed
    assert "Means of 3 seeds" in (tmp_path / "report.html").read_text()
    assert main([*words, "--lora"]) == 2 and "began with other options" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 2 and "several seeds" in capsys.readouterr().err


def test_a_seed_goes_on_with_the_words_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its processes, its trackers and the Python files that the words name; none that only the folder names."""
    recipe, reward, out = tmp_path / "mine.py", tmp_path / "reward.py", tmp_path / "out"
    shutil.copy(find_script("recipes", "audio-qa"), recipe)
    reward.touch()
    (tmp_path / "run.yaml").write_text("runtime: {ranks: 8, fsdp: true}\n")
    words = [str(recipe), "--tiny", "--runtime.kind", "torchrun", "--reward-file", str(reward)]
    words += ["--config", str(tmp_path / "run.yaml"), "--log", "wandb", "mlflow"]
    (out / "seed_0").mkdir(parents=True)
    (out / "seed_0" / "state.json").write_text("{}")
    (out / "seeds.json").write_text(json.dumps({"args": words, "finished": []}))
    asked: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]):
            asked.append(command[3:])

        def wait(self) -> int:
            return 1

    monkeypatch.setattr("audiorl.cli.train.subprocess.Popen", Process)
    assert main(["train", *words, "--seeds", "0", "--out", str(out)]) == 1
    assert "the same command continues" in capsys.readouterr().err
    runtime = ["--runtime.kind", "torchrun", "--runtime.ranks", "8", "--runtime.fsdp"]
    going_on = [*runtime, "--log", "wandb", "mlflow", "--trust", str(recipe), str(reward)]
    assert asked == [["resume", str(out / "seed_0"), *going_on]]
    options = parse(ResumeOptions, asked[0][1:], prog="")
    assert options.runtime == RuntimeConfig("torchrun", ranks=8, fsdp=True) and len(options.trust) == 2


def test_a_first_seed_that_is_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the command itself was killed; a folder in which no run began takes other options."""
    words, out = ["sft-audio", "--tiny"], tmp_path / "out"
    asked: list[list[str]] = []

    class Process:
        begins = False

        def __init__(self, command: list[str]):
            asked.append(command[3:])

        def wait(self) -> int:
            assert json.loads((out / "seeds.json").read_text())["finished"] == []
            if self.begins:
                (out / "seed_0").mkdir(exist_ok=True)
                (out / "seed_0" / "state.json").write_text("{}")
            return 130

    monkeypatch.setattr("audiorl.cli.train.subprocess.Popen", Process)
    seeds = ["--seeds", "0", "--out", str(out)]
    assert main(["train", *words, "--lora", *seeds]) == 130 and not any(out.iterdir())
    Process.begins = True
    for begins in ("train", "resume"):
        assert main(["train", *words, *seeds]) == 130, capsys.readouterr().err
        assert asked[-1][0] == begins


@pytest.mark.parametrize(
    ("words", "error", "code", "message"),
    [
        ("export x", ImportError("needs x: pip install x"), 2, "audiorl: needs x: pip install x\n"),
        ("export x", ModuleNotFoundError("No module named 'x'", name="x"), None, ""),
        ("export x", KeyboardInterrupt(), 130, "audiorl: stopped at once\n"),
        ("resume x", KeyboardInterrupt(), 130, "audiorl: stopped at once; 'audiorl resume' continues"),
    ],
)
def test_how_a_command_ends(
    words: str,
    error: BaseException,
    code: int | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A package to install is one line; an import that fails is a mistake of ours, whose traceback stays."""

    def ends(args: list[str]) -> int:
        raise error

    monkeypatch.setattr(import_module(f"audiorl.cli.{words.split()[0]}"), "main", ends)
    with nullcontext() if code is not None else pytest.raises(ImportError):
        assert main(words.split()) == code
    assert capsys.readouterr().err.startswith(message)


def test_files_that_are_missing_are_named_with_those_called_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").touch()
    for option, name in (
        ("--data", "trian.jsonl:5x2"),
        ("--held-out", "trian.jsonl"),
        ("--reward-file", "trian.jsonl"),
    ):
        assert main(["train", "mmau-grpo", "--out", str(tmp_path / "run"), option, str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"audiorl: {option} ") and f"did you mean {tmp_path}/train.jsonl?" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("trian", "unknown command 'trian'; did you mean audiorl train?"),
        ("train mmau-grp", "no recipe 'mmau-grp'; did you mean mmau-grpo? audiorl train --help lists all"),
        ("train mmau-grpo --otu x", "no option is called --otu; did you mean --out?"),
        ("train mmau-grpo --rl.grop-size 3", "no option is called --rl.grop-size; did you mean --rl.group-size?"),
        ("train mmau-grpo --group-size=3", "did you mean --rl.group-size?"),
        ("train mmau-grpo --num_generations 8", "no option is called --num-generations; did you mean --rl.group-size?"),
        ("train sft-audio --learning_rate 1e-5", "no option is called --learning-rate; did you mean --optim.lr?"),
        ("eval asr --modle x", "no option is called --modle; did you mean --model?"),
        ("train mmau-grpo --xyz", "no option is called --xyz; --help lists the options"),
    ],
)
def test_a_wrong_word_names_a_near_one(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert hint in capsys.readouterr().err.splitlines()[0]


def test_shells_complete_commands_recipes_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('--mine')\n")
    for words, expected in (
        ("tra", ["train"]),
        ("train mmau", ["mmau-grpo"]),
        ("train mmau-grpo --rl.adv", ["--rl.advantage"]),
        ("train mmau-grpo --rl.aggregation tok", ["token-mean"]),
        ("train mmau-grpo --data ma", []),
        ("train audio-qa --preset --lo", ["--log", "--lora"]),
        ("train codec --tokenizer.num-c", ["--tokenizer.num-codebooks"]),
        ("rewards s", ["score", "study", "serve"]),
        ("chat runs/x --ph", ["--phase"]),
        ("eval mm", ["mmau"]),
        ("eval asr --no-th", ["--no-think"]),
        (f"eval {tmp_path}/mine.py --m", []),  # is not run
        ("nothing --o", []),
    ):
        assert completions(words.split()) == expected, words
    assert set(completions([""])) == {*cli.COMMANDS, *cli.EXTENSIONS}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "audiorl").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m audiorl "$@"\n')
    (tmp_path / "audiorl").chmod(0o755)
    code = """
eval "$(audiorl completion bash)"
COMP_WORDS=(audiorl train mmau-grpo --model.dtype bf) COMP_CWORD=4; _audiorl; echo "${COMPREPLY[@]}"
COMP_WORDS=(audiorl train sft-audio --optim.l) COMP_CWORD=3; _audiorl; echo "${COMPREPLY[@]}"
"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["bfloat16", "--optim.lr"], done.stderr
