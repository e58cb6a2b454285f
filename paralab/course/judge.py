"""Judge a free-text answer by what it states, not by the words it contains.

The template's rubric has one deciding fact per question:

    yes or no   the answer starts with it, and does not state the opposite later
    choice      "DDP is slower than DataParallel" chooses DataParallel
    key terms   the answer states one alternative for each term; "not in the backward pass" does not
                state "backward"
    numbers     each number is in its place: "8 processes on 2 GPUs" does not state 2 processes

A human must read an answer that does not state the fact, is not clear, contains a number that is
not in the run, or uses many words that do not occur in the course.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paralab.analyse.blocks import Answer
from paralab.course.numbers import FACTORS, Stated, is_count, numbers_in

Status = Literal["right", "wrong", "missing", "not judged"]
Judgment = tuple[Status, str]  # the reason is empty only for "right"

YES = ("yes", "yep", "yeah", "true", "✓", "ja", "oui", "sí", "si", "sim", "да", "是", "はい")
NO = ("no", "nope", "false", "✗", "nein", "non", "não", "нет", "否", "いいえ")
YES_NO = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
# A verdict word on its own, unlike the "no" in "there is no rank 1".
ALONE = re.compile(rf"\b({'|'.join(YES_NO)})\b(?=\s*(?:[.,;:!/]|$|and\b|or\b|but\b))")
LEADING = re.compile(
    r"^(?:[^\w✓✗]|_|(?:my |the )?answer(?: is)?\b|i (?:think|believe|guess|would say)\b"
    r"|(?:definitely|certainly|clearly|absolutely|obviously|of course|well)\b)+"
)
PLAIN_NOT = re.compile(r"^not(?: (?:at all|really|quite|exactly))?(?:\W*$|[.,;])")
HEDGE = re.compile(r"\b(?:depends?|maybe|perhaps|possibly|sure|know|idk|dunno|either)\b")
CLAUSE = re.compile(r"[.,](?=\s|$)|[;:!?()\n]|\b(?:because|but|since|while|whereas|as|so)\b")
NEGATION = r"\b(?:not|no|never|none|nor|nothing|without|cannot|hardly)\b|n['’]t\b"
# Words that yes-or-no questions ask about, and their opposites.
OPPOSITES = {
    "faster": "slower",
    "less memory": "more memory",
    "equally": r"unequal|uneven|\bdifferent(?:ly)?",
    "more balanced": r"less balanced|unbalanced|imbalanced",
    "proportional": "disproportion",
    "automatically": r"by hand|manual",
    "by hand": "automatic",
    "same": "different",
    "below": r"above|over 10",
}
LESS = r"\b(?:slow\w*|worse|worst|less|least|fewer|lower|loses?)\b"
MORE = (
    r"\b(?:faster|fastest|quick\w*|better|best|more|most|higher|wins?|beats?|outperforms?|gains?"
    r"|saves?|scales?|rather|instead)\b"
)
NEITHER = r"\b(?:neither|same|equal\w*|tie|both|similar\w*|identical\w*)\b|\bno (?:\w+ )?difference"
UNDECIDED = r"nois[ey]|few rounds|(?:cannot|can['’]t|hard to) (?:tell|say|decide)|undecided|unclear"
LABEL = re.compile(
    r"\b(?:rank|part|step|process)\s*$"
)  # a number after one of these is part of a name: rank 0
MOST_WORDS = 150  # a longer text may mention every term by chance
LOOSE = ("", "per", "of", "in", "for", "each", "on", "with", "and", "or", "to", "at", "is", "are")
# Common words that no sheet uses.
COMMON = """
able although always anymore anything apart around been being best bigger bring calculate case come
cost course doing done down drift due either even exactly expect far further goes got help high
however itself just know lead let lot made make manual merge might must myself neither noise noisy
now often one our out place point possible prevent problem put rather really should side since
slice some store such sure talk there thing think this toward try usually very want way will worse
wrong
""".split()
# An answer that is a sentence has some of these words; a list of key terms does not.
GLUE = (
    r"\b(?:a|an|and|are|as|at|be|because|become|by|do|does|for|from|gets?|has|have|if|in|is|its?"
    r"|of|on|or|per|so|than|that|the|they|to|uses?|was|when|with)\b"
)
STEM = 4  # compare only this many letters of a word, and ignore its ending
FOREIGN = {*"ist nicht der und sind weil est pas plus les une sont que los más più niet".split()}


def judge(answer: Answer, given: str, tolerance: float, known: Sequence[Stated] = ()) -> Judgment:
    """Judge an answer. `known` are the numbers in the run's sheet."""
    text, question = plain(given), plain(answer.question)
    if text in (plain(answer.text), plain(f"{verdict_word(answer)}. {answer.text}")):
        return "right", ""
    text = text.removeprefix(question).strip()
    mine, asked = _words(text), _words(question)
    repeats = mine <= asked and len(mine) >= 0.7 * len([word for word in asked if len(word) > 1])
    if repeats or not (mine or text):
        return "missing", "the answer only repeats the question"

    status, reason = _judge_fact(answer, text, tolerance)
    doubt = _find_doubt(answer, text, tolerance, known) if status == "right" else ""
    return ("not judged", doubt) if doubt else (status, reason)


