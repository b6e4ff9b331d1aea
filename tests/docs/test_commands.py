"""Each command in README.md and docs/ names what exists; what can run here runs, with tiny options where it takes long.

bash runs every shell block with stand-ins for the programs, which write down their arguments. So loops, variables and
quotes are those of bash, and what is checked is what a program would get.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl import cli
from audiorl.cli import codec, rewards, train
from audiorl.cli.plan import FlowOptions
from audiorl.cli.plan import Options as PlanOptions
from audiorl.data.bundled import SPOKEN
from audiorl.data.corpus import Utterance
from audiorl.eval._common import options_type
from audiorl.gpu_check.run import _parser as gpu_check
from audiorl.models.export import export
from audiorl.models.families import qwen2_audio, qwen_omni
from audiorl.options import names, parse
from audiorl.recipes._loader import config_class, find_script, load_recipe, parse_config, scripts
from corpora.annotate.options import Annotate
from corpora.cli import DATA_COMMANDS, GraftOptions
from tests.conftest import TEXTS, make_omni
from tests.support.chat_servers import ChatServer
from tests.support.reward_servers import serving
from tests.support.vllm_engines import lively, vllm_server

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "experiments" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = ["audiorl", "python", "python3", "torchrun", "make", "pip", "simuleval", "lmms-eval", "vllm", "ray", "aplay"]
PROGRAMS += ["docker"]
STAND_IN = """#!/bin/sh
{{ printf '%s\\0' {name} "$@"; printf '\\n'; }} > "$RECORD.$$"
cat "$RECORD.$$" >> "$RECORD"  # in one write: the programs of a pipe run at once
"""
Argv = list[str]


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def shell_blocks(page: Path) -> list[str]:
    indented = re.findall(r"^    ((?:OMP_\S+ )?(?:python|audiorl) .*)$", page.read_text(), re.MULTILINE)
    return [*blocks(page, "", "sh", "bash"), *indented]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[Argv]]:
    """What the programs would get, by page."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        stand_in = folder / "bin" / name
        stand_in.write_text(STAND_IN.format(name=name))
        stand_in.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").write_text("")
    found: dict[Path, list[Argv]] = {}
    for page in PAGES:
        record = folder / f"{page.stem}.jsonl"
        record.write_text("")
        environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORD": str(record)}
        for block in shell_blocks(page):
            bash = ["bash", "-eu", "-c", block]
            done = subprocess.run(bash, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{page.name}: {block}\n{done.stderr}"
        found[page] = [line.split("\0") for line in record.read_text().split("\0\n")[:-1]]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_their_options_exist(page: Path, commands: dict[Path, list[Argv]]) -> None:
    for argv in commands[page]:
        try:
            check(argv)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page.name}: {' '.join(argv)}: {error}") from error


def test_the_pages_have_commands(commands: dict[Path, list[Argv]]) -> None:
    audiorl = {argv[1] for argvs in commands.values() for argv in argvs if argv[0] == "audiorl"}
    assert audiorl == {*cli.COMMANDS, *cli.EXTENSIONS}


def check(argv: Argv) -> None:
    """Raise unless the program, the file or recipe, and all options exist."""
    program, *args = argv
    if program == "audiorl":
        check_audiorl(*args)
    elif program == "torchrun":
        assert args[2:4] == ["-m", "audiorl.cli"]
        check_audiorl(*args[4:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert args[0] in targets
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"\[([\w,-]+)\]", " ".join(args)):
            assert set(extra.split(",")) <= set(extras)
    elif program in ("python", "python3") and (args[0].endswith(".py") or args[1].startswith("bench.")):
        script = args[0] if args[0].endswith(".py") else f"{args[1].replace('.', '/')}.py"
        source = (ROOT / script).read_text()
        for option in options_of(args):
            name = option.removeprefix("--").replace("-", "_")
            assert option in source or re.search(rf"^    {name}: ", source, re.MULTILINE), option
        for handed_on in (word.split() for word in args if " " in word):  # options of the recipe that the script runs
            assert set(options_of(handed_on)) <= option_names()
    elif program == "python" and args[:2] == ["-m", "audiorl.gpu_check"]:
        gpu_check().parse_args(args[2:])
    elif program == "python" and args[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).exists() for path in args[2:] if path not in ("-m", ""))
    elif program == "lmms-eval":
        given = [word.partition("=")[0] for word in args[args.index("--model_args") + 1].split(",")]
        source = (ROOT / "audiorl" / "eval" / "_lmms_eval_model.py").read_text()
        assert args[:2] == ["--model", "audiorl"] and all(f"        {name}: " in source for name in given)
    elif program == "simuleval":
        module, _, name = args[args.index("--agent-class") + 1].rpartition(".")
        assert ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text().count(f"class {name}")
    elif program == "docker" and args[0] == "run":
        check_audiorl(*args[args.index("audiorl") + 1 :])
    else:
        assert (program, args[0]) in (
            ("docker", "build"),
            ("python", "-c"),
            ("python3", "-m"),
            ("vllm", "serve"),
            ("ray", "start"),
            ("aplay", "-f"),
        )


