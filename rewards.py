"""Score answers: one scorer for training, validation, evaluate.py and this command.

    python rewards.py responses.jsonl                      # accuracy, format, invalid, truncated per problem type
    python rewards.py responses.jsonl --out scored.jsonl   # every response with its scores
    python rewards.py responses.jsonl --show wrong 5       # print examples: ok | wrong | invalid | truncated
    python rewards.py responses.jsonl --explain 3          # response 3: what was read, and by which rule

A row has a record's fields (problem, answer or solution, problem_type, options ...) and `response` or `responses`;
training's rollouts/step_*.jsonl are such files. score(record, response) returns
    accuracy    0..1; what it means is said beside each problem type's function below
    format      1 = one closed <answer> tag, its content of the type's form; 0.5 = tag, other content; 0 = no tag
    overlong, repetition   -1..0, present only when switched on
    overall     accuracy_weight * accuracy + format_weight * format + the weighted penalties
    prediction  what was read;  method  the rule that read it
    status      ok (accuracy > 0) | wrong (read, accuracy 0) | invalid (not readable) | truncated (inside <think>)
Nothing is guessed or drawn: what cannot be read is `invalid` and counted. Patterns are linear in the text's length;
what may hang all the same (math, code, custom rewards) runs in a worker that is killed at the time limit.
"""
import argparse, ast, bisect, difflib, faulthandler, functools, importlib, importlib.util, json, logging, math, os
import re, resource, signal, subprocess, sys, tempfile, time, unicodedata
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

def library(module: str, package: str):
    """A scoring library, imported on first use: toy runs and GPU test machines do without most of them."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"scoring needs the package {package}: pip install {package} ({error})") from None

# ---------------------------------------------------------------- the answer inside the response

def answer_region(response: str) -> tuple[str, str | None, bool]:
    """(answer text, what marked it: tag | open tag | None, cut off inside its thoughts?). Last marks win."""
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        return "", None, True
    before, mark, answer = text.rpartition("<answer>")
    if not mark:
        return text.replace("</answer>", " "), None, False
    answer, closed, _ = answer.partition("</answer>")
    return answer, "tag" if closed else "open tag", False

def unbox(text: str) -> str:
    r"""Content of the last \boxed{...}, "" if it never closes; the text itself where there is none."""
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
    """The gold answer. A tagged `solution` wins: benchmarks use `answer` for the option's text beside it."""
    answer, solution = record.get("answer"), record.get("solution")
    if answer is None or isinstance(solution, str) and re.search("<answer>|<think>", solution):
        answer = solution
    answer = json.dumps(answer) if isinstance(answer, (dict, list)) else "" if answer is None else str(answer)
    text, mark, _ = answer_region(answer)
    # Charades-STA's gold stands inside <think>, behind it is a broken tag: take the whole text without tags.
    return (text if mark else re.sub("</?(?:think|answer)>", " ", answer)).strip()

SIGNS = {"-": "‐‑‒–—―−", '"': "“”„«»", "'": "‘’´", "/": "⁄", "": "\u200b\u200c\u200d\ufeff"}
SIGNS = {ord(char): sign for sign, chars in SIGNS.items() for char in chars}

def plain(text: str) -> str:
    r"""NFKC, one kind of dash and quote, no Markdown or LaTeX dressing (**B**, $B$, \text{B}, `B`)."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", r"^\g<0>", text)           # NFKC alone turns n² into n2
    text = re.sub("(?<=[0-9])(?=[¼½¾⅐-⅞])", " ", text)           # and 1½ into 11/2
    text = re.sub(r"[^\W\d_]?[\u0300-\u036f]{9,}", "", text)     # stacks of accents make NFKC quadratic
    text = unicodedata.normalize("NFKC", text).translate(SIGNS)
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\%", "%")
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[*$`]|\\[()\[\]]", "", text).strip()

def phrase(text: str) -> str:
    """For comparing words: lower case, single spaces, no outer punctuation, no leading article."""
    text = " ".join(plain(text).lower().split()).strip(" .,;:!?\"'()[]<>。、")
    return re.sub(r"^(?:an?|the) (?=.)", "", text)

# ---------------------------------------------------------------- choices: options, yes or no, preferences

@dataclass
class Mention:
    start: int
    end: int
    label: str
    free: bool           # counts wherever it stands; letters and "no" only when declared or at the start of a line

# What may stand right before a declared label, and right after one. Searched in short windows around it.
FILL = (r"(?:[\W_]|\b(?:is|was|be|would|should|must|will|are|the|an?|option|choice|letter|answer|most|likely|probably|"
        r"clearly|definitely|still|now|number|response)\b|[是为应该选择项])*$")
CUE = re.compile(r"(?:\b(?:answer|response|verdict|conclusion|it is|it's|it must be|choose|pick|select|go with|go for|"
                 r"i say|i'd say|so|thus|therefore|hence|finally|i prefer)\b|\b[^\W_]+\s*[:=]|=>|->|→|⇒|答案|"
                 r"(?<!不)选|选项|(?<!不)是)" + FILL, re.I)
NOT_BEFORE = re.compile(r"(?:\b(?:not|never|neither|nor|no|than|rather than|instead of)|n't|不是?|不选|排除|而非)"
                        r"(?:\s|[\"'(]|\b(?:an?|the|option|choice|选项)\b)*$", re.I)
RIGHT = re.compile(r"[)\]\"'.]*\s*(?:(?:is|are|would be|must be|seems|looks|appears)\s+(?:to be\s+)?(?:(?:the|most|"
                   r"only|clearly|my)\s+)*(?:correct|right|best|true|final|answer|better|preferred|superior)\b|wins\b|"
                   r"(?:才?是|为)?\s*(?:正确|对的|答案|更好))", re.I)
WRONG = re.compile(r"[)\]\"'.]*\s*(?:(?:is|are|seems|looks|can't be|cannot be)\s+(?:\w+ly\s+)?(?:not|wrong|incorrect|"
                   r"false|ruled|out|worse|inferior)\b|isn't\b|是?[错不])", re.I)
JOIN = re.compile(r"[)\].\"']*\s*(?:[,/&+~、|-]|\b(?:or|and|to)\b|和|或|以及)\s*(?:(?:and|or|maybe|option)\s+)*[(\[\"']*", re.I)
ALONE = re.compile(r"[)\]]*\s*(?:[.:,、。;-]|$|\n)|[)\]]")

def decide(text: str, mentions: list[Mention]) -> tuple[str, str]:
    """The label that the text settles on: the last declared one, else one that opens a line, else the only one."""
    mentions = sorted(mentions, key=lambda m: (m.start, -m.end))
    reach = [0, *accumulate((m.end for m in mentions), max)]
    mentions = [m for m, before in zip(mentions, reach) if m.end > before]        # not inside a longer mention
    mentions = mentions[:100] + mentions[100:][-100:]                             # bounds the work on endless lists

    def joined(i):
        for a, b in ((i - 1, i), (i, i + 1)):
            if 0 <= a and b < len(mentions) and mentions[a].label != mentions[b].label \
                    and JOIN.fullmatch(text[mentions[a].end:mentions[b].start][:40]):
                raise NoAnswer(f"several answers ({mentions[a].label}, {mentions[b].label})", "wrong")
        return mentions[i].label

    rejected, alive = set(), []
    for i in range(len(mentions) - 1, -1, -1):
        m = mentions[i]
        before, after = text[max(0, m.start - 60):m.start], text[m.end:m.end + 40]
        if NOT_BEFORE.search(before) or WRONG.match(after):
            rejected.add(m.label)
        elif m.label not in rejected:
            if CUE.search(before) or RIGHT.match(after):
                return joined(i), "declared"
            alive.append(i)

    opening = [i for i in alive if (mentions[i].free or ALONE.match(text, mentions[i].end)) and re.fullmatch(
        r"(?:[\W_]|option|choice|选项|选)*", text[text.rfind("\n", 0, mentions[i].start) + 1:mentions[i].start][-40:], re.I)]
    for found, method in ((opening, "opens a line"), ([i for i in alive if mentions[i].free], "only one named")):
        if len({mentions[i].label for i in found}) > 1:
            raise NoAnswer("several answers", "wrong" if method == "opens a line" else "invalid")
        if found:
            return joined(found[0]), method
    raise NoAnswer("no choice named")

def option_texts(record: dict) -> dict[str, str]:
    """{"A": "text", ...}; the options' own letters when every option has one and none repeats."""
    options = [str(option) for option in record.get("options") or []]
    prefixes = [re.match(r"\s*\(?([A-Z])(?:[.:)、,]|\s-)\s*", unicodedata.normalize("NFKC", o)) for o in options]
    if all(prefixes) and len({match[1] for match in prefixes}) == len(options):
        return {match[1]: match.string[match.end():] for match in prefixes}
    return {chr(65 + i): option for i, option in enumerate(options[:26])}

