import json

import pytest

from audiorl.eval._common import check_settings, generate_all, read_rows
from audiorl.types import Sample

SAMPLES = [Sample(id=f"s{i}", messages=()) for i in range(5)]
TEXTS = {s.id: f"text {s.id} ä" for s in SAMPLES}


def test_rows_come_in_sample_order_with_extras(tmp_path, scripted) -> None:
    engine = scripted(TEXTS)
    rows = generate_all(
        engine, SAMPLES, tmp_path / "a" / "out.jsonl", batch_size=2, describe=lambda r: {"up": r.text.upper()}
    )
    assert [r["id"] for r in rows] == ["s0", "s1", "s2", "s3", "s4"]
    assert rows[0] == {"id": "s0", "text": "text s0 ä", "tokens": 10, "stop_reason": "eos", "up": "TEXT S0 Ä"}
    assert read_rows(tmp_path / "a" / "out.jsonl") == rows


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, scripted) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        generate_all(scripted(TEXTS, fail_after=2), SAMPLES, out, batch_size=2)
    again = scripted(TEXTS)
    rows = generate_all(again, SAMPLES, out, batch_size=2)
    assert again.asked == ["s2", "s3", "s4"]
    assert [r["text"] for r in rows] == list(TEXTS.values())
    assert len(read_rows(out)) == 5
    idle = scripted(TEXTS)
    assert generate_all(idle, SAMPLES, out) == rows
    assert idle.asked == []


def test_every_place_a_file_can_be_torn(tmp_path, scripted) -> None:
    whole = tmp_path / "whole.jsonl"
    rows = generate_all(scripted(TEXTS), SAMPLES[:2], whole, progress=False)
    content = whole.read_bytes()
    for cut in range(len(content) + 1):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(content[:cut])
        assert generate_all(scripted(TEXTS), SAMPLES[:2], torn, progress=False) == rows
        assert torn.read_bytes() == content


def test_rows_of_other_samples_stay_in_the_file(tmp_path, scripted) -> None:
    out = tmp_path / "out.jsonl"
    generate_all(scripted(TEXTS), SAMPLES, out, progress=False)
    assert [r["id"] for r in generate_all(scripted(TEXTS), SAMPLES[3:], out, progress=False)] == ["s3", "s4"]
    assert len(read_rows(out)) == 5


def test_errors(tmp_path, scripted) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="repeated: s0"):
        generate_all(scripted(TEXTS), [SAMPLES[0], SAMPLES[0]], out)
    with pytest.raises(ValueError, match="batch_size"):
        generate_all(scripted(TEXTS), SAMPLES, out, batch_size=0)
    out.write_text('{"id": "s0"}\n{"id": \n{"id": "s1"}\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        generate_all(scripted(TEXTS), SAMPLES, out)
    out.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: not a result row"):
        read_rows(out)


def test_settings_must_not_change_between_runs(tmp_path) -> None:
    path = tmp_path / "run" / "settings.json"
    check_settings(path, {"model": "a", "tokens": (1, 2)})
    check_settings(path, {"model": "a", "tokens": [1, 2]})
    assert json.loads(path.read_text()) == {"model": "a", "tokens": [1, 2]}
    with pytest.raises(ValueError, match=r"model: 'a' -> 'b', new: None -> 1"):
        check_settings(path, {"model": "b", "tokens": [1, 2], "new": 1})
