"""The search box: words and conditions as SQL.

    menor "o igual" reward>0.5 accuracy=1 task:asr step<=40 -sil prompt:spanish

finds rollouts whose text holds "menor" and "o igual" and not "sil", with these numbers; `prompt:WORD` looks into
prompts and gold answers. Fields are those of `NUMBERS` and `TEXTS` and all reward parts. Upper and lower case are the
same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBERS = ("step", "reward", "advantage", "tokens", "index")
TEXTS = ("run", "phase", "task", "group", "sample", "stop", "prompt")
_TERM = re.compile(r'(-?)(?:"([^"]*)"|([^\s"<>=:]+)(<=|>=|<|>|=|:)("[^"]*"|\S+)|(\S+))')
_COLUMN = {"index": "member", "group": "group_id"}
ORDERS = {
    "newest": "step DESC, run, row",
    "oldest": "step, run, row",
    "reward ↓": "reward DESC, step DESC, run, row",
    "reward ↑": "reward, step DESC, run, row",
    "advantage ↓": "advantage DESC, step DESC, run, row",
    "advantage ↑": "advantage, step DESC, run, row",
    "longest": "tokens DESC, step DESC, run, row",
    "shortest": "tokens, step DESC, run, row",
}


def conditions(text: str, parts: Sequence[str], runs: Sequence[str]) -> tuple[list[str], list[object]]:
    """SQL conditions and their values. `parts`: the reward parts that exist, `runs`: the names of the runs.

    Raises ValueError for a field that does not exist and for a number that is none.
    """
    where: list[str] = []
    values: list[object] = []
    for term in _TERM.finditer(text):
        negative, quoted, field, relation, value, word = term.groups()
        if field is None or (relation == ":" and field not in (*NUMBERS, *TEXTS, *parts)):
            needle = (
                quoted if quoted is not None else term[0].removeprefix("-").replace('"', "") if word is None else word
            )
            if needle:
                where.append(f"instr(folded, ?) {'=' if negative else '>'} 0")
                values.append(needle.casefold())
            continue
        value = value.strip('"')
        if field in TEXTS:
            if relation not in ":=":
                raise ValueError(f"{field} is a text: write {field}:{value}")
            condition, given = f"{_COLUMN.get(field, field)} = ?", value
            if field == "prompt":
                condition, given = "instr(asks, ?) > 0", value.casefold()
            elif field == "run":
                matching = [str(i) for i, name in enumerate(runs) if name == value or name.endswith(f"/{value}")]
                if not matching:
                    raise ValueError(f"no run is called {value}; there are {', '.join(runs)}")
                condition, given = f"run IN ({','.join(matching)}) AND ?", "1"
        else:
            column = _COLUMN.get(field, field)
            if field not in NUMBERS:
                if field not in parts:
                    fields = ", ".join((*NUMBERS, *TEXTS, *parts))
                    raise ValueError(
                        f'no field or reward part is called {field}; there are {fields}. A text: "{term[0]}"'
                    )
                column = f"json_extract(parts, {_literal(field)})"
            try:
                number = float(value)
            except ValueError:
                raise ValueError(f"{term[0]}: {value} is not a number") from None
            condition, given = f"{column} {'=' if relation == ':' else relation} ?", number  # type: ignore[assignment]
        where.append(f"NOT ({condition})" if negative else f"({condition})")
        values.append(given)
    return where, values


def _literal(part: str) -> str:
    """The JSON path of a reward part, as an SQL text."""
    return "'$.\"" + part.replace("'", "''") + "\"'"
