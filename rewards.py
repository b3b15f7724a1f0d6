"""Score answers: one scorer for training, validation, evaluate.py and this command.

    python rewards.py responses.jsonl                     # accuracy, format, invalid, truncated per type
    python rewards.py responses.jsonl --out scored.jsonl  # every response with its scores
    python rewards.py responses.jsonl --show wrong 5      # print examples: ok | wrong | invalid | truncated
    python rewards.py responses.jsonl --explain 3         # response 3: what was read, and by which rule

A row is a record (problem, answer or solution, problem_type, options ...) with `response` or `responses`, as
in training's rollouts/step_*.jsonl. score(record, response) returns
    accuracy    0..1, its meaning is said beside each problem type's function below
    format      1 = a closed <answer> tag, its content of the type's form; 0.5 = tag, other content; 0 = none
    overlong, repetition   -1..0, present only when switched on
    overall     accuracy_weight * accuracy + format_weight * format + the weighted penalties
    prediction  what was read;  method  the rule that read it
    status      ok (accuracy > 0) | wrong (read, accuracy 0) | invalid (unreadable) | truncated (in <think>)
Nothing is guessed or drawn: what cannot be read is `invalid` and counted. Patterns are linear in the text;
what may hang all the same (math, code, custom rewards) runs in a worker that is killed at the time limit.
"""
import argparse, ast, bisect, difflib, faulthandler, functools, importlib.util, json, logging, math, os, re
import resource, signal, subprocess, sys, tempfile, time, unicodedata
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

@dataclass(frozen=True)
class RewardSettings:
    accuracy_weight: float = 0.9
    format_weight: float = 0.1
    reward: str | None = None            # "path/to/file.py:function" in place of the rules below
    on_reward_error: str = "stop"        # stop | zero, when that function raises
    timeout_s: float = 10.0              # per response; time to import libraries is not counted
    allow_code_execution: bool = False   # run a record's `tests` on code answers (limits: run_tests)
    box_space: str | None = None         # gold boxes of records without `box_space`: pixels | 0-1000 | 0-1
    answer_box_space: str = "0-1000"     # the model's boxes, wherever the gold's space is known
    overlong_limit: int = 0              # tokens; 0 = no overlong penalty
    overlong_buffer: int = 0             # tokens before the limit over which the penalty grows to -1
    overlong_weight: float = 1.0
    repetition_ngram: int = 0            # words per n-gram; 0 = no repetition penalty
    repetition_weight: float = 0.1

class NoAnswer(ValueError):
    """The text holds no answer of this type. status: invalid, or wrong for hedges and lists."""
    def __init__(self, reason, status="invalid"):
        super().__init__(reason)
        self.status = status

class RewardError(RuntimeError):
    """The scorer cannot go on (custom reward failed, package missing). The message is ready to print."""

@functools.cache
def library(module: str, package: str):
    """A scoring library, imported on first use: runs on other problem types do without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"scoring this type needs {package}: pip install {package} ({error})") from None

# ---------------------------------------------------------------- the answer inside the response

def answer_region(response: str) -> tuple[str, str | None, bool]:
    """(answer text, what marked it: tag | open tag | None, cut off inside its thoughts?). Last marks win."""
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        return "", None, True
    _, opened, answer = text.rpartition("<answer>")        # without the tag, `answer` is all of the text
    answer, closed, _ = answer.partition("</answer>")
    return answer, (("tag" if closed else "open tag") if opened else None), False

def unbox(text: str) -> str:
    r"""Content of the last \boxed{...}, "" if it never closes; the text itself where there is none."""
    start, depth = text.rfind("\\boxed{"), 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 7:i]
    return text if start < 0 else ""

def gold_text(record: dict) -> str:
    """The gold answer. A tagged `solution` wins: benchmarks use `answer` for the option's text beside it."""
    answer, solution = record.get("answer"), record.get("solution")
    if answer is None or isinstance(solution, str) and re.search("<answer>|<think>", solution):
        answer = solution
    answer = json.dumps(answer) if isinstance(answer, (dict, list)) else str("" if answer is None else answer)
    text, mark, _ = answer_region(answer)
    # Charades-STA's gold stands inside <think>, behind it is a broken tag: take the whole text without tags.
    return (text if mark else re.sub("</?(?:think|answer)>", " ", answer)).strip()

SIGNS = {"-": "‐‑‒–—―−", '"': "“”„«»", "'": "‘’´", "/": "⁄", "": "\u200b\u200c\u200d\ufeff"}
SIGNS = {ord(char): sign for sign, chars in SIGNS.items() for char in chars}

