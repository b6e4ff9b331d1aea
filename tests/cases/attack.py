"""B1 to B17: what an attack on readers, servers, rewards and commands found."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from audiorl.config import ModelConfig, SamplingConfig, torch_device
from audiorl.data.containers import webdataset_rows
from audiorl.data.rows import read_rows
from audiorl.models import load_policy
from audiorl.models.export import export
from audiorl.models.families.text import tiny
from audiorl.options import parse
from audiorl.recipes._loader import load_recipe, parse_config
from audiorl.rewards import Gated, StandardisedSum, WeightedSum, load_reward
from audiorl.rewards.chat import BadAnswer, ChatEndpoint
from audiorl.rewards.combine import score_rollouts
from audiorl.rewards.llm_judge import JudgePrompt, OpenAIJudge
from audiorl.rollout.samplers import SegmentBuffer, choose, filtered_logprobs
from audiorl.run.folder import Run
from audiorl.run.records import RunState, write_json
from audiorl.types import Message, Rollout, Sample, Score, Segment
from corpora.cli import DATA_COMMANDS, GraftOptions
from tests.cases import Case, Refused
from tests.support.reports import write_run
from tests.support.views import client, viewed

# -- rewards that change what they are given ---------------------------------------------------------------------------


def _rollouts(*texts: str) -> list[Rollout]:
    """One group of answers with these texts, to a prompt with metadata of several levels."""
    sample = Sample("q", (Message("user", ("Which?",)),), ("b",), metadata={"words": ["x", "a"], "more": {"n": [1]}})
    return [
        Rollout(sample, (Segment(torch.zeros(0).long(), torch.tensor([i, 9]), torch.zeros(2), text),), "g", i)
        for i, text in enumerate(texts)
    ]


def _totals(reward: Any, rollouts: Sequence[Rollout]) -> list[float]:
    return [score.total for score in score_rollouts(reward, rollouts) if score is not None]


def _by_file(code: str) -> Callable[[Path], list[float]]:
    """Return the totals of two answers, "long" and "s", by a reward file."""

    def run(folder: Path) -> list[float]:
        (folder / "reward.py").write_text(code)
        try:
            return _totals(load_reward(folder / "reward.py"), _rollouts("long", "s"))
        except RuntimeError as error:  # a reward file that raises; `audiorl` shows its traceback
            raise ValueError(str(error)) from error

    return run


def _metadata_after(folder: Path) -> Any:
    rollouts = _rollouts("a", "b")

    def reward(given: Sequence[Rollout]) -> list[Score]:
        given[0].sample.metadata["words"].sort()
        given[0].sample.metadata["more"]["n"].clear()
        return [Score(0.0) for _ in given]

    score_rollouts(reward, rollouts)
    return rollouts[0].sample.metadata


def _scored_again(folder: Path) -> Any:
    (rollout,) = (r.with_score(Score(1.0, {"old": 1.0})) for r in _rollouts("a"))

    def reward(given: Sequence[Rollout]) -> list[Score]:
        assert given[0].score is not None
        given[0].score.parts["new"] = 2.0  # type: ignore[index]
        return [Score(0.0)]

    score_rollouts(reward, [rollout])
    assert rollout.score is not None
    return dict(rollout.score.parts)


def _sum(kind: Any) -> Callable[[Path], Any]:
    def zeroes(given: Sequence[Rollout]) -> list[Score]:
        for rollout in given:
            rollout.segments[0].ids.zero_()
        return [Score(0.0) for _ in given]

    def ids(given: Sequence[Rollout]) -> list[Score]:
        return [Score(float(r.segments[0].ids.sum())) for r in given]

    return lambda folder: _totals(kind(zeroes, ids), _rollouts("a", "b"))


# -- judges, options, the view -----------------------------------------------------------------------------------------


def _verdict(text: str) -> Callable[[Path], str]:
    """Return how a judge's answer fails, which is counted and skips the rollout."""

    def run(folder: Path) -> str:
        judge = OpenAIJudge(ChatEndpoint("m"), JudgePrompt("5: right."))
        (question,) = judge._questions(_rollouts("a")[0])
        try:
            return str(question.read(text))
        except BadAnswer as error:
            return error.kind

    return run