def check_audiorl(command: str, *args: str) -> None:
    assert command in (*cli.COMMANDS, *cli.EXTENSIONS), command
    if {"--help", "-h"} & set(args):
        assert command != "train" or find_script("recipes", args[0])
    elif command == "train" or (command, args[:1]) == ("codec", ("train",)):
        check_train(["codec", *args[1:]] if command == "codec" else list(args))
    elif command == "eval" and args[0].endswith(".py"):
        assert args[0] in dict(python_files()) and set(options_of(args)) <= {"--model", "--data", "--out"}
    elif command == "eval":
        find_script("eval", args[0])
        parse(options_type(importlib.import_module(f"audiorl.eval.{args[0]}").main), args[1:], prog="x", run_file=True)
    elif command == "audit":
        check_audiorl("eval", "audit", "--model", *args)
    elif command == "rewards":
        parse(rewards.OPTIONS, args, prog="rewards")
    elif command == "codec":
        parse(codec.OPTIONS, args, prog="codec")
    elif command == "data":
        kind, _ = DATA_COMMANDS[args[0]]
        parse(kind, args[1:], prog="data")
    elif command in ("annotate", "graft"):
        parse(Annotate if command == "annotate" else GraftOptions, args, prog=command)
    elif command == "doctor":
        if args[:1] == ("--gpu",):
            gpu_check().parse_args(args[1:])
            return
        assert not args or args[0] == "--plan"
        if args:
            words = [word.replace("--lora-rank", "--model.lora.rank") for word in args[1:]]  # the short form
            parse(PlanOptions, words, prog="plan")
    else:
        (kind,) = command_options(command)
        parse(kind, args, prog=command)


def check_train(args: list[str]) -> None:
    name = args[0] if args[0] != "my_recipe.py" else "mmau-grpo"
    options, words = train.read([name, *args[1:]])
    assert options.out is not None or options.print_config
    options.runtime.check()
    parse_config(load_recipe(name), words)


def command_options(command: str) -> list[type]:
    """The option classes that the command's module defines."""
    module = importlib.import_module(f"audiorl.cli.{command}")
    own = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
    return [kind for kind in own if kind.__name__.endswith("Options")]


