import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.eval.metrics import latency as playback
from audiorl.eval.metrics.latency import (
    al,
    ap,
    atd,
    dal,
    end_offset,
    flal,
    laal,
    latency_unit,
    reference_length,
    start_offset,
    text_units,
    wait_k,
    yaal,
)

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "simuleval_1.1.4.json").read_text(encoding="utf-8"))


def ours(line: dict, log: dict, elapsed: list[float], aware: bool) -> dict[str, float]:
    """Every metric of one line of a log, from the functions alone."""
    times, length = (elapsed if aware else line["delays"]), line["source_length"]
    wanted = reference_length(line["reference"], log["unit"]) if log["use_reference_length"] else len(times)
    text, spoken = log["source_type"] == "text", log["target_type"] == "speech"
    values = {
        "AL": al(times, length, wanted),
        "LAAL": laal(times, length, wanted),
        "AP": ap(times, length, wanted),
        "DAL": dal(times, length),
        "ATD": atd(
            line["delays"],
            elapsed=times if aware else None,
            durations=line.get("durations"),
            source_token=1 if text else 300,
            target_token=1 if text else None,
        ),
        "StartOffset": start_offset(times),
        "EndOffset": end_offset(playback.ends(line["intervals"]) if spoken else times, length),
        "NumChunks": len(times),
    }
    if spoken:
        values |= playback.discontinuity(line["intervals"])
    return {name + "_CA" * aware: value for name, value in values.items()}


@pytest.mark.parametrize("place", range(len(VECTORS["logs"])))
def test_equals_simuleval(place: int) -> None:
    log = VECTORS["logs"][place]
    compared = 0
    for line, elapsed, expected in zip(log["instances"], log["elapsed"], log["instance_scores"], strict=True):
        if not line["delays"]:
            assert expected == {}  # SimulEval skips what never spoke
            continue
        found = ours(line, log, elapsed, False)
        if log["source_type"] == "speech":
            found |= ours(line, log, elapsed, True)
        assert found == pytest.approx(expected, abs=1e-6, rel=0)
        compared += 1
    assert compared == 11


def test_average_lagging_by_hand() -> None:
    # Step X/4 = 500: lags 1000, 1000 - 500, 2000 - 1000; the third unit is the first with everything read.
    assert al([1000, 1000, 2000, 2000], 2000, 4) == pytest.approx(2500 / 3)
    # A reference of 2 (step 1000): 1000 + 0 + 0; LAAL keeps the step 500 of the four written units.
    assert al([1000, 1000, 2000, 2000], 2000, 2) == pytest.approx(1000 / 3)
    assert laal([1000, 1000, 2000, 2000], 2000, 2) == pytest.approx(2500 / 3)
    # A longer reference than output: LAAL takes the reference, step 250: 1000, 750, 1500.
    assert laal([1000, 1000, 2000, 2000], 2000, 8) == pytest.approx(3250 / 3)
    # The first unit after the end: its delay, whatever follows.
    assert al([2500, 9000], 2000, 2) == laal([2500, 9000], 2000, 2) == 2500
    assert al([2000, 9000], 2000, 2) == 2000  # at the end: tau = 1


def test_proportion_and_differentiable_lagging_by_hand() -> None:
    assert ap([1000, 1000, 2000, 2000], 2000, 4) == pytest.approx(6000 / 8000)
    assert ap([2000, 2000], 2000, 2) == 1.0
    # Step 500. g = 1000, max(1000, 1500), max(2000, 2000), max(2000, 2500); minus 0, 500, 1000, 1500: 1000 each.
    assert dal([1000, 1000, 2000, 2000], 2000) == pytest.approx(1000)


def test_yaal_by_hand() -> None:
    # Step 500, the units at 2000 are no longer simultaneous: (1000 + 500) / 2.
    assert yaal([1000, 1000, 2000, 2000], 2000, 4) == pytest.approx(750)
    # Up to an end at 2500 all count: (1000 + 500 + 1000 + 500) / 4.
    assert yaal([1000, 1000, 2000, 2000], 2000, 4, end=2500) == pytest.approx(750)
    assert yaal([1000, 1000, 2000, 2400], 2000, 4, end=2500) == pytest.approx(850)
    assert yaal([2000, 2100], 2000, 2) is None
    assert yaal([-300.0], 1000, 1, end=1000) == -300  # in a stream: written before its segment began