def _parsed(recipe: str, *words: str) -> Callable[[Path], Any]:
    """Return the steps of a recipe's first group that has some, by its options."""

    def run(folder: Path) -> Any:
        (folder / "run.yaml").write_text("sft:\n  steps: 7\n")
        given = [word.replace("FOLDER", str(folder)) for word in words]
        config = parse_config(load_recipe(recipe), ["--tiny", *given])
        return config.stage1.steps if hasattr(config, "stage1") else config.sft.steps

    return run


def _command(name: str, *words: str) -> Callable[[Path], Any]:
    """Return the options of `audiorl data NAME` or `audiorl graft`, as text."""
    kind = GraftOptions if name == "graft" else DATA_COMMANDS[name][0]

    def run(folder: Path) -> str:
        try:
            return str(parse(kind, words, prog=name))
        except SystemExit as end:  # tyro has printed the reason
            raise ValueError(f"exit code {end.code}") from None

    return run


def _seed(*words: str) -> Callable[[Path], Any]:
    return lambda folder: parse_config(load_recipe("quickstart"), ["--tiny", *words]).seed


def _listed(path: str) -> Callable[[Path], list[int]]:
    """Return the status of the list and of a page where one row names a clip `path`."""

    def run(folder: Path) -> list[int]:
        made = write_run(folder / "run")
        file = next(made.glob("rollouts/step_*.jsonl"))
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0]["sample"]["audio"] = [{"path": path, "start": 0.0, "duration": None}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        view = viewed(made)
        places = view.index.search().places
        return [client(view).get(p).status_code for p in ("/rollouts", *(f"/rollouts/{place}" for place in places[:2]))]

    return run


def _fifo(name: str) -> Callable[[Path], Any]:
    """Return whether the view still reads rollouts that arrive after a FIFO has appeared in the run folder."""

    def run(folder: Path) -> bool:
        made = write_run(folder / "run")
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).unlink(missing_ok=True)
        os.mkfifo(made / name)
        view = viewed(made)
        file = next(f for f in made.glob("rollouts/step_*.jsonl") if f.is_file())
        before = view.index.count(0)
        shutil.copy(file, made / "rollouts" / "step_000777.jsonl")
        view.poll()
        paths = ("/state", "/", "/rollouts", "/metrics/0")
        return view.index.count(0) > before and all(client(view).get(path).status_code == 200 for path in paths)

    return run


def _asked(method: str, path: str, **more: Any) -> Callable[[Path], Any]:
    """Return the status of a request to a view with labels."""

    def run(folder: Path) -> int:
        view = viewed(write_run(folder / "run"), labels=folder / "labels.jsonl")
        requests = client(view)
        requests._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        return requests.request(method, path, **more).status_code

    return run


# -- archives, devices, sampling ---------------------------------------------------------------------------------------


def _tar(folder: Path, mode: str, size: int, sparse: bool = False) -> Path:
    """Write x.tar with a.wav of `size` zeros and a.txt; `sparse`: a hole, which takes no place in the file."""
    path = folder / "x.tar"
    with tarfile.open(path, mode) as archive:
        for name, content in (("a.txt", b"hello"), ("a.wav", None)):
            member = tarfile.TarInfo(name)
            member.size = size if content is None else len(content)
            if content is None and sparse:
                member.size = 0
                member.pax_headers = {
                    "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": name,
                    "GNU.sparse.size": str(size), "GNU.sparse.map": f"{size},0",
                }  # fmt: skip
                archive.addfile(member)
            else:
                archive.addfile(member, io.BytesIO(content) if content else _Zeros())
    return path