def options_of(words: Sequence[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--[a-z]\S*$", word)]


# ------------------------------------------------------------------------------------------------------ options in text


@cache
def option_names() -> frozenset[str]:
    """Every option of every command and recipe."""
    kinds: list[object] = [kind for command in cli.COMMANDS for kind in command_options(command)]
    kinds += [PlanOptions, FlowOptions, Annotate, GraftOptions, *(kind for kind, _ in DATA_COMMANDS.values())]
    kinds += [config_class(load_recipe(file)) for file in scripts("recipes").values()]
    kinds += [options_type(importlib.import_module(f"audiorl.eval.{name}").main) for name in scripts("eval")]
    return frozenset(f"--{path}" for kind in kinds for path, _ in names(kind))


def test_options_in_the_text_exist() -> None:
    known = option_names()
    scripted = "".join(p.read_text() for folder in ("tools", "bench") for p in (ROOT / folder).glob("*.py"))
    for page in PAGES:
        if page.name == "changelog.md":
            continue
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", page.read_text())):
            if code.startswith(("pip ", "ray ", "vllm ")):
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*[a-z0-9]", code):
                path, dot, name = option.rpartition(".")
                positive = f"{path}{dot}{name.removeprefix('no-')}" if dot else f"--{option[2:].removeprefix('no-')}"
                ok = {option, positive} & known or f'"{option}"' in scripted or option in NO_FIELDS
                name = option.removeprefix("--").replace("-", "_")
                ok = ok or re.search(rf"^    {name}: ", scripted, re.MULTILINE)
                assert ok, f"{page.name}: {option} in `{code}` is no option"


NO_FIELDS = (
    "--lora-rank",
    "--help",
    "--help-all",
    "--version",
    "--no-use-ref-len",
    "--computation-aware",
    "--pretend",
    "--only",
)


# ------------------------------------------------------------------------------------------------------ Python in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "audiorl",
                "tokenizers_audio",
            ):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"


def python_files() -> Iterator[tuple[str, str]]:
    """Blocks that begin with the name of a file."""
    for page in PAGES:
        for block in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", block)
            if name:
                yield name[1], block


def test_reward_files_of_the_text_give_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from audiorl.rewards.replay import replay

    monkeypatch.chdir(tmp_path)
    make_omni().save(tmp_path / "runs" / "sft" / "exported")
    server = ChatServer(lambda answers: 1.0 + len(answers[0]) % 5)

    captions = [{"audio": f"{i}.wav", "question": "?", "answer": SPOKEN[code]} for i, code in enumerate(SPOKEN)]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in captions))
    recorded = ROOT / "docs" / "recorded" / "rollouts" / "step_000001.jsonl"
    written = {name: source for name, source in python_files() if "reward" in source and "eval" not in source}
    assert {"brevity.py", "loud.py", "ranked.py", "transcribed.py"} <= set(written)
    with serving(server.app) as url:
        for name, source in written.items():
            (tmp_path / name).write_text(source.replace("http://127.0.0.1:8000", url))
            result = replay(tmp_path / name, recorded)
            assert len({s.total for s in result.scores if s is not None}) > 1, name
    assert server.calls and list((tmp_path / "judge_cache").rglob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "qwen2-audio",
        pytest.param(
            "qwen2.5-omni",
            marks=pytest.mark.skipif(find_spec("torchvision") is None, reason="Omni's processor needs torchvision"),
        ),
    ],
)
def test_an_export_answers_alike_in_every_program_of_the_page(
    family: str,
    commands: dict[Path, list[Argv]],
    speech: list[Utterance],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers, audiorl, and vLLM's server with OpenAI's client, by the code and the command of docs/use.md."""
    pytest.importorskip("vllm")
    made = qwen2_audio.tiny(TEXTS, hidden=128, window=30)  # vLLM pads clips to 30 s
    if family == "qwen2.5-omni":
        made = qwen_omni.tiny(TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False)
    lively(made).save(tmp_path / "step")
    export(tmp_path / "step", tmp_path / "exported")
    # Silence at the end: Qwen2-Audio's own code lets what is behind a clip reach its last token.
    soundfile.write(tmp_path / "dog.wav", np.pad(speech[0].clip.load(16_000), (0, 400)), 16_000)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "use.md"

    def answer(name: str, old: str = "", new: str = "") -> str:
        (code,) = (block for block in blocks(page, "python") if name in block)
        capsys.readouterr()
        exec(code.replace(old, new) if old else code, {})
        return capsys.readouterr().out.rstrip("\ufffd\n")  # vLLM leaves out half a character at the end

    ours = answer("HFEngine")
    assert len(set(ours)) > 10, "the answer says too little to compare"
    thinker = "Qwen2_5OmniThinkerForConditionalGeneration"
    general = "AutoModelForMultimodalLM"
    assert answer(general, general, thinker if "omni" in family else general) == ours
    (serve,) = (argv for argv in commands[page] if argv[:1] == ["python3"])
    with vllm_server(serve, tmp_path) as url:
        assert answer("OpenAI", "http://127.0.0.1:8000", url) == ours


# ------------------------------------------------------------------------------------------------------ running them


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "rewards.ipynb", as_version=4)
    metadata = {"metadata": {"path": str(ROOT / "docs")}}
    done = NotebookClient(notebook, timeout=120, resources=metadata).execute()
    printed = "".join(o.get("text", "") for cell in done.cells for o in cell.get("outputs", []))
    assert "96 rollouts; groups: 12" in printed and "correlation of accuracy and thought" in printed
    assert sum("image/png" in o.get("data", {}) for cell in done.cells for o in cell.get("outputs", [])) == 1


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A command of the documents, and what is different when it runs here: words replaced, words added."""

    words: str
    replace: dict[str, str] = dataclasses.field(default_factory=dict)
    add: str = ""


QUESTIONS, STREAMS = "questions.jsonl", "bundled:es/test"
RUNS = (
    Tiny("audiorl doctor"),
    Tiny("audiorl doctor --plan qwen2.5-omni-7b --lora-rank 16 --gpu-gib 80"),
    Tiny("audiorl train quickstart --out runs/quickstart", add="--tiny"),
    Tiny("audiorl resume runs/q1", {"runs/q1": "runs/quickstart"}),
    Tiny("audiorl report runs/q1", {"runs/q1": "runs/quickstart"}),
    Tiny("audiorl train mmau-grpo --tiny --out runs/try"),
    Tiny("audiorl train mmau-grpo --tiny --reward-file brevity.py --reward-weight 0.2 --out runs/brief"),
    Tiny("audiorl rewards score brevity.py runs/try"),
    Tiny("audiorl rewards study brevity.py ranked.py --rollouts runs/try/rollouts/*.jsonl --out study.html"),
    Tiny(
        "audiorl chat openai/whisper-base --language es --audio buenos_dias.wav",
        {"openai/whisper-base": "runs/try", "buenos_dias.wav": "speech.flac"},
    ),
    Tiny(
        "audiorl eval mmau --model runs/mmau --data mmau-test-mini.json …",
        {"runs/mmau": "runs/try", "mmau-test-mini.json": QUESTIONS},
    ),
    Tiny("audiorl eval yes.py …", {"runs/mmau": "runs/try"}),
    Tiny(
        "audiorl eval asr --model Qwen/…", {"Qwen/Qwen2.5-Omni-3B": "runs/try", "LibriSpeech/test-clean": "asr.jsonl"}
    ),
    Tiny(
        "audiorl eval asr --score evals/after/results.jsonl --baseline evals/asr/results.jsonl",
        {"evals/after": "evals/asr"},
    ),
    Tiny(
        "audiorl eval text --model runs/asr --text essays.txt --questions none",
        {"runs/asr": "runs/try", "essays.txt": "texts.txt"},
    ),
    Tiny("audiorl train codec --out runs/codec", add="--tiny"),
    Tiny("audiorl codec encode speech.flac --codec runs/codec/codec --out speech.safetensors"),
    Tiny("audiorl eval codec --codecs runs/codec/codec --audio bundled:en --asr pocketsphinx …", add="--limit 2"),
    Tiny("audiorl train simul-quickstart --out runs/simul", add="--tiny"),
    Tiny("audiorl eval simul --model runs/simul --streams bundled:es/test …", add="--limit 1"),
    Tiny("audiorl eval simul --score evals/simul --language es"),
    Tiny("audiorl train tts-quickstart --out runs/tts", add="--tiny"),
    Tiny("audiorl eval tts --model runs/tts --texts texts.txt …", add="--sampling.max-frames 5"),
    Tiny("audiorl export runs/mmau --out exported --merge", {"runs/mmau": "runs/try", "--merge": ""}),
)


@pytest.mark.slow
def test_commands_run(
    tmp_path: Path,
    commands: dict[Path, list[Argv]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands of a first day, in one folder and in their order, on tiny models."""
    monkeypatch.chdir(tmp_path)
    prepare()
    documented = [" ".join(argv) for argvs in commands.values() for argv in argvs]
    for tiny in RUNS:
        start = tiny.words.split(" …")[0].replace("…", "")
        pattern = re.escape(tiny.words).replace(re.escape("…"), r"\S*") + ("" if "…" not in tiny.words else r".*")
        matching = [line for line in documented if re.fullmatch(pattern, line)]
        assert matching, f"no page has the command {start}"
        words = matching[0].split(" ")[1:] + tiny.add.split()
        for old, new in tiny.replace.items():
            words = [word.replace(old, new) for word in words]
        words = [word for word in words if word]
        codes = (0, 1) if "--plan" in words else (0,)  # 1: the plan does not fit
        assert cli.main(words) in codes, f"{words}\n{capsys.readouterr().err}"


def prepare() -> None:
    """The files that the commands name."""
    from audiorl.data.corpus import bundled_speech

    for name, source in python_files():
        Path(name).write_text(source)
    utterances = [u for u in bundled_speech() if u.language == "en"][:2]
    paths = [str(u.clip.path) for u in utterances]
    rows = [
        {"id": str(i), "audio_id": path, "question": "Which?", "choices": ["a", "b"], "answer": "a", "task": "speech"}
        for i, path in enumerate(paths)
    ]
    Path(QUESTIONS).write_text(json.dumps(rows))
    spoken = [{"audio": path, "text": u.text} for path, u in zip(paths, utterances, strict=True)]
    Path("asr.jsonl").write_text("\n".join(map(json.dumps, spoken)))
    Path("speech.flac").write_bytes(Path(paths[0]).read_bytes())
    Path("texts.txt").write_text("Hello.\n")
