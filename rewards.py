"""Score answers: one scorer for training, validation, evaluate.py and this command.

    python rewards.py responses.jsonl                       # table: accuracy, format, invalid, truncated per type
    python rewards.py responses.jsonl --out scored.jsonl    # every row with its scores
    python rewards.py responses.jsonl --show wrong 5        # print examples (wrong | invalid | truncated | ok)
    python rewards.py responses.jsonl --explain 3           # record 3: what was read, and which rule fired

A row holds the record's fields (problem, answer or solution, problem_type, options ...) and `response` (text) or
`responses` (list of texts); training's rollouts/step_*.jsonl are such files.

`score(record, response)` returns
    accuracy    0..1, the meaning of each problem type is beside its function below
    format      1 = one closed <answer> tag whose content has the form of the type, 0.5 = tag, other content, 0 = none
    overlong, repetition   <= 0, only when switched on (soft_overlong, repetition_penalty)
    overall     accuracy_weight * accuracy + format_weight * format + the weighted penalties
    prediction  what was read from the response;  method  the rule that read it
    status      ok (accuracy > 0) | wrong (read, accuracy 0) | invalid (nothing readable) | truncated (in its thoughts)
Nothing is ever guessed or drawn at random: what cannot be read is `invalid`, and it is counted.
All patterns are linear in the length of the text; what may still hang (math, code, custom rewards) runs in a worker
process that is killed at the time limit.
"""
import argparse
import bisect
import difflib
import faulthandler
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class RewardSettings:
    accuracy_weight: float = 0.9
    format_weight: float = 0.1
    reward: str | None = None             # "path/to/file.py:function" replaces the rules below
    on_reward_error: str = "stop"         # stop | zero: what an exception inside the custom reward does
    timeout_s: float = 10.0               # per response, libraries already imported
    allow_code_execution: bool = False    # run a record's `tests` (limits: see run_tests)
    box_space: str | None = None          # space of gold boxes without a `box_space` field: pixels | 0-1000 | 0-1
    answer_box_space: str = "0-1000"      # space in which the model answers; used when the gold's space is known
    overlong_limit: int = 0               # tokens; 0 = no overlong penalty
    overlong_buffer: int = 0              # tokens before the limit over which the penalty grows to 1
    overlong_weight: float = 1.0
    repetition_ngram: int = 0             # words; 0 = no repetition penalty
    repetition_weight: float = 0.1


class NoAnswer(ValueError):
    """The text holds no answer of this type. status: invalid, or wrong for hedges and lists."""

    def __init__(self, reason, status="invalid"):
        super().__init__(reason)
        self.status = status


class RewardError(RuntimeError):
    """The scorer itself cannot go on (custom reward failed, package missing); the message is ready to print."""


# ---------------------------------------------------------------- the answer inside the response

def answer_region(response: str) -> tuple[str, str | None, bool]:
    """(text of the answer, what marked it: tag | open tag | box | None, cut off inside its thoughts)."""
    text = response[response.rfind("</think>") + 8:] if "</think>" in response else response
    if "<think>" in text:
        return "", None, True

    start = text.rfind("<answer>")
    if start >= 0:
        end = text.find("</answer>", start)
        return (text[start + 8:end], "tag", False) if end >= 0 else (text[start + 8:], "open tag", False)

    text = text.replace("</answer>", " ")
    return (text, "box" if "\\boxed" in text else None, False)