def read_choice(text: str, record: dict) -> tuple[str, str]:
    """Letter of the chosen option. Letters are case-sensitive unless the letter is the whole answer."""
    texts = {letter: phrase(option) for letter, option in option_texts(record).items()}
    text = plain(text)
    whole = re.fullmatch(r"[\W_]*([A-Za-z])[\W_]*", text)
    if whole and whole[1].upper() in texts:
        return whole[1].upper(), "letter"
    same = [letter for letter, option in texts.items() if option == phrase(text) != ""]
    if len(same) > 1:
        raise NoAnswer(f"text of several options ({', '.join(same)})")
    if same:
        return same[0], "option text"

    # "A man", "I think": a word, not a letter, unless it goes on as a sentence about the letter does.
    letters = re.finditer(r"(?<![A-Za-z0-9])(?:[B-HJ-Z]|[AI](?!\s+(?!(?:because|since|as|and|but|or|due|based|is|in|"
                          r"for|from|seems|with)\b)[a-z]))(?![A-Za-z0-9]|'\w)", text)
    mentions = [Mention(*m.span(), m[0], False) for m in letters if m[0] in texts]
    for letter, option in texts.items():
        if len(option) > 1 or option.isdigit():
            pattern = r"(?<![\w.])" + re.escape(option).replace(r"\ ", r"\s+") + r"(?!\w|[.,]\d)"
            mentions += [Mention(*m.span(), letter, True) for m in re.finditer(pattern, text.lower())]
    return decide(text, mentions)

YES = re.compile(r"\b(?:yes|true|correct|right|not (?:false|wrong))\b|(?<!\w)(?:是|对|真)的?(?!\w)|(?<!不)正确", re.I)
NO = re.compile(r"\b(?:no|false|incorrect|wrong|untrue|not (?:true|correct|right))\b|(?:is|does)n't (?:true|correct|"
                r"right)|(?<!\w)(?:否|没有|错误?|假)的?(?!\w)|不是的?(?!\w)|不对|不正确", re.I)

def read_boolean(text: str, record: dict) -> tuple[str, str]:
    text = plain(text)
    if whole := re.fullmatch(r"\W*([ynft])\W*", text, re.I):
        return ("yes" if whole[1].lower() in "yt" else "no"), "letter"
    return decide(text, [Mention(*m.span(), "yes", True) for m in YES.finditer(text)] + [
        Mention(*m.span(), "no", m[0].lower() != "no" or not text[:m.start()].strip("\"'( ")) for m in NO.finditer(text)])

def read_class(text: str, record: dict) -> tuple[str, str]:
    """Binary classification: yes/no, one of `options`, or any other pair of labels, which must match as a whole."""
    if record.get("options"):
        return read_choice(text, record)
    gold = phrase(gold_text(record))
    if gold in ("y", "n", "t", "f") or YES.fullmatch(gold) or NO.fullmatch(gold):
        return read_boolean(text, record)
    return short_answer(text, gold), "label"

SIDE = r"(?:(?:response|answer|model|assistant|caption|candidate|option|output|image|video)\s*#?\s*(?:{0})\b|\b{1}\b|\[\[{2}\]\])"
PREFERENCES = {"1": re.compile(SIDE.format("1|a|one", "first", "a"), re.I),
               "2": re.compile(SIDE.format("2|b|two", "second", "b"), re.I),
               "tie": re.compile(r"\b(?:tie|tied|draw|equal|equally|neither|both)\b|\bthe same\b|\[\[c\]\]|平局", re.I)}

def read_preference(text: str, record: dict) -> tuple[str, str]:
    """1, 2 or tie, in the spellings of the preference sets: "A", "[[B]]", "Response 1 is better", "second", "equal"."""
    if record.get("options"):
        return read_choice(text, record)
    text = plain(text)
    if whole := re.fullmatch(r"[\W_]*([abc012])[\W_]*", text, re.I):
        return {"a": "1", "1": "1", "b": "2", "2": "2", "c": "tie", "0": "tie"}[whole[1].lower()], "letter"
    mentions = [Mention(*m.span(), label, True) for label, p in PREFERENCES.items() for m in p.finditer(text)]
    mentions += [Mention(*m.span(), {"A": "1", "B": "2"}[m[0]], False) for m in re.finditer(r"\b[AB]\b(?!\s+[a-z]+ing)", text)]
    return decide(text, mentions)

def equal(prediction, gold, record, settings) -> float:
    return float(prediction == gold)

# ---------------------------------------------------------------- numbers