def plain(text: str) -> str:
    r"""NFKC, one kind of dash and quote, no Markdown or LaTeX dressing (**B**, $B$, \text{B}, `B`)."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", r"^\g<0>", text)      # NFKC alone turns n² into n2
        text = re.sub("(?<=[0-9])(?=[¼½¾⅐-⅞])", " ", text)      # and 1½ into 11/2
        text = re.sub("[\u0300-\u036f]{9,}|[\ufdfa\ufdfb]", "", text)   # quadratic; 18 characters
        text = unicodedata.normalize("NFKC", text).translate(SIGNS)
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\%", "%")
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[*$`]|\\[()\[\]]", "", text).strip()

def phrase(text: str) -> str:
    """For comparing words: lower case, single spaces, no outer punctuation, no leading article."""
    text = " ".join(plain(text).lower().split()).strip(" .,;:!?\"'()[]<>。、")
    return re.sub(r"^(?:an?|the) (?=.)", "", text)

# ---------------------------------------------------------------- choices: options, yes or no, preferences

# What may stand right before or after a declared label; matched in windows of 60 and 40 characters around it.
FILL = (r"(?:[\W_]|\b(?:is|was|be|would|should|must|will|are|the|an?|option|choice|letter|answer|most|likely|"
        r"probably|clearly|definitely|still|now|number|response)\b|[是为应该选择项])*$")
CUE = re.compile(
    r"(?:\b(?:ans|response|it is|it's|must be|choose|pick|select|prefer|go with|go for|i say|i'd say|think|"
    r"believe|guess|so|thus|therefore|hence|finally|not [A-Z],? but)\b|"
    r"\b(?:answer\b|(?:option|choice|verdict)\b(?=.*\b(?:is|be)\b))(?:[^.\n]{0,40}\b(?:is|be)\b)?|"
    r"\b[^\W_]+\s*[:=]|[=-]>|→|⇒|答案|(?<!不)[选是])" + FILL, re.I)
NOT_BEFORE = re.compile(r"(?:\b(?:not|never|neither|nor|no|than|instead of)|n't|不是?|不选|排除|而非)"
                        r"(?:[\s\"'(]|\b(?:an?|the|option|choice|选项)\b)*$", re.I)
RIGHT = re.compile(r"[)\]\"'.]*\s*(?:(?:is|are|would be|must be|seems|looks) (?:(?:to be|the|most|only|my) )*"
                   r"(?:correct|right|best|true|final|answer|better|preferred|superior|likely)\b|wins\b|"
                   r"(?:选项)?(?:才?是|为)?\s*(?:正确|对的|答案|更好))", re.I)
WRONG = re.compile(r"[)\]\"'.]*\s*(?:(?:is|are|seems|looks|can't be|cannot be)\s+(?:\w+ly\s+)?(?:not|wrong|"
                   r"incorrect|false|ruled|out|worse|inferior)\b|isn't\b|是?[错不])", re.I)
AND = r"[)\].\"']*\s*(?:{}\b(?:or|and|to)\b|和|或|以及)\s*(?:(?:and|or|maybe|option)\s+)*[(\[\"']*"
JOIN, BOTH = re.compile(AND.format("[,/&+~、|-]|"), re.I), re.compile(AND.format(""), re.I)
OPENS = re.compile(r"(?:[\W_]|option|choice|definitely|probably|clearly|likely|选项|选)*", re.I)
ALONE = re.compile(r"[)\]]|\s*(?:[.:,、。;-]|$|\n)|\s+(?:rather|instead|because|since)\b")

def decide(text: str, mentions: list[tuple]) -> tuple[str, str]:
    """(label, method) a text settles on: the last one declared, else one that opens a line, else the only.
    mentions: (start, end, label, free); what is not free (a letter, "no") has to be declared or opening."""
    kept = []
    for mention in sorted(mentions, key=lambda m: (m[0], -m[1])):
        if not kept or mention[1] > kept[-1][1]:              # not inside a longer one
            kept.append(mention)
    kept = kept[:100] + kept[100:][-100:]                     # bounds the work on endless lists
    between = [text[a[1]:b[0]][:40] if a[2] != b[2] else "" for a, b in zip(kept, kept[1:])] + [""]

    def settle(i, method):
        for j in (i - 1, i):
            if j >= 0 and JOIN.fullmatch(between[j]):
                raise NoAnswer(f"several answers ({kept[j][2]}, {kept[j + 1][2]})", "wrong")
        return kept[i][2], method

    opening, free_ones, rejected = [], [], set()
    for i, (start, end, label, free) in reversed(list(enumerate(kept))):
        before, after = text[max(0, start - 60):start], text[end:end + 40]
        if NOT_BEFORE.search(before) or WRONG.match(after) or (
                BOTH.fullmatch(between[i]) and kept[i + 1][2] in rejected):
            rejected.add(label)
        elif label not in rejected:
            if CUE.search(before) or RIGHT.match(after):
                return settle(i, "declared")
            line = text[text.rfind("\n", 0, start) + 1:start][-40:]
            last = re.search(r"(?:[.!?。]\s+[\W_]*|\()$", before) and not after.strip(" .)*\n")
            if (OPENS.fullmatch(line) or last) and (free or ALONE.match(after)):
                opening.append(i)
            if free:
                free_ones.append(i)
    for method, found in (("opens a line", opening), ("only one named", free_ones)):
        if len({kept[i][2] for i in found}) > 1:
            raise NoAnswer("several answers", "wrong" if found is opening else "invalid")
        if found:
            return settle(found[0], method)
    hedged = any(JOIN.fullmatch(gap) for gap in between)
    raise NoAnswer("several answers" if hedged else "no choice named", "wrong" if hedged else "invalid")

@functools.lru_cache(4096)
def option_phrases(options: tuple) -> dict[str, str]:
    """{"A": phrase, ...}; the options' own letters when every option has one and none repeats."""
    options = [plain(str(option)) for option in options]
    prefixes = [re.match(r"\(?([A-Z])(?:[.:)、,]|\s-)\s*", option) for option in options]
    if all(prefixes) and len({match[1] for match in prefixes}) == len(options):
        return {match[1]: phrase(match.string[match.end():]) for match in prefixes}
    return {chr(65 + i): phrase(option) for i, option in enumerate(options[:26])}

def read_choice(text: str, record: dict, *_) -> tuple[str, str]:
    """Letter of the chosen option. Letters are case-sensitive unless the letter is the whole answer."""
    texts, text = option_phrases(tuple(record.get("options") or ())), plain(text)
    whole = re.fullmatch(r"[\W_]*([A-Za-z])[\W_]*", text)
    if whole and whole[1].upper() in texts:
        return whole[1].upper(), "letter"
    said = phrase(text)
    same = [letter for letter, option in texts.items() if option == said != ""]
    if len(same) == 1:
        return same[0], "option text"
    # "A man", "I think": words, not letters, unless the sentence goes on about the letter.
    letters = re.finditer(r"(?<![A-Za-z0-9])(?:[B-HJ-Z]|[AI](?!\s+(?!(?:because|since|as|and|but|or|due|is|"
                          r"in|for|from|seems|with)\b)[a-z]))(?![A-Za-z0-9]|'\w)", text)
    mentions = [(*m.span(), m[0], False) for m in letters if m[0] in texts]
    for option in set(texts.values()):
        if len(option) > 1 or option.isdigit():
            same = "/".join(letter for letter, other in texts.items() if other == option)
            words_ = r"(?<![\w.])" + re.escape(option).replace(r"\ ", r"\s+") + r"(?!\w|[.,]\d)"
            mentions += [(*m.span(), same, True) for m in re.finditer(words_, text.lower())]
    letter, method = decide(text, mentions)
    if letter not in texts:
        raise NoAnswer(f"text of several options ({letter})")
    return letter, method

YES = re.compile(r"\b(?:yes|true|correct|right|not (?:false|wrong))\b|(?<!\w)[是对真]的?(?!\w)|(?<!不)正确", re.I)
NO = re.compile(r"\b(?:no|false|incorrect|wrong|untrue)\b|(?:\bnot|n't) (?:true|correct|right)\b|"
                r"(?<!\w)(?:否|没有|错误?|假)的?(?!\w)|不是的?(?!\w)|不对|不正确", re.I)

def read_boolean(text: str, record: dict, *_) -> tuple[str, str]:
    """yes or no. Binary classification also has `options`, or other labels, which must match as a whole."""
    gold, text = phrase(gold_text(record)), plain(text)
    if record.get("options"):
        return read_choice(text, record)
    if whole := re.fullmatch(r"\W*([ynft])\W*", text, re.I):
        return ("yes" if whole[1].lower() in "yt" else "no"), "letter"
    yes_or_no = re.fullmatch(f"[yntf]|{YES.pattern}|{NO.pattern}", gold)
    if "class" in record["problem_type"].lower() and not yes_or_no:
        return short_answer(text, gold), "label"
    return decide(text, [(*m.span(), "yes", True) for m in YES.finditer(text)] + [
        (*m.span(), "no", m[0].lower() != "no" or not m.start()) for m in NO.finditer(text)])

SIDE = r"(?:response|answer|model|assistant|caption|critique|output)\s*#?\s*(?:{0})\b|\b{1}\b|\[\[{2}\]\]"
SIDES = {"1": SIDE.format("1|a|one", "first", "a"), "2": SIDE.format("2|b|two", "second", "b"),
         "tie": r"\b(?:tied?|draw|equal|equally|neither|both|the same)\b|\[\[c\]\]|平局"}

