"""Which number, which letter, which language: error rates of texts, worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from audiorl.eval import asr
from audiorl.eval.metrics.latency import latency_unit
from audiorl.eval.metrics.text import Normalizer, char_errors, normalize, word_errors
from audiorl.rewards import CharAccuracy, LanguageConsistency, WordAccuracy
from audiorl.tasks.simul.quality import bleu_tokenizer, is_english
from audiorl.types import Message, Rollout, Sample, Segment
from tests.cases import Case, Refused

ROOT = Path(__file__).parents[2]
ISSUES = {
    "A6": "saurabhav88/EnviousWispr#1982",
    "A14": "NVIDIA-NeMo/Speech#4638",
    "A15": "PyThaiNLP/pythainlp#373",
    "A16": "elizaOS/eliza#27446",
    "A17": "speechbrain/speechbrain#1290",
    "A28": "PigeonDan1/sure-evaluation#2",
}


def pair(
    kind: str,
    reference: str,
    hypothesis: str,
    language: str | None,
    right: float,
    *,
    chars: bool = False,
    normalizer: Normalizer = "basic",
    own: bool = True,
    note: str = "",
) -> Case:
    """Make the case of one reference and hypothesis: the rate of its words or characters."""
    errors = char_errors if chars else word_errors
    unit = "characters" if chars else "words"
    given = f"{reference!r} / {hypothesis!r}: {', '.join(filter(None, (unit, normalizer, language, note)))}"

    def run(folder: Path) -> float:
        return errors(reference, hypothesis, normalizer, language).rate

    return Case(kind, "own" if own else ISSUES[kind], given, run, right)


def value(kind: str, source: str, given: str, run: Callable[[], Any], right: Any) -> Case:
    return Case(kind, source, given, lambda folder: run(), right)


def scored(folder: Path) -> list[Any]:
    """Score the two rows of the report from the command line's entry and return the rates, as in scores.json."""
    said = [("twenty one cats", "21 cats"), ("one thousand people", "1,000 people")]
    rows = [{"id": str(i), "reference": r, "hypothesis": h, "language": "English"} for i, (r, h) in enumerate(said)]
    file = folder / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = asr.main(asr.ASROptions(score=file, out=folder / "out"))
    return [scores["wer"], scores["systems"]["model"]["all"]["cer"]["value"], scores["numbers"]]