UNITS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()
VALUES = {word: i for i, word in enumerate(UNITS)} | {"hundred": 100, "dozen": 12, "thousand": 1000, "million": 10**6}
VALUES |= {word: 10 * i for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}
WORD = "(?:" + "|".join(sorted(VALUES, key=len, reverse=True)) + ")"
WORD_RUN = re.compile(rf"\b(?:a (?={WORD}))?{WORD}(?:(?:\s+and\s+|\s+|-){WORD})*\b(?!\s+of\b)", re.I)
HANZI = dict(zip("零一二三四五六七八九〇两十百千万亿", [*range(10), 0, 2, 10, 100, 1000, 10**4, 10**8]))
HANZI_RUN = re.compile(f"(?<!第)[{''.join(HANZI)}]+(?![共直样些起定下般切])")
NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
QUANTITY = re.compile(rf"(?<![A-Za-z_^\d])(?<!\d\.)(?P<sign>(?<![\d)%A-Za-z])[-+]\s?)?(?:(?P<whole>\d+)\s+(?=\d+\s?/))?"
                      rf"(?P<top>{NUMBER})(?:\s?/\s?(?P<low>{NUMBER}))?(?:\^\{{?(?P<power>[-+]?\d+)\}}?)?"
                      r"(?P<percent>\s?(?:%|per\s?cent\b|pct\b))?", re.I)
ANSWER_CUE = re.compile(r"(?i:\banswer\b|\bresult\b|\bfinal(?:ly)?\b)|答案")
CONCLUSION = re.compile(r"(?i:=|≈|\b(?:so|thus|therefore|hence|making|makes|totals?|equals?)\b)|所以|因此|总共|一共")
ALSO = re.compile(r"\s*(?:[a-z]+\s*)?(?:\b(?:or|to|through)\b|[-~/:±]|至|到|或)\W*|\s*(?:\band\b|[,;+x*·^、和])?\s*", re.I)

def digits(text: str) -> str:
    """Write every number as digits: twenty-one, 十二, 1,234, 3×10^8, 2.5 million, \\frac{1}{2}, one and a half."""
    def value_of(parts, values):
        total = group = 0
        for part in parts:
            value = values[part]
            if value < 100 and value not in (10, 12) or values is VALUES and value < 100 and part != "dozen":
                group += value
            elif value < 1000 or value == 1000 and values is HANZI:
                ones = group % 10 if values is HANZI else group
                group += max(ones, 1) * value - ones
            else:
                total, group = (total + max(group, 1)) * value if values is HANZI else total + max(group, 1) * value, 0
        return str(total + group)

    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"(?i)(?:\b(?:an?|one) )?\bhalf\b(?! of\b)", "1/2", text)
    text = WORD_RUN.sub(lambda m: value_of(re.findall(WORD, m[0].lower()), VALUES), text)
    text = HANZI_RUN.sub(lambda m: value_of(m[0], HANZI), text)
    text = re.sub(r"百分之(\d+(?:\.\d+)?)", r"\1%", re.sub(r"(\d) ?(?:point|点) ?(?=\d)", r"\1.", text))
    text = re.sub(r"(?<=\d) and (?=1/2)", " ", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![,\d])|(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/])",
                  lambda m: re.sub("[, ]", "", m[0]), text)
    text = re.sub(r"(?i)(?<=\d)\s?(?:[x*·×]|\\times|\\cdot)\s?10\s?\^\s?\{?([-+]?\d+)\}?", r"e\1", text)
    for scale, power in (("thousand", 3), ("million", 6), ("billion", 9), ("万", 4), ("亿", 8)):
        text = re.sub(rf"(?i)(?<=\d)\s?{scale}", f"e{power}", text)
    return text

def value_of_quantity(match) -> float:
    """nan for what overflows or divides by zero."""
    try:
        value = float(match["top"]) / float(match["low"] or 1) + float(match["whole"] or 0)
        value = value ** int(match["power"]) if match["power"] else value
    except (ZeroDivisionError, OverflowError, ValueError):
        return math.nan
    return -value if (match["sign"] or "").startswith("-") else value

def read_number(text: str, record: dict) -> tuple[tuple[float, bool], str]:
    """((value, has a percent sign), method): the number after the last "answer", else after the last "so", "=",
    "total", else the first one of the last sentence with a number. Ranges, alternatives, open sums are hedges."""
    text = plain(text)
    if re.fullmatch(r"\W*(?:none|no|nil|nothing|没有|无)\W*", text, re.I):
        return (0.0, False), "none is zero"
    text = digits(text)
    found = list(QUANTITY.finditer(text))
    outside = [m for m in found if not re.search(r"\([^()]*$", text[max(0, m.start() - 60):m.start()])]
    found = outside or found                                                    # "3.2 m (10.5 ft)"
    if not found:
        raise NoAnswer("no number")

    for cue, method in ((ANSWER_CUE, "declared"), (CONCLUSION, "concluded"), (re.compile(r"[.!?。]\s|\n"), "first number")):
        ends = [0, *(match.end() for match in cue.finditer(text) if match.end() <= found[-1].end())]
        if len(ends) > 1 or method == "first number":
            break
    i = next(i for i, m in enumerate(found) if m.end() >= ends[-1])
    value, end = value_of_quantity(found[i]), found[i].end()
    if re.match(r"[.,]\d", text[end:end + 2]) or not math.isfinite(value):
        raise NoAnswer("malformed or infinite number")
    for other in found[i + 1:]:
        if not ALSO.fullmatch(text, end, other.start()):
            break
        if value_of_quantity(other) != value:
            raise NoAnswer("several numbers", "wrong")
        end = other.end()
    return (value, bool(found[i]["percent"])), method

def same_number(prediction, gold, record, settings) -> float:
    """1 when equal after rounding to 2 decimals (2 digits for |gold| < 0.01). 50% is 0.5, and 50 if the gold has no %."""
    (p, p_percent), (g, g_percent) = prediction, gold
    pairs = [(p, g)]
    if p_percent != g_percent:
        pairs.append((p / 100, g) if p_percent else (p, g / 100))
    return float(any(round(a, 2) == round(b, 2) if abs(b) >= 0.01 or not b else math.isclose(a, b, rel_tol=0.01)
                     for a, b in pairs))

def relative_accuracy(prediction, gold, record, settings) -> float:
    """MRA (VSI-Bench): share of the ten thresholds t = .5 ... .95 (numpy.linspace) with |p - g| / |g| <= 1 - t."""
    p, g = prediction[0], gold[0]
    error = abs(p - g) / abs(g) if g else 0.0 if p == g else math.inf
    return sum(error <= 1 - t for t in [*(0.5 + i * ((0.95 - 0.5) / 9) for i in range(9)), 0.95]) / 10

# ---------------------------------------------------------------- JSON, times and boxes

def json_values(text: str) -> list:
    """Every outermost JSON object or list in the text, in order; single quotes are forgiven."""
    values, depth, start = [], 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        if match[0] in "{[":
            start, depth = match.start() if depth == 0 else start, depth + 1
        elif match[0] in "}]" and depth:
            depth -= 1
            if depth == 0:
                for candidate in (text[start:match.end()], text[start:match.end()].replace("'", '"')):
                    try:
                        values.append(json.loads(candidate))
                        break
                    except (ValueError, RecursionError):
                        pass
    if depth:
        raise NoAnswer("brackets that never close")
    return values