def _judge_fact(answer: Answer, text: str, tolerance: float) -> Judgment:
    if answer.undecided:
        admits = re.search(UNDECIDED, text)
        return ("right", "") if admits else ("not judged", "this run is too noisy to tell")
    if answer.verdict is not None:
        return _judge_verdict(answer, text)
    if answer.choice is not None:
        return _judge_choice(answer, text)
    if answer.terms:
        misplaced = _find_misplaced(answer.evidence, text)
        return ("not judged", misplaced) if misplaced else _judge_terms(answer.terms, text)
    return _judge_numbers(answer, text, tolerance)


def _find_doubt(answer: Answer, text: str, tolerance: float, known: Sequence[Stated]) -> str:
    """Return why a human should read an answer even though it states the fact."""
    if text.endswith("?"):
        return "it is a question"
    if len(text.split()) > MOST_WORDS:
        return "it is too long to judge"
    facts = [*known, *numbers_in(f"{answer.text} {answer.question}")]
    facts += [Stated(value, "") for value in _flat(answer.evidence)]
    for number in numbers_in(text):
        named = LABEL.search(text[: number.start])
        if not named and not _is_known(number, facts, tolerance):
            return f"{text[number.start : number.end]} is not a number from this run"
    words = _content(text)
    foreign = [word for word in words if word[:STEM] not in vocabulary()]
    return (
        "it uses many words that do not occur in the course"
        if 4 * len(foreign) > len(words)
        else ""
    )


def _is_known(number: Stated, facts: Sequence[Stated], tolerance: float) -> bool:
    """Return whether a number or its inverse is in the run. 0, 1, 2, and 95% are always allowed."""
    pure = ("", "number", "share")
    if number.kind not in pure:
        facts = [fact for fact in facts if fact.kind in ("", number.kind)]
        return any(number.equals(fact.value, tolerance) for fact in facts)
    values = [fact.value for fact in facts if fact.kind in pure]
    values += [1 / value for value in values if 0 < abs(value) < 1000]
    trivial = round(number.value, 6) in (0, 1, 2, 0.95)
    return trivial or any(number.equals(value, tolerance) for value in values)


@cache
def vocabulary() -> frozenset[str]:
    """Return the stems of the words in the sheets and of common English words."""
    templates = sorted((Path(__file__).parent / "templates").glob("*.j2"))
    text = " ".join(path.read_text(encoding="utf-8").lower() for path in templates)
    return frozenset(word[:STEM] for word in (*_long_words(text), *COMMON))


def _is_relevant(text: str) -> bool:
    """Return whether an answer that does not state the fact may still be a serious attempt."""
    words = _content(text)
    serious = sum(word[:STEM] in vocabulary() for word in words) + bool(_words(text) & {*YES_NO})
    return 2 * serious >= max(len(words), 1) or bool(_words(text) & FOREIGN) or not text.isascii()