def read_preference(text: str, record: dict, *_) -> tuple[str, str]:
    """1, 2 or tie, in the sets' spellings: "A", "[[B]]", "Response 1 is better", "the second", "equal"."""
    if record.get("options"):
        return read_choice(text, record)
    if whole := re.fullmatch(r"[\W_]*([abc012])[\W_]*", text := plain(text), re.I):
        return {"a": "1", "b": "2", "c": "tie", "0": "tie"}.get(whole[1].lower(), whole[1]), "letter"
    found = [(*m.span(), side, True) for side in SIDES for m in re.finditer(SIDES[side], text, re.I)]
    letters = [(*m.span(), {"A": "1", "B": "2"}[m[0]], False) for m in re.finditer(r"\b[AB]\b", text)]
    return decide(text, found + letters)

def equal(prediction, gold, *_) -> float:
    return float(prediction == gold)

# ---------------------------------------------------------------- numbers

VALUES = dict(zip("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                  "fifteen sixteen seventeen eighteen nineteen".split(), range(20)))
VALUES |= dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10)))
VALUES |= dict(zip("零一二三四五六七八九〇两", [*range(10), 0, 2]))
SCALES = {"hundred": 100, "dozen": 12, "thousand": 10**3, "million": 10**6} | dict(
    zip("十百千万亿", (10, 100, 1000, 10**4, 10**8)))
WORD = "(?:" + "|".join(sorted((word for word in VALUES | SCALES if word.isascii()), key=len)[::-1]) + ")"
HANZI = "[" + "".join(word for word in VALUES | SCALES if not word.isascii()) + "]"
NUMBER_WORDS = re.compile(rf"\b(?:a (?={WORD}))?{WORD}(?:(?:\s+and\s+|\s+|-){WORD})*\b(?!\s+of\b)|"
                          rf"(?<!第){HANZI}+(?![共直样些起定下般切])", re.I)
NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
QUANTITY = re.compile(
    rf"(?<![A-Za-z_^\d])(?<!\d\.)(?P<sign>(?<![\d)%A-Za-z])-\s?)?(?:(?P<whole>\d+)\s+(?=\d+\s?/))?"
    rf"(?P<top>{NUMBER})(?:\s?/\s?(?P<low>{NUMBER}))?(?:\^\{{?(?P<power>[-+]?\d+)\}}?)?"
    r"(?P<percent>\s?(?:%|per\s?cent\b))?", re.I)
CUES = (("declared", re.compile(r"\b(?:answer|result|final(?:ly)?)\b|答案", re.I)),
        ("concluded", re.compile(r"[=≈]|\b(?:so|thus|therefore|hence|making|total|equals)\b|[总一]共|所以", re.I)),
        ("last sentence", re.compile(r"[.!?。]\s|\n")))
ALSO = re.compile(r"\s*(?:[a-z]+\s*)?(?:\b(?:or|to)\b|[-~/:±至到或])\W*|\s*(?:\band\b|[,;+x*·^、和])?\s*", re.I)

def words_value(match) -> str:
    total = 0
    for word in re.findall(f"{WORD}|{HANZI}", match[0].lower()):
        if scale := SCALES.get(word):          # multiplies what is smaller: 2 thousand 3 | hundred
            total += max(total % scale, 1) * scale - total % scale
        else:
            total += VALUES[word]
    return str(total)

def digits(text: str) -> str:
    r"""Write numbers as digits: twenty-one, 十二, 3×10^8, 2.5 million, \frac{1}{2}, one and a half."""
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(rf"百分之({HANZI}+|[\d.]+)", r"\1%", text)
    for scale, power in (("thousand", 3), ("million", 6), ("billion", 9), ("万", 4), ("亿", 8)):
        text = re.sub(rf"(?i)(?<=\d)\s?{scale}", f"e{power}", text)
    text = NUMBER_WORDS.sub(words_value, re.sub(r"(?i)(?:\b(?:an?|one) )?\bhalf\b(?! of\b)", "1/2", text))
    text = re.sub(r"(?<=\d) and (?=1/2)", " ", re.sub(r"(?<=\d) ?(?:point|点) ?(?=\d)", ".", text))
    text = re.sub(r"(?i)\b(?:minus|negative) (?=\d)", "-", text)
    return re.sub(r"(?i)(?<=\d)\s?(?:[x*·×]|\\times|\\cdot)\s?10\s?\^\s?\{?([-+]?\d+)\}?", r"e\1", text)

def quantity(match) -> float:
    """Value of a QUANTITY match; nan when it overflows or divides by zero."""
    try:
        value = float(match["top"]) / float(match["low"] or 1) + float(match["whole"] or 0)
        return value ** int(match["power"] or 1) * (-1 if match["sign"] else 1)
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.nan

def read_number(text: str, *_) -> tuple[tuple[float, bool], str]:
    """((value, has a percent sign), method): the number after the last "answer", else after the last "so" or
    "total", else the first of the last sentence that has one. Ranges, alternatives, sums are hedges."""
    text = digits(re.sub(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+(?![,\d])|(?: \d{3})+(?![\d,/]))",
                         lambda match: re.sub("[, ]", "", match[0]), plain(text)))       # 1,234 and 1 234
    if re.fullmatch(r"\W*(?:none|no|nil|nothing|没有|无)\W*", text, re.I):
        return (0.0, False), "none is zero"
    bare = re.sub(r"\([^()]*\)?", lambda match: " " * len(match[0]), text)      # without "(10.5 ft)"
    text = bare if QUANTITY.search(bare) else text
    found = list(QUANTITY.finditer(text))
    if not found:
        raise NoAnswer("no number")
    for method, cue in CUES:
        start = max((m.end() for m in cue.finditer(text) if m.end() <= found[-1].end()), default=0)
        if start:
            break
    i = next(i for i, match in enumerate(found) if match.end() >= start)
    value, end = quantity(found[i]), found[i].end()
    if re.match(r"[.,]\d", text[end:end + 2]) or not math.isfinite(value):
        raise NoAnswer("malformed or infinite number")
    for other in found[i + 1:]:
        if not ALSO.fullmatch(text, end, other.start()):
            break
        if quantity(other) != value:
            raise NoAnswer("several numbers", "wrong")
        end = other.end()
    return (value, bool(found[i]["percent"])), method

def same_number(prediction, gold, *_) -> float:
    """1 if equal after rounding to 2 decimals (to 1 % below .01). 50% is .5, and 50 if the gold has no %."""
    (p, p_percent), (g, g_percent) = prediction, gold
    pairs = [(p, g)] + [(p / 100, g) if p_percent else (p, g / 100)] * (p_percent != g_percent)
    return float(any(math.isclose(a, b, rel_tol=0.01) if 0 < abs(b) < 0.01 else round(a, 2) == round(b, 2)
                     for a, b in pairs))

def relative_accuracy(prediction, gold, *_) -> float:
    """MRA (VSI-Bench): share of t in numpy.linspace(.5, .95, 10) with |p - g| / |g| <= 1 - t."""
    p, g = prediction[0], gold[0]
    error = abs(p - g) / abs(g) if g else 0.0 if p == g else math.inf
    return sum(error <= 1 - t for t in [*(0.5 + i * ((0.95 - 0.5) / 9) for i in range(9)), 0.95]) / 10