class _Zeros(io.RawIOBase):
    """Zeros without end."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def _unpacked(mode: str, size: int, sparse: bool = False) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        os.environ["AUDIORL_CACHE"] = str(folder / "cache")
        try:
            return [type(row).__name__ for row in webdataset_rows(_tar(folder, mode, size, sparse))]
        finally:
            del os.environ["AUDIORL_CACHE"]

    return run


def _gzip(size: int, content: bytes) -> Callable[[Path], Any]:
    def run(folder: Path) -> int:
        with gzip.open(folder / "x.jsonl.gz", "wb", 6) as file:
            file.write(content)
            for _ in range(size):
                file.write(b" " * 2**20)
        return len(list(read_rows(folder / "x.jsonl.gz")))

    return run


def _chosen(logits: list[float], greedy: bool = False, top_p: float = 1.0) -> Callable[[Path], Any]:
    """Return the token and whether it has a log-prob, of a row of logits."""

    def run(folder: Path) -> list[int]:
        logprobs = filtered_logprobs(torch.tensor([logits]), SamplingConfig(top_p=top_p))
        token = int(choose(logprobs, torch.tensor([0.5], dtype=torch.float64), greedy))
        buffer = SegmentBuffer()
        try:
            buffer.add(token, float(logprobs[0, token]))
        except FloatingPointError as error:  # which `audiorl` prints as one line
            raise ValueError(str(error)) from None
        return buffer.ids

    return run


# -- run folders, export, models ---------------------------------------------------------------------------------------


def _full_disk(folder: Path) -> list[str]:
    """Return what is left beside a run folder that could not be made."""
    (folder / "run.partial").write_text("")  # in the way: no folder can be made there
    (folder / "run.partial").chmod(0o600)
    with tempfile.TemporaryDirectory() as other:
        os.environ["TMPDIR"] = other
        try:
            with _limited(100):
                Run.create(folder / "run", "quickstart", ["x"] * 1000, ModelConfig())
        except OSError:
            pass
        finally:
            del os.environ["TMPDIR"]
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


class _limited:
    """Files may have so many bytes at most: what a full disk does to those who write."""

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> None:
        import resource

        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *error: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def _partial_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint that was cut off is still there once the run is open again."""
    run = Run.create(folder / "run", "quickstart", [], ModelConfig())
    run.close()
    cut = folder / "run" / "checkpoints" / "grpo" / ".step_000003.partial"
    cut.mkdir(parents=True)
    (cut / "model.safetensors").write_bytes(bytes(1000))
    Run.open(folder / "run").close()
    return cut.exists()


def _failed_save(folder: Path) -> list[str]:
    """Return what is left of a checkpoint that was begun and not ended when the run is closed."""
    with Run.create(folder / "run", "quickstart", [], ModelConfig()) as run:
        (run.begin_save("grpo", 1) / "model.safetensors").write_bytes(bytes(1000))
    return [p.name for p in (folder / "run" / "checkpoints" / "grpo").iterdir()]


def _failed_record(folder: Path) -> list[str]:
    """Return the files after a record was written for which there is no room."""
    write_json(folder / "state.json", {"seq": 1})
    try:
        with _limited(50):
            write_json(folder / "state.json", {"seq": "x" * 100_000})
    except OSError:
        pass
    return [p.name + p.read_text().replace("\n", "") for p in folder.iterdir()]


def _seq(state: int, saved: int) -> Callable[[Path], Any]:
    """Return the lines of metrics that are left of three, with these numbers in state.json and in the checkpoint."""

    def run(folder: Path) -> int:
        out = folder / "run"
        with Run.create(out, "quickstart", [], ModelConfig()) as made:
            for step in range(3):
                made.log("grpo", step, {"loss": 1.0})
        step = out / "checkpoints" / "grpo" / "step_000003"
        step.mkdir(parents=True)
        write_json(step / "trainer.json", {"phase": "grpo", "step": 3, "seq": saved})
        paths = {"grpo": "checkpoints/grpo/step_000003"}
        record = RunState(state, {}, paths, {})
        write_json(out / "state.json", {name: getattr(record, name) for name in record.__struct_fields__})
        Run.open(out).close()
        return len((out / "metrics.jsonl").read_text().splitlines())

    return run


def _model(folder: Path) -> Path:
    tiny(["a few words"] * 20, hidden=32, layers=1, vocab_size=300).save(folder / "model")
    return folder / "model"


