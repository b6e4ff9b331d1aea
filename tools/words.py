"""Private words that the code and the documents do not use, because the field has names for these things.

    python tools/words.py             print every use as FILE:LINE; exit code 1 if there are any
    python tools/words.py PATH …      only in these files and folders

Checked are names that the code defines (functions, classes, arguments, variables, attributes, files) and prose
(docstrings, comments, Markdown). To allow a use, add it to ALLOWED with the reason.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODE = ("audiorl", "tokenizers_audio", "recipes", "eval", "bench", "tools")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs")

# Words that no name contains, as a part between underscores or capitals, and what to say in their place.
WORDS_IN_NAMES = {
    "pen": "sampler",
    "pens": "samplers",
    "ear": "audio encoder, or recogniser",
    "ears": "audio encoders, or recognisers",
    "hear": "encode_audio, or transcribe",
    "hears": "encode_audio, or transcribe",
    "heard": "encoder output, audio, or transcript",
    "stretch": "span",
    "stretches": "spans",
    "beside": "ptx_examples, overlap, colocated, or non_layer",
    "apart": "dedicated, or separate",
    "anew": "restart",
    "wire": "serialization",
}
# Names that tell nothing about the thing, or that the field calls otherwise.
NAMES = {
    "found": "what was looked up",
    "known": "what the collection holds",
    "taken": "what was taken",
    "asked": "the request",
    "told": "the message",
    "kept": "the rows, tokens or files that remain",
    "RLWorker": "Trainer",
    "Shard": "TrainBatch",
    "Trained": "TrainOutput",
    "Collected": "RolloutBatch",
    "Author": "the rollout's RNG key",
    "shape_scores": "normalize_scores",
    "make_room": "free_memory",
    "drawn": "code_mask, or sampled",
    "optimise": "update",
    "CONNECTING": "a constant that says the unit, such as CONNECT_TIMEOUT",
    "NOTICING": "a constant that says the unit",
    "PLACING": "a constant that says the unit",
}
PROSE = re.compile(
    r"\b(pens?|stretch(?:es)?|anew|beside|travels|an ear|ears|the ear|hear_once|whole-reward)\b", re.IGNORECASE
)

# (file, word): why it is right there.
ALLOWED: dict[tuple[str, str], str] = {}
# Files and folders that still use such words; to be emptied.
NOT_DONE: tuple[str, ...] = ()


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that the code defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def parts_of_name(name: str) -> list[str]:
    """``_encode_once`` is encode, once; ``SpeechSampler`` is speech, sampler."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line


def uses_in_code(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, word, advice) of every forbidden word in a Python file."""
    for line, name in names_in(ast.parse(source)):
        bare = name.strip("_")
        for word in [bare] if bare in NAMES else [p for p in parts_of_name(name) if p in WORDS_IN_NAMES]:
            yield line, word, f"{name}: say {NAMES.get(word) or WORDS_IN_NAMES[word]}"
    for line, text in prose_in(source):
        for match in PROSE.finditer(text):
            yield line, match[0].lower(), text.strip()


def uses_in_document(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, word, the line) of every forbidden word in a Markdown file."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PROSE.finditer(line):
            yield number, match[0].lower(), line.strip()


def uses(root: Path, paths: Sequence[str] = (*CODE, *DOCUMENTS), not_done: Sequence[str] = NOT_DONE) -> list[str]:
    """``FILE:LINE: WORD: …`` of every use below `paths` that ALLOWED does not name, outside of `not_done`."""
    result = []
    for path in paths:
        folder = root / path
        files: Any = [folder] if folder.is_file() else sorted([*folder.rglob("*.py"), *folder.rglob("*.md")])
        for file in files:
            name = file.relative_to(root).as_posix()
            if any(name == path or name.startswith(f"{path}/") for path in not_done):
                continue
            text = file.read_text(encoding="utf-8")
            entries = list(uses_in_code(text) if file.suffix == ".py" else uses_in_document(text))
            entries += [(1, part, "the file's name") for part in parts_of_name(file.stem) if part in WORDS_IN_NAMES]
            result += [f"{name}:{n}: {word}: {where}" for n, word, where in entries if (name, word) not in ALLOWED]
    return result


def main(paths: Sequence[str]) -> int:
    lines = uses(ROOT, paths or (*CODE, *DOCUMENTS), not_done=() if paths else NOT_DONE)
    print("\n".join(lines) or "none of the private words is used")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