def leaves(value, keys, depth=0) -> list:
    """Scalars in a JSON value, in order; of an object only the fields whose names match `keys`, where any does."""
    if depth > 8:
        raise NoAnswer("nested too deep")
    if isinstance(value, dict):
        value = [value[key] for key in value if keys.search(key)] or list(value.values())
    return [leaf for item in value for leaf in leaves(item, keys, depth + 1)] if isinstance(value, list) else [value]

UNIT = r"(?:hours?|hrs?|minutes?|mins?|seconds?|secs?|[hms]\b|小时|分钟?|秒)"
TIME = re.compile(rf"(?<![A-Za-z\d.:])(?:(?P<clock>(?:\d+:)?\d+:\d+(?:[.,]\d+)?)|(?P<parts>\d+(?:\.\d+)?\s?{UNIT}(?:\s?(?:and )?"
                  rf"\d+(?:\.\d+)?\s?{UNIT}){{0,2}})|(?P<number>\d+(?:\.\d+)?|\.\d+))(?:\s?(?:s|secs?|seconds?)\b)?", re.I)
TO = re.compile(r"[\s<>\"'(\[\])]*(?:\b(?:to|and|until|till|through)\b|-+>?|~|→|至|到|,|和)"
                r"(?:[\s<>\"'(\[\])第=]|\b(?:the|about|around|approximately|second|timestamp|at|t)\b)*", re.I)
TIME_KEY = re.compile("time|window|interval|segment|span|moment|start|begin|from|end|stop|^to$", re.I)

def seconds(match) -> float:
    """Seconds of a TIME match: 7, 7 s, 1:07, 00:01:07.5, 1 min 7 s."""
    if match["clock"]:
        return functools.reduce(lambda total, part: total * 60 + float(part), match["clock"].replace(",", ".").split(":"), 0.0)
    parts = re.findall(rf"(\d+(?:\.\d+)?)\s?({UNIT})", match["parts"] or "", re.I)
    scale = {"h": 3600, "小": 3600, "m": 60, "分": 60}
    return sum(float(n) * scale.get(unit[0].lower(), 1) for n, unit in parts) if parts else float(match["number"])

def read_spans(text: str, record: dict) -> tuple[list, str]:
    """([(start, end)] in seconds, sorted ends, without zero lengths). JSON first; in prose the last range wins."""
    text = plain(text)
    for value in reversed(json_values(text)):
        times = []
        for leaf in leaves(value, TIME_KEY):
            if isinstance(leaf, str):
                times += [seconds(match) for match in TIME.finditer(leaf)]
            elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
                times.append(float(leaf))
        if len(times) >= 2 and len(times) % 2 == 0 and all(map(math.isfinite, times)):
            return spans(zip(times[::2], times[1::2])), "JSON"
        if isinstance(value, dict):
            raise NoAnswer("no pair of times in the JSON")

    tokens = list(TIME.finditer(text))
    for first, second in zip(tokens[-2::-1], tokens[:0:-1]):
        before, between = text[max(0, first.start() - 60):first.start()], text[first.end():second.start()][:80]
        if (TO.fullmatch(between) if between.strip() != "," else len(tokens) == 2) \
                or len(tokens) == 2 and not re.search(r"\w", between) \
                or re.search(r"(?i)\b(?:start|begin|from)|开始|从", before) and re.search(r"(?i)\b(?:end|stop|finish|until|to\b)|结束|到", between):
            start, end = seconds(first), seconds(second)
            if first["number"] and (unit := re.search("(?i)[hm分小]", second["parts"] or "")):    # "3 to 7 minutes"
                start *= 60 if unit[0].lower() in "m分" else 3600
            return spans([(start, end)]), "range in prose"
    raise NoAnswer("no range of times")

def spans(pairs) -> list:
    """Sorted, disjoint, non-empty (start, end)."""
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
    union = sum(e - s for s, e in [*prediction, *gold]) - both
    return both / union if union > 0 else 0.0

BOX_KEY = re.compile(r"box|bbox|^[xy](?:_?(?:min|max|[12]))$", re.I)

def boxes_of(value) -> list[tuple]:
    """Boxes (x1, y1, x2, y2), corners sorted, from a JSON value with a multiple of four numbers."""
    xs = [float(x) for x in leaves(value, BOX_KEY) if isinstance(x, (int, float)) and not isinstance(x, bool)]
    if not xs or len(xs) % 4 or not all(map(math.isfinite, xs)):
        raise NoAnswer("no box of four numbers")
    return [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in zip(*(xs[i::4] for i in range(4)))]