def without_num2words() -> str:
    """Return what a process without num2words says to the rate of the report."""
    code = (
        "import sys; sys.modules['num2words'] = None\n"
        "from audiorl.eval.metrics.text import word_errors\n"
        "print(word_errors('twenty one cats', '21 cats', 'basic', 'en').rate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1].split(":")[0]


def reward(text: str, reference: str, language: str, of: Any) -> float:
    sample = Sample(
        "s", (Message("user", ("q",)),), references=(reference,), task="asr", metadata={"language": language}
    )
    none = torch.zeros(0, dtype=torch.long)
    return of([Rollout(sample, (Segment(none, none, none.float(), text),), "g")])[0].total


A6 = [
    pair("A6", "one thousand people", "1,000 people", "en", 0.0, own=False),
    pair("A6", "1,000 people", "1000 people", "en", 0.0, own=False),
    pair("A6", "ten million people", "10,000,000 people", "en", 0.0, own=False),
    pair("A6", "1.250 Euro", "1250 Euro", "de", 0.0, own=False),
    pair("A6", "1,5 Liter", "eins Komma fünf Liter", "de", 0.0, own=False),
    pair("A6", "mille deux cents euros", "1 200 euros", "fr", 0.0, own=False),
    pair("A6", "two point five", "2.5", "en", 0.0, own=False),
    pair("A6", "minus five degrees", "-5 degrees", "en", 0.0, own=False),
    pair("A6", "fifty percent", "50%", "en", 0.0, own=False),
    # own
    pair("A6", "1\u202f234\u202f567 francs", "1234567 francs", "fr", 0.0),
    pair("A6", "12\u00a0500 рублей", "двенадцать тысяч пятьсот рублей", "ru", 0.0),
    pair("A6", "12 500 рублей", "12500 рублей", "ru", 0.0),
    pair("A6", "2\u2009000 km", "2000 km", "sv", 0.0),
    pair("A6", "zwei Millionen", "2.000.000", "de", 0.0),
    pair("A6", "1.234,56 Euro", "1234,56 Euro", "de", 0.0),
    pair("A6", "1,234.56 dollars", "1234.56 dollars", "en", 0.0),
    pair("A6", "1’000 Franken", "1'000 Franken", "de-CH", 0.0),
    pair("A6", "eintausend Franken", "1’000 Franken", "German", 0.0),
    pair("A6", "dos coma cinco", "2,5", "es", 0.0),
    pair("A6", "mil pesos", "1,000 pesos", "es-MX", 0.0),
    pair("A6", "três vírgula um quatro", "3,14", "pt", 0.0),
    pair("A6", "uno virgola cinque", "1,5", "it", 0.0),
    pair("A6", "1,00,000 rupees", "100000 rupees", "en-IN", 0.0),
    pair("A6", "एक लाख", "1,00,000", "hi", 0.0),
    pair("A6", "−5 Grad", "minus fünf Grad", "de", 0.0),
    pair("A6", "fünfzig Prozent", "50 %", "de", 0.0),
    pair("A6", "cinquante pour cent", "50\u00a0%", "fr", 0.0),
    pair("A6", "quaranta per cento", "40%", "it", 0.0),
    pair("A6", "خمسون بالمائة", "50٪", "ar", 0.0),
    pair("A6", "yüzde elli", "%50", "tr", 0.0),
    pair("A6", "–5 Grad", "minus fünf Grad", "de", 0.0),
    pair("A6", "the 1,000th visitor ran 1,500m", "the 1000th visitor ran 1500m", "en", 0.0),
    pair("A6", "fifty per cent", "50%", "en", 0.0),
    pair("A6", "one hundred five", "105", "en", 0.0),
    pair("A6", "三百円", "300円", "ja", 0.0, chars=True),
    pair("A6", "dwa tysiące", "2 000", "pl", 0.0),
    pair("A6", "1,5", "eins fünf", "de", 1 / 3, note="a decimal comma is said"),
    # what must stay
    pair("A6", "ten thirty", "10:30", "en", 0.0),
    pair("A6", "three five", "3-5", "en", 0.0, note="a range, no minus"),
    pair("A6", "192.168.0.1", "192.168.0.2", "en", 1 / 4),
    pair("A6", "1.2.3", "1.2.3", "de", 0.0),
    pair("A6", "am 24.12.2024", "am 24.12.2024", "de", 0.0),
    pair("A6", "2.05", "2.5", "fa", 1 / 4, note="another number"),
    pair("A6", "pages 1,5 and 7", "pages one, five and seven", "en", 0.0, note="a list"),
    pair("A6", "agent zero zero seven", "agent 007", "en", 0.0),
    pair("A6", "0800 123 456", "0800 123456", "de", 2 / 4, note="a telephone number is not joined"),
    pair("A6", "1½ cups", "1 1/2 cups", "en", 0.0),
    pair("A6", "10² metres", "102 metres", "en", 2 / 3, note="a power is no digit"),
    value("A6", "own", "100 digits", lambda: normalize("9" * 100, "basic", "en"), "9" * 100),
    value(
        "A6",
        "own",
        "999999999999 in Amharic, which num2words never ends to say",
        lambda: normalize("999999999999", "basic", "am"),
        "999999999999",
    ),
    value(
        "A6",
        "own",
        "the reward of '1 200 euros' for 'mille deux cents euros'",
        lambda: reward("1 200 euros", "mille deux cents euros", "French", WordAccuracy()),
        1.0,
    ),
]

A7 = [
    value(
        "A7",
        "PigeonDan1/sure-evaluation#2",
        "'twenty one cats' / '21 cats' where num2words is not installed",
        without_num2words,
        "ModuleNotFoundError",
    ),
    Case(
        "A7",
        "PigeonDan1/sure-evaluation#2",
        "`eval asr --score` of two rows with numbers",
        scored,
        [0.0, 0.0, {"English": "words"}],
    ),
    value(
        "A7",
        "own",
        "num2words is a dependency of the base package",
        lambda: any(
            line.strip().startswith('"num2words')
            for line in (ROOT / "pyproject.toml")
            .read_text()
            .partition("dependencies = [")[2]
            .partition("]\n")[0]
            .splitlines()
        ),
        True,
    ),
    value(
        "A7",
        "own",
        "'21 cats' in Filipino, which num2words reads as Finnish",
        lambda: normalize("21 cats", "basic", "fil"),
        "21 cats",
    ),
    value(
        "A7",
        "own",
        "'21' in Estonian by its three letters, which num2words reads as Spanish",
        lambda: normalize("21", "basic", "est"),
        "21",
    ),
    value("A7", "own", "'21' in Hindi, which num2words does not know", lambda: normalize("२१", "basic", "hi"), "इक्कीस"),
]

A14 = [
    pair("A14", "１２３円です", "123円です", "ja", 0.0, chars=True, own=False),
    pair("A14", "room １２", "room 12", "en", 0.0, own=False),
    pair("A14", "１，０００円", "1000円", "ja", 0.0, chars=True),
    pair("A14", "２．５ percent", "2.5％", "en", 0.0),
    pair("A14", "٢١ قطة", "21 قطة", "ar", 0.0),
    pair("A14", "واحد وعشرون قطة", "٢١ قطة", "ar", 0.0),
    pair("A14", "१,००,००० लोग", "100000 लोग", "hi", 0.0),
    pair("A14", "৫০ টাকা", "50 টাকা", "bn", 0.0),
    pair("A14", "๒๕ คน", "25 คน", "th", 0.0),
    pair("A14", "۱۲٬۵۰۰ نفر", "12500 نفر", "fa", 0.0),
    pair("A14", "٣٫٥", "3.5", "ar", 0.0),
    pair("A14", "ＣＥＯ宣布", "CEO宣布", "zh", 0.0, chars=True),
    pair("A14", "room １２", "room 12", "en", 0.0, normalizer="english"),
    pair("A6", "twenty percent", "20 %", "en", 0.0, normalizer="english"),
    pair("A14", "好（笑）", "好", "ja", 0.0, chars=True, note="brackets are dropped"),
    pair("A14", "Ａｐｒｉｌ　１", "April 1", None, 0.0),
]

Z = "\u200b"
A15 = [
    pair("A15", "hello world", f"hello{Z} world", "en", 0.0, own=False),
    pair("A15", "cooperate now", "co\u00adoperate now", "en", 0.0, own=False),
    pair("A15", "hello world", "\ufeffhello world", "en", 0.0, own=False),
    pair("A15", "می\u200cخواهم", "میخواهم", "fa", 0.0, own=False),
    pair("A15", "café au lait", "cafe\u0301 au lait", None, 0.0, normalizer="none", own=False),
    pair("A15", "hello world", f"hello{Z} world", "en", 0.0, normalizer="english"),
    pair("A15", "1000 people", f"1{Z}000 people", "en", 0.0, note="inside of a number"),
    pair("A15", "hello world", "\u200ehello\u200f \u2066world\u2069", None, 0.0, note="marks of direction"),
    pair("A15", "hello world", "hello\u2060 wo\u034frld\ufe0f", "en", 0.0),
    pair("A15", "สวัสดีครับ", f"สวัสดี{Z}ครับ", "th", 0.0, chars=True),
    pair("A15", "क्\u200dष", "क्ष", "hi", 0.0),
    pair("A15", "hello world", f"hello{Z} world", None, 0.0, normalizer="none"),
    pair("A15", "संस्कृति", "संस्कृति", "hi", 0.0, note="vowel signs stay"),
    pair("A15", "प्राचीन संस्कृति", "प्रचीन संस्कृति", "hi", 0.5),
    value(
        "A15",
        "own",
        "the reward of a soft hyphen",
        lambda: reward("co\u00adoperate", "cooperate", "en", CharAccuracy()),
        1.0,
    ),
]

A16 = [
    pair("A16", "don't", "don’t", "en", 0.0, normalizer="english", own=False),
    pair("A16", "it's here", "it’s here", "en", 0.0, normalizer="english", own=False),
    pair("A16", "don't", "don’t", "en", 0.0, own=False),
    pair("A16", "I do not know what it is", "I don’t know what it’s", "en", 0.0, normalizer="english", own=False),
    pair("A16", "we'll go", "we＇ll go", "en", 0.0, normalizer="english"),
    pair("A16", "we'll go", "we‘ll go", "en", 0.0, normalizer="english"),
    pair("A16", "they're here", "theyʼre here", "en", 0.0, normalizer="english"),
    pair("A16", "I can't", "I can´t", "en", 0.0, normalizer="english"),
    pair("A16", "I can't", "I can`t", "en", 0.0, normalizer="english"),
    pair("A16", "I can't", "I can′t", "en", 0.0, normalizer="english"),
    pair("A16", "п'ять", "пʼять", "uk", 0.0),
    pair("A16", "п’ять", "5", "uk", 0.0),
    pair("A16", "l'ami", "l´ami", "fr", 0.0),
    pair("A16", "‘quoted’ text", "quoted text", "en", 0.0, normalizer="english", note="quotes are no apostrophes"),
    pair("A16", "dogs' tails", "dogs’ tails", "en", 0.0, normalizer="english"),
]

A17 = [
    pair("A17", "مَرْحَبًا بِكَ", "مرحبا بك", "ar", 0.0, own=False),
    pair("A17", "مرحبـــا", "مرحبا", "ar", 0.0, own=False),
    pair("A17", "سَلام", "سلام", "fa", 0.0),
    pair("A17", "هٰذا", "هذا", "ar", 0.0, note="superscript alef"),
    pair("A17", "آدم", "ا\u0653دم", "ar", 0.0, note="a letter, decomposed"),
    pair("A17", "أحمد", "احمد", "ar", 1.0, note="another letter"),
    pair("A17", "שָׁלוֹם", "שלום", "he", 0.0),
    pair("A17", "за́мок", "замок", "ru", 0.0, note="a stress mark"),
    pair("A17", "йод", "и\u0306од", "ru", 0.0, note="a letter, decomposed"),
    pair("A17", "мой", "мои", "ru", 1.0, note="another letter"),
    pair("A17", "ﷲ", "الله", "ar", 0.0, note="a ligature"),
    pair("A17", "கொடு", "கடு", "ta", 1.0, note="vowel signs of Tamil stay"),
    pair("A17", "مَرْحَبًا", "مرحبا", None, 0.0, note="no language named"),
]

CHINESE = [
    pair("A28", "百分之五十", "50%", "zh", 0.0, chars=True, own=False),
    pair("A28", "二零二四年", "2024年", "zh", 0.0, chars=True, own=False),
    pair("A28", "今天天气很好", "今天天氣很好", "zh", 0.0, chars=True, own=False),
    pair("A28", "三百一十五", "315", "zh", 0.0, chars=True, own=False),
    pair("A28", "二〇二四年", "2024年", "Chinese", 0.0, chars=True),
    pair("A28", "两千零二十四", "2,024", "zh-CN", 0.0, chars=True),
    pair("A28", "三萬五千塊", "3.5万块", "zh-TW", 0.0, chars=True),
    pair("A28", "三万五", "35000", "zh", 0.0, chars=True),
    pair("A28", "一百零五个", "105个", "cmn", 0.0, chars=True),
    pair("A28", "三点一四一五九", "3.14159", "zh", 0.0, chars=True),
    pair("A28", "百分之三点五", "3.5％", "zh", 0.0, chars=True),
    pair("A28", "五月十二日", "5月12日", "zho", 0.0, chars=True),
    pair("A28", "负五度", "-5度", "zh", 0.0, chars=True),
    pair("A28", "十亿人", "10亿人", "zh", 0.0, chars=True),
    pair("A28", "百分之百", "100%", "zh", 0.0, chars=True),
    pair("A28", "两个人", "2个人", "zh", 0.0, chars=True),
    pair("A28", "七八个", "七八个", "zh", 0.0, chars=True),
    pair("A28", "你好，世界。", "你好 世界", "zh", 0.0, chars=True),
    value(
        "A28",
        "own",
        "words with numerals stay: 十分 万一 千万 一起 三三",
        lambda: normalize("十分 万一 千万 一起 三三", "basic", "zh"),
        "十分 万一 千万 一起 三三",
    ),
    value(
        "A28",
        "own",
        "the reward of 50% for 百分之五十",
        lambda: reward("50%", "百分之五十", "Chinese", CharAccuracy()),
        1.0,
    ),
]

TEXTS = {
    "zh": "今天天气很好" * 5,
    "ja": "今日は天気です" * 5,
    "ko": "오늘 날씨가 좋습니다" * 3,
    "en": "the weather is fine today and tomorrow too",
    "de": "heute ist das Wetter schön und morgen auch noch",
    "ar": "الطقس جميل اليوم وغدا أيضا إن شاء الله",
}


def consistency(language: str, text: str) -> float:
    return reward(TEXTS.get(text, text), "", language, LanguageConsistency())


def language(source: str, name: str, text: str, right: float) -> Case:
    return value("A21", source, f"LanguageConsistency of {text} for {name!r}", lambda: consistency(name, text), right)


KNOWN = "modelscope/evalscope#1431"
NOBODY = Refused("language 'Klingonish' is unknown")
A21 = [
    *(language(KNOWN, name, "zh", 1.0) for name in ("zh", "zh-CN", "Chinese", "zho", "cmn", "Mandarin")),
    *(language(KNOWN, name, "ja", 1.0) for name in ("ja", "Japanese", "jpn")),
    *(language(KNOWN, name, "ko", 1.0) for name in ("Korean", "kor")),
    language("own", "zh_Hans", "zh", 1.0),
    language("own", "CHI", "zh", 1.0),
    language("own", "yue-Hant-HK", "佢哋今日去咗邊度食飯呀我唔知道喎佢冇話我知", 1.0),
    language("own", "ger", "de", 1.0),
    language("own", "German", "en", 0.0),
    language("own", "English (US)", "en", 1.0),
    language("own", "English-US", "en", 1.0),
    language("own", "arb", "ar", 1.0),
    language("own", "si", "මෙය සිංහල වාක්යයකි එය කෙටි එකකි", 1.0),
    language("own", "Klingonish", "en", NOBODY),  # type: ignore[arg-type]
    value(
        "A21",
        KNOWN,
        "the latency unit of zh, zh-TW, Chinese, chinese, Japanese, jpn, yue, cmn, wuu",
        lambda: {
            latency_unit(c) for c in ("zh", "zh-TW", "Chinese", "chinese", "Japanese", "jpn", "yue", "cmn", "wuu")
        },
        {"char"},
    ),
    value(
        "A21",
        "own",
        "the latency unit of kor, Spanish, deu, fil",
        lambda: {latency_unit(c) for c in ("kor", "Spanish", "deu", "fil")},
        {"word"},
    ),
    value(
        "A21",
        "own",
        "the latency unit of th, Lao, khm, Burmese",
        lambda: {latency_unit(c) for c in ("th", "Lao", "khm", "Burmese")},
        {"char"},
    ),
    value("A21", "own", "the latency unit of 'Klingonish'", lambda: latency_unit("Klingonish"), NOBODY),
    value(
        "A21",
        "own",
        "LanguageConsistency(language='Klingonish'), before anything is scored",
        lambda: LanguageConsistency(language="Klingonish"),
        NOBODY,
    ),
    value(
        "A21",
        "own",
        "BLEU's tokenizer of Japanese, jpn, Chinese, Korean",
        lambda: [bleu_tokenizer(c) for c in ("Japanese", "jpn", "Chinese", "Korean")],
        ["char", "char", "zh", "13a"],
    ),
    value(
        "A21",
        "own",
        "English, eng, en_US are English; es is not",
        lambda: [is_english(c) for c in ("English", "eng", "en_US", "es")],
        [True, True, True, False],
    ),
    value(
        "A21",
        "own",
        "numbers in 'English', 'eng', 'en-GB', 'en_us'",
        lambda: {normalize("21 cats", "basic", c) for c in ("English", "eng", "en-GB", "en_us")},
        {"twenty one cats"},
    ),
    value(
        "A21",
        "own",
        "numbers in 'Deutsch', 'deu', 'ger', 'German', 'de-AT'",
        lambda: {normalize("21", "basic", c) for c in ("Deutsch", "deu", "ger", "German", "de-AT")},
        {"einundzwanzig"},
    ),
    value("A21", "own", "numbers in 'Klingonish'", lambda: normalize("21", "basic", "Klingonish"), NOBODY),
]

CASES = [*A6, *A7, *A14, *A15, *A16, *A17, *CHINESE, *A21]
