"""Reads a cell in words phrase by phrase, the longest known phrase first.

    cell     = phrase {[","] phrase}
    phrase   = [negation] known phrase [switch] | "(" cell ")"
    negation = "no" | "not" | "without" | "w/o" | "non"
    switch   = "on" | "true" | "enabled" ... | "off" | "false" | "disabled" ...

Case does not matter, nor whether words are joined by blanks, `_`, `-`, `=`, `:` or nothing. Text
that no phrase explains is returned, and named in `assumed`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from perfmodel.display import shorten_reprs


@dataclass(frozen=True)
class Phrase:
    """A known phrase of a column."""

    pattern: str
    """Regular expression over plain words (`plain_words`); a blank may be a comma, and may be
    missing. Groups are figures of the meaning."""
    meaning: str = ""
    """Name of the phrase's meaning; empty for a phrase without effect."""
    is_whole_cell: bool = False
    """Whether the phrase is known only where it is the whole cell, as `1` is for a switch."""

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The compiled pattern, which does not end inside a word."""
        pattern = self.pattern.replace(" ", "(?:, ?| )?")
        return re.compile(rf"(?:{pattern}){' *$' if self.is_whole_cell else ''}(?![a-z0-9])")


@dataclass(frozen=True)
class Reading:
    """The meaning of a cell's text."""

    said: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Meanings in the order in which they occur, each with its figures; `not` stands before negated
    ones."""
    unread: tuple[str, ...] = ()
    """Words that no phrase explains."""

    def has_meaning(self, meaning: str) -> bool:
        """Whether the text contains a phrase with this meaning."""
        return any(name == meaning for name, _ in self.said)

    def figure(self, meaning: str) -> int | None:
        """The first whole number in a phrase with this meaning; None if there is none."""
        return next(iter(self.figures(meaning)), None)

    def figures(self, meaning: str) -> tuple[int, ...]:
        """The whole numbers in the first phrase with this meaning that has any."""
        for name, figures in self.said:
            if name == meaning and figures:
                return tuple(map(int, figures))
        return ()

    def first(self, *meanings: str) -> str:
        """Return the first of these meanings that the text contains; empty if it contains none."""
        return next((name for name, _ in self.said if name in meanings), "")

    def all_of(self, *meanings: str) -> tuple[str, ...]:
        """Return the meanings that the text contains, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.said if name in meanings))


_NUMBER_WORDS: Final = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
_ORDINALS: Final = {
    "other": 2,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "eighth": 8,
}
_SPELLINGS: Final = (
    # `with` and `without` as people abbreviate them.
    (r"\bw/o\b", "without"),
    (r"\bw/", "with "),
    # Joints between words. A point divides words, and is part of a number.
    (r"[_\-=:\s\u00a0\u2010-\u2015]+", " "),
    (r"\.(?![0-9])|(?<![0-9])\.", " "),
    (r"\u00d7", "x"),
    (r"[;|]", ","),
    # Numbers in words. Stages of ZeRO are also written in Roman numerals.
    (rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b", lambda match: str(_NUMBER_WORDS.index(match[0]) + 1)),
    (rf"\b(every|each) ({'|'.join(_ORDINALS)})\b", lambda match: f"every {_ORDINALS[match[2]]}"),
    (r"\bzero (i{1,3})\b", lambda match: f"zero {len(match[1])}"),
    (r" +", " "),
)
"""Patterns over lower-case text with their replacements in plain words, in this order."""


def plain_words(text: str) -> str:
    """A text in lower case with blanks between its words, and numbers in digits."""
    plain = text.lower()
    for pattern, replacement in _SPELLINGS:
        plain = re.sub(pattern, replacement, plain)
    return plain.strip()


_WORD: Final = re.compile(r"[^\s,;()+|]*[a-z0-9][^\s,;()+|]*")
_FILLER_WORDS: Final = """
    a an the of in on to by for with and as at from is are or other others otherwise default assumed stated
    inferred config configuration round kind usual only via using use uses used based style also plus
"""
"""Filler words, which are skipped without being reported."""
_FILLERS: Final = frozenset(_FILLER_WORDS.split())
_NEGATION: Final = re.compile(
    r"(?:no|not|without|non)(?![a-z0-9])(?: (?:an?|the|any|use of)(?![a-z0-9]))?[ ,]*"
)
_SWITCHED_OFF: Final = re.compile(
    r" (?:off|false|disabled|(?:is )?not (?:used|enabled|applied))(?![a-z0-9])"
)
_SWITCHED_ON: Final = re.compile(r" (?:on|true|enabled|yes)(?![a-z0-9])")
_REMARK: Final = re.compile(r"\([^()]*\)")

NOT_STATED: Final = Phrase(
    r"n/a|unknown|unspecified|undisclosed|unstated|tbd|unclear"
    r"|(?:kind )?not (?:stated|reported|given|specified|mentioned|disclosed|known|available|described)"
)
"""Words for a cell that states nothing, known in every column."""


@lru_cache(maxsize=1024)
def read_phrases(text: str, vocabulary: tuple[Phrase, ...]) -> Reading:
    """Parse a text with a vocabulary. Unknown remarks in brackets are ignored."""
    plain = plain_words(text)
    meanings: list[tuple[str, tuple[str, ...]]] = []
    unread: list[str] = []
    # Phrases are taken from left to right, at every place the longest that fits.
    position = 0
    while position < len(plain):
        # A remark in brackets is read for what is known in it. Its unknown words are not a
        # statement about the setting.
        remark = _REMARK.match(plain, position) if plain[position] == "(" else None
        if remark:
            inside = read_phrases(remark[0][1:-1], vocabulary)
            meanings += inside.said
            position = remark.end()
            continue
        if not plain[position].isalnum():
            position += 1
            continue

        # A negation belongs to the phrase behind it, unless the two are a phrase themselves
        # (`no sharding`).
        phrase, match = _longest(plain, position, vocabulary)
        negation = _NEGATION.match(plain, position) if match is None else None
        if negation is not None:
            phrase, match = _longest(plain, negation.end(), vocabulary)
        if match is not None:
            off = _SWITCHED_OFF.match(plain, match.end())
            on = _SWITCHED_ON.match(plain, match.end())
            is_negated = (negation is not None) != (off is not None)
            if phrase.meaning:
                meaning = f"not {phrase.meaning}" if is_negated else phrase.meaning
                meanings.append((meaning, tuple(figure for figure in match.groups() if figure)))
            position = (off or on or match).end()
            continue
        word = _WORD.match(plain, position)
        if word is None:
            position += 1
            continue
        if word[0] not in _FILLERS:
            unread.append(word[0])
        position = word.end()
    return Reading(tuple(meanings), tuple(dict.fromkeys(unread)))


def _longest(
    text: str, position: int, vocabulary: Sequence[Phrase]
) -> tuple[Phrase, re.Match[str] | None]:
    """The phrase of a vocabulary that matches the longest text from a position on."""
    best = vocabulary[0]
    best_match = None
    for phrase in (*vocabulary, NOT_STATED):
        if phrase.is_whole_cell and position > 0:
            continue
        match = phrase.expression.match(text, position)
        longest = position if best_match is None else best_match.end()
        if match is not None and match.end() > longest:
            best, best_match = phrase, match
    return best, best_match


shorten_reprs(__name__)