def read_boxes(text: str, record: dict) -> tuple[list, str]:
    """JSON boxes, else exactly four numbers, as in "(10, 20), (30, 40)"."""
    if "{" in text or re.search(r"\[[^\[\]()]*\]", text):
        return boxes_of(json_values(plain(text))[-1:]), "JSON"
    return boxes_of([float(n) for n in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", plain(text))]), "numbers"

def box_iou(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0.0, width) * max(0.0, height)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / union if union > 0 else 0.0

def to_gold_space(record: dict, settings: RewardSettings) -> tuple[float, float]:
    """Factors (x, y) from the model's coordinates to the gold's; (1, 1) when no `box_space` is declared."""
    space = record.get("box_space") or settings.box_space
    if not space:
        return 1.0, 1.0
    sizes = {"0-1000": (1000.0, 1000.0), "0-1": (1.0, 1.0)}
    if "pixels" in (space, settings.answer_box_space):
        if not record.get("width") or not record.get("height"):
            raise ValueError("boxes in pixels need the record's `width` and `height`")
        sizes["pixels"] = float(record["width"]), float(record["height"])
    if not {space, settings.answer_box_space} <= set(sizes):
        raise ValueError(f"box_space {space!r} / {settings.answer_box_space!r}: choose from pixels, 0-1000, 0-1")
    return tuple(gold / answer for gold, answer in zip(sizes[space], sizes[settings.answer_box_space]))

def scaled(box, factors):
    return tuple(value * factors[i % 2] for i, value in enumerate(box))

def boxes_iou(prediction, gold, record, settings) -> float:
    """IoU of the box; with several boxes, best pairs one to one, over the larger of the two counts."""
    factors = to_gold_space(record, settings)
    pairs = sorted(((box_iou(scaled(p, factors), g), i, j) for i, p in enumerate(prediction[:100])
                    for j, g in enumerate(gold[:100])), reverse=True)
    total, used_p, used_g = 0.0, set(), set()
    for iou, i, j in pairs:
        if i not in used_p and j not in used_g:
            total, used_p, used_g = total + iou, used_p | {i}, used_g | {j}
    return total / max(len(prediction), len(gold))

def read_tube(text: str, record: dict) -> tuple[tuple, str]:
    """((windows, {second: box or None}), method) from {"time": [s, e], "boxes": {"8": [x1, y1, x2, y2], ...}}."""
    value = next((value for value in reversed(json_values(plain(text))) if isinstance(value, dict)), None)
    if value is None:
        raise NoAnswer("no JSON object")
    boxes = {}
    for key, box in (value.get("boxes") or {}).items() if isinstance(value.get("boxes"), dict) else ():
        try:
            second = round(float(key), 3)                           # "8" and "8.0" are one second
            boxes[second] = None
            boxes[second] = boxes_of(box)[0]
        except (NoAnswer, ValueError):
            pass                                                    # counts as a second without a right box
    try:
        windows = read_spans(json.dumps({"time": value["time"]}), record)[0] if "time" in value else []
    except NoAnswer:
        windows = []
    if not windows and not boxes:
        raise NoAnswer("neither times nor boxes by second")
    return (windows, boxes), "JSON"

def mean_box_iou(prediction, gold, seconds_, record, settings) -> float:
    factors = to_gold_space(record, settings)
    return sum(box_iou(scaled(prediction[t], factors), gold[t]) for t in seconds_
               if prediction.get(t) and gold.get(t)) / len(seconds_)

def tube_iou(prediction, gold, record, settings) -> float:
    """0.5 temporal IoU + 0.5 box IoU averaged over the seconds of either; temporal IoU alone without gold boxes."""
    time_iou = span_iou(prediction[0], gold[0])
    either = set(gold[1]) | set(prediction[1])
    return 0.5 * time_iou + 0.5 * mean_box_iou(prediction[1], gold[1], either, record, settings) if gold[1] else time_iou

def track_iou(prediction, gold, record, settings) -> float:
    """Box IoU averaged over the gold's frames, so that leaving out hard frames does not pay."""
    return mean_box_iou(prediction[1], gold[1], set(gold[1]), record, settings) if gold[1] else 0.0

def read_segments(text: str, record: dict) -> tuple[dict, str]:
    """{"box", "positive", "negative", "time", "mask"} of {"boxes": [..], "positive_points": [[x, y], ..], ...}."""
    value = next((value for value in reversed(json_values(plain(text))) if isinstance(value, dict)), None)
    if value is None:
        raise NoAnswer("no JSON object")
    out = {"box": boxes_of(value.get("boxes", value.get("bbox_2d")))[0], "mask": value.get("mask")}
    for name in ("positive", "negative"):
        xs = [x for x in leaves(value.get(f"{name}_points") or [], BOX_KEY) if isinstance(x, (int, float))]
        out[name] = list(zip(xs[::2], xs[1::2]))
    out["time"] = float(value["time"]) if isinstance(value.get("time"), (int, float)) else None
    return out, "JSON"

def inside(point, box, mask) -> bool:
    """mask: uncompressed COCO run lengths {"size": [h, w], "counts": [...]}, column by column, zeros first."""
    x, y = point
    if not mask:
        return box[0] <= x <= box[2] and box[1] <= y <= box[3]
    height, width = mask["size"]
    return 0 <= x < width and 0 <= y < height and bisect.bisect_right(
        list(accumulate(mask["counts"])), int(x) * height + int(y)) % 2 == 1

def segment_score(prediction, gold, record, settings) -> float:
    """.5 box IoU + .25 share of positive points inside + .25 of negative points outside the gold box or mask.
    Video: .3, .2, .2, and .3 exp(-|seconds off| / 2) (the weights of OneThinker's reward)."""
    factors = to_gold_space(record, settings)
    hits = {name: [inside(scaled(p, factors), gold["box"], gold["mask"]) == (name == "positive") for p in prediction[name]]
            for name in ("positive", "negative")}
    parts = [(0.5, box_iou(scaled(prediction["box"], factors), gold["box"]))]
    parts += [(0.25, sum(hit) / max(len(hit), 1)) for name, hit in hits.items()]
    if gold["time"] is not None:
        off = abs(prediction["time"] - gold["time"]) if prediction["time"] is not None else math.inf
        parts = [(0.3, parts[0][1]), (0.2, parts[1][1]), (0.2, parts[2][1]), (0.3, math.exp(-off / 2))]
    return sum(weight * part for weight, part in parts)

# ---------------------------------------------------------------- text

def words(text: str) -> list[str]:
    """Lower-case words without outer punctuation; CJK text by character."""
    found = re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+", plain(text).lower())
    return [word for word in (word.strip(".,;:!?\"'()[]<>。、") for word in found) if word]

def read_text(text: str, record: dict) -> tuple[str, str]:
    if not text.strip():
        raise NoAnswer("empty answer")
    return text.strip(), "text"

def read_ocr(text: str, record: dict) -> tuple[str, str]:
    """The text; the quoted part of a sentence that quotes once and has little else to say."""
    quoted = re.findall(r'"([^"]+)"', plain(text))
    if len(quoted) == 1 and re.search(r"(?i)\b(?:reads?|says?|text|sign|shows?|written|is)\b|[是写]", plain(text).replace(quoted[0], "")) \
            and phrase(text) != phrase(gold_text(record)):
        return quoted[0], "quoted text"
    return read_text(text, record)

def word_accuracy(prediction, gold, *_) -> float:
    """1 - word error rate, at least 0."""
    gold = words(gold)
    distance = library("rapidfuzz.distance.Levenshtein", "rapidfuzz").distance
    return max(0.0, 1 - distance(gold, words(prediction)) / len(gold)) if gold else float(prediction == gold)

@functools.cache
def rouge():
    scorer = library("rouge_score.rouge_scorer", "rouge-score")
    return scorer.RougeScorer(["rouge1", "rouge2"], tokenizer=SimpleNamespace(tokenize=words))

LEAD = re.compile(r"(?:.{0,200}\b(?:answer|it|this|that|they|result) (?:is|are|was)|it's|答案是?)\W*", re.I | re.S)

def short_answer(text: str, gold: str) -> str:
    """A short answer as a comparable phrase, "It is a" and "The answer is" taken off."""
    answer = phrase(text)
    lead = LEAD.match(answer)
    return answer if answer == gold or not lead else phrase(answer[lead.end():])

def text_similarity(prediction, gold, *_) -> float:
    """Golds up to five words: exact (case, articles, punctuation aside; "(DFS)" behind its words may stand for them).
    Longer: mean F1 of ROUGE-1, -2 and -L."""
    gold_words = words(gold)
    if len(gold_words) <= 5:
        short = phrase(gold)
        initials = re.fullmatch(r"(.+?)\s*\(([A-Z]{2,6})\)", gold.strip())
        accepted = {short, *(phrase(part) for part in initials.groups())} if initials else {short}
        return float(phrase(prediction) in accepted or short_answer(prediction, short) in accepted)
    scores = rouge().score(gold, prediction)
    answer_words = words(prediction)
    # rouge-score's own ROUGE-L walks an n x m table in Python; the same LCS from rapidfuzz is bit-parallel.
    common = library("rapidfuzz.distance.LCSseq", "rapidfuzz").similarity(gold_words, answer_words)
    longest = 2 * common / (len(gold_words) + len(answer_words))
    return (scores["rouge1"].fmeasure + scores["rouge2"].fmeasure + longest) / 3

# ---------------------------------------------------------------- math

@functools.cache
def math_library():
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)      # it warns that its own timeout is off: ours kills
    return library("math_verify", "math-verify")

@functools.lru_cache(4096)
def parsed_math(text: str) -> list:
    text = re.sub(r"√\s?(\d+)", r"\\sqrt{\1}", text.replace("π", "\\pi ").replace("∞", "\\infty").replace("°", "^\\circ"))
    text = text.replace("≤", "\\le ").replace("≥", "\\ge ").replace("×", "\\times ").replace("·", "\\cdot ").replace("%", "\\%")
    return math_library().parse(f"${text}$", parsing_timeout=None)

def read_math(text: str, record: dict) -> tuple[str, str]:
    r"""The boxed answer, else what follows the last "answer is", else the last $...$, else the whole text."""
    math_library()
    method = "whole text"
    if record.get("options"):
        try:
            return read_choice(text, record)[0], "option"
        except NoAnswer:
            pass
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1", text.strip().strip("`").replace("\\$", ""))
    if cue := list(re.finditer(r"(?i)\banswer(?:\s+is)?\s*[:=]?|答案(?:是|为)?[::]?", text)):
        text, method = text[cue[-1].end():].strip().split("\n")[0], "declared"
    if spans_ := re.findall(r"\$([^$]+)\$", text):
        text, method = spans_[-1], "math span"
    text = unicodedata.normalize("NFKC", re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0] + "}", text)).translate(SIGNS)
    text = text.strip(" .,;*`\n")
    if not text:
        raise NoAnswer("no math answer")
    return text[:2000], method

def same_math(prediction, gold, record, settings) -> float:
    """Equality by math-verify: surds, fractions, sets, intervals, equations. Words are compared as words."""
    if phrase(prediction) == phrase(gold) or gold in option_texts(record) and prediction == gold:
        return 1.0
    if gold in (options := option_texts(record)):
        gold = options[gold]
    if re.fullmatch(r"[A-Za-z]|[^\\]*\b(?!sin|cos|tan|log|sqrt|pi\b|exp|ln)[A-Za-z]{3,}\b.*", gold):
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    p, g = parsed_math(prediction), parsed_math(gold)
    return float(bool(p) and bool(g) and math_library().verify(g, p, timeout_seconds=None, allow_set_relation_comp=True))

# ---------------------------------------------------------------- code and markup

CHILD = """
import builtins, os, resource, sys
cpu, folder, token = int(sys.argv[1]), os.getcwd(), os.environ.pop("TOKEN")
for kind, limit in (("CPU", cpu), ("AS", 1 << 30), ("FSIZE", 10 << 20), ("NPROC", 0), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
source = open("answer.py", encoding="utf-8").read()
readable = (folder, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), os.path.dirname(os.path.realpath(os.__file__)))
def guard(event, args):
    if event == "open":
        path, mode, flags = args
        real = os.path.realpath(os.fspath(path)) if not isinstance(path, int) else folder
        write = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else True
        if not str(real).startswith((folder,) if write else readable):
            raise PermissionError("files outside the folder are closed")
    elif event.split(".")[0] in ("socket", "subprocess", "ctypes", "pty", "gc", "resource", "mmap", "signal", "shutil") \\
            or event.startswith("os.") and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(event + " is closed")
sys.addaudithook(guard)
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
sys.stdout.flush()
sys.stdout.write("\\n" + token)
"""

def run_tests(code: str, tests, limit_s: float) -> float:
    """Share of the tests that pass. A test is Python text run after the code, or {"input": stdin, "output": stdout}.
    Each runs in its own process: isolated Python in a temporary folder, limits on CPU, memory (1 GB), file size,
    processes; no sockets, no files outside; killed after what is left of limit_s. Keeps accidents and cheap tricks
    out; against a determined attacker use a container."""
    tests, deadline, passed = [tests] if isinstance(tests, (str, dict)) else list(tests), time.monotonic() + limit_s, 0
    for test in tests:
        stdin_test, token = isinstance(test, dict), os.urandom(16).hex()
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
            source = code if stdin_test else f"{code}\n{test}"
            (Path(folder) / "answer.py").write_text(source, encoding="utf-8", errors="replace")
            child = subprocess.Popen([sys.executable, "-I", "-c", CHILD, str(math.ceil(limit_s))], cwd=folder, stdout=out,
                                     stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                                     env={"TOKEN": token, "OPENBLAS_NUM_THREADS": "1"})
            try:
                child.communicate(str(test["input"]).encode() if stdin_test else b"", max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            out.seek(0)
            output, ended, _ = out.read(1 << 20).decode(errors="replace").rpartition("\n" + token)
        passed += bool(ended) and (not stdin_test or output.split() == str(test["output"]).split())
    return passed / max(len(tests), 1)

def fenced(text: str) -> str:
    """The last ``` block, or the text."""
    blocks = text.split("```")
    return re.sub(r"^[\w+-]*\n", "", blocks[-2 if len(blocks) % 2 else -1]) if len(blocks) > 1 else text

def read_code(text: str, record: dict) -> tuple[str, str]:
    code = fenced(text).strip()
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoAnswer(f"not Python: {str(error)[:60]}") from None
    if not tree.body:
        raise NoAnswer("no code")
    return code, "Python"

def alike(a: list, b: list) -> float:
    return library("rapidfuzz.distance.Indel", "rapidfuzz").normalized_similarity(a, b)

def code_score(prediction, gold, record, settings) -> float:
    """Share of `tests` passed where the record has them and allow_code_execution is on; else likeness of the syntax
    trees (types of the nodes in order) to the gold's."""
    if record.get("tests") and settings.allow_code_execution:
        return run_tests(prediction, record["tests"], 0.8 * settings.timeout_s)
    trees = [[type(node).__name__ for node in ast.walk(ast.parse(code))] for code in (prediction, gold)]
    return alike(*trees)

def read_markup(text: str, record: dict) -> tuple[tuple, str]:
    """((tags in document order, Counter of attributes), method), by lxml: SVG must be well-formed XML, HTML must
    nest its tags right (HTML5's own tag names are unknown to libxml2, which is no error here)."""
    etree, svg = library("lxml.etree", "lxml"), canonical(record["problem_type"]) == "svg-code"
    text = fenced(text)
    start = re.search(r"<svg\b" if svg else r"<!doctype|<\w", text, re.I)
    if not start:
        raise NoAnswer("no markup")
    text = text[start.start():text.rfind(">") + 1]
    parser = etree.XMLParser(resolve_entities=False, no_network=True) if svg else etree.HTMLParser(no_network=True)
    try:
        root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise NoAnswer(f"does not parse: {str(error)[:60]}") from None
    wrong = [entry.message for entry in parser.error_log if not svg and re.search("mismatch|Unexpected end tag", entry.message)]
    if root is None or wrong:
        raise NoAnswer(f"does not parse: {wrong[0][:60] if wrong else 'empty'}")
    nodes = [node for node in root.iter() if isinstance(node.tag, str)]
    return ([node.tag for node in nodes], Counter((node.tag, *item) for node in nodes for item in node.attrib.items())), "parsed"

def markup_similarity(prediction, gold, *_) -> float:
    """Mean of the likeness of the tag sequences and the F1 of the attributes (name and value, by tag)."""
    total = sum(prediction[1].values()) + sum(gold[1].values())
    shared = 2 * sum((prediction[1] & gold[1]).values()) / total if total else 1.0
    return (alike(prediction[0], gold[0]) + shared) / 2

# ---------------------------------------------------------------- every type, one response

TYPES = {   # problem type: (read(text, record) -> (value, method), compare(value, gold, record, settings) -> 0..1)
    "multiple choice": (read_choice, equal), "numerical": (read_number, same_number),
    "regression": (read_number, relative_accuracy), "boolean": (read_boolean, equal),
    "binary classification": (read_class, equal), "math": (read_math, same_math), "ocr": (read_ocr, word_accuracy),
    "open-ended": (read_text, text_similarity), "free-form": (read_text, text_similarity),
    "video qa": (read_text, text_similarity), "video description": (read_text, text_similarity),
    "temporal grounding": (read_spans, span_iou), "spatial grounding": (read_boxes, boxes_iou),
    "spatial-temporal grounding": (read_tube, tube_iou), "tracking": (read_tube, track_iou),
    "segmentation": (read_segments, segment_score), "code": (read_code, code_score),
    "svg-code": (read_markup, markup_similarity), "html-code": (read_markup, markup_similarity),
    "llava preference": (read_preference, equal), "critic preference": (read_preference, equal),
    "rec": (read_number, same_number), "ssr": (read_boolean, equal), "crr": (read_boolean, equal),   # OVO-Bench
}
RISKY = {"math", "code"}             # their parsers may hang or eat memory: never in the caller's process

@functools.lru_cache(1024)
def canonical(name: str) -> str:
    """Problem type as in TYPES; case, spaces, hyphens, underscores do not matter. ValueError names the nearest."""
    squeezed = {re.sub(r"[\s_-]+", "", kind): kind for kind in TYPES} | {"caption": "video description"}
    key = re.sub(r"[\s_-]+", "", str(name)).casefold()
    if key not in squeezed:
        near = [squeezed[k] for k in difflib.get_close_matches(key, squeezed, 3, 0.4)] or list(TYPES)
        raise ValueError(f"problem_type {str(name)[:60]!r} is unknown; nearest: {', '.join(near)}")
    return squeezed[key]

def check_record(record: dict, settings: RewardSettings | None = None) -> None:
    """ValueError (one line, ready to print) for an unknown problem type or a gold that its reader cannot read."""
    settings = settings or RewardSettings()
    if settings.reward:
        return
    where = record.get("where") or record.get("key") or f"record {record.get('problem_id', '')}".strip()
    gold = gold_text(record)
    try:
        kind = canonical(record.get("problem_type"))
        if kind == "multiple choice" and not record.get("options"):
            raise ValueError("`options` are missing: multiple choice needs its list of choices")
        if kind == "code" and record.get("tests"):
            return
        value, _ = TYPES[kind][0](gold, record)
        if kind in ("temporal grounding", "tracking") and not (value if kind[1] == "e" else value[1]):
            raise NoAnswer("empty")
        if "spatial" in kind or kind in ("tracking", "segmentation"):
            to_gold_space(record, settings)
    except NoAnswer as error:
        raise ValueError(f"{where}: answer {gold[:80]!r} cannot be read as {kind} ({error})") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None

def soft_overlong(length: int, limit: int, buffer: int) -> float:
    """DAPO, eq. 13: 0 up to limit - buffer tokens, then linear to -1 at the limit, -1 beyond."""
    return max(-1.0, min(0.0, (limit - buffer - length) / max(buffer, 1)))

def repetition(text: str, n: int) -> float:
    """-(share of the n-grams of words that are repeats)."""
    tokens = words(text)
    grams = [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0

@functools.cache
def custom_reward(spec: str):
    path, _, name = spec.rpartition(":")
    try:
        module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        return getattr(module, name)
    except (OSError, AttributeError, ImportError, SyntaxError) as error:
        raise RewardError(f"reward {spec!r}: expected path/to/file.py:function ({error})") from None

def custom_score(record, response, answer, settings) -> dict:
    """Result of the user's function: a float is the accuracy, a dict may set any field. Format: the tag alone."""
    function, where = custom_reward(settings.reward), record.get("key") or record.get("where") or record.get("problem_id")
    try:
        value = function(record, response)
        value = dict(value) if isinstance(value, dict) else {"accuracy": float(value)}
        if not all(math.isfinite(float(value[key])) for key in ("accuracy", "format", "overall") if key in value):
            raise ValueError(f"not finite: {value}")
    except Exception as error:                 # whatever a user's function raises: named, and fatal unless told otherwise
        if settings.on_reward_error != "zero":
            raise RewardError(f"reward {settings.reward} failed on record {where}: {type(error).__name__}: {error}") from error
        value = {"accuracy": 0.0, "status": "invalid", "method": f"{type(error).__name__}: {error}"}
    accuracy = float(value.get("accuracy", value.get("overall", 0.0)))
    return {"accuracy": accuracy, "prediction": answer.strip()[:200], "status": "ok" if accuracy > 0 else "wrong",
            "method": "custom"} | value

def score_here(record: dict, response: str, settings: RewardSettings, length: int | None = None) -> dict:
    """Score in this process, without a time limit."""
    answer, mark, truncated = answer_region(response)
    out = {"overall": None, "accuracy": 0.0, "format": float(mark == "tag" and bool(answer.strip())), "prediction": None,
           "status": "truncated", "method": "thoughts never end"}
    if settings.reward:
        out |= custom_score(record, response, answer, settings)
    elif not truncated:
        read, compare = TYPES[canonical(record["problem_type"])]
        try:
            prediction, out["method"] = read(unbox(answer), record)
            gold, _ = read(gold_text(record), record)
            out["prediction"] = str(prediction)[:200]
            out["accuracy"] = float(compare(prediction, gold, record, settings))
            out["status"] = "ok" if out["accuracy"] > 0 else "wrong"
        except NoAnswer as error:
            out |= {"status": error.status, "method": str(error), "format": 0.5 * (mark == "tag")}
        except (MemoryError, RecursionError) as error:
            out |= {"status": "invalid", "method": type(error).__name__, "format": 0.5 * (mark == "tag")}
    penalties = 0.0
    if settings.overlong_limit:
        if length is None:
            raise ValueError("overlong_limit is set: score needs the response's length in tokens")
        out["overlong"] = soft_overlong(length, settings.overlong_limit, settings.overlong_buffer)
        penalties += settings.overlong_weight * out["overlong"]
    if settings.repetition_ngram:
        out["repetition"] = repetition(response, settings.repetition_ngram)
        penalties += settings.repetition_weight * out["repetition"]
    if out["overall"] is None:
        out["overall"] = settings.accuracy_weight * out["accuracy"] + settings.format_weight * out["format"] + penalties
    return out

def score(record: dict, response: str, settings: RewardSettings | None = None, length: int | None = None) -> dict:
    """Score one response (fields: module docstring). Types that may hang go through a killable worker."""
    settings = settings or RewardSettings()
    if settings.reward or canonical(record["problem_type"]) in RISKY:
        return shared_scorer(settings).score_many([record], [response], [length])[0]
    return score_here(record, response, settings, length)

# ---------------------------------------------------------------- many responses, in killable workers

class Scorer:
    """Worker processes that score one response at a time, and are replaced when one exceeds timeout_s or dies.
    They are fresh interpreters running this file: nothing is forked, the caller's __main__ is not imported."""

    def __init__(self, settings: RewardSettings | None = None, workers: int = 1):
        self.settings = settings or RewardSettings()
        self.workers = [None] * max(1, workers)

    def _start(self):
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(asdict(self.settings))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)

    def _ask(self, i, record, response, length) -> dict:
        self.workers[i] = self.workers[i] or self._start()
        try:
            self.workers[i].stdin.write(json.dumps([record, response, length]) + "\n")
            self.workers[i].stdin.flush()
            line = self.workers[i].stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:                               # killed by its own clock, or crashed
            self.workers[i].kill()
            self.workers[i].wait()
            self.workers[i] = None
            line = json.dumps({"overall": 0.0, "accuracy": 0.0, "format": 0.0, "prediction": None, "status": "invalid",
                               "method": f"no result within {self.settings.timeout_s} s"})
        result = json.loads(line)
        if "error" in result:
            raise RewardError(result["error"])
        return result

    def score_many(self, records, responses, lengths=None) -> list[dict]:
        """One dict per response, in order. lengths: tokens per response (for the overlong penalty)."""
        jobs = list(zip(records, responses, lengths or [None] * len(responses), strict=True))
        results, todo = [None] * len(jobs), deque(range(len(jobs)))

        def serve(i):
            while todo:
                try:
                    job = todo.popleft()
                except IndexError:
                    return
                results[job] = self._ask(i, *jobs[job])

        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(serve, range(len(self.workers))))
        return results

    def close(self):
        for worker in filter(None, self.workers):
            worker.kill()
            worker.wait()
        self.workers = [None] * len(self.workers)

@functools.cache
def shared_scorer(settings: RewardSettings) -> Scorer:
    return Scorer(settings)

def worker_main(settings: RewardSettings):
    """Reads [record, response, length] lines, writes result lines. What a custom reward prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not settings.reward:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    silent = open(os.devnull, "w")
    for line in sys.stdin:
        record, response, length = json.loads(line)
        try:
            if not settings.reward and canonical(record["problem_type"]) == "math":
                math_library()                     # imports before the clock starts
            faulthandler.dump_traceback_later(settings.timeout_s, exit=True, file=silent)    # its thread needs no GIL
            result = score_here(record, response, settings, length)
        except RewardError as error:
            result = {"error": str(error)}
        finally:
            faulthandler.cancel_dump_traceback_later()
        channel.write(json.dumps(result) + "\n")
        channel.flush()

# ---------------------------------------------------------------- the command

def read_rows(path: str) -> list[dict]:
    """Rows of a responses file, one per response. ValueError names the line."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
        responses = row.get("responses", [row["response"]] if "response" in row else None) if isinstance(row, dict) else None
        if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
            raise ValueError(f"{where}: expected an object with `response` (text) or `responses` (list of texts)")
        for response in responses:
            rows.append(row | {"where": where, "response": response})
            check_record(rows[-1])
    return rows

def main():
    parser = argparse.ArgumentParser(description="Score a file of responses.")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--out")
    parser.add_argument("--show", nargs=2, metavar=("STATUS", "N"))
    parser.add_argument("--explain", type=int, nargs="?", const=1, metavar="N")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--reward")
    parser.add_argument("--allow-code-execution", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker_main(RewardSettings(**json.loads(args.worker)))
    settings = RewardSettings(reward=args.reward, allow_code_execution=args.allow_code_execution)
    try:
        rows = read_rows(args.file)
        rows = rows[args.explain - 1:args.explain] if args.explain else rows
        scorer = Scorer(settings, args.workers)
        results = scorer.score_many(rows, [row["response"] for row in rows])
        scorer.close()
    except (OSError, ValueError, RewardError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if args.explain:
        for row, result in zip(rows, results):
            print(json.dumps({"problem_type": row["problem_type"], "gold": gold_text(row),
                              "region": answer_region(row["response"])[0][-500:], **result}, indent=1, ensure_ascii=False))
        return
    groups = defaultdict(list)
    for row, result in zip(rows, results):
        groups[row["problem_type"]].append(result)
        groups["all"].append(result)
    print(f"{'problem type':28}{'n':>7}{'accuracy':>10}{'format':>8}{'invalid':>9}{'truncated':>11}")
    for kind, group in groups.items():
        rates = [sum(map(key, group)) / len(group) for key in (lambda r: r["accuracy"], lambda r: r["format"],
                 lambda r: r["status"] == "invalid", lambda r: r["status"] == "truncated")]
        print(f"{kind:28}{len(group):7}{rates[0]:10.4f}{rates[1]:8.3f}{rates[2]:9.3f}{rates[3]:11.3f}")
    if args.out:
        temp = Path(args.out + ".tmp")
        temp.write_text("".join(json.dumps(row | result, ensure_ascii=False) + "\n" for row, result in zip(rows, results)))
        os.replace(temp, args.out)
    if args.show:
        shown = [(row, result) for row, result in zip(rows, results) if result["status"] == args.show[0]]
        for row, result in shown[:int(args.show[1])]:
            print(f"\n{row['where']} [{row['problem_type']}] gold {gold_text(row)!r}, read {result['prediction']!r} "
                  f"({result['method']})\n{row['response'][-600:]}")

if __name__ == "__main__":
    main()