def _pushed(fails: str) -> Callable[[Path], Any]:
    """Return whether a folder is left after an upload in which this call of the hub fails."""

    def run(folder: Path) -> Any:
        import huggingface_hub

        class Hub:
            def create_repo(self, *args: Any, **options: Any) -> None:
                self.call("create_repo")

            def upload_folder(self, *args: Any, **options: Any) -> None:
                self.call("upload_folder")

            def call(self, name: str) -> None:
                if name == fails:
                    raise OSError("401 Unauthorized")
                if fails == "connection":
                    raise httpx.ConnectError("401 no such host")

        original, huggingface_hub.HfApi = huggingface_hub.HfApi, Hub  # type: ignore[misc]
        try:
            export(_model(folder), folder / "out", push="me/model")
        except ValueError as error:
            assert "me/model" in str(error) and "401" in str(error)
        finally:
            huggingface_hub.HfApi = original  # type: ignore[misc]
        return (folder / "out").exists()

    return run


def _sized(name: str, value: int) -> Callable[[Path], Any]:
    """Load a small model whose config.json has another size."""

    def run(folder: Path) -> Any:
        path = _model(folder)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, name: value}))
        return load_policy(path).device.type

    return run


CASES = [
    Case("B1", "attack", "a reward that sorts its list of rollouts in place by length",
         _by_file("def reward(rollouts):\n    rollouts.sort(key=lambda r: len(r.text))\n"
                  "    return [float(len(r.text)) for r in rollouts]\n"),
         Refused("'tuple' object has no attribute 'sort'")),
    Case("B1", "own", "a reward object that reverses its list in place",
         _by_file("class R:\n    def __call__(self, rollouts):\n        rollouts.reverse()\n"
                  "        return [float(len(r.text)) for r in rollouts]\nreward = R()\n"),
         Refused("'tuple' object has no attribute 'reverse'")),
    Case("B1", "own", "a reward with the signature of TRL that sorts `completions` in place",
         _by_file("def reward(prompts, completions):\n    completions.sort(key=len)\n"
                  "    return [float(len(c)) for c in completions]\n"), Refused("changes the list 'completions'")),
    Case("B1", "own", "a reward with the signature of TRL that sorts a copy",
         _by_file("def reward(prompts, completions):\n    sorted(completions, key=len)\n"
                  "    return [float(len(c)) for c in completions]\n"), [4.0, 1.0]),
    Case("B1", "own", "a reward that sorts a list in the metadata of its sample", _metadata_after,
         {"words": ["x", "a"], "more": {"n": [1]}}),
    Case("B1", "own", "a reward that adds a part to the score that a rollout has already", _scored_again, {"old": 1.0}),
    *(
        Case(
            "B1",
            "own",
            f"a term of a {kind.__name__} that writes to the tokens which the next term reads",
            _sum(
                (lambda a, b, kind=kind: Gated(a, b, 0.0))
                if kind is Gated
                else (lambda a, b, kind=kind: kind.of(a=a, b=b))
            ),
            Refused("writes to the rollouts, which other rewards see too"),
        )
        for kind in (WeightedSum, StandardisedSum, Gated)
    ),
    *(
        Case("B2", source, f"a judge's answer: {given}", _verdict(text), right)
        for source, given, text, right in (
            ("attack", "100,000 open brackets", "[" * 100_000, "wrong fields"),
            ("own", "100,000 objects in each other", '{"a":' * 100_000, "not JSON"),
            ("own", "a reason that is a list 5,000 deep",
             '{"id": "i", "score": 1, "reason": ' + "[" * 5000 + "]" * 5000 + "}", "wrong fields"),
            ("own", "an unknown field 5,000 deep", '{"id": "i", "score": 1, "x": ' + "[" * 5000 + "]" * 5000 + "}",
             "not JSON"),
            ("own", "a Markdown block 100,000 deep", "```json\n" + "[" * 100_000 + "\n```", "wrong fields"),
        )
    ),
    Case("B3", "attack", "simul-ppo --stage1.steps 5", _parsed("simul-ppo", "--stage1.steps", "5"), 5),
    Case("B3", "own", "simul-ppo --stage1.steps=5 --max-steps 3",
         _parsed("simul-ppo", "--stage1.steps=5", "--max-steps", "3"), 5),
    Case("B3", "own", "simul-ppo --sft.steps 5, which follow from --sft-epochs",
         _parsed("simul-ppo", "--sft.steps", "5"), Refused("--sft.steps: the steps of this recipe follow")),
    Case("B3", "own", "sft-audio with sft: steps: 7 in a run file", _parsed("sft-audio", "--config", "FOLDER/run.yaml"),
         Refused("--sft.steps: the steps of this recipe follow")),
    *(
        Case("B4", source, f"a row of the view with the path {given}", _listed(path), [200, 200, 200])
        for source, given, path in (
            ("attack", "with NUL", "a\0b.wav"),
            ("attack", "of 300 letters", "a" * 300 + ".wav"),
            ("own", "of 5,000 letters in folders", "/".join(["b" * 99] * 50)),
            ("own", "/dev/zero", "/dev/zero"),
            ("own", "half a character", "\ud800.wav"),
        )
    ),
    *(
        Case("B5", source, f"a FIFO {name} in a run that is viewed", _fifo(name), True)
        for source, name in (
            ("attack", "rollouts/step_000900.jsonl"),
            ("own", "metrics.jsonl"),
            ("own", "state.json"),
            ("own", "eval.json"),
            ("own", "eval/fifo.jsonl"),
        )
    ),
    *(
        Case("B6", source, f"{method} {given} to the view", _asked(method, path, **more), right)
        for source, method, given, path, more, right in (
            ("attack", "GET", "a step of 400 digits", "/rollouts?step=" + "9" * 400, {}, 400),
            ("attack", "GET", "a row beyond 64 bits", "/rollouts/0/1/99999999999999999999", {}, 400),
            ("attack", "GET", "a search of 2,000 terms", "/rollouts?q=" + "+".join(f"reward>{i}" for i in range(2000)),
             {}, 400),
            ("attack", "POST", "labels of an id that is a list", "/labels", {"content": b'{"id": []}'}, 400),
            ("attack", "POST", "labels 200,000 deep", "/labels", {"content": b"[" * 200_000}, 400),
            ("own", "POST", "labels 20,000 deep, below the limit of bytes", "/labels", {"content": b"[" * 20_000}, 400),
            ("own", "PUT", "an Origin that is no address", "/labels", {"headers": {"Origin": "http://[::1"}}, 403),
            ("own", "GET", "a step beyond 64 bits in a path", "/rollouts/0/99999999999999999999/0", {}, 400),
        )
    ),
    *(
        Case("B9", source, given, _unpacked(mode, size, sparse), right)
        for source, given, mode, size, sparse, right in (
            ("attack", "a tar.gz of 0.3 MB that becomes 300 MB", "w:gz", 300 * 2**20, False, Refused("as no data do")),
            ("own", "a tar.xz that becomes 300 MB", "w:xz", 300 * 2**20, False, Refused("as no data do")),
            ("own", "a sparse file of 8 TiB in a tar of 10 KiB", "w", 2**43, True, Refused("as no data do")),
            ("own", "a tar.gz with a second of silence", "w:gz", 32_044, False, ["Row"]),
        )
    ),
    Case("B9", "own", "a .jsonl.gz of 0.3 MB that becomes 300 MB", _gzip(300, b'{"id": 1}\n'),
         Refused("as no data do")),
    Case("B9", "own", "a .jsonl.gz of two alike rows", _gzip(1, b'{"id": 1}\n{"id": 1}\n'), 2),
    *(
        Case("B10", source, f"--model.device {device}",
             lambda folder, device=device: str(parse_config(load_recipe("mmau-grpo"),
                                                            ["--tiny", "--model.device", device]).model.device),
             Refused("it must be auto, cpu, cuda or cuda:N"))
        for source, device in (("attack", "cdua"), ("own", "gpu"), ("own", "cuda:"), ("own", "CPU"), ("own", "cuda:-1"))
    ),
    Case("B10", "attack", "the device cuda:99", lambda folder: torch_device("cuda:99"), Refused("'cuda:99': ")),
    Case("B11", "attack", "a row of logits that are NaN", _chosen([float("nan")] * 5),
         Refused("token 1: the model's logits")),
    Case("B11", "own", "one NaN among logits", _chosen([0.0, float("nan"), 1.0]),
         Refused("token 1: the model's logits")),
    Case("B11", "own", "an infinite logit", _chosen([0.0, float("inf"), 1.0]), Refused("token 1: the model's logits")),
    Case("B11", "own", "NaN with greedy sampling", _chosen([float("nan")] * 3, True),
         Refused("token 1: the model's logits")),
    Case("B11", "own", "NaN with top-p", _chosen([float("nan")] * 3, top_p=0.5),
         Refused("token 1: the model's logits")),
    Case("B11", "own", "logits of which one is -inf", _chosen([-float("inf"), 0.0]), [1]),
    Case("B12", "own", "files that may have 100 bytes when a run begins", _full_disk, []),
    Case("B12", "attack", "a checkpoint that a full disk cut off, when the run goes on", _partial_checkpoint, False),
    Case("B12", "own", "a checkpoint that was begun when an error ended the run", _failed_save, []),
    Case("B12", "own", "a state.json for which there is no room", _failed_record, ['state.json{ "seq": 1}']),
    Case("B13", "attack", "state.json with seq 0 and a checkpoint of seq 3", _seq(0, 3),
         Refused("seq is 0, but checkpoints/grpo")),
    Case("B13", "own", "state.json with seq 2 and a checkpoint of seq 3", _seq(2, 3),
         Refused("seq is 2, but checkpoints/grpo")),
    Case("B13", "own", "state.json with seq 3 and a checkpoint of seq 3", _seq(3, 3), 3),
    Case("B13", "own", "state.json with seq 3 and a checkpoint of seq 2", _seq(3, 2), 3),
    *(
        Case("B14", source, " ".join((name, *words)), _command(name, *words), Refused(reason))
        for source, name, words, reason in (
            ("attack", "build", ("out", "--max-seconds", "nan"), "exit code 2"),
            ("own", "build", ("out", "--bitrate", "-1"), "exit code 2"),
            ("own", "build", ("out", "--synthetic-speakers", "0"), "exit code 2"),
            ("own", "split", ("a", "--out", "b", "--min-seconds", "inf"), "exit code 2"),
            ("own", "split", ("a", "--out", "b", "--min-words", "-3"), "min_words is -3; it must be at least 0"),
            ("own", "split", ("a", "--out", "b", "--held-out", "1.5"), "exit code 2"),
            ("own", "build-qa", ("out", "--speech", "a", "--train", "-5"), "exit code 2"),
            ("own", "graft", ("--llm", "a", "--encoder", "b", "--family", "qwen2-audio", "--out", "c",
                              "--encoder-layers", "99999999999999999999"), "exit code 2"),
        )
    ),
    *(
        Case("B15", source, f"export --push where {name} fails", _pushed(name), False)
        for source, name in (("attack", "create_repo"), ("own", "connection"))
    ),
    Case("B15", "own", "export --push where upload_folder fails, after all is written", _pushed("upload_folder"), True),
    Case("B15", "own", "export --push that works", _pushed(""), True),
    Case("B16", "attack", "--seed 99999999999999999999", _seed("--seed", "99999999999999999999"),
         Refused("seed is 99999999999999999999")),
    Case("B16", "own", "--seed -1", _seed("--seed", "-1"), Refused("seed is -1; it must be at least 0")),
    Case("B16", "own", "--seed 9223372036854775808", _seed("--seed", str(2**63)),
         Refused("seed is 9223372036854775808")),
    Case("B16", "own", "--seed 4294967296", _seed("--seed", str(2**32)), 2**32),
    *(
        Case("B17", source, f"config.json with {name} {value}", _sized(name, value),
             Refused(f"{name} is {value}, more than"))
        for source, name, value in (
            ("attack", "hidden_size", 10**7),
            ("own", "num_hidden_layers", 10**9),
            ("own", "vocab_size", 10**12),
            ("own", "intermediate_size", 10**11),
            ("own", "num_attention_heads", 10**9),
        )
    ),
]  # fmt: skip