def yes_or_no(text: str) -> bool | None:
    rest = LEADING.sub("", text.lower())
    if PLAIN_NOT.match(rest):
        return False
    return YES_NO.get(re.split(r"[^\w✓✗]+", rest, maxsplit=1)[0])


def verdict_word(answer: Answer) -> str:
    return "" if answer.verdict is None else "yes" if answer.verdict else "no"


def _judge_verdict(answer: Answer, text: str) -> Judgment:
    stated = yes_or_no(text)
    if stated is None:
        hedges = HEDGE.search(text) or not _is_relevant(text)
        return "wrong" if hedges else "not judged", "start with Yes or No"
    if len({YES_NO[word] for word in ALONE.findall(text)} | {stated}) > 1:
        return "wrong", "it states both yes and no"
    if stated == answer.verdict:
        opposite = _states_opposite(plain(answer.question), text, stated)
        return ("not judged", "the explanation contradicts it") if opposite else ("right", "")
    if answer.terms and _judge_terms(answer.terms, text)[0] == "right":
        return "not judged", "the explanation may be correct"
    return "wrong", answer.text


def _states_opposite(question: str, text: str, stated: bool) -> bool:
    """Return whether the explanation contradicts the yes or no: `Yes, it is slower`."""
    for word, opposite in OPPOSITES.items():
        if word not in question:
            continue
        for clause in CLAUSE.split(text)[1:]:
            for pattern, meaning in ((word, True), (opposite, False)):
                match = re.search(pattern, clause)
                negated = match and re.search(NEGATION, clause[: match.start()])
                if match and (meaning is not bool(negated)) is not stated:
                    return True
    return False


def _judge_choice(answer: Answer, text: str) -> Judgment:
    chosen = stated_option(text, answer.options or (answer.choice or "",))
    names = " or ".join(option.split("|")[0] for option in answer.options)
    if chosen is None:
        return "not judged", "it is not clear which option the answer chooses"
    if chosen == "":
        return "not judged" if _is_relevant(text) else "wrong", f"name one: {names}"
    return ("right", "") if chosen == answer.choice else ("wrong", answer.text)


def stated_option(text: str, options: Sequence[str]) -> str | None:
    """Return the option that the answer chooses, or `neither`. Return an empty string if it does
    not name an option, or None if its choice is not clear. An option is `name|alias|alias`."""
    stated: list[str | None] = []
    for clause in CLAUSE.split(text):
        mentions = _mentions(clause, options)
        if not mentions and not re.search(NEITHER, clause):
            continue
        if not stated or re.search(r"\b(?:faster|quicker|slower|better|worse|best)\b", clause):
            stated.append(_choose_clause(clause, mentions))
    if not stated:
        return ""
    clear = {option for option in stated[1:] if option is not None} | {stated[0]}
    return clear.pop() if len(clear) == 1 else None


def _choose_clause(clause: str, mentions: list[tuple[int, str]]) -> str | None:
    """Return what a clause chooses. `A is faster than B` and `B is slower than A` choose A."""
    names = list(dict.fromkeys(name for _, name in mentions))
    if re.search(NEITHER, clause):
        return None if re.search(NEGATION, clause.replace("no ", "")) else "neither"
    if re.search(NEGATION, clause):
        return None
    less, than = re.search(LESS, clause), re.search(r"\b(?:than|beats?|outperforms?|of)\b", clause)
    if len(names) == 1:
        return None if less or (than and mentions[0][0] > than.start()) else names[0]
    if not than or not mentions[0][0] < than.start() < mentions[-1][0] or len(mentions) > 2:
        return None
    if less:
        return names[1]
    return names[0] if re.search(MORE, clause) else None


def _mentions(clause: str, options: Sequence[str]) -> list[tuple[int, str]]:
    """Return the place and option of each mention. Longer aliases are matched first."""
    names = {alias.lower(): each.split("|")[0] for each in options for alias in each.split("|")}
    pattern = "|".join(re.escape(alias) for alias in sorted(names, key=len, reverse=True))
    return [(hit.start(), names[hit[1]]) for hit in re.finditer(rf"(?<!\w)({pattern})", clause)]


