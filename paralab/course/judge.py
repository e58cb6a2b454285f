"""Judge a free-text answer by what it states, not by what it mentions.

The template's rubric has one deciding fact per question:

    yes or no   the answer starts with it, and does not state the opposite later
    choice      "DDP is slower than DataParallel" chooses DataParallel
    key terms   the answer states one alternative for each term; "not in the backward pass" does not
                state "backward"
    numbers     each number is in its place: "8 processes on 2 GPUs" does not state 2 processes

An answer that does not state the fact, or is not clear, is left for a human to read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paralab.analyse.blocks import Answer
from paralab.course.numbers import Stated, is_count, numbers_in

Status = Literal["right", "wrong", "missing", "not judged"]
Judgment = tuple[Status, str]  # the reason is empty only for "right"

YES = ("yes", "ja", "oui", "sí", "si")
NO = ("no", "nope", "nein", "non")
YES_NO = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
# A verdict word on its own, unlike the "no" in "there is no rank 1".
ALONE = re.compile(rf"\b({'|'.join(YES_NO)})\b(?=\s*(?:[.,;:!/]|$|and\b|or\b|but\b))")
LEADING = re.compile(r"^(?:[\W_]|(?:my |the )?answer(?: is)?\b|i think\b)+")
CLAUSE = re.compile(
    r"[.,](?=\s|$)|[;:!?()\n]|\b(?:because|but|since|while|whereas|although|as|so)\b"
)
NEGATION = r"\b(?:not|no|never|none|nor|nothing|without|cannot|hardly)\b|n['’]t\b"
LESS = r"\b(?:slow\w*|worse|worst|less|least|fewer|lower|loses?)\b"
MORE = (
    r"\b(?:faster|fastest|quick\w*|better|best|more|most|higher|wins?|beats?|outperforms?|gains?"
    r"|saves?|scales?|rather|instead)\b"
)
NEITHER = r"\b(?:neither|same|equal\w*|tie|both|similar\w*|identical\w*)\b|\bno (?:\w+ )?difference"
UNDECIDED = (
    r"nois[ey]|(?:can ?not|can['’]t|impossible to|hard to) (?:tell|say|decide)|undecided|unclear"
)
LABEL = re.compile(r"\b(?:rank|part|step|process)\s*$")  # the number after it is a name: rank 0
MOST_TERMS = 3  # an answer with more key terms must be more than a list of them
LOOSE = ("", "per", "of", "in", "for", "each", "on", "with", "and", "or", "to", "at", "is", "are")


def judge(answer: Answer, given: str, tolerance: float) -> Judgment:
    text = plain(given)
    if _words(text) <= _words(plain(answer.question)) and yes_or_no(text) is None:
        return "missing", "the answer repeats the question"
    if answer.undecided:
        told = re.search(UNDECIDED, text)
        return ("right", "") if told else ("not judged", "this run is too noisy to tell")
    if answer.verdict is not None or answer.choice is not None:
        status, reason = (_judge_choice if answer.verdict is None else _judge_verdict)(answer, text)
        if status == "right" and _contradicts(answer, text, tolerance):
            return "not judged", f"no number in it matches the run: {answer.text}"
        return status, reason
    if answer.terms:
        misplaced = _misplaced(answer.evidence, text)
        return ("not judged", misplaced) if misplaced else _judge_terms(answer.terms, text)
    return _judge_numbers(answer, text, tolerance)


def yes_or_no(text: str) -> bool | None:
    return YES_NO.get(re.split(r"\W+", LEADING.sub("", text.lower()), maxsplit=1)[0])


def _judge_verdict(answer: Answer, text: str) -> Judgment:
    said = yes_or_no(text)
    if said is None:
        return "wrong", "start with Yes or No"
    if len({YES_NO[word] for word in ALONE.findall(text)} | {said}) > 1:
        return "wrong", "it states both yes and no"
    if said == answer.verdict:
        return "right", ""
    if answer.terms and _judge_terms(answer.terms, text)[0] == "right":
        return "not judged", "the explanation may be correct"
    return "wrong", answer.text


def _judge_choice(answer: Answer, text: str) -> Judgment:
    said = stated_option(text, answer.options or (answer.choice or "",))
    if said is None:
        return "not judged", "it is not clear which option the answer chooses"
    if said == "":
        names = " or ".join(option.split("|")[0] for option in answer.options)
        return "wrong", f"name one: {names}"
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
    mentioned = {word for term in terms for word in term.lower().split("|") if word in text}
    if len(mentioned) > MOST_TERMS and len(_words(text)) < 3 * len(mentioned):
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
    known = [n for each in facts.values() for n in (each if isinstance(each, list) else [each])]
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


def _contradicts(answer: Answer, text: str, tolerance: float) -> bool:
    """Return whether an answer states factors such as `7.3×`, but none of them matches the run."""
    numbers = [each for each in answer.evidence.values() if isinstance(each, int | float)]
    facts = [each for each in numbers if 0 < abs(each) < 1000]  # factors, not bytes
    stated = [one for one in numbers_in(text) if re.match(r"\s*(×|x\b|times\b)", text[one.end :])]
    known = [number for each in facts for number in (each, 1 / each)]
    return bool(facts and stated) and not any(
        one.equals(number, tolerance) for one in stated for number in known
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
    after = rf"\s*(?!per |of |for |in |on |each )(?:[\w-]+ )?{stem}"
    return bool(before or re.match(after, text[number.end :]))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def plain(words: str) -> str:
    """Return the text in lower case, without backquotes and extra spaces."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
