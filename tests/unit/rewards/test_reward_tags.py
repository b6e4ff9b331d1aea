import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.rewards import after_think, extract_answer, extract_think, final_text, strip_tags


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>t</think><answer> B </answer>", "B"),
        ("<answer>B</answer>", "B"),
        ("<answer>A</answer> wait <answer>B</answer>", "B"),
        ("<answer>A <answer>B</answer>", "B"),  # the outer tag is not closed
        ("<answer>A</answer><answer>B", "A"),
        ("<think>maybe <answer>A</answer></think>", None),  # an answer inside the thinking is not given
        ("<think>maybe <answer>A</answer></think><answer>B</answer>", "B"),
        ("the prompt opened it <answer>A</answer></think><answer>B</answer>", "B"),
        ("<answer>line\nbreak</answer>", "line\nbreak"),
        ("<answer></answer>", ""),
        ("B", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "think"),
    [
        ("<think> a dog </think><answer>B</answer>", "a dog"),
        ("opened by the prompt</think><answer>B</answer>", "opened by the prompt"),
        ("<think></think>", ""),
        ("<think>never closed <answer>B</answer>", None),
        ("<answer>B</answer>", None),
    ],
)
def test_extract_think(text: str, think: str | None) -> None:
    assert extract_think(text) == think


def test_final_text() -> None:
    assert final_text("<think>a</think> hello there ") == "hello there"
    assert final_text("hello there") == "hello there"
    assert final_text("<answer>hi</answer> there") == "hi"
    assert final_text("<answer>cut off") == "cut off"
    assert final_text("<think>cut off while thinking") == ""
    assert after_think("<think>a</think>b<think>c</think>d") == "bd"
    assert strip_tags("<think>a</think><answer>b</answer>").split() == ["a", "b"]


@given(think=st.text(alphabet="ab <>/\n"), answer=st.text(alphabet="xy <>/\n"))
def test_a_well_formed_response_gives_back_its_parts(think: str, answer: str) -> None:
    text = f"<think>{think}</think>\n<answer>{answer}</answer>"
    assert extract_think(text) == think.strip()
    assert extract_answer(text) == answer.strip()