# ---------------------------------------------------------------- times and boxes

def json_values(text: str) -> list:
    """Every outermost JSON object or list in the text, in order; single quotes are forgiven."""
    values, depth, start = [], 0, 0
    for match in re.finditer(r'"(?:[^"\\\n]|\\.)*"?|[\[\]{}]', text):
        if match[0] in "{[":
            start, depth = start if depth else match.start(), depth + 1
        elif match[0] in "}]" and depth:
            depth -= 1
            span = text[start:match.end()] if depth == 0 else ""
            for candidate in (span, span.replace("'", '"')) if span else ():
                try:
                    values.append(json.loads(candidate))
                    break
                except (ValueError, RecursionError):
                    pass
    if depth:
        raise NoAnswer("brackets that never close")
    return values

def json_object(text: str) -> dict:
    objects = [value for value in json_values(plain(text)) if isinstance(value, dict)]
    if not objects:
        raise NoAnswer("no JSON object")
    return objects[-1]

def numbers(value, keys, depth=0) -> list[float]:
    """Numbers of a JSON value (or in its strings) in order; of an object, only those of the fields with names
    that match `keys`, where any does."""
    if isinstance(value, dict):
        value = [value[key] for key in value if keys.search(key)] or list(value.values())
    if isinstance(value, list) and depth < 9:
        return [number for item in value for number in numbers(item, keys, depth + 1)]
    found = [float(n) for n in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?|(?<=\d-)\d+(?:\.\d+)?", str(value))]
    if not found and not isinstance(value, str) or any(abs(number) > 1e9 for number in found):
        raise NoAnswer(f"not a number: {str(value)[:40]}")          # NaN, null, true, nested too deep
    return found

CLOCK = re.compile(r"(?<![\d.:])(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)(?![\d:])")
AMOUNT = r"(?:(\d+(?:\.\d+)?)\s?(?:{}))?\s?"
SPELLED = re.compile(r"(?<![A-Za-z\d.])(?=\d)" + AMOUNT.format("hours?|hrs?|h|小时")
                     + AMOUNT.format("minutes?|mins?|m|分钟?") + "(?:and )?"
                     + AMOUNT.format("seconds?|secs?|s|秒|st|nd|rd|th") + "(?![a-z])", re.I)
TO = re.compile(r"[\s<>\"'(\[\])]*(?:\b(?:to|and|until|till|through)\b|-+>?|~|→|至|到|,|和)"
                r"(?:[\s<>\"'(\[\])第=]|\b(?:the|about|around|approximately|second|timestamp|at|t)\b)*", re.I)
START = re.compile(r"\b(?:start|begin|from)|开始|从", re.I)
END = re.compile(r"\b(?:end|stop|finish|until|to\b)|结束|到", re.I)
TIME_KEY = re.compile("time|window|interval|segment|span|moment|start|begin|from|end|stop|^to$", re.I)

def in_seconds(text: str) -> str:
    """Every time as a plain number of seconds: 1:07, 00:01:07,5, 1 min 7 s, seven seconds, 1 to 2 minutes."""
    total = lambda match: str(sum(float((part or "0").replace(",", ".")) * scale
                                  for part, scale in zip(match.groups(), (3600, 60, 1))))
    text = re.sub(r"(?<![\d.])([\d.]+)(\s?(?:-|to|and|到|至)\s?[\d.]+ ?(min|hour|分|小时))", r"\1 \3 \2", text)
    text = digits(CLOCK.sub(total, text))
    return SPELLED.sub(lambda match: total(match) if any(match.groups()) else match[0], text)

def read_spans(text: str, *_) -> tuple[list, str]:
    """([(start, end)] in seconds, ends sorted, method). JSON first; in prose the last range wins."""
    text = in_seconds(plain(text))
    for value in reversed(json_values(text)):
        times = numbers(value, TIME_KEY)
        if times and len(times) % 2 == 0:
            return disjoint(zip(times[::2], times[1::2])), "JSON"
        if isinstance(value, dict):
            raise NoAnswer("no pair of times in the JSON")
    tokens = list(re.finditer(r"(?<![A-Za-z\d.])\d+(?:\.\d+)?", text))[-200:]
    for first, second in zip(tokens[-2::-1], tokens[:0:-1]):
        before, gap = text[max(0, first.start() - 60):first.start()], text[first.end():second.start()][:80]
        only = len(tokens) == 2 and not re.search(r"\w", gap)
        if only or TO.fullmatch(gap) and gap.strip() != "," or START.search(before) and END.search(gap):
            return disjoint([(float(first[0]), float(second[0]))]), "range in prose"
    raise NoAnswer("no range of times")

def disjoint(pairs) -> list:
    """Sorted, merged (start, end); zero lengths are dropped."""
    out = []
    for start, end in sorted(sorted(pair) for pair in pairs):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        elif end > start:
            out.append((start, end))
    return out

def span_iou(prediction, gold, *_) -> float:
    """Seconds in both over seconds in either; several windows count as one set of seconds."""
    both = sum(max(0.0, min(e, f) - max(s, t)) for s, e in prediction for t, f in gold)
    return both / max(sum(e - s for s, e in [*prediction, *gold]) - both, 1e-9)

BOX_KEY = re.compile(r"box|^[xy](?:_?(?:min|max|[12]))$", re.I)

def box_scale(record: dict, settings: RewardSettings) -> tuple[float, float]:
    """Factors (x, y) from the model's coordinates to the gold's; (1, 1) where no `box_space` is declared."""
    spaces = record.get("box_space") or settings.box_space, settings.answer_box_space
    if spaces[0] is None:
        return 1.0, 1.0
    sizes = {"0-1000": (1000, 1000), "0-1": (1, 1), "pixels": (record.get("width"), record.get("height"))}
    if any(space not in sizes or not all(sizes[space]) for space in spaces):
        raise ValueError(f"box_space {spaces}: choose pixels (with the record's width, height), 0-1000, 0-1")
    return tuple(gold / answer for gold, answer in zip(sizes[spaces[0]], sizes[spaces[1]]))

def boxes_of(value, scale) -> list[tuple]:
    """Boxes (x1, y1, x2, y2), corners sorted, of a JSON value or text with a multiple of four numbers."""
    xs = [x * scale[i % 2] for i, x in enumerate(numbers(value, BOX_KEY))]
    if not xs or len(xs) % 4:
        raise NoAnswer("no box of four numbers")
    return [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in zip(*(xs[i::4] for i in range(4)))]

def read_boxes(text: str, record: dict, scale=(1, 1)) -> tuple[list, str]:
    """JSON boxes, else the numbers of the text: (10, 20), (30, 40)."""
    values = json_values(plain(text))
    return boxes_of(values[-1] if values else plain(text), scale), "JSON" if values else "numbers"

def box_iou(a, b) -> float:
    both = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return both / max((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both, 1e-9)

def boxes_iou(prediction, gold, *_) -> float:
    """Box IoU; of several boxes in order, over the larger count, so that extra boxes cost."""
    return sum(map(box_iou, prediction, gold)) / max(len(prediction), len(gold))

def read_tube(text: str, record: dict, scale=(1, 1)) -> tuple[tuple, str]:
    """((windows, {second: box}), method) of {"time": [s, e], "boxes": {"8": [x1, y1, x2, y2], ...}}."""
    value, boxes = json_object(text), {}
    for key, box in value["boxes"].items() if isinstance(value.get("boxes"), dict) else ():
        try:
            second = round(float(key), 3)                      # "8" and "8.0" are the same second
            boxes[second] = (0, 0, 0, 0)                       # a broken box counts as a wrong one
            boxes[second] = boxes_of(box, scale)[0]
        except ValueError:
            pass
    windows = read_spans(json.dumps([value["time"]]))[0] if "time" in value else []
    if not windows and not boxes:
        raise NoAnswer("neither times nor boxes by second")
    return (windows, boxes), "JSON"

def mean_box_iou(prediction: dict, gold: dict, when) -> float:
    shared = [box_iou(prediction[t], gold[t]) for t in when if t in prediction and t in gold]
    return sum(shared) / max(len(when), 1)

def tube_iou(prediction, gold, *_) -> float:
    """.5 temporal IoU + .5 box IoU over the seconds of either; temporal alone if the gold has no box."""
    time_iou, boxes = span_iou(prediction[0], gold[0]), (prediction[1], gold[1])
    return 0.5 * time_iou + 0.5 * mean_box_iou(*boxes, {*boxes[0], *boxes[1]}) if gold[1] else time_iou

def track_iou(prediction, gold, *_) -> float:
    """Box IoU over the gold's frames: leaving out the hard ones does not pay."""
    return mean_box_iou(prediction[1], gold[1], gold[1])

def read_segments(text: str, record: dict, scale=(1, 1)) -> tuple[dict, str]:
    """{"boxes": [x1, y1, x2, y2], "positive_points": [[x, y], ...], "negative_points": ..., "time": s}."""
    value = json_object(text)
    out = {"box": boxes_of(value.get("boxes", value.get("bbox_2d")), scale)[0], "mask": value.get("mask")}
    for name in ("positive_points", "negative_points", "time"):
        xs = numbers(value.get(name) or [], BOX_KEY)
        points = [(x * scale[0], y * scale[1]) for x, y in zip(xs[::2], xs[1::2])]
        out[name] = xs if name == "time" else points
    return out, "JSON"

def inside(point, box, mask) -> bool:
    """mask: uncompressed COCO run lengths {"size": [h, w], "counts": [...]}: by column, zeros first."""
    x, y = point
    if not mask:
        return box[0] <= x <= box[2] and box[1] <= y <= box[3]
    (height, width), ends = mask["size"], list(accumulate(mask["counts"]))
    return 0 <= x < width and 0 <= y < height and bisect.bisect_right(ends, int(x) * height + int(y)) % 2 == 1

def segment_score(prediction, gold, *_) -> float:
    """.5 box IoU + .25 share of positive points inside + .25 of negative points outside the gold box or mask.
    With a time in the gold (video): .3, .2, .2 and .3 exp(-|seconds off| / 2). OneThinker's weights."""
    positive, negative = ([inside(point, gold["box"], gold["mask"]) for point in prediction[name]]
                          for name in ("positive_points", "negative_points"))
    points = sum(positive) / max(len(positive), 1) + negative.count(False) / max(len(negative), 1)
    if not gold["time"]:
        return 0.5 * box_iou(prediction["box"], gold["box"]) + 0.25 * points
    off = abs(prediction["time"][0] - gold["time"][0]) if prediction["time"] else math.inf
    return 0.3 * box_iou(prediction["box"], gold["box"]) + 0.2 * points + 0.3 * math.exp(-off / 2)

# ---------------------------------------------------------------- text and math

CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"

def words(text: str) -> list[str]:
    """Lower-case words without outer punctuation; CJK text by character."""
    found = re.findall(rf"[{CJK}]|[^\s{CJK}]+", plain(text).lower())
    return [word for word in (word.strip(".,;:!?\"'()[]<>。、") for word in found) if word]

def read_text(text: str, *_) -> tuple[str, str]:
    if not text.strip():
        raise NoAnswer("empty answer")
    return text.strip(), "text"

QUOTING = re.compile(r"(?i)\b(?:reads?|says?|text|signs?|shows?|written|is)\b|[是写]")

def read_ocr(text: str, record: dict, *_) -> tuple[str, str]:
    """The text, or the part that a sentence quotes or announces: The sign reads "STOP"; Text: STOP."""
    said = plain(text)
    quotes = re.findall(r"\"([^\"]+)\"|(?<!\w)'([^']+)'(?!\w)", said)
    quotes = quotes or re.findall(r"^[^:\n]{1,60}: *(.+)()$", said)
    quoted = "".join(quotes[0]) if len(quotes) == 1 else ""
    if quoted and phrase(text) != phrase(gold_text(record)) and QUOTING.search(said.replace(quoted, " ")):
        return quoted, "quoted text"
    return read_text(text)

def word_accuracy(prediction, gold, *_) -> float:
    """1 - word error rate, at least 0."""
    prediction, gold = words(prediction), words(gold)
    distance = library("rapidfuzz.distance.Levenshtein", "rapidfuzz").distance(gold, prediction)
    return max(0.0, 1 - distance / max(len(gold), 1))

LEAD = re.compile(r"(?:.*(?:\b(?:is|are|was|were)\b|:|是)|it's)\W*")

def short_answer(text: str, gold: str) -> str:
    """An answer as a phrase to compare with the gold's, without "It is a" or "The answer is" in front."""
    answer = phrase(text)
    lead = LEAD.match(answer)
    return answer if answer == gold or not lead else phrase(answer[lead.end():])

@functools.cache
def rouge():
    scorer = library("rouge_score.rouge_scorer", "rouge-score")
    return scorer.RougeScorer(["rouge1", "rouge2"], tokenizer=SimpleNamespace(tokenize=words))

def text_similarity(prediction, gold, *_) -> float:
    """Golds up to five words: the same phrase. Longer ones: mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    gold_words, answer_words = words(gold), words(prediction)
    if len(gold_words) <= 5:
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    scores = rouge().score(gold, prediction)
    # rouge-score's own ROUGE-L fills an n x m table in Python; rapidfuzz finds the same length bit-parallel.
    common = library("rapidfuzz.distance.LCSseq", "rapidfuzz").similarity(gold_words, answer_words)
    longest = 2 * common / (len(gold_words) + len(answer_words))
    return (scores["rouge1"].fmeasure + scores["rouge2"].fmeasure + longest) / 3

@functools.cache
def math_library():
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)     # its own timeout is off: ours kills
    return library("math_verify", "math-verify")

LATEX = str.maketrans({"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "%": r"\%",
                       "×": r"\times ", "·": r"\cdot ", "∪": r"\cup ", "±": r"\pm "})

@functools.lru_cache(4096)
def parsed_math(text: str) -> list:
    text = re.sub(r"√\s?(\d+)", r"\\sqrt{\1}", text.replace("\\%", "%").replace("\\$", ""))
    text = re.sub(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp)\b", r"\\\1", text)
    return math_library().parse(f"${text.translate(LATEX)}$", parsing_timeout=None)

def read_math(text: str, record: dict, *_) -> tuple[str, str]:
    r"""What follows the last "answer is", in it the last $...$; the whole text where there is neither."""
    if record.get("options"):
        try:
            return read_choice(text, record)[0], "option"
        except NoAnswer:
            pass
    method, text = "whole text", re.sub(r"\\(?:text|math)(?:rm|bf)?\s*\{([^{}]*)\}", r" \1", text.strip())
    if cues := list(re.finditer(r"(?i)\banswer(?:\s+is)?\s*[:=]?|答案(?:是|为)?[:：]?", text)):
        method, text = "declared", text[cues[-1].end():].strip().split("\n")[0]
    if dollars := re.findall(r"\$([^$]+)\$", text):
        method, text = "math span", dollars[-1]
    text = unicodedata.normalize("NFKC", re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", r"^{\g<0>}", text)).translate(SIGNS)
    if not (text := text.strip(" .,;*`\n")):
        raise NoAnswer("no math answer")
    return text[:2000], method

def same_math(prediction, gold, record, settings) -> float:
    """Equality by math-verify: surds, sets of answers, intervals, equations. Words are compared as words."""
    options = option_phrases(tuple(record.get("options") or ()))
    gold = options[gold] if gold in options and prediction not in options else gold
    if " ".join(plain(prediction).lower().split()) == " ".join(plain(gold).lower().split()):
        return 1.0
    if re.search(r"^\(?[A-Za-z]\)?$|(?<!\\)\b(?!sin|cos|tan|log|sqrt|exp)[A-Za-z]{3,}", gold):
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    p, g = parsed_math(prediction), parsed_math(gold)
    verify = math_library().verify
    return float(bool(p and g) and verify(g, p, timeout_seconds=None, allow_set_relation_comp=True))

# ---------------------------------------------------------------- code and markup

CHILD = r"""
import os, resource, sys
folder, token = os.getcwd(), os.environ.pop("TOKEN")
limits = {"CPU": int(sys.argv[1]), "AS": 1 << 30, "FSIZE": 10 << 20, "NPROC": 0, "NOFILE": 64}
for kind, most in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
readable = (folder, *map(os.path.realpath, (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))))
closed = ("os", "socket", "subprocess", "ctypes", "pty", "gc", "resource", "mmap", "signal", "shutil")
def guard(event, args):
    if event == "open" and not isinstance(args[0], int):
        writes = not isinstance(args[2], int) or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not os.path.realpath(os.fsdecode(args[0])).startswith(folder if writes else readable):
            raise PermissionError("files outside the folder are closed")
    elif event.split(".")[0] in closed and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(event + " is closed")
source = compile(open("answer.py", encoding="utf-8").read(), "answer.py", "exec")
sys.addaudithook(guard)
exec(source, {"__name__": "__main__"})
sys.stdout.flush()
sys.stdout.write("\n" + token)
"""

def run_tests(code: str, tests, limit_s: float) -> float:
    """Share of tests passed. A test is Python text run after the code, or {"input": stdin, "output": stdout}.
    Each gets its own process: isolated Python, temporary folder, limits on CPU, memory (1 GB), file size and
    processes, no sockets, no files outside; killed when limit_s for all is used up. This keeps accidents and
    cheap tricks out; for code that attacks on purpose, put the whole run into a container."""
    tests = [tests] if isinstance(tests, (str, dict)) else tests
    deadline, passed = time.monotonic() + limit_s, 0
    for test in tests:
        token, asks = os.urandom(16).hex(), isinstance(test, dict)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
            Path(folder, "answer.py").write_text(code if asks else f"{code}\n{test}", "utf-8", "replace")
            child = subprocess.Popen([sys.executable, "-I", "-c", CHILD, str(math.ceil(limit_s))], cwd=folder,
                                     stdin=subprocess.PIPE, stdout=out, stderr=subprocess.DEVNULL,
                                     env={"TOKEN": token, "OPENBLAS_NUM_THREADS": "1"})
            try:
                typed = str(test["input"]).encode() if asks else b""
                child.communicate(typed, max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()                       # it could not start others
                child.communicate()
            out.seek(0)
            printed, ended, _ = out.read(1 << 20).decode(errors="replace").partition("\n" + token)
            ended = child.returncode == 0 if asks else bool(ended)
        passed += ended and (not asks or printed.split() == str(test["output"]).split())
    return passed / max(len(tests), 1)

def fenced(text: str) -> str:
    """Inside of the last ``` block, or the text."""
    blocks = text.split("```")
    return re.sub(r"^[\w+-]*\n", "", blocks[-2 if len(blocks) % 2 else -1]) if len(blocks) > 1 else text

def read_code(text: str, *_) -> tuple[str, str]:
    code = fenced(text).strip()
    try:
        if ast.parse(code).body:
            return code, "Python"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoAnswer(f"not Python: {str(error)[:60]}") from None
    raise NoAnswer("no code")

def alike(a: list, b: list) -> float:
    """2 x the longest common subsequence / (len(a) + len(b))."""
    return library("rapidfuzz.distance.Indel", "rapidfuzz").normalized_similarity(a, b)

def code_score(prediction, gold, record, settings) -> float:
    """Share of `tests` passed if allow_code_execution; else likeness to the gold's syntax nodes."""
    if record.get("tests") and settings.allow_code_execution:
        return run_tests(prediction, record["tests"], 0.8 * settings.timeout_s)
    trees = ast.parse(prediction), ast.parse(fenced(gold).strip())
    return alike(*([type(node).__name__ for node in ast.walk(tree)] for tree in trees))

def read_markup(text: str, record: dict, *_) -> tuple[tuple, str]:
    """((tags in document order, Counter of attributes), method). SVG must be well-formed XML; HTML must close
    its tags in order (libxml2 calls HTML5's tag names unknown, which is no error here)."""
    etree, text, svg = library("lxml.etree", "lxml"), fenced(text), "svg" in record["problem_type"].lower()
    start = re.search(r"(?i)<svg\b" if svg else r"(?i)<!doctype|<[a-z]", text)
    parser = etree.XMLParser(resolve_entities=False) if svg else etree.HTMLParser()
    try:
        root = etree.fromstring(text[start.start():text.rfind(">") + 1].encode("utf-8", "replace"), parser)
        nodes = [node for node in root.iter() if isinstance(node.tag, str)]
    except (etree.XMLSyntaxError, AttributeError, ValueError) as error:
        raise NoAnswer(f"no markup that parses: {str(error)[:60]}") from None
    if not svg and any(re.search("mismatch|Unexpected end tag", entry.message) for entry in parser.error_log):
        raise NoAnswer("tags that do not match")
    attributes = Counter((node.tag, *item) for node in nodes for item in node.items())
    return ([node.tag for node in nodes], attributes), "parsed"

def markup_similarity(prediction, gold, *_) -> float:
    """Mean of the likeness of the tag sequences and the F1 of the attributes (name and value, by tag)."""
    total = prediction[1].total() + gold[1].total()
    shared = 2 * (prediction[1] & gold[1]).total() / total if total else 1.0
    return (alike(prediction[0], gold[0]) + shared) / 2

# ---------------------------------------------------------------- every type, one response

TYPES = {  # type: (read(text, record, box scale) -> (value, method), compare(value, gold, record, settings))
    "multiple choice": (read_choice, equal), "numerical": (read_number, same_number),
    "regression": (read_number, relative_accuracy), "boolean": (read_boolean, equal),
    "binary classification": (read_boolean, equal), "math": (read_math, same_math),
    "ocr": (read_ocr, word_accuracy),
    "open-ended": (read_text, text_similarity), "free-form": (read_text, text_similarity),
    "video qa": (read_text, text_similarity), "video description": (read_text, text_similarity),
    "temporal grounding": (read_spans, span_iou), "spatial grounding": (read_boxes, boxes_iou),
    "spatial-temporal grounding": (read_tube, tube_iou), "tracking": (read_tube, track_iou),
    "segmentation": (read_segments, segment_score), "code": (read_code, code_score),
    "svg-code": (read_markup, markup_similarity), "html-code": (read_markup, markup_similarity),
    "llava preference": (read_preference, equal), "critic preference": (read_preference, equal),
    "rec": (read_number, same_number), "ssr": (read_boolean, equal), "crr": (read_boolean, equal),   # OVO
}

@functools.lru_cache(1024)
def canonical(name: str) -> str:
    """Problem type as in TYPES; case, spaces, hyphens, underscores are free. ValueError names the nearest."""
    known = {re.sub("[ -]", "", kind): kind for kind in TYPES} | {"caption": "video description"}
    key = re.sub(r"[\s_-]+", "", str(name)).lower()
    if key not in known:
        near = [known[match] for match in difflib.get_close_matches(key, known, 3, 0.4)] or list(TYPES)
        raise ValueError(f"problem_type {str(name)[:60]!r} is unknown; nearest: {', '.join(near)}")
    return known[key]

def check_record(record: dict, settings: RewardSettings | None = None) -> None:
    """ValueError (one line, ready to print) for an unknown problem type or a gold that cannot be read."""
    settings, gold = settings or RewardSettings(), gold_text(record)
    if settings.reward:
        return
    try:
        kind = canonical(record.get("problem_type"))
        if kind == "multiple choice" and not record.get("options"):
            raise ValueError("multiple choice needs `options`, a list of texts")
        box_scale(record, settings)
        if kind == "code" and record.get("tests"):
            return
        value, _ = TYPES[kind][0](gold, record)
        if kind == "temporal grounding" and not value or kind == "tracking" and not value[1]:
            raise NoAnswer("empty")
    except ValueError as error:
        where = record.get("where") or record.get("key") or f"record {record.get('problem_id', '')}".strip()
        unread = f"answer {gold[:80]!r} cannot be read as {kind}: " if isinstance(error, NoAnswer) else ""
        raise ValueError(f"{where}: {unread}{error}") from None

@functools.lru_cache(4096)
def read_gold(kind: str, gold: str, options: tuple):
    """The gold's value, read once per group of responses (as text for code, whose tests need no gold)."""
    record = {"problem_type": kind, "answer": gold, "options": options}
    return gold if kind == "code" else TYPES[kind][0](gold, record)[0]

def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO, eq. 13: 0 up to limit - buffer tokens, then linear to -1 at the limit, -1 beyond."""
    return max(-1.0, min(0.0, (limit - buffer - length) / max(buffer, 1)))

def repetition(text: str, n: int) -> float:
    """-(share of the word n-grams that are repeats)."""
    tokens = words(text)
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0

@functools.cache
def custom_reward(spec: str):
    path, _, name = spec.rpartition(":")
    try:
        found = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return getattr(module, name)
    except (OSError, AttributeError, ImportError, SyntaxError) as error:
        raise RewardError(f"reward {spec!r}: expected path/to/file.py:function ({error})") from None

def custom_score(record: dict, response: str, settings: RewardSettings) -> dict:
    """The user's function(record, response): a float is the accuracy, a dict sets any field of the result."""
    function = custom_reward(settings.reward)
    try:
        value = function(record, response)
        value = dict(value) if isinstance(value, dict) else {"accuracy": float(value)}
        if not all(math.isfinite(value.get(part, 0.0)) for part in ("accuracy", "format", "overall")):
            raise ValueError(f"not finite: {value}")
    except Exception as error:      # whatever the user's code raises: named here, fatal unless told otherwise
        where, what = record.get("key") or record.get("where"), f"{type(error).__name__}: {error}"
        if settings.on_reward_error != "zero":
            raise RewardError(f"reward {settings.reward} failed on record {where}: {what}") from error
        value = {"accuracy": 0.0, "status": "invalid", "method": what}
    accuracy = value.get("accuracy", value.get("overall", 0.0))
    return {"accuracy": accuracy, "status": "ok" if accuracy > 0 else "wrong", "method": "custom"} | value

def score_here(record: dict, response: str, settings: RewardSettings, length=None) -> dict:
    """Score in this process, without a time limit."""
    answer, mark, truncated = answer_region(response)
    out = {"accuracy": 0.0, "format": float(mark == "tag" and bool(answer.strip())), "prediction": None,
           "status": "truncated", "method": "thoughts never end"}
    if settings.reward:
        out |= custom_score(record, response, settings)
    elif not truncated:
        kind = canonical(record["problem_type"])
        read, compare = TYPES[kind]
        prose = read in (read_choice, read_boolean, read_preference, read_number, read_spans)
        if len(answer) > 4000 and prose and not (read is read_spans and re.search(r"[\[{]", answer)):
            answer = answer[:1000] + "\n" + answer[-3000:]       # answers in prose stand at either end
        try:
            prediction, out["method"] = read(unbox(answer), record, box_scale(record, settings))
            gold = read_gold(kind, gold_text(record), tuple(record.get("options") or ()))
            accuracy = float(compare(prediction, gold, record, settings))
            out |= {"accuracy": accuracy, "prediction": str(prediction)[:200]}
            out["status"] = "ok" if accuracy > 0 else "wrong"
        except (NoAnswer, MemoryError, RecursionError) as error:
            out["status"] = error.status if isinstance(error, NoAnswer) else "invalid"
            out |= {"method": str(error) or type(error).__name__, "format": 0.5 * (mark == "tag")}
    if settings.overlong_limit:
        if length is None:
            raise ValueError("overlong_limit is set: scoring needs each response's length in tokens")
        out["overlong"] = soft_overlong(length, settings.overlong_limit, settings.overlong_buffer)
    if settings.repetition_ngram:
        out["repetition"] = repetition(response, settings.repetition_ngram)
    weights = {"accuracy": settings.accuracy_weight, "format": settings.format_weight,
               "overlong": settings.overlong_weight, "repetition": settings.repetition_weight}
    return {"overall": sum(weight * out.get(part, 0.0) for part, weight in weights.items())} | out

def score(record: dict, response: str, settings: RewardSettings | None = None, length=None) -> dict:
    """Score one response (fields: module docstring; length: tokens). What may hang goes to a worker."""
    settings = settings or RewardSettings()
    if settings.reward or canonical(record["problem_type"]) in ("math", "code"):
        return shared_scorer(settings).score_many([record], [response], [length])[0]
    return score_here(record, response, settings, length)

# ---------------------------------------------------------------- many responses, in killable workers

class Scorer:
    """Workers that score one response at a time; one that exceeds timeout_s or dies is replaced, its response
    invalid. They are new interpreters running this file: nothing is forked, no __main__ imported again."""
    def __init__(self, settings: RewardSettings | None = None, workers: int = 1):
        self.settings, self.workers = settings or RewardSettings(), [None] * max(1, workers)

    def _start(self):
        command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(asdict(self.settings))]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def _stop(self, i: int):
        if self.workers[i]:
            self.workers[i].kill()
            self.workers[i].communicate()
        self.workers[i] = None

    def _serve(self, i: int, todo: deque, results: list):
        """Feed worker i until nothing is left, several jobs at once: a round trip costs more than a score."""
        while todo:
            try:
                jobs = todo.popleft()
            except IndexError:                     # another thread took the last ones
                return
            while jobs:
                self.workers[i] = worker = self.workers[i] or self._start()
                try:
                    worker.stdin.write("".join(json.dumps(job, default=str) + "\n" for _, job in jobs))
                    worker.stdin.flush()
                except BrokenPipeError:
                    pass                           # it died; what it finished can still be read
                while jobs and (line := worker.stdout.readline()):
                    results[jobs.pop(0)[0]] = result = json.loads(line)
                    if "error" in result:
                        self._stop(i)
                        raise RewardError(result["error"])
                if jobs:                           # the first unanswered one was too slow or ended the worker
                    self._stop(i)
                    results[jobs.pop(0)[0]] = {
                        "overall": 0.0, "accuracy": 0.0, "format": 0.0, "prediction": None,
                        "status": "invalid", "method": f"no result within {self.settings.timeout_s} s"}

    def score_many(self, records, responses, lengths=None) -> list[dict]:
        """One dict per response, in order. lengths: tokens of each response (for the overlong penalty)."""
        jobs = list(enumerate(zip(records, responses, lengths or [None] * len(responses), strict=True)))
        size = max(1, min(16, len(jobs) // (4 * len(self.workers))))
        todo, results = deque(jobs[i:i + size] for i in range(0, len(jobs), size)), [None] * len(jobs)
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(lambda i: self._serve(i, todo, results), range(len(self.workers))))
        return results

    def close(self):
        for i in range(len(self.workers)):
            self._stop(i)

@functools.cache
def shared_scorer(settings: RewardSettings) -> Scorer:
    return Scorer(settings)

def serve_jobs(settings: RewardSettings):
    """A worker: job lines in, result lines out. What a custom reward prints goes to stderr."""
    results, silence = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")
    os.dup2(2, 1)
    if not settings.reward:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for line in sys.stdin:
        record, response, length = json.loads(line)
        try:
            if not settings.reward and canonical(record["problem_type"]) == "math":
                math_library()                  # a slow import; the clock starts behind it
            if settings.reward:                 # which may use SIGALRM itself; this clock is 40 us slower
                faulthandler.dump_traceback_later(settings.timeout_s, exit=True, file=silence)
            else:
                signal.setitimer(signal.ITIMER_REAL, settings.timeout_s)        # SIGALRM ends even a C loop
            result = score_here(record, response, settings, length)
        except (RewardError, ValueError) as error:
            result = {"error": str(error)}
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=results, flush=True)