def unbox(text: str) -> str:
    r"""Content of the last \boxed{...}; the text itself without one; "" when that box is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth = 0
    for i in range(start + 6, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7:i]
    return ""


def gold_text(record: dict) -> str:
    """The gold answer as text. A tagged `solution` wins over `answer`, which some benchmarks use for other things."""
    solution = record.get("solution")
    answer = record.get("answer")
    tagged = isinstance(solution, str) and ("<answer>" in solution or "<think>" in solution)
    gold = solution if tagged or answer is None else answer
    if isinstance(gold, (dict, list)):
        return json.dumps(gold)
    gold = "" if gold is None else str(gold)
    text, mark, _ = answer_region(gold)
    if mark in ("tag", "open tag"):
        return text.strip()
    return re.sub(r"</?(?:think|answer)>", " ", gold).strip()  # Charades-STA's gold stands in <think>, its tag is broken


DASHES = dict.fromkeys(map(ord, "‐‑‒–—―−"), "-") | dict.fromkeys(map(ord, "“”„«»"), '"')
DASHES |= dict.fromkeys(map(ord, "‘’`´"), "'") | {ord("⁄"): "/"} | dict.fromkeys(map(ord, "\u200b\u200c\u200d\ufeff"), None)


def normalise(text: str) -> str:
    """NFKC with one kind of dash and quote. n² becomes n^2 and 1½ becomes 1 1/2 first: NFKC alone says n2 and 11/2."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: "^" + unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub("(?<=[0-9])(?=[¼½¾⅐-⅞])", " ", text)
    return unicodedata.normalize("NFKC", text).translate(DASHES)


