"""Languages by code, tag and name: what a text, a row or an option calls "zh-CN", "zho", "cmn" or "Chinese" is one.

Source: the Common Locale Data Repository (CLDR) of Unicode, by Babel.
"""

from __future__ import annotations

import functools
import re

# Names that CLDR does not list in English.
_NAMES = (
    "bengali bn, bokmal nb, burmese my, castilian es, farsi fa, flemish nl, haitian ht, mandarin zh, "
    "mandarin chinese zh, modern greek el, moldovan ro, oriya or, panjabi pa, pushto ps, sinhalese si, tagalog tl"
)
_SCRIPT_CODES = (  # ISO 15924
    "latn latin, grek greek, cyrl cyrillic, armn armenian, hebr hebrew, arab arabic, deva devanagari, beng bengali, "
    "guru gurmukhi, gujr gujarati, orya odia, taml tamil, telu telugu, knda kannada, mlym malayalam, sinh sinhala, "
    "thai thai, laoo lao, tibt tibetan, mymr myanmar, geor georgian, kore hangul, hang hangul, ethi ethiopic, "
    "khmr khmer, hans han, hant han, hani han, jpan han kana"
)
_SCRIPTS_BY_CODE = {code: tuple(names) for code, *names in map(str.split, _SCRIPT_CODES.split(","))}


@functools.cache
def language_code(language: str) -> str:
    """Return the code of a language that is given by code, tag or name: of ISO 639-1 where there is one.

    Raises ValueError for a language that CLDR does not know.

    >>> [language_code(name) for name in ("zh-CN", "zho", "cmn", "Chinese", "中文", "yue")]
    ['zh', 'zh', 'zh', 'zh', 'zh', 'yue']
    """
    from babel import Locale
    from babel.core import get_global
    from babel.localedata import locale_identifiers

    given = " ".join(language.casefold().split())
    english = Locale("en").languages
    code = re.split("[-_]", given)[0]
    code = get_global("language_aliases").get(code, code).split("_")[0]
    if code not in english and code not in get_global("likely_subtags"):
        names = {name.casefold(): code for code, name in english.items()}
        names |= {name: code for name, _, code in (pair.rpartition(" ") for pair in _NAMES.split(", "))}
        plain = re.split("[-_(,;]", given)[0].strip()  # "English (US)", "English-US", "Spanish; Castilian"
        found = names.get(given) or names.get(plain)
        if found is None:  # "Deutsch": half a second
            own = {str(Locale(c).display_name).casefold(): c for c in locale_identifiers() if "_" not in c}
            found = own.get(given) or own.get(plain)
        if found is None:
            raise ValueError(
                f"language {language!r} is unknown; give a code of ISO 639 such as 'de', or a name such as 'German'"
            )
        code = found
    code = code.split("_")[0]
    return "tl" if code == "fil" else code  # what Whisper and py3langid call it


@functools.cache
def written_in(language: str) -> tuple[str, ...]:
    """Return the names, in `eval.metrics.text.SCRIPTS`, of the scripts of a language: the tag's own ("sr-Latn") or the
    usual ones; "other" for one that is not there."""
    from babel.core import get_global

    named = [part.lower() for part in re.split("[-_]", language)[1:] if len(part) == 4 and part.isalpha()]
    usual = get_global("likely_subtags").get(language_code(language), "_latn").split("_")[1].lower()
    script = [*named, usual][0]
    return _SCRIPTS_BY_CODE.get(script, ("other",))


def whisper_code(language: str) -> str:
    """Return what Whisper calls a language."""
    code = language_code(language)
    return {"jv": "jw", "nb": "no"}.get(code, code)
