"""Judge a free-text answer by what it states, not by what it mentions.

The template's rubric has one deciding fact per question:

    yes or no   the answer starts with it, and does not state the opposite later
    choice      "DDP is slower than DataParallel" chooses DataParallel
    key terms   the answer states one alternative for each term; "not in the backward pass" does not
                state "backward"
    numbers     each number is in its place: "8 processes on 2 GPUs" does not state 2 processes

An answer that does not state the fact, is not clear, contains a number that is not in the run, or mostly uses words from outside the course is left for a human to read.
"""

from __future__ import annotations

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
CLAUSE = re.compile(
    r"[.,](?=\s|$)|[;:!?()\n]|\b(?:because|but|since|while|whereas|although|as|so)\b"
)
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
UNDECIDED = r"nois[ey]|few rounds|(?:can ?not|can['’]t|impossible to|hard to) (?:tell|say|decide)|undecided|unclear"
LABEL = re.compile(r"\b(?:rank|part|step|process)\s*$")  # the number after it is a name: rank 0
MOST_WORDS = 150  # nobody answers in more words; such a text mentions everything
LOOSE = ("", "per", "of", "in", "for", "each", "on", "with", "and", "or", "to", "at", "is", "are")
COMMON = """
able about above after again also although always another any anymore anything apart are around
because become been before being best better between bigger both bring but calculate called can
case cause clearly come cost could course did difference different does doing done down drift due
during easier either enough equal even ever everything exactly exist expect extra fact false far
fast few find first for from full further get give goes good got happen have help here high how
however idle important into itself just keep know later lead let like long look lot low made main
make manual many may mean merge might more most must myself near need neither never not nothing now
often once one only other our out over own perform place point possible prevent problem process put
rather really reason reduce result run same save second see send several should side simple since
slice slow some speed start stay still store such sure take talk tell than that the their them then
there therefore they thing think this those through time too toward true try two under until use
using usually very wait want was way well were what when where which while who whole why will with
without work worse would wrong you your
""".split()
# An answer that is a sentence has some of these words; a list of key terms does not.
GLUE = (
    r"\b(?:a|an|and|are|as|at|be|because|become|by|do|does|for|from|gets?|has|have|if|in|is|it|its|of|on|or"
    r"|per|so|than|that|the|they|to|uses?|was|when|with)\b"
)
STEM = 4  # letters; the rest is grammar
FOREIGN = set(
    "ist nicht der und sind weil est pas plus les une sont que los más più het niet".split()
)


def judge(answer: Answer, given: str, tolerance: float, known: Sequence[Stated] = ()) -> Judgment:
    """Judge an answer. `known` are the numbers in the run's sheet."""
    text, question = plain(given), plain(answer.question)
    if text in (plain(answer.text), plain(f"{_verdict_word(answer)}. {answer.text}")):
        return "right", ""
    text = text.removeprefix(question).strip()
    mine, asked = _words(text), _words(question)
    if mine <= asked and len(mine) >= 0.7 * len(asked - {"a", "b", "c", "d", "e"}):
        return "missing", "the answer repeats the question"
    if not mine and not yes_or_no(text):
        return "missing", "the answer repeats the question"
    if answer.undecided:
        told = re.search(UNDECIDED, text)
        return ("right", "") if told else ("not judged", "this run is too noisy to tell")

    status, reason = _judge_fact(answer, text, tolerance)
    doubt = _find_doubt(answer, text, tolerance, known) if status == "right" else ""
    return ("not judged", doubt) if doubt else (status, reason)


def _judge_fact(answer: Answer, text: str, tolerance: float) -> Judgment:
    if answer.verdict is not None:
        return _judge_verdict(answer, text)
    if answer.choice is not None:
        return _judge_choice(answer, text)
    if answer.terms:
        misplaced = _misplaced(answer.evidence, text)
        return ("not judged", misplaced) if misplaced else _judge_terms(answer.terms, text)
    return _judge_numbers(answer, text, tolerance)


def _find_doubt(answer: Answer, text: str, tolerance: float, known: Sequence[Stated]) -> str:
    """Say why a human should read an answer that states the fact."""
    if text.endswith("?"):
        return "it is a question"
    if len(text.split()) > MOST_WORDS:
        return "it is too long to judge"
    facts = [*known, *numbers_in(f"{answer.text} {answer.question}")]
    facts += [Stated(value, "") for value in _flat(answer.evidence)]
    for number in numbers_in(text):
        named = LABEL.search(text[: number.start])
        if not named and not _is_known(number, facts, tolerance):
            return f"{text[number.start : number.end]} is not a number of this run"
    words = [word for word in _long_words(text) if word not in (*COMMON, *YES_NO, *FACTORS)]
    foreign = [word for word in words if word[:STEM] not in vocabulary()]
    if 4 * len(foreign) > len(words):
        return "it uses other words than the course"
    return ""