# ---------------------------------------------------------------- the command

def read_rows(path: str, settings: RewardSettings) -> list[dict]:
    """One record per response of a responses file, checked. ValueError names the line."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            responses = row["responses"] if "responses" in row else [row["response"]]
            rows += [row | {"where": f"{path}:{number}", "response": response} for response in responses]
        except (ValueError, KeyError, TypeError) as error:
            expected = "expected a JSON object with `response` or `responses`"
            raise ValueError(f"{path}:{number}: {expected} ({error!r})") from None
        check_record(rows[-1], settings)
    return rows

def main():
    parser = argparse.ArgumentParser(description="Score a file of responses.")
    parser.add_argument("file")
    parser.add_argument("--out", help="write every response with its scores here (JSONL)")
    parser.add_argument("--show", nargs=2, metavar=("STATUS", "N"), help="print N responses that are STATUS")
    parser.add_argument("--explain", type=int, nargs="?", const=1, metavar="N", help="how N was read")
    parser.add_argument("--reward", help="path/to/file.py:function")
    parser.add_argument("--allow-code-execution", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    settings = RewardSettings(reward=args.reward, allow_code_execution=args.allow_code_execution)
    try:
        rows = read_rows(args.file, settings)
        rows = rows[args.explain - 1:args.explain] if args.explain else rows
        scorer = Scorer(settings, args.workers)
        results = scorer.score_many(rows, [row["response"] for row in rows])
        scorer.close()
    except (OSError, ValueError, RewardError) as error:
        sys.exit(print(error, file=sys.stderr) or 2)

    groups = defaultdict(list)
    for row, result in zip(rows, results):
        groups[str(row.get("problem_type"))].append(result)
        groups["all"].append(result)
        if args.explain:
            seen = {"gold": gold_text(row), "answer": answer_region(row["response"])[0][-500:]}
            print(json.dumps(seen | result, indent=1, ensure_ascii=False))
    print(f"{'problem type':28}{'n':>7}{'accuracy':>10}{'format':>9}{'invalid':>9}{'truncated':>11}")
    for kind, group in groups.items():
        rates = [sum(map(value, group)) / len(group) for value in (
            lambda out: out["accuracy"], lambda out: out["format"],
            lambda out: out["status"] == "invalid", lambda out: out["status"] == "truncated")]
        print("{:28}{:7}{:10.4f}{:9.4f}{:9.4f}{:11.4f}".format(kind, len(group), *rates))
    if args.out:
        lines = [json.dumps(row | result) + "\n" for row, result in zip(rows, results)]
        Path(args.out + ".tmp").write_text("".join(lines))
        os.replace(args.out + ".tmp", args.out)
    shown = [pair for pair in zip(rows, results) if args.show and pair[1]["status"] == args.show[0]]
    for row, result in shown[:int(args.show[1])] if shown else ():
        print(f"\n{row['where']} [{row['problem_type']}] gold {gold_text(row)!r}, "
              f"read {result['prediction']!r} ({result['method']})\n{row['response'][-600:]}")

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve_jobs(RewardSettings(**json.loads(sys.argv[2])))
    else:
        main()
