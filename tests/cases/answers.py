"""Answers as models write them: letters in brackets and marks, the same words in other characters, the two rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audiorl.eval.mmau import judge
from audiorl.rewards import AnswerAccuracy
from audiorl.types import Sample
from tests.cases import Case

ANIMALS = ("dog", "cat", "bird", "fish")


def _reward(answer: str, gold: str, choices: tuple[str, ...], language: str = "") -> int:
    sample = Sample(id="q", messages=(), references=(gold,), choices=choices, metadata={"language": language})
    return int(AnswerAccuracy().correct(f"<answer>{answer}</answer>", sample))


def _cases(
    kind: str,
    source: str,
    texts: str | tuple[str, ...],
    gold: str,
    choices: tuple[str, ...],
    right: int,
    language: str = "",
) -> Iterator[Case]:
    """Make a case of each text, an answer whose reward is right."""
    for text in (texts,) if isinstance(texts, str) else texts:

        def run(folder: Path, text: str = text) -> int:
            return _reward(text, gold, choices, language)

        given = f"{text!a} for {gold!a}" + (f" of {', '.join(map(ascii, choices))}" if choices != ANIMALS else "")
        given += f" in {language}" if language else ""
        yield Case(kind, source, given, run, right)


EVALSCOPE, GYM, SOUP, OPDV = (
    "modelscope/evalscope#1560",
    "NVIDIA-NeMo/Gym#1844",
    "MakazhanAlpamys/Soup#357",
    "aniri15/OPD-V#2",
)
LMMS, LMMS_AUDIO = "EvolvingLMMs-Lab/lmms-eval#364", "EvolvingLMMs-Lab/lmms-eval#1434"
LETTERS = [
    *_cases("A12", EVALSCOPE, ("[B]", "**B**", "**B. cat**", "B,", '"B"'), "cat", ANIMALS, 1),
    *_cases("A12", EVALSCOPE, ("(B)", "B.", "b", "B) cat", "B: cat", "B - cat", "B — cat"), "cat", ANIMALS, 1),
    *_cases("A12", GYM, (r"$\boxed{\text{B}}$", r"\boxed{B: cat}", r"\boxed{cat}", r"\text{cat}"), "cat", ANIMALS, 1),
    *_cases("A12", SOUP, (r"\boxed{B}", r"The answer is \boxed {B}."), "cat", ANIMALS, 1),
    *_cases("A12", SOUP, r"\boxed{2}", "cat", ANIMALS, 0),
    *_cases("A12", OPDV, ("（B）", "Ｂ", "B．", "B。", "B、cat", "B：cat", "（B）cat"), "cat", ANIMALS, 1),
    *_cases("A12", LMMS, ("The answer is B.", "Answer: B) cat", "Option B", "答案是B", "选B"), "cat", ANIMALS, 1),
    *_cases("A12", LMMS, "猫", "B、猫", ("A、狗", "B、猫"), 1),
    *_cases("A12", LMMS, "猫", "B．猫", ("A．狗", "B．猫"), 1),
    *_cases("A12", LMMS, ("A or B", "not B", "B) dog", "E", "cat dog bird fish"), "cat", ANIMALS, 0),
    *_cases("A12", LMMS, ("AB", "A cat", "A and B"), "dog", ANIMALS, 0),
    *_cases("A12", LMMS_AUDIO, "Based on the audio", "cat", ANIMALS, 0),
    *_cases("A12", "openai/evals#1767", "Answer: A ... actually, answer: B", "cat", ANIMALS, 1),
    *_cases("A12", "openai/evals#1767", "Answer: AB", "dog", ANIMALS, 0),
    *_cases("A12", "own", ("【B】", "「B」", "⟨B⟩", "«B»", "{B}", "`B`", "__B__", "<b>B</b>"), "cat", ANIMALS, 1),
    *_cases("A12", "own", ("Ⓑ", "🅱️", "ⓑ cat", "𝐁", "B;", "B > cat"), "cat", ANIMALS, 1),
    *_cases("A12", "own", (r"\(\mathbf{B}\)", r"\[\boxed{\textbf{(B)}}\]", "**Answer:** B"), "cat", ANIMALS, 1),
    *_cases("A12", "own", ("B is correct.", "I would pick B - a safe choice.", "cat (B)"), "cat", ANIMALS, 1),
    *_cases("A12", "own", ("정답은 B입니다", "Ответ: B", "答案：（B）猫", "It is a cat."), "cat", ANIMALS, 1),
    *_cases("A12", "own", "Based on the audio, the answer is B.", "cat", ANIMALS, 1),
    *_cases("A12", "own", ("B or C", "B/C", "B, C", "It cannot be B", "B is not correct"), "cat", ANIMALS, 0),
    *_cases("A12", "own", ("~~B~~", "!B", "不选B", "答案不是B", "I don't think the answer is B"), "cat", ANIMALS, 0),
    *_cases("A12", "own", ("В", "Β", "B-flat major", "Neither A nor B is correct"), "cat", ANIMALS, 0),
    *_cases("A12", "own", ("B. or C", "B. No, C"), "cat", ANIMALS, 0),
    *_cases("A12", "own", ("[[B]]", "### Answer\nB", "The answer is most likely B.", "所以选B。"), "cat", ANIMALS, 1),
    *_cases("A12", "own", ("anything but B", "B vs C", "cat? no, dog", "the answer is unknown"), "cat", ANIMALS, 0),
    *_cases(
        "A12",
        "own",
        (
            "The correct answer is B. The audio does not contain a dog.",
            "Answer: B\nExplanation: the animal is not a dog.",
            "(B) cat. There is no dog.",
            "The answer is B. Options A and C are wrong, and the others do not fit.",
            "B. I hear it, but it is faint.",
            "The answer to the question is B.",
            '{"answer": "B"}',
            "Thus, (B).",
            "Selected: B",
        ),
        "cat",
        ANIMALS,
        1,
    ),
    *_cases(
        "A12",
        "own",
        ("B. It may be C.", "B. I think the answer is dog.", "B. But it could be a dog", "B. Option B is wrong."),
        "cat",
        ANIMALS,
        0,
    ),
    *_cases("A12", "own", ("Solution: B", "Select B", "正解はB", "B. It might be heard twice."), "cat", ANIMALS, 1),
    *_cases("A12", "own", "B. It might be a bird.", "cat", ANIMALS, 0),
    *_cases("A12", "own", "Yes, there are no birds.", "Yes", ("Yes", "No"), 1),
    *_cases("A12", "own", "2", "2. cat", ("1. dog", "2. cat"), 1),
    *_cases("A12", "own", "Jones", "B. Jones", ("J. Smith", "B. Jones"), 0),
    *_cases("A12", "own", "minor", "A minor", ("A minor", "C major"), 0),
]
KEYS, LEVELS = ("C minor", "C# minor", "Bb major", "B major"), ("5 dB", "-5 dB")
WRITING = [
    *_cases("A13", "the list", ("C♯ minor", "C sharp minor"), "C# minor", KEYS, 1),
    *_cases("A13", "the list", "B♭ major", "Bb major", KEYS, 1),
    *_cases("A13", "the list", "C minor", "C# minor", KEYS, 0),
    *_cases("A13", "the list", "−5 dB", "-5 dB", LEVELS, 1),
    *_cases("A13", "the list", "5 dB", "-5 dB", LEVELS, 0),
    *_cases("A13", "the list", "1,000 Hz", "1000 Hz", ("100 Hz", "1000 Hz"), 1),
    *_cases("A13", "the list", ("cat\u200b", "\ufeffcat", "a cat", "the cat"), "cat", ANIMALS, 1),
    *_cases("A13", "the list", "three", "3", ("2", "3", "4"), 1),
    *_cases("A13", "own", ("10 - 20 s", "10–20 s", "10 to 20 s"), "10-20 s", ("5-10 s", "10-20 s"), 1),
    *_cases("A13", "the list", "Yes, it is.", "Yes", ("Yes", "No"), 1),
    *_cases("A13", "the list", "twenty-one", "21", (), 1),
    *_cases("A13", "the list", "50%", "50", (), 0),
    *_cases("A13", "the list", "50%", "0.5", (), 1),
    *_cases("A13", "the list", "6/8", "3/4", ("3/4", "6/8"), 0),
    *_cases("A13", "own", ("B-flat major", "B flat major", r"B\flat major"), "Bb major", KEYS, 1),
    *_cases("A13", "own", "C ♯ minor", "C# minor", KEYS, 1),
    *_cases("A13", "own", "+5 dB", "5 dB", LEVELS, 1),
    *_cases("A13", "own", ("٣", "३"), "3", ("2", "3"), 1),
    *_cases("A13", "own", "Yes, the dog barks.", "Yes", ("Yes", "No"), 1),
    *_cases("A13", "own", "Yes. No.", "Yes", ("Yes", "No"), 0),
    *_cases("A13", "own", "Db minor", "C# minor", KEYS, 0),
    *_cases("A13", "own", ("–5 dB", "minus five dB", "-5dB"), "-5 dB", LEVELS, 1),
    *_cases("A13", "own", "A) 5 dB", "-5 dB", ("-5 dB", "5 dB"), 0),
    *_cases("A13", "own", "1\u202f000 Hz", "1000 Hz", ("100 Hz", "1000 Hz"), 1),
    *_cases("A13", "own", "one hundred and five", "105", ("15", "105"), 1),
    *_cases("A13", "own", "three four", "34", ("34", "43"), 0),
    *_cases("A13", "own", ("三", "three"), "3", (), 1),
    *_cases("A13", "own", ("两只", "兩只"), "2只", (), 1),
    *_cases("A13", "own", ("一百二", "120"), "120", (), 1),
    *_cases("A13", "own", ("一万二千", "一萬二"), "12000", (), 1),
    *_cases("A13", "own", "百分之百", "100%", (), 1),
    *_cases("A13", "own", ("七八", "万一", "十" * 3000), "78", (), 0),
    *_cases("A13", "own", "B", "两只猫", ("一只猫", "两只猫"), 1),
    *_cases("A13", "own", "20-30", "30-40", (), 0),
    *_cases("A13", "own", ("2-1", "2024-01-15"), "1", (), 0),
    *_cases("A13", "own", "二十一只", "21只", ("20只", "21只"), 1),
    *_cases("A13", "own", ("fifty percent", "50 per cent"), "50%", ("50", "50%"), 1),
    *_cases("A13", "own", "50", "50%", ("50%", "5%"), 0),
    *_cases("A13", "own", "½", "1/2", ("1/2", "1/4"), 1),
    *_cases("A13", "own", "3½", "31/2", ("31/2", "7"), 0),
    *_cases("A13", "own", "10²", "102", ("102", "12"), 0),
    *_cases("A13", "own", "0.75", "3/4", ("3/4", "6/8"), 0),
    *_cases("A13", "own", ("d\u00adog", "\u202adog\u202c"), "dog", ANIMALS, 1),
    *_cases("A13", "own", ("Don‘t stop", "Don′t stop"), "Don't stop", ("Don't stop", "Go"), 1),
    *_cases("A13", "own", "Beyonce", "Beyoncé", ("Beyoncé", "Adele"), 1),
    *_cases("A13", "own", "THE SAME", "The same", ("the same", "The same"), 0),
]
FIGURES, GERMAN, SPANISH = ("11", "12", "21"), ("elf Hunde", "zwölf Hunde"), ("once", "veintidós", "treinta")
NUMBERS = [
    *_cases("A30", "own", ("elf", "Elf.", "A) elf", "Die Antwort ist: elf"), "11", FIGURES, 1, "de"),
    *_cases("A30", "own", ("vingt et un", "vingt-et-un", "C. vingt et un"), "21", FIGURES, 1, "fr"),
    *_cases("A30", "own", ("двадцать один", "двадцать один."), "21", FIGURES, 1),
    *_cases("A30", "own", ("إحدى عشرة", "יותר"), "12", FIGURES, 0),
    *_cases("A30", "own", ("बारह", "십이", "สิบสอง"), "12", FIGURES, 1),
    *_cases("A30", "own", ("12 Hunde", "B: 12 Hunde", "12 Hunde."), GERMAN[1], GERMAN, 1),
    *_cases("A30", "own", ("22", "B) 22", "veintidos"), "veintidós", SPANISH, 1),
    *_cases("A30", "own", ("deux", "Deux."), "2", (), 1, "fr"),
    *_cases("A30", "own", "deux", "2", (), 0),
    *_cases("A30", "own", "once", "11", FIGURES, 1, "es"),
    *_cases("A30", "own", ("elf", "once", "dodici"), "11", FIGURES, 0),
    *_cases("A30", "own", ("elf", "dozen"), "11", FIGURES, 0, "en"),
    *_cases("A30", "own", ("doce", "veintiuno", "A) doce", "once o doce"), "11", FIGURES, 0, "es"),
    *_cases("A30", "own", ("11 Hunde", "A) 12 Hunde", "12 Katzen", "21"), GERMAN[1], GERMAN, 0),
    *_cases("A30", "own", ("10", "2"), "on", ("on", "off"), 0),
    *_cases("A30", "own", "10", "on", ("on", "off"), 0, "tr"),
    *_cases("A30", "own", "4 alarms", "fire alarms", ("fire alarms", "bells"), 0),
    *_cases("A30", "own", "6", "sex", ("sex", "age", "height"), 0),
    *_cases("A30", "own", ("twelve", "12", "十二"), "12", FIGURES, 1, "de"),
]


ROWS = "QwenLM/Qwen2.5-Omni#243, QwenLM/Qwen3-Omni#63"


def _rules(source: str, text: str, right: tuple[int, int], choices: tuple[str, ...] = ("dog", "cat")) -> Case:
    """Make a case of an answer for the second choice: is it right by the official rule, by the rule of rewards."""

    def run(folder: Path) -> Any:
        row = judge({"id": "1", "choices": list(choices), "answer": choices[1], "model_output": text}, "mmau")
        return int(row["accuracy"]), int(row["rewarded"])

    return Case("A28", source, f"both rules of eval mmau: {text!r} of {', '.join(choices)}", run, right)


RULES = [
    _rules(ROWS, "cat", (1, 1)),
    _rules(ROWS, "B", (0, 1)),
    _rules(ROWS, "(B) cat", (1, 1)),
    _rules(ROWS, "The answer is cat.", (1, 1)),
    _rules(ROWS, "a cat", (1, 1)),
    _rules(ROWS, "not a dog but a cat", (0, 0)),
    _rules(ROWS, "cat", (0, 1), ("A dog", "A cat")),
    _rules("own", "<answer>cat</answer>", (0, 1), ("answer dog", "cat")),
    _rules("own", "I hear something like a cat", (1, 0)),
    _rules("own", "3", (0, 1), ("two", "three")),
    _rules("own", "**B**", (0, 1)),
]
CASES = [*LETTERS, *WRITING, *NUMBERS, *RULES]