def _is_known(number: Stated, facts: Sequence[Stated], tolerance: float) -> bool:
    """Return whether a number or its inverse is a fact. Everyone may state 0, 1, 2, and 95 %."""
    pure = ("", "number", "share")
    if number.kind not in pure:
        facts = [fact for fact in facts if fact.kind in ("", number.kind)]
        return any(number.equals(fact.value, tolerance) for fact in facts)
    values = [fact.value for fact in facts if fact.kind in pure]
    values += [1 / value for value in values if 0 < abs(value) < 1000]
    return round(number.value, 6) in (0, 1, 2, 0.95) or any(
        number.equals(v, tolerance) for v in values
    )


@cache
def vocabulary() -> frozenset[str]:
    """Return the beginnings of all words in the sheets, and of common English words."""
    templates = sorted((Path(__file__).parent / "templates").glob("*.j2"))
    text = " ".join(path.read_text(encoding="utf-8").lower() for path in templates)
    return frozenset(word[:STEM] for word in (*_long_words(text), *COMMON))


def _is_relevant(text: str) -> bool:
    """Return whether an answer may be serious, although it does not state the fact."""
    words = [word for word in _long_words(text) if word not in COMMON]
    serious = sum(word[:STEM] in vocabulary() or word in YES_NO for word in words)
    return 2 * serious >= len(words) > 0 or bool(_words(text) & FOREIGN) or not text.isascii()


def yes_or_no(text: str) -> bool | None:
    rest = LEADING.sub("", text.lower())
    if PLAIN_NOT.match(rest):
        return False
    return YES_NO.get(re.split(r"[^\w✓✗]+", rest, maxsplit=1)[0])


def _verdict_word(answer: Answer) -> str:
    return "" if answer.verdict is None else "yes" if answer.verdict else "no"


def _judge_verdict(answer: Answer, text: str) -> Judgment:
    said = yes_or_no(text)
    if said is None:
        hedges = HEDGE.search(text) or not _is_relevant(text)
        return "wrong" if hedges else "not judged", "start with Yes or No"
    if len({YES_NO[word] for word in ALONE.findall(text)} | {said}) > 1:
        return "wrong", "it states both yes and no"
    if said == answer.verdict:
        opposite = _states_opposite(plain(answer.question), text, said)
        return ("not judged", "the explanation contradicts it") if opposite else ("right", "")
    if answer.terms and _judge_terms(answer.terms, text)[0] == "right":
        return "not judged", "the explanation may be correct"
    return "wrong", answer.text


def _states_opposite(question: str, text: str, said: bool) -> bool:
    """Return whether the explanation contradicts its yes or no: `Yes, it is slower`."""
    for word, opposite in OPPOSITES.items():
        if word not in question:
            continue
        for clause in CLAUSE.split(text)[1:]:
            for pattern, meaning in ((word, True), (opposite, False)):
                found = re.search(pattern, clause)
                negated = found and re.search(NEGATION, clause[: found.start()])
                if found and (meaning is not bool(negated)) is not said:
                    return True
    return False


def _judge_choice(answer: Answer, text: str) -> Judgment:
    said = stated_option(text, answer.options or (answer.choice or "",))
    names = " or ".join(option.split("|")[0] for option in answer.options)
    if said is None:
        return "not judged", "it is not clear which option the answer chooses"
    if said == "":
        return "not judged" if _is_relevant(text) else "wrong", f"name one: {names}"
    return ("right", "") if said == answer.choice else ("wrong", answer.text)


def stated_option(text: str, options: Sequence[str]) -> str | None:
    """Return the option that the answer chooses, or `neither`. Return an empty string if it names
    no option, or None if its choice is not clear. An option is `name|alias|alias`."""
    stated: list[str | None] = []
    for clause in CLAUSE.split(text):
        found = _mentions(clause, options)
        if not found and not re.search(NEITHER, clause):
            continue
        if not stated or re.search(r"\b(?:faster|quicker|slower|better|worse|best)\b", clause):
            stated.append(_chosen(clause, found))
    if not stated:
        return ""
    clear = {option for option in stated[1:] if option is not None} | {stated[0]}
    return clear.pop() if len(clear) == 1 else None