def test_token_delay_by_hand() -> None:
    # Chunk 1: source tokens end at 300, 600; target words 1, 2 at 600: 600 - 300, 600 - 600.
    # Chunk 2: 600 to 1000 is 300 + 100, ends 900, 1000; word 3 belongs to source token 3: 1000 - 900.
    assert atd([600, 600, 1000]) == pytest.approx((300 + 0 + 100) / 3)
    # Three words in chunk 1 of two source tokens: the third waits on token 2. Chunk 2 forgives one extra word:
    # word 4 belongs to source token 3: 1000 - 900.
    assert atd([600, 600, 600, 1000]) == pytest.approx((300 + 0 + 0 + 100) / 4)
    # Computing took 50 for each unit: ends 650, 700, 1050 in place of 600, 600, 1000.
    assert atd([600, 600, 1000], elapsed=[650, 700, 1150]) == pytest.approx((350 + 100 + 150) / 3)
    # Speech of 450 ms after 600: tokens of 300 and 150 end at 900 and 1050, source tokens at 300 and 600.
    assert atd([600], durations=[450]) == pytest.approx((600 + 450) / 2)
    # Text to text, wait-1: target token t ends one after its source token t.
    assert atd([1, 2, 3], source_token=1, target_token=1) == 1


def test_offsets_and_pauses_by_hand() -> None:
    intervals = playback.play([1000, 2000, 4000], [1500, 200, 300])
    assert intervals == [(1000, 1500), (2500, 200), (4000, 300)]  # the second waits, the third comes after a pause
    assert [*playback.discontinuity(intervals).values()] == [1300, 1300, 1]
    assert [*playback.discontinuity([(1000, 5)]).values()] == [0, 0, 0]
    assert end_offset(playback.ends(intervals), 3500) == 800
    assert start_offset([1000, 2000]) == 1000


def test_first_letter() -> None:
    assert flal([800, 1200]) == 800
    assert flal([800, 1200, 1500], ["I", "Hel", "Hello"]) == 1200  # "I" was retracted
    assert flal([800, 1200, 1500], ["H", "I", "Hello"]) == 1500  # came back later
    assert flal([700, 800], ["", " Hello"]) == 800
    assert flal([500, 900], ["مر", "مرحبا"]) == 500


def test_units() -> None:
    assert [latency_unit(code) for code in ("zh", "zh-Hans", "ja_JP", "yue", "de", "ko")] == ["char"] * 4 + ["word"] * 2
    assert {latency_unit(code) for code in ("th", "lo", "km", "my", "Thai")} == {"char"}
    assert latency_unit("vi") == "word"
    assert text_units(" a  b\n", "word") == ["a", "b"]
    assert text_units("我 们ok", "char") == ["我", "们", "o", "k"]
    assert reference_length("a  b", "word") == 3  # SimulEval splits at single spaces
    assert reference_length(" 我们 去 ", "char") == 4  # and counts inner ones
    assert reference_length("", "word") == reference_length(" ", "char") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((partial(metric, [], 1000, 3), "no delays") for metric in (al, laal, ap, yaal)),
        *((partial(metric, []), "no delays") for metric in (start_offset, flal, atd)),
        (lambda: al([1], 0, 1), "source_length"),
        (lambda: al([1], 1, 0), "target_length"),
        (lambda: atd([600], durations=[0]), "durations"),
        (lambda: flal([800, 900], ["Hello", " "]), "nothing is shown"),
        (lambda: flal([800], []), "one text per time"),
        (lambda: wait_k(0, 5, 5), "wait-k"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


lengths = st.integers(1, 20)
delays = st.lists(st.integers(1, 3000), min_size=1, max_size=20).map(sorted)


@given(delays, lengths)
def test_length_adaptive_lagging_is_no_lower(times: list[int], wanted: int) -> None:
    assert al(times, 3000, wanted) <= laal(times, 3000, wanted) + 1e-9
    assert laal(times, 3000, wanted) <= max(times)
    assert laal(times, 3000, len(times)) == al(times, 3000, len(times))


@given(delays, lengths)
def test_waiting_longer_is_no_faster(times: list[int], wanted: int) -> None:
    later = [min(3000, t + 500) for t in times]
    for metric in (ap, lambda d, x, y: dal(d, x)):
        assert metric(later, 3000, wanted) >= metric(times, 3000, wanted) - 1e-9
    assert start_offset(later) >= start_offset(times)
    lag = yaal(times, 3000, wanted)
    if lag is not None and lag == yaal(times, 3000, wanted, end=float("inf")):  # no unit at the end
        assert laal(times, 3000, wanted) == pytest.approx(lag)


@given(lengths, st.integers(1, 20))
def test_wait_k_lags_k_words(length: int, k: int) -> None:
    """As STACL shows for equal lengths; waiting beyond the end is waiting for the end."""
    schedule = wait_k(k, length, length)
    assert al(schedule, length, length) == pytest.approx(min(k, length))
    assert dal(schedule, length) == pytest.approx(min(k, length))
    assert wait_k(3, 5, 6) == [3, 4, 5, 5, 5, 5]


@given(delays)
def test_computing_time_adds_to_token_delay(times: list[int]) -> None:
    assert atd(times, elapsed=times) == pytest.approx(atd(times))
    slower = [t + 10.0 * i for i, t in enumerate(times, 1)]
    assert atd(times, elapsed=slower) >= atd(times) + 10 - 1e-6