def _judge_terms(terms: Sequence[str], text: str) -> Judgment:
    clauses = CLAUSE.split(text)
    if not all(any(_affirms(clause, term) for clause in clauses) for term in terms):
        return "not judged", "it does not state every key term"
    if len(_long_words(text)) > 3 + 5 * len(re.findall(GLUE, text)):
        return "not judged", "it lists terms instead of answering"
    return "right", ""


def _affirms(clause: str, term: str) -> bool:
    words = sorted(map(re.escape, term.lower().split("|")), key=len, reverse=True)
    hits = re.finditer(rf"(?<!\w)(?:{'|'.join(words)})", clause)
    return any(not re.search(NEGATION, clause[: hit.start()]) for hit in hits)


def _judge_numbers(answer: Answer, text: str, tolerance: float) -> Judgment:
    facts = {name: value for name, value in answer.evidence.items() if value is not None}
    stated = [number for number in numbers_in(text) if not LABEL.search(text[: number.start])]
    if not facts or not stated:
        return "not judged", ""
    if misplaced := _find_misplaced(facts, text):
        return "wrong", f"{misplaced}: {answer.text}"

    places = {name: _place(name, facts[name], stated, text, tolerance) for name in facts}
    stated_at = [place for place in places.values() if place is not None]
    enough = len(stated_at) >= min(2, len(facts))
    lists = all(places[name] is not None for name in facts if isinstance(facts[name], list))
    in_order = stated_at == sorted(stated_at)  # not swapped, as in `single: 122 MiB, all: 74 MiB`
    if enough and lists and in_order:
        return "right", ""
    if any(each.equals(number, tolerance) for each in stated for number in _flat(facts)):
        return "not judged", (
            "it states only some of the numbers, or states them in a different order"
        )
    return "wrong", f"none of these numbers matches the run: {answer.text}"


def _place(name: str, fact: Any, stated: Sequence[Stated], text: str, near: float) -> int | None:
    """Return where the answer states a number, or all numbers of a list in the list's order."""
    known = fact if isinstance(fact, list) else [fact]
    for place in range(len(stated) - len(known) + 1):
        pairs = list(zip(stated[place:], known, strict=False))
        loose = isinstance(fact, list) or not is_count(fact) or stated[place].noun in LOOSE
        if all(each.equals(number, near) for each, number in pairs) and (
            loose or _counts(stated[place], name, text)
        ):
            return place
    return None


def _find_misplaced(facts: Mapping[str, Any], text: str) -> str:
    """Describe the first count that the answer gets wrong, or return an empty string."""
    for name, value in facts.items():
        if isinstance(value, int | float) and is_count(value):
            counts = [each.value for each in numbers_in(text) if _counts(each, name, text)]
            if counts and value not in counts:
                return f"the run has {value:g} {name}"
    return ""


def _counts(number: Stated, noun: str, text: str) -> bool:
    """Return whether a number counts a noun: `8 processes`, `8 new processes`, `processes: 8`."""
    stem = re.escape(re.sub(r"e?s$", "", noun.lower()))
    before = re.search(rf"(?<!\w){stem}[\w-]*(?: is| are|:| =)?\s*$", text[: number.start])
    after = rf"\s*(?!per |of |for |in |into |on |each )(?:[\w-]+ )?{stem}"
    return bool(before or re.match(after, text[number.end :]))


def _flat(facts: Mapping[str, Any]) -> list[float]:
    values = (value if isinstance(value, list) else [value] for value in facts.values())
    return [each for value in values for each in value if isinstance(each, int | float)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _content(text: str) -> list[str]:
    """Return the words that carry the meaning."""
    words = _long_words(re.sub(GLUE, " ", text))
    return [word for word in words if word not in COMMON and word not in (*YES_NO, *FACTORS)]


def _long_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]{3,}", text)


def plain(words: str) -> str:
    """Return the text in lower case, without backquotes and extra spaces."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