def _chosen(clause: str, found: list[tuple[int, str]]) -> str | None:
    """Return what one clause chooses. `A`, `A is faster`, `A is faster than B`, and `B is slower
    than A` all choose A."""
    names = list(dict.fromkeys(name for _, name in found))
    if re.search(NEITHER, clause):
        return None if re.search(NEGATION, clause.replace("no ", "")) else "neither"
    if re.search(NEGATION, clause):
        return None
    less, than = re.search(LESS, clause), re.search(r"\b(?:than|beats?|outperforms?|of)\b", clause)
    if len(names) == 1:
        return None if less or (than and found[0][0] > than.start()) else names[0]
    if not than or not found[0][0] < than.start() < found[-1][0] or len(found) > 2:
        return None
    if less:
        return names[1]
    return names[0] if re.search(MORE, clause) else None


def _mentions(clause: str, options: Sequence[str]) -> list[tuple[int, str]]:
    """Return the place and the option of each mention. Longer aliases are matched first, because
    `distributed data parallel` is not `data parallel`."""
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
    misplaced = _misplaced(facts, text) or _swapped(facts, text, tolerance)
    if misplaced:
        return "wrong", f"{misplaced}: {answer.text}"

    right = [name for name, value in facts.items() if _states(name, value, stated, text, tolerance)]
    lists = [name for name, value in facts.items() if isinstance(value, list)]
    if set(lists) <= set(right) and len(right) >= min(2, len(facts)):
        return "right", ""
    known = _flat(facts)
    matches = any(each.equals(number, tolerance) for each in stated for number in known)
    if right or matches:
        return "not judged", "it states only some of the numbers"
    return "wrong", f"none of these numbers matches the run: {answer.text}"


def _states(name: str, value: Any, stated: Sequence[Stated], text: str, tolerance: float) -> bool:
    """Return whether the answer states a number, or all numbers in a list in the same order."""
    if isinstance(value, list):
        windows = (stated[n : n + len(value)] for n in range(len(stated) - len(value) + 1))
        return any(
            all(each.equals(k, tolerance) for each, k in zip(window, value, strict=True))
            for window in windows
        )
    return any(
        each.equals(value, tolerance)
        and (not is_count(value) or each.noun in LOOSE or _counts(each, name, text))
        for each in stated
    )


def _swapped(facts: Mapping[str, Any], text: str, tolerance: float) -> str:
    """Say for which fact the answer states another fact's number. For example, `single: 122 MiB` is
    wrong if 122 MiB is the total for all devices."""
    values = {name: value for name, value in facts.items() if isinstance(value, float | int)}
    for clause in re.split(r"[;.,](?=\s|$)|\band\b|\n", text):
        names = [name for name in values if re.search(rf"(?<!\w){re.escape(name.lower())}", clause)]
        stated = numbers_in(clause)
        stated = [each for each in stated if not LABEL.search(clause[: each.start])]
        if len(names) == 1 and len(stated) == 1 and not stated[0].noun:
            others = [value for name, value in values.items() if name != names[0]]
            if not stated[0].equals(values[names[0]], tolerance) and any(
                stated[0].equals(other, tolerance) for other in others
            ):
                return f"that is not the number for {names[0]}"
    return ""


def _misplaced(facts: Mapping[str, Any], text: str) -> str:
    """Describe the first count that the answer gets wrong, or return an empty string."""
    for name, value in facts.items():
        if isinstance(value, int | float) and is_count(value):
            said = [each.value for each in numbers_in(text) if _counts(each, name, text)]
            if said and value not in said:
                return f"the run has {value:g} {name}"
    return ""


def _counts(number: Stated, noun: str, text: str) -> bool:
    """Return whether a number counts this noun: `8 processes`, `8 worker processes`, `processes:
    8`."""
    stem = re.escape(re.sub(r"e?s$", "", noun.lower()))
    before = re.search(rf"(?<!\w){stem}[\w-]*(?: is| are|:| =)?\s*$", text[: number.start])
    after = rf"\s*(?!per |of |for |in |into |on |each )(?:[\w-]+ )?{stem}"
    return bool(before or re.match(after, text[number.end :]))


def _flat(facts: Mapping[str, Any]) -> list[float]:
    values = (value if isinstance(value, list) else [value] for value in facts.values())
    return [each for value in values for each in value if isinstance(each, int | float)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _long_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]{3,}", text)


def plain(words: str) -> str:
    """Return the text in lower case, without backquotes and extra spaces."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