def plain(text: str) -> str:
    r"""Normalised text without Markdown and LaTeX dressing (**B**, $B$, \text{B}, `B`)."""
    text = normalise(text).replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\%", "%")
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|boxed)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[*$`]|\\[()\[\]]|'(?=\W|$)|(?<!\w)'", lambda m: "'" if m[0] == "'" else "", text).strip()


def phrase(text: str) -> str:
    """For comparing words: lower case, single spaces, no outer punctuation, no leading article."""
    text = " ".join(plain(text).casefold().split()).strip(" .,;:!?\"'()[]<>。,、")
    return re.sub(r"^(?:an?|the) (?=.)", "", text)


# ---------------------------------------------------------------- multiple choice

PREFIX = re.compile(r"\s*\(?([A-Z])(?:[.:)、,]|\s-)\s*")


def option_texts(record: dict) -> dict[str, str]:
    """{"A": "text", ...}. Letters in front of the options are used when all have one and none repeats."""
    options = [str(option) for option in record.get("options") or []]
    prefixes = [PREFIX.match(normalise(option)) for option in options]
    letters = [match[1] for match in prefixes if match]
    if len(letters) == len(options) == len(set(letters)):
        return {match[1]: match.string[match.end():] for match in prefixes}
    return {chr(65 + i): option for i, option in enumerate(options[:26])}


# A declaration ends where its letter must begin. Words ignore case, the letter after them does not.
CUE = re.compile(
    r"(?i:\b(?:answer|option|choice|response|letter)\b[^\S\n]*(?:(?:is|was|would be|should be|must be|will be|are)\b)?|"
    r"\b(?:it is|it's|it must be|i (?:would |will )?(?:choose|pick|select|say|go (?:with|for)|think)|i'd (?:say|go with)|"
    r"(?:choose|pick|select|so|thus|therefore|hence|finally)\b,?)|"
    r"\b[^\W\d_]+(?=\s*[:=])|[→⇒>]|(?<!不)(?:答案|正确选项|选项|选择|应该?选|故选|选|(?<!不)是))"
    r"[\s:=,是为应该选项择→>\"'(\[]*")
FILLER = re.compile(r"(?i:(?:(?:most likely|likely|probably|clearly|definitely|indeed|simply|actually|still|now|the|option|"
                    r"choice|letter|answer|is|number|选项|选)\b[\s:]*)*)[\"'(\[\s]*")
JOINED = re.compile(r"[)\].\"']*\s*(?:,|/|&|\+|-|~|、|和|或|以及|\b(?:or|and|to)\b)\s*(?:(?:and|or|maybe|option)\s+)*[(\[]?([A-Z])\b")
RIGHT = re.compile(r"\b([A-Z])\b[)\]\"']*\s*(?:(?i:(?:is|are|would be|must be|seems|looks|appears|as)\s+)?"
                   r"(?i:(?:to be\s+)?(?:(?:the|most|only|clearly|my)\s+)*(?:correct|right|best|true|final|answer)\b)|"
                   r"\s*(?:才?是|为)?\s*(?:正确|对的|答案))")
WRONG = re.compile(r"\b([A-Z])\b[)\]\"']*\s*(?i:(?:is|are|can(?:no|')t be|seems|looks)\s+)(?i:(?:clearly\s+|definitely\s+)?"
                   r"(?:not|wrong|incorrect|false|out|ruled out))\b|(?:不是|不选|排除)\s*([A-Z])\b")


def lead_letter(text: str, letters) -> str | None:
    """The option letter that opens `text`; raises NoAnswer for "A or C"; "A man ..." opens with a word, not a letter."""
    text = text[FILLER.match(text).end():]
    match = re.match(r"([A-Z]+)(?![^\W_])", text, re.ASCII)
    if not match or not set(match[1]) <= set(letters):
        return None
    run, rest = match[1], text[match.end():]
    if len(run) > 1:
        if len(set(run)) == len(run) and run == "".join(sorted(run)):
            raise NoAnswer(f"several options ({run})", "wrong")
        return None
    joined = JOINED.match(rest)
    if joined and joined[1] in letters and joined[1] != run:
        raise NoAnswer(f"several options ({run}, {joined[1]})", "wrong")
    if re.match(r"['’]\w|\s+(?!(?i:because|since|as|and|but|due|based|given|is|would|in|for|from|it|the|with|after|by)\b)"
                r"[a-z]" if run in "AI" else r"['’]\w", rest):
        return None
    return run


def read_choice(text: str, record: dict):
    options = option_texts(record)
    texts = {letter: phrase(option) for letter, option in options.items()}
    text = plain(text)
    whole = re.fullmatch(r"[\W_]*([A-Za-z])[\W_]*", text)
    if whole and whole[1].upper() in options:
        return whole[1].upper(), "letter"

    def same_text(answer):
        answer = phrase(answer)
        return [letter for letter, option in texts.items() if option == answer and option]

    # A text that is exactly an option's wins over a letter that opens it ("E. coli").
    if len(same := same_text(text)) > 1:
        raise NoAnswer(f"text of several options ({', '.join(same)})")
    if same:
        return same[0], "option text"

    rejected = {letter for match in WRONG.finditer(text) for letter in match.groups() if letter}
    declared = [(match.end(), match) for match in CUE.finditer(text)] + [(m.end(), m) for m in RIGHT.finditer(text)]
    for end, match in sorted(declared, key=lambda item: item[0], reverse=True)[:200]:
        if match.re is RIGHT:
            if match[1] in options:
                return match[1], "declared"
            continue
        tail = text[end:end + 400].split("\n")[0]
        if negated := re.match(r"(?i:not|neither|never)\b\W*(?:option\W*)?([A-Z])\b|不是?\s*([A-Z])", tail):
            rejected |= set(negated.groups())
            continue
        if re.match(r"(?i:either|both|between)\b", tail):
            raise NoAnswer("several options", "wrong")
        letter = lead_letter(tail, options)
        if letter is None and len(same := same_text(re.split(r"[.;!?](?:\s|$)", tail)[0])) == 1:
            letter = same[0]
        if letter and letter not in rejected:
            return letter, "declared"

    # Lines that are a letter alone, then lines that open with one ("C. A dog is sleeping").
    for pattern, method in ((r"[\W_]*([A-Z])[\W_]*", "letter line"), (r"[\"'\s]*(?:\(([A-Z])\)|([A-Z])\s?[.:)、]).*", "lettered line")):
        found = [next(g for g in m.groups() if g) for line in text.split("\n") if (m := re.fullmatch(pattern, line.strip()))]
        found = {letter for letter in found if letter in options}
        if len(found) > 1:
            raise NoAnswer(f"several options ({', '.join(sorted(found))})", "wrong")
        if found:
            lead_letter(text, options)      # raises for "A, C"
            return found.pop(), method
    lead_letter(text, options)              # raises for "A or C"
    return named_option(text, texts), "option named in the text"


def named_option(text: str, texts: dict[str, str]) -> str:
    """The one option whose words occur in the text, outside a negation and not inside a longer option's words."""
    words = " ".join(text.casefold().split())
    spans = []
    for letter, option in texts.items():
        if not option or (len(option) == 1 and not option.isdigit()):
            continue
        for match in re.finditer(r"(?<![\w.])" + re.escape(option) + r"(?!\w|[.,]\d)", words):
            before = words[max(0, match.start() - 24):match.start()]
            if not re.search(r"(?:\bnot|n't|\bno|rather than|instead of|不是)(?: \w+)? ?(?:an? |the )?$", before):
                spans.append((match.start(), match.end(), letter))
    spans.sort(key=lambda span: (span[0], -span[1]))
    named, reach = set(), -1
    for start, end, letter in spans:
        if end > reach:
            named.add(letter)
            reach = end
        elif any(texts[letter] == texts[other] for other in named):
            named.add(letter)
    if len(named) != 1:
        raise NoAnswer("no option named" if not named else f"several options named ({', '.join(sorted(named))})")
    return named.pop()


# ---------------------------------------------------------------- numbers

SMALL = {word: i for i, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen".split())}
SMALL |= {word: 10 * i for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
SCALE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
WORDS = "|".join(sorted([*SMALL, *SCALE], key=len, reverse=True))
WORD_RUN = re.compile(rf"\b(?:a (?=hundred|thousand|million|dozen))?(?:{WORDS})(?:(?:\s+and\s+|\s+|-)(?:{WORDS}))*\b(?!\s+of\b)", re.I)
HANZI = {char: i for i, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
HANZI_RUN = re.compile(r"(?<!第)[零〇一二两三四五六七八九十百千万亿]+(?![共直样些起定下般切])")
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?![\d.,/])|\d+)(?:\.\d+)?|\.\d+"
QUANTITY = re.compile(
    rf"(?<![A-Za-z_^\d])(?<!\d\.)(?P<sign>(?<![\d)%])[-+]\s?)?(?:(?P<whole>\d+)\s+(?P<top>\d+)\s?/\s?(?P<low>\d+)|"
    rf"(?P<value>{DIGITS})(?:[eE](?P<exp>[-+]?\d+))?(?:\s?/\s?(?P<over>{DIGITS}))?)"
    r"(?:\s?(?:[x*·]|×|\\times|\\cdot)\s?10\s?\^\s?\{?(?P<ten>[-+]?\d+)\}?|\^\{?(?P<power>[-+]?\d+)\}?)?"
    r"(?:\s?(?P<scale>thousand|million|billion|万|亿)\b|(?P<percent>\s?%|\s?per\s?cent\b|\s?pct\b))?", re.I)
BEHIND = re.compile(r"(?i:\banswer\b|答案|\bresult\b|\bfinal(?:ly)?\b)")
CONCLUDES = re.compile(r"(?i:=|≈|\bso\b|\bthus\b|\btherefore\b|\bhence\b|\btotal(?:s|ling)?\b|\bmak(?:es|ing)\b|\bequals?\b|所以|因此|总共|一共)")
ALSO = re.compile(r"\s*(?:[a-z]+\s*)?(?:\b(?:or|to|through)\b|[-~/:±]|至|到|或)\W*|\s*(?:\band\b|[,;+x*×·^、和])?\s*", re.I)


def number_words(text: str) -> str:
    """Number words become digits: "one hundred and five" -> 105, "twenty-one" -> 21, 十二 -> 12, 百分之五十 -> 50%."""
    def english(match):
        values, total, group, last = [], 0, 0, None
        for word in re.findall(WORDS, match[0].lower()):
            if word in SMALL:
                if last is not None and not (last >= 100 or (20 <= last < 100 and 0 < SMALL[word] < 10)):
                    values, total, group = [*values, total + group], 0, 0     # "two three": two numbers
                group += SMALL[word]
                last = SMALL[word]
            else:
                last = SCALE[word]
                if last in (12, 100):
                    group = max(group, 1) * last
                else:
                    total, group = total + max(group, 1) * last, 0
        return " , ".join(str(value) for value in [*values, total + group])

    def chinese(match):
        total, group, digit = 0, 0, 0
        for value in map(HANZI.get, match[0]):
            if value < 10:
                digit = value
            elif value < 10**4:
                group, digit = group + max(digit, 1) * value, 0
            else:
                total, group, digit = (total + group + digit or 1) * value, 0, 0
        return str(total + group + digit)

    text = re.sub(r"(?:\band )?(?:\b(?:an?|one) )?\bhalf\b(?! of\b)", " 1/2", text)
    text = HANZI_RUN.sub(chinese, WORD_RUN.sub(english, text))
    text = re.sub(r"百分之(\d+(?:\.\d+)?)", r"\1%", re.sub(r"(\d) ?(?:point|点) ?(?=\d)", r"\1.", text))
    return re.sub(r"(?<=\d) and (?=1/2)", " ", text)


def read_number(text: str, record: dict | None = None):
    """-> ((value, has percent sign), method). Ranges, alternatives and unevaluated sums are hedges."""
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", plain(text))
    if re.fullmatch(r"\W*(?:none|no|nil|nothing|没有|无)\W*", text, re.I):
        return (0.0, False), "none is zero"
    text = number_words(text)
    found = []
    for match in QUANTITY.finditer(text):
        if re.match(r"\.\d|,\d", text[match.end():match.end() + 2]) and not match["percent"]:
            raise NoAnswer("malformed number")
        found.append((quantity(match), bool(match["percent"]), match.start(), match.end()))
    if not found:
        raise NoAnswer("no number")
    outside = [item for item in found if text.count("(", 0, item[2]) <= text.count(")", 0, item[2])] \
        if len(found) < 50 else found
    found = outside or found                # "3.2 m (10.5 ft)"

    method, start = "number", None
    for cue, name in ((BEHIND, "declared"), (CONCLUDES, "concluding number")):
        ends = [match.end() for match in cue.finditer(text) if match.end() <= found[-1][2] + 1]
        if ends:
            method, start = name, ends[-1]
            break
    if start is None:                       # the first number of the last sentence that has one
        breaks = [match.end() for match in re.finditer(r"[.!?。!?](?=\s|$)|\n", text) if match.end() <= found[-1][2]]
        start = breaks[-1] if breaks else 0
    i = next((i for i, item in enumerate(found) if item[2] >= start - 1), len(found) - 1)
    value, percent, _, end = found[i]
    for other, _, next_start, next_end in found[i + 1:]:
        if not ALSO.fullmatch(text, end, next_start):
            break
        if other != value:
            raise NoAnswer("several numbers", "wrong")
        end = next_end
    if not math.isfinite(value):
        raise NoAnswer("not a finite number")
    return (value, percent), method


def quantity(match) -> float:
    """Value of a QUANTITY match; inf or nan when it overflows or divides by zero."""
    number = lambda digits: float(digits.replace(",", "").replace(" ", ""))
    try:
        if match["whole"]:
            value = number(match["whole"]) + number(match["top"]) / number(match["low"])
        else:
            value = number(match["value"]) * 10.0 ** int(match["exp"] or 0)
            value = number(match["value"] + "e" + match["exp"]) if match["exp"] else number(match["value"])
            value = value / number(match["over"]) if match["over"] else value
        value = value * float("1e" + match["ten"]) if match["ten"] else value
        value = value ** int(match["power"]) if match["power"] else value
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.nan
    scale = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "万": 1e4, "亿": 1e8}[(match["scale"] or "").lower()] \
        if match["scale"] else 1.0
    return (-value if (match["sign"] or "").strip() == "-" else value) * scale


def same_number(prediction, gold, record, settings) -> float:
    """1 when equal after rounding to 2 decimals. 50% is 0.5, and also 50 where the gold has no percent sign."""
    (p, p_percent), (g, g_percent) = prediction, gold
    pairs = [(p, g)]
    if p_percent != g_percent:
        pairs.append((p / 100, g) if p_percent else (p, g / 100))
    return float(any(round(a, 2) == round(b, 2) if abs(b) >= 0.01 or b == 0 else math.isclose(a, b, rel_tol=0.01)
                     for a, b in pairs))


def relative_accuracy(prediction, gold, record, settings) -> float:
    """MRA of VSI-Bench: share of the thresholds t = .5, .55 ... .95 with |p - g| / g <= 1 - t (their floats)."""
    p, g = prediction[0], gold[0]
    if g == 0:
        return float(p == 0)
    thresholds = [0.5 + i * ((0.95 - 0.5) / 9) for i in range(9)] + [0.95]     # numpy.linspace(.5, .95, 10)
    return sum(abs(p - g) / abs(g) <= 1 - t for t in thresholds) / 10


# ---------------------------------------------------------------- boolean

YES = {"yes", "true", "correct", "right", "是", "是的", "对", "对的", "正确", "真"}
NO = {"no", "false", "incorrect", "wrong", "否", "不", "不是", "不是的", "不对", "不正确", "错", "错误", "假", "没有"}
VERDICT = re.compile(r"\b(?:(?:is|was|does|do)?(?: not|n't) )?(?:yes|no|true|false|correct|incorrect|right|wrong)\b|"
                     r"不是的?|不对|不正确|错误?|没有|否|假|是的?|对的?|正确|真")


def polarity(word: str) -> bool:
    """True for yes. "not true" is no."""
    flipped = re.search(r"not |n't ", word) is not None
    return (word.split()[-1] in YES) != flipped


def read_boolean(text: str, record: dict):
    text = " ".join(plain(text).casefold().split())
    if single := re.fullmatch(r"\W*([ynft])\W*", text):
        return single[1] in "yt", "letter"
    found = list(VERDICT.finditer(text))
    if not found:
        raise NoAnswer("neither yes nor no")
    values = [polarity(match[0]) for match in found]
    opening = [i for i, match in enumerate(found) if not re.search(r"\w", text[:match.start()])]
    declared = [i for i, match in enumerate(found)
                if re.search(r"(?:answer|答案)\W*(?:(?:is|would be|should be|是|为)\b)?\W*$", text[max(0, match.start() - 40):match.start()])]
    i = declared[-1] if declared else opening[0] if opening else len(found) - 1 if len(set(values)) == 1 else None
    if i is None:
        raise NoAnswer("both yes and no", "wrong")
    joined = i + 1 < len(found) and re.fullmatch(r"\W*(?:or|and|/|maybe|或|和)\W*(?:maybe )?", text[found[i].end():found[i + 1].start()])
    if joined and values[i] != values[i + 1]:
        raise NoAnswer("both yes and no", "wrong")
    if not declared and not opening and found[i][0] == "no":
        raise NoAnswer("neither yes nor no")       # "no" inside a sentence is a determiner
    return values[i], "declared" if declared else "opening word" if opening else "word"


# ---------------------------------------------------------------- temporal grounding

CLOCK = r"(?:\d+:)?\d+:\d+(?:[.,]\d+)?"
UNIT = r"(?:hours?|hrs?|minutes?|mins?|seconds?|secs?|[hms](?![a-z])|小时|分钟?|秒)"
TIME = re.compile(rf"(?<![A-Za-z\d.:])(?:(?P<clock>{CLOCK})|(?P<parts>(?:\d+(?:\.\d+)?\s?{UNIT}\s?(?:and )?){{1,3}})|(?P<number>\d+(?:\.\d+)?|\.\d+))"
                  r"(?:\s?(?:s|sec|secs|seconds?)\b)?", re.I)
TO = re.compile(r"[\s<>\"'(\[\])]*(?:\b(?:to|and|until|till|through|thru|up to)\b|-+>?|~|→|至|到|,|和)"
                r"(?:[\s<>\"'(\[\])第]|\b(?:the|about|around|approximately|second|timestamp|at|t|frame)\b|=)*", re.I)
SPAN_KEYS = ("time", "times", "timestamp", "timestamps", "window", "windows", "relevant_windows", "interval", "intervals",
             "segment", "segments", "span", "spans", "time_span", "answer")


def seconds(value) -> float:
    """Seconds of a number, "7", "7 s", "1:07", "00:01:07.5" or "1 min 7 s". Raises NoAnswer."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e15 else math.inf
    else:
        match = TIME.fullmatch(normalise(str(value)).strip(" <>\"'"))
        number = token_seconds(match) if match else math.nan
    if not math.isfinite(number):
        raise NoAnswer(f"no time: {str(value)[:40]!r}")
    return number


def token_seconds(match) -> float:
    if match["clock"]:
        total = 0.0
        for part in match["clock"].replace(",", ".").split(":"):
            total = total * 60 + float(part)
        return total
    if match["parts"]:
        total = 0.0
        for number, unit in re.findall(rf"(\d+(?:\.\d+)?)\s?({UNIT})", match["parts"], re.I):
            total += float(number) * {"h": 3600, "小": 3600, "m": 60, "分": 60}.get(unit[0].lower(), 1)
        return total
    return float(match["number"])


def json_values(text: str) -> list:
    """Every JSON object or list in the text, outermost ones, in order; single quotes are forgiven. Linear."""
    values, depth, start, quote = [], 0, 0, False
    for i, char in enumerate(text):
        if depth and char == '"' and text[i - 1] != "\\":
            quote = not quote
        elif quote:
            continue
        elif char in "{[":
            start = i if depth == 0 else start
            depth += 1
        elif char in "}]" and depth:
            depth -= 1
            if depth == 0:
                span = text[start:i + 1]
                for candidate in (span, span.replace("'", '"')):
                    try:
                        values.append(json.loads(candidate))
                        break
                    except (ValueError, RecursionError):
                        continue
    if depth:
        raise NoAnswer("brackets that never close")
    return values


def spans_of(value, depth=0) -> list[tuple[float, float]]:
    """(start, end) pairs in a parsed JSON value."""
    if depth > 4:
        raise NoAnswer("nested too deep")
    if isinstance(value, dict):
        named = {str(key).lower().replace(" ", "_"): item for key, item in value.items()}
        start = next((v for k, v in named.items() if re.match(r"(?:start|begin|from)", k)), None)
        end = next((v for k, v in named.items() if re.match(r"(?:end|stop|finish|to$)", k)), None)
        if start is not None and end is not None:
            return [(seconds(start), seconds(end))]
        for key in SPAN_KEYS:
            if key in named:
                return spans_of(named[key], depth + 1)
        raise NoAnswer("no time in the object")
    if isinstance(value, str):
        return read_span(value)[0]
    if isinstance(value, list) and len(value) == 2 and not any(isinstance(item, (list, dict)) for item in value):
        return [(seconds(value[0]), seconds(value[1]))]
    if isinstance(value, list) and value and len(value) <= 50:
        return [span for item in value for span in spans_of(item, depth + 1)]
    raise NoAnswer("no pair of times")


def read_span(text: str, record=None):
    """-> ([(start, end)], method) in seconds, sorted. JSON first, then prose; the last range in prose wins."""
    text = plain(text)
    values = json_values(text)
    for value in reversed(values):
        try:
            return [tuple(sorted(span)) for span in spans_of(value)], "JSON"
        except NoAnswer:
            if "{" in text:
                raise
    tokens = list(TIME.finditer(text))
    for first, second in zip(reversed(tokens[:-1]), reversed(tokens[1:])):
        between = text[first.end():second.start()]
        before = text[max(0, first.start() - 60):first.start()]
        pair = TO.fullmatch(between) and not (between.strip() == "," and len(tokens) > 2)
        if pair or (len(tokens) == 2 and not re.search(r"\w", between)) or (
                len(between) < 80 and re.search(r"(?i)\b(?:start|begin|from|onset)|开始|从", before)
                and re.search(r"(?i)\b(?:end|stop|finish|until|to|last)|结束|到", between)):
            start, end = token_seconds(first), token_seconds(second)
            unit = re.search(UNIT, second["parts"] or "", re.I)
            if first["number"] and unit and unit[0][0].lower() in "mh分小":      # "3 to 7 minutes"
                start *= 60 if unit[0][0].lower() in "m分" else 3600
            return [tuple(sorted((start, end)))], "range in prose"
    raise NoAnswer("no range of times")


def merged(spans):
    """Sorted, disjoint, without zero-length and negative parts."""
    out = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out


def span_iou(prediction, gold, record=None, settings=None) -> float:
    """Length of the intersection over length of the union; several windows count as the set of their seconds."""
    prediction, gold = merged(prediction), merged(gold)
    both = sum(max(0.0, min(e, f) - max(s, t)) for s, e in prediction for t, f in gold)
    union = sum(e - s for s, e in prediction) + sum(f - t for t, f in gold) - both
    return both / union if union > 0 else 0.0


# ---------------------------------------------------------------- all types

TYPES = {   # problem type: (read(text, record) -> (value, method), compare(value, gold, record, settings) -> 0..1)
    "multiple choice": (read_choice, lambda p, g, *_: float(p == g)),
    "numerical": (read_number, same_number),
    "regression": (read_number, relative_accuracy),
    "boolean": (read_boolean, lambda p, g, *_: float(p == g)),
    "binary classification": (read_boolean, lambda p, g, *_: float(p == g)),
    "temporal grounding": (read_span, span_iou),
    "rec": (read_number, same_number),      # OVO-Bench: how often so far
    "ssr": (read_boolean, lambda p, g, *_: float(p == g)),
    "crr": (read_boolean, lambda p, g, *_: float(p == g)),
}


def problem_type(name) -> str:
    """Canonical name; case, spaces, hyphens and underscores do not matter. ValueError names the nearest types."""
    squeeze = lambda text: re.sub(r"[\s_-]+", " ", str(text)).strip().casefold()
    known = {squeeze(kind): kind for kind in TYPES}
    if squeeze(name) in known:
        return known[squeeze(name)]
    near = difflib.get_close_matches(squeeze(name), known, n=3, cutoff=0.4) or sorted(known)
    raise ValueError(f"problem_type {str(name)[:60]!r} is unknown; nearest: {', '.join(known[n] for n in near)}")


def check_record(record: dict, settings: RewardSettings | None = None) -> None:
    """ValueError (one line, ready to print) for an unknown problem type or a gold that its own reader cannot read."""
    settings = settings or RewardSettings()
    if settings.reward:
        return
    kind = problem_type(record.get("problem_type"))
    gold = gold_text(record)
    where = f"{record.get('where') or record.get('key') or record.get('problem_id') or 'record'}: "
    if kind == "multiple choice" and not record.get("options"):
        raise ValueError(where + "options are missing: multiple choice needs the list of choices")
    try:
        TYPES[kind][0](gold, record)
    except NoAnswer as error:
        raise ValueError(f"{where}answer {gold[:80]!r} is no {kind} answer ({error})") from None


def score(record: dict, response: str, settings: RewardSettings | None = None, length: int | None = None) -> dict:
    """Score one response; fields in the module's docstring. `length`: its tokens, for the overlong penalty."""
    settings = settings or RewardSettings()
    kind = problem_type(record["problem_type"])
    read, compare = TYPES[kind]
    answer, mark, truncated = answer_region(response)
    out = {"overall": 0.0, "accuracy": 0.0, "format": 0.0, "prediction": None, "status": "truncated", "method": "none"}
    if not truncated:
        try:
            prediction, out["method"] = read(unbox(answer), record)
            out["prediction"] = str(prediction)[:200]
            out["accuracy"] = float(compare(prediction, read(gold_text(record), record)[0], record, settings))
            out["status"] = "ok" if out["accuracy"] > 0 else "wrong"
            out["format"] = float(mark == "tag")
        except NoAnswer as error:
            out["status"], out["method"] = error.status, str(error)
            out["format"] = 0.5 * (mark == "tag")
    out["overall"] = settings.accuracy_weight * out["accuracy"] + settings.format_weight * out["format"]
    return out


class Scorer:
    def __init__(self, settings: RewardSettings | None = None, workers: int = 1):
        self.settings = settings or RewardSettings()

    def score_many(self, records, responses) -> list[dict]:
        return [score(record, response, self.settings) for record, response in zip(records, responses, strict=True)]

    def close(self):
        pass
