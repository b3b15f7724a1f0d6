"""Score answers: one scorer for training, validation, evaluate.py and this command.

    python rewards.py responses.jsonl                     # accuracy, format, invalid, truncated per type
    python rewards.py responses.jsonl --out scored.jsonl  # every response with its scores
    python rewards.py responses.jsonl --show wrong 5      # print examples: ok | wrong | invalid | truncated
    python rewards.py responses.jsonl --explain 3         # response 3: what was read, and by which rule

A row is a record with `response` or `responses`, as in training's rollouts/step_*.jsonl. score() returns
    accuracy    0..1; the formula is beside each comparer below
    format      1 = a closed <answer> tag, its content of the type's form; 0.5 = tag, other content; 0 = none
    overlong, repetition   -1..0, only when switched on;  overall   the weighted sum of all these
    prediction, method     what was read, and the rule that read it
    status      ok (accuracy > 0) | wrong (read, accuracy 0) | invalid (unreadable) | truncated (in <think>)
A problem type is a pair in TYPES: a reader (text to value, or NoAnswer) and a comparer (two values to 0..1).
Patterns are linear in the text; what may hang all the same (math, code, custom rewards) runs in a worker that
is killed at the time limit.
"""
import argparse, ast, bisect, contextlib, difflib, faulthandler, functools, itertools, json, logging, math
import os, re, resource, runpy, subprocess, sys, tempfile, time, unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from rapidfuzz.distance import Indel, LCSseq, Levenshtein

@dataclass(frozen=True)
class RewardSettings:
    accuracy_weight: float = 0.9
    format_weight: float = 0.1
    reward: str | None = None            # "path/to/file.py:function" in place of the rules below
    on_reward_error: str = "stop"        # stop | zero, when that function raises
    timeout_s: float = 10.0              # per response
    allow_code_execution: bool = False   # run a record's `tests` on code answers (limits: run_tests)
    box_space: str | None = None         # gold boxes of records without `box_space`: pixels | 0-1000 | 0-1
    answer_box_space: str = "0-1000"     # the model's boxes, wherever the gold's space is known
    overlong_limit: int = 0              # tokens; 0 = no overlong penalty
    overlong_buffer: int = 0             # tokens before the limit over which the penalty grows to -1
    overlong_weight: float = 1.0
    repetition_ngram: int = 0            # words per n-gram; 0 = no repetition penalty
    repetition_weight: float = 0.1

class NoAnswer(ValueError):
    """The text holds no answer of this type: status invalid."""

class Hedge(NoAnswer):
    """It holds several: status wrong."""

class RewardError(RuntimeError):
    """The custom reward failed. The message is ready to print."""

def need(condition, reason: str):
    if not condition:
        raise NoAnswer(reason)

# ---------------------------------------------------------------- the answer inside the response

def answer_region(response: str) -> tuple[str, bool, bool]:
    """(answer text, in a closed tag?, cut off inside its thoughts?). The last </think> and <answer> count."""
    text = response.rpartition("</think>")[2]
    if "<think>" in text:
        return "", False, True
    answer, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    return answer, bool(closed) and "<answer>" in text, False

def unbox(text: str) -> str:
    r"""Content of the last \boxed{...}, "" if it never closes; the text itself where there is none."""
    _, boxed, content = text.rpartition("\\boxed{")
    depths = itertools.accumulate((c == "{") - (c == "}") for c in content)
    end = next((i for i, depth in enumerate(depths) if depth < 0), 0)
    return content[:end] if boxed else text

def gold_text(record: dict) -> str:
    """The gold answer. A tagged `solution` wins: benchmarks use `answer` for the option's text beside it."""
    gold, solution = record.get("answer"), record.get("solution")
    gold = solution if gold is None or re.search("<answer>|<think>", str(solution)) else gold
    gold = json.dumps(gold) if isinstance(gold, (dict, list)) else str("" if gold is None else gold)
    text, tagged, _ = answer_region(gold)
    # Charades-STA's gold stands inside <think>, behind it is a broken tag: take the whole text without tags.
    return (text if tagged else re.sub("</?(?:think|answer)>", " ", gold)).strip()

SIGNS = {"-": "‐‑‒–—―−", '"': "“”„«»", "'": "‘’´", "/": "⁄", "": "\u200b\u200c\u200d\ufeff"}
SIGNS = {ord(char): sign for sign, chars in SIGNS.items() for char in chars}

def plain(text: str) -> str:
    r"""NFKC, one kind of dash and quote, no Markdown or LaTeX dressing (**B**, $B$, \text{B}, `B`)."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", r"^\g<0>", text)      # NFKC alone turns n² into n2
        text = re.sub("(?<=[0-9])(?=[¼½¾⅐-⅞])", " ", text)      # and 1½ into 11/2
        text = re.sub("[\u0300-\u036f]{9,}|[\ufdfa\ufdfb]", "", text)   # quadratic; 18 characters
        text = unicodedata.normalize("NFKC", text).translate(SIGNS)
    text = re.sub(r"\\(?:text|math)(?:rm|bf)?\s*\{([^{}]*)\}", r" \1", text)
    text = text.replace("{,}", ",").replace("\\%", "%")
    return re.sub(r"\\[,!()\[\]]|[$`]|\*+(?!\d)|(?<!\d)\*+", "", text).strip()

def prose(text: str) -> str:
    """plain() text of at most 4,000 characters: answers in prose stand at either end."""
    return plain(text if len(text) <= 4000 else text[:1000] + "\n" + text[-3000:])

def phrase(text: str) -> str:
    """For comparing words: lower case, single spaces, no outer punctuation, no leading article."""
    text = " ".join(plain(text).lower().split()).strip(" .,;:!?\"'()[]<>。、")
    return re.sub(r"^(?:an?|the) (?=.)", "", text)

# ---------------------------------------------------------------- choices: options, yes or no, preferences

# Every mention of a label is first replaced by one private character (MARK), with FREE behind it if it speaks
# for itself: an option's text does, a letter must be declared. So one grammar serves all types of choice.
MARK, FREE = "[\ue000-\ue0ff]", "\uf000"
SAID = f"({MARK}){FREE}?"
FILL = (rf"(?:(?!{MARK})[\W_]|\b(?:is|was|be|would|should|must|will|the|an?|option|choice|letter|answer|most|"
        r"likely|probably|clearly|definitely|number|response)\b|[是为应该选择项]){0,20}")
CUE = (r"(?:\b(?:ans|response|it is|it's|must be|choose|pick|select|prefer|go (?:with|for)|say|think|believe|"
       rf"guess|so|thus|therefore|hence|finally|not {MARK}{FREE}?,? but|(?:answer|verdict|(?:correct|right|"
       r"best) (?:option|choice))(?:\b[^.\n\ue000-\uf000]{0,40}\b(?:is|be))?)\b|\b\w{1,30}\s?[:=]|"
       r"=>|答案|(?<!不)[选是])")
AFTER = r"[)\]\"'.]{0,3}\s?"
RIGHT = AFTER + (r"(?:(?:is|are|would be|must be|seems|looks) (?:(?:to be|the|most|only|my|likely) ){0,3}"
                 r"(?:correct|right|best|true|final|answer|better)\b|wins\b|"
                 r"(?:选项)?[才是为]{0,2}\s?(?:正确|对的|答案|更好))")
WRONG = AFTER + (r"(?:(?:is|are|seems|looks|can't be|cannot be)\s(?:\w+ly\s)?(?:not|wrong|incorrect|false|"
                 r"ruled out|worse)\b|isn't\b|是?[错不])")
NOT = (r"(?:\b(?:not|never|neither|nor|no|than|instead of)|n't|不是?|不选|排除|而非)"
       r"(?:[\s\"'(]|\b(?:an?|the|option|choice)\b|选项){0,8}")
OR = AFTER + r"(?:[,/&+~、|-]|\b(?:or|and|to)\b|和|或|以及)\s?(?:(?:and|or|maybe|option) ){0,2}[(\[\"']{0,3}"
OPENS = r"^(?:[\W_]|option|choice|definitely|probably|clearly|likely|选项|选){0,20}?"
ALONE = r"(?=[)\]]|\s?(?:[.:,、。;-]|$)|\s(?:rather|instead|because|since)\b)"
REJECTED = re.compile(f"{NOT}{SAID}|{SAID}{WRONG}", re.I)
HEDGED = re.compile(rf"{SAID}{OR}(?!\1)(?=({MARK}))", re.I)
RULES = {"declared": re.compile(f"{CUE}{FILL}{SAID}|{SAID}{RIGHT}", re.I),
         "opens a line": re.compile(f"{OPENS}(?:({MARK}){FREE}|{SAID}{ALONE})", re.I | re.M),
         "only one named": re.compile(f"({MARK}){FREE}"),
         "ends the text": re.compile(rf"[.!?。(]\s*{SAID}[\s.)]*\Z")}

def decide(text: str, letters: dict, free: dict, weak: dict) -> tuple[str, str]:
    """(label, method) that a text settles on: its only letter, else the last label declared, else the one
    that opens a line, else the only one named. free, weak: {label: pattern of its mentions}."""
    whole = re.fullmatch(r"[\W_]*([A-Za-z0-9])[\W_]*", text)
    if whole and whole[1].upper() in letters:
        return letters[whole[1].upper()], "letter"
    text, labels = re.sub(f"{MARK}|{FREE}", " ", text), list(free | weak)
    for patterns, suffix in ((free, FREE), (weak, "")):
        for label, pattern in patterns.items():
            text = re.sub(pattern, chr(0xE000 + labels.index(label)) + suffix, text)

    def spots(pattern):                            # (place, label) of each match
        found = [match.start(match.lastindex) for match in pattern.finditer(text)]
        return [(i, labels[ord(text[i]) - 0xE000]) for i in found]

    rejected = {label: i for i, label in spots(REJECTED)}
    hedged = {match.start(k) for match in HEDGED.finditer(text) for k in (1, 2)}
    for method, pattern in RULES.items():
        found = [(i, label) for i, label in spots(pattern) if i > rejected.get(label, -1)]
        found = found[-1:] if method == "declared" else found
        if len({label for _, label in found}) > 1 or hedged & {i for i, _ in found}:
            raise Hedge("several answers")
        if found:
            return found[-1][1], method
    raise Hedge("several answers") if hedged else NoAnswer("no choice named")

@functools.lru_cache(4096)
def option_phrases(options: tuple) -> dict[str, str]:
    """{"A": phrase, ...}; the options' own letters when every option has one and none repeats."""
    options = [plain(str(option)) for option in options]
    own = [re.match(r"\(?([A-Z])(?:[.:)、,]|\s-)\s*(.*)", option, re.S) for option in options]
    if all(own) and len({match[1] for match in own}) == len(own):
        return {match[1]: phrase(match[2]) for match in own}
    return {chr(65 + i): phrase(option) for i, option in enumerate(options[:26])}

def read_choice(text: str, record: dict, *_) -> tuple[str, str]:
    """Letter of the chosen option. Letters are case-sensitive unless the letter is the whole answer."""
    texts, said = option_phrases(tuple(record.get("options") or ())), phrase(text)
    unique = {option: letter for letter, option in texts.items() if list(texts.values()).count(option) == 1}
    if said in unique and said:
        return unique[said], "option text"
    free = {unique[option]: r"(?i)(?<![\w.])(?:(?:an?|the)\s+)?" + r"\s+".join(map(re.escape, option.split()))
            + r"(?!\w|[.,]\d)" for option in sorted(unique, key=len)[::-1] if option.isdigit() or option[1:]}
    # "A man", "I think": words, not letters, unless the sentence goes on about the letter.
    word = r"|\s+(?!(?:because|since|as|and|but|or|due|is|in|for|from|seems|with)\b)[a-z]"
    weak = {letter: rf"(?<![A-Za-z0-9]){letter}(?![A-Za-z0-9]|'\w{word if letter in 'AI' else ''})"
            for letter in texts}
    return decide(prose(text), dict(zip(texts, texts)), free, weak)

YES = r"(?i)\b(?:yes|true|correct|right|not (?:false|wrong))\b|(?<!\w)[是对真]的?(?!\w)|(?<!不)正确"
NO = (r"(?i)^\W*no\b|(?<!not )\b(?:false|incorrect|wrong|untrue)\b|(?:\bnot|n't) (?:true|correct|right)\b|"
      r"(?<!\w)(?:否|没有|错误?|假)的?(?!\w)|不是的?(?!\w)|不对|不正确")

def read_boolean(text: str, record: dict, *_) -> tuple[str, str]:
    """yes or no. Binary classification also has `options`, or other labels, which must match as a whole."""
    if record.get("options"):
        return read_choice(text, record)
    gold = phrase(gold_text(record))
    if "class" in record["problem_type"].lower() and not re.fullmatch(f"{YES}|[yntf]|{NO[4:]}", gold):
        return short_answer(text, gold), "label"
    letters = {"Y": "yes", "T": "yes", "N": "no", "F": "no"}
    return decide(prose(text), letters, {"no": NO, "yes": YES}, {"no": r"(?i)\bno\b"})

SIDE = r"(?i)(?:response|answer|model|assistant|caption|critique|output)\s*#?\s*(?:{0})\b|\b{1}\b|\[\[{2}\]\]"
SIDES = {"1": SIDE.format("1|a|one", "first", "a"), "2": SIDE.format("2|b|two", "second", "b"),
         "tie": r"(?i)\b(?:tied?|draw|equal|equally|neither|both|the same)\b|\[\[c\]\]|平局"}

def read_preference(text: str, record: dict, *_) -> tuple[str, str]:
    """1, 2 or tie, in the sets' spellings: "A", "[[B]]", "Response 1 is better", "the second", "equal"."""
    letters = {"A": "1", "1": "1", "B": "2", "2": "2", "C": "tie", "0": "tie"}
    return decide(prose(text), letters, SIDES, {"1": r"\bA\b", "2": r"\bB\b"})

def equal(prediction, gold, *_) -> float:
    return float(prediction == gold)

# ---------------------------------------------------------------- numbers, first rewritten as digits

ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "sixteen seventeen eighteen nineteen").split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
VALUES = dict(zip([*ONES, *TENS, *"零一二三四五六七八九〇两"], [*range(20), *range(20, 100, 10), *range(10), 0, 2]))
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9} | dict(zip("十百千万亿", (1, 2, 3, 4, 8)))
WORD = "(?:" + "|".join([*TENS, *ONES[::-1], *list(POWERS)[:4]]) + ")"
HANZI = "[零一二三四五六七八九〇两十百千万亿]"
NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"

def words_value(match) -> str:
    total = 0
    for word in re.findall(f"{WORD}|{HANZI}", match[0].lower()):
        scale = 10 ** POWERS.get(word, 0)      # multiplies what is smaller: 2 thousand 3 | hundred
        total += VALUES[word] if word in VALUES else max(total % scale, 1) * scale - total % scale
    return str(total)

def clock_value(match) -> str:
    hours, minutes, seconds = (float((part or "0").replace(",", ".")) for part in match.groups())
    return str(hours * 3600 + minutes * 60 + seconds)

THOUSANDS = {r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+(?![,\d])|(?: \d{3})+(?![\d,/]))":       # 1,234 and 1 234
             lambda match: re.sub("[, ]", "", match[0])}
DIGITS = {
    r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}": r" \1/\2",
    r"(?<=\d)\s?(thousand|[mb]illion|[万亿])": lambda match: f"e{POWERS[match[1].lower()]}",
    r"(?:\b(?:an?|one) )?\bhalf\b(?! of\b)": "1/2",
    rf"\b(?:a (?={WORD}))?{WORD}(?:(?:\s+and\s+|\s+|-){WORD})*\b(?!\s+of\b)|"
    rf"(?<!第){HANZI}+(?![共直样些起定下般切])": words_value,
    r"(?<=\d) and (?=1/2)": " ",
    r"\b(?:minus|negative) (?=\d)": "-",
    r"(?<=\d)\s?(?:[x*·×]|\\times|\\cdot)\s?10\s?\^\s?\{?([-+]?\d+)\}?": r"e\1",                 # 3 x 10^8
    r"(?<![\d.])10\s?\^\s?\{?([-+]?\d+)\}?": r"1e\1"}
SECONDS = {
    r"(?<![\d.:])(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)(?![\d:])": clock_value,
    r"(?<![\d.])([\d.]+)(?=\s?(?:-|to|and|到|至)\s?[\d.]+\s?(min|分))": r"\1 \2"} | DIGITS | {
    r"(?<![a-z\d.])(?:(\d+)\s?(?:hours?|hrs?|h|小时)\s?)?(\d+(?:\.\d+)?)\s?(?:minutes?|mins?|m|分钟?)"
    r"(?:\s?(?:and )?(\d+(?:\.\d+)?)\s?(?:seconds?|secs?|s|秒))?(?![a-z])": clock_value,
    r"(?<=\d)\s?(?:seconds?|secs?|s|秒|st|nd|rd|th)(?![a-z])": ""}

def rewrite(text: str, rules: dict) -> str:
    """Numbers as digits, by THOUSANDS, DIGITS or SECONDS."""
    for pattern, replacement in rules.items():
        text = re.sub(pattern, replacement, text, flags=re.I)
    return text

QUANTITY = re.compile(rf"(?<![A-Za-z_^\d])(?<!\d\.)((?<![\d)%A-Za-z])-\s?)?(?:(\d+)\s+(?=\d+\s?/))?({NUMBER})"
                      rf"(?:\s?/\s?({NUMBER}))?(\s?(?:%|per\s?cent\b))?", re.I)
CUES = {"declared": r"\b(?:answer|result|final(?:ly)?)\b|答案",
        "concluded": r"[=≈]|\b(?:so|thus|therefore|hence|making|total|equals)\b|[总一]共|所以",
        "last sentence": r"[.!?。]\s|\n"}
ALSO = re.compile(r"\s*(?:[a-z]+\s*)?(?:\b(?:or|to)\b|[-~/:±至到或])\W*|\s*(?:\band\b|[,;+x*·、和])?\s*", re.I)

def quantity(match) -> float:
    sign, whole, top, low, _ = match.groups()
    value = float(whole or 0) + float(top) / (float(low or 1) or math.nan)
    return -value if sign else value

def read_number(text: str, *_) -> tuple[tuple[float, bool], str]:
    """((value, has a percent sign), method): the number after the last "answer", else after the last "so" or
    "total", else the first of the last sentence that has one. Ranges, alternatives, sums are hedges."""
    text = rewrite(prose(text), THOUSANDS | DIGITS)
    if re.fullmatch(r"\W*(?:none|no|nil|nothing|没有|无)\W*", text, re.I):
        return (0.0, False), "none is zero"
    bare = re.sub(r"\([^()]*\)?", lambda match: " " * len(match[0]), text)      # without "(10.5 ft)"
    text = bare if QUANTITY.search(bare) else text
    found = list(QUANTITY.finditer(text))
    need(found, "no number")
    for method, cue in CUES.items():
        ends = [match.end() for match in re.finditer(cue, text, re.I) if match.end() <= found[-1].end()]
        if ends:
            found = [match for match in found if match.end() >= ends[-1]]
            break
    value, end = quantity(found[0]), found[0].end()
    need(math.isfinite(value) and not re.match(r"[.,]\d|\^", text[end:end + 2]), "malformed number")
    for other in itertools.takewhile(lambda other: ALSO.fullmatch(text, end, other.start()), found[1:]):
        if quantity(other) != value:
            raise Hedge("several numbers")
        end = other.end()
    return (value, bool(found[0][5])), method

def same_number(prediction, gold, *_) -> float:
    """1 if equal after rounding to 2 decimals. 50% is .5, and 50 if the gold has no %."""
    (p, p_percent), (g, g_percent) = prediction, gold
    pairs = [(p, g)] + [(p / 100, g) if p_percent else (p, g / 100)] * (p_percent != g_percent)
    return float(any(round(a, 2) == round(b, 2) for a, b in pairs))

def relative_accuracy(prediction, gold, *_) -> float:
    """MRA (VSI-Bench): share of t in numpy.linspace(.5, .95, 10) with |p - g| / |g| <= 1 - t."""
    p, g = prediction[0], gold[0]
    error = abs(p - g) / abs(g) if g else 0.0 if p == g else math.inf
    return sum(error <= 1 - t for t in [*(0.5 + i * ((0.95 - 0.5) / 9) for i in range(9)), 0.95]) / 10

# ---------------------------------------------------------------- times, boxes and points: one JSON reader

N = r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)"
RANGE = re.compile(rf"{N}(?=\D{{0,12}}(?:\b(?:to|and|until|till|ends?|stops?|finish(?:es)?)\b|->?|~|→|至|到|和)"
                   rf"\D{{0,20}}{N})|\A\D*{N}[^\w.]+{N}\D*\Z", re.I)
FIELDS = re.compile("time|window|interval|segment|span|moment|start|begin|end|box|^[xy]_?(?:min|max|[12])$")

def json_value(text: str):
    """The last JSON object or list in the text, None where there is none; single quotes are forgiven."""
    need(text.count("[") == text.count("]") and text.count("{") == text.count("}"), "brackets left open")
    text = text if '"' in text else text.replace("'", '"')
    value, end, failures = None, 0, 0
    for opening in re.finditer(r"[\[{]", text):
        if opening.start() >= end and failures < 20:
            try:
                value, end = json.JSONDecoder().raw_decode(text, opening.start())
            except (ValueError, RecursionError):
                failures += 1
    return value

def numbers(value) -> list[float]:
    """Numbers of a JSON value in order, those in strings too; other strings are labels. Of an object, those
    of the fields named in FIELDS, where it has any."""
    if isinstance(value, dict):
        value = [value[key] for key in value if FIELDS.search(key)] or list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    text = str(value)
    labelled = re.search(r"[^\W\d]", text.replace("to", ""))           # so are NaN, null and true
    found = [] if labelled else re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?", text)
    need(all(abs(float(number)) < 1e9 for number in found), "too large a number")
    return [float(number) for number in found]

def coordinates(value, scale) -> list[float]:
    return [x * scale[i % 2] for i, x in enumerate(numbers(value))]

def boxes_of(value, scale) -> dict:
    """{second: (x1, y1, x2, y2)}, corners sorted. Boxes without seconds are counted from 0."""
    xs, boxes = coordinates(value, scale), {}
    if not isinstance(value, dict) or not all(re.fullmatch(r"[\d.]+", key) for key in value):
        value = {i // 4: xs[i:i + 4] for i in range(0, len(xs), 4)}
        scale = 1, 1
        need(len(xs) % 4 == 0, "no box of four numbers")
    for second, box in value.items():
        a, b, c, d = xs if len(xs := coordinates(box, scale)) == 4 else (0, 0, 0, 0)
        boxes[round(float(second), 3)] = (min(a, c), min(b, d), max(a, c), max(b, d))   # "8.0" is "8"
    return boxes

def box_scale(record: dict, settings: RewardSettings) -> tuple[float, float]:
    """Factors (x, y) from the model's coordinates to the gold's; (1, 1) where no `box_space` is declared."""
    spaces = record.get("box_space") or settings.box_space, settings.answer_box_space
    if spaces[0] is None:
        return 1.0, 1.0
    sizes = {"0-1000": (1000, 1000), "0-1": (1, 1), "pixels": (record.get("width"), record.get("height"))}
    if any(space not in sizes or not all(sizes[space]) for space in spaces):
        raise ValueError(f"box_space {spaces}: choose pixels (with the record's width, height), 0-1000, 0-1")
    return tuple(gold / answer for gold, answer in zip(sizes[spaces[0]], sizes[spaces[1]]))

def read_marks(text: str, record: dict, scale=(1, 1)) -> tuple[dict, str]:
    """{"time": [s, e], "boxes": {"8": [x1, y1, x2, y2], ...} or one box, "positive_points": [[x, y], ...],
    "negative_points": ..., "mask": ...}, what the type needs of them; times or a box in other forms too."""
    kind, method = canonical(record["problem_type"]), "JSON"
    name = "time" if kind == "temporal grounding" else "boxes"
    value = json_value(rewrite(plain(text), SECONDS))
    if value is None:
        text, method = rewrite(prose(text), SECONDS), "prose"
        ranges = [[time for time in match.groups() if time] for match in RANGE.finditer(text)]
        value = ([[]] + ranges)[-1] if name == "time" else re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)[:99]
    fields = value if isinstance(value, dict) and {"time", "boxes"} & set(value) else {name: value}
    marks = {"time": sorted(numbers(fields.get("time"))), "mask": fields.get("mask"),
             "boxes": boxes_of(fields.get("boxes", {}), scale)}
    for name in ("positive_points", "negative_points"):
        xs = coordinates(fields.get(name), scale)
        marks[name] = list(zip(xs[::2], xs[1::2]))
    need(len(marks["time"]) == 2 or "temporal" not in kind, "no pair of times")
    need(marks["boxes"] or "temporal" in kind, "no box")
    return marks, method

def span_iou(prediction, gold, *_) -> float:
    """Seconds in both over seconds in either."""
    (s, e), (t, f) = prediction["time"], gold["time"]
    both = max(0.0, min(e, f) - max(s, t))
    return both / max(e - s + f - t - both, 1e-9)

def box_iou(a, b) -> float:
    """Area in both over area in either."""
    both = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return both / max((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both, 1e-9)

def track_iou(prediction, gold, *_, seconds=None) -> float:
    """Mean box IoU over the gold's frames: leaving out the hard ones does not pay."""
    p, g, seconds = prediction["boxes"], gold["boxes"], seconds or gold["boxes"]
    return sum(box_iou(p[t], g[t]) for t in seconds if t in p and t in g) / max(len(seconds), 1)

def boxes_iou(prediction, gold, *_) -> float:
    """Mean box IoU over the seconds (or, without seconds, places in the list) of either: extra boxes cost."""
    return track_iou(prediction, gold, seconds=prediction["boxes"] | gold["boxes"])

def tube_iou(prediction, gold, *_) -> float:
    """.5 temporal IoU + .5 boxes_iou; temporal IoU alone if the gold has no box."""
    time_iou = span_iou(prediction, gold)
    return 0.5 * time_iou + 0.5 * boxes_iou(prediction, gold) if gold["boxes"] else time_iou

def inside(point, gold) -> bool:
    """In a box, or in a mask: COCO run lengths {"size": [h, w], "counts": [...]} by column, zeros first."""
    x, y = point
    if not gold["mask"]:
        return any(box[0] <= x <= box[2] and box[1] <= y <= box[3] for box in gold["boxes"].values())
    (height, width), ends = gold["mask"]["size"], list(itertools.accumulate(gold["mask"]["counts"]))
    return 0 <= x < width and 0 <= y < height and bisect.bisect_right(ends, int(x) * height + int(y)) % 2 == 1

def segment_score(prediction, gold, *_) -> float:
    """.5 box IoU + .25 share of positive points inside + .25 of negative points outside the gold box or mask.
    With a time in the gold (video): .3, .2, .2 and .3 exp(-|seconds off| / 2). OneThinker's weights."""
    positive, negative = ([inside(point, gold) for point in prediction[name]]
                          for name in ("positive_points", "negative_points"))
    box = boxes_iou(prediction, gold)
    points = sum(positive) / max(len(positive), 1) + negative.count(False) / max(len(negative), 1)
    off = abs((prediction["time"] or [math.inf])[0] - (gold["time"] or [0])[0])
    return 0.3 * box + 0.2 * points + 0.3 * math.exp(-off / 2) if gold["time"] else 0.5 * box + 0.25 * points

# ---------------------------------------------------------------- text and math

CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"

def words(text: str) -> list[str]:
    """Lower-case words without outer punctuation; CJK text by character."""
    found = re.findall(rf"[{CJK}]|[^\s{CJK}]+", plain(text).lower())
    return [word for word in (word.strip(".,;:!?\"'()[]<>。、") for word in found) if word]

def read_text(text: str, *_) -> tuple[str, str]:
    need(text.strip(), "empty answer")
    return text.strip(), "text"

def read_ocr(text: str, record: dict, *_) -> tuple[str, str]:
    """The text, or the part that a sentence quotes or announces: The sign reads "STOP"; Text: STOP."""
    quotes = re.findall(r"\"([^\"]+)\"|^(?:text|answer)\s?: *(.+)", plain(text), re.I)
    if len(quotes) == 1 and '"' not in plain(gold_text(record)):
        return "".join(quotes[0]), "quoted text"
    return read_text(text)

def word_accuracy(prediction, gold, *_) -> float:
    """1 - word error rate, at least 0."""
    gold = words(gold)
    return max(0.0, 1 - Levenshtein.distance(gold, words(prediction)) / max(len(gold), 1))

def short_answer(text: str, gold: str) -> str:
    """An answer as a phrase to compare with the gold's, without "It is a" or "The answer is" in front."""
    answer = phrase(text)
    lead = re.match(r"(?:.*(?:\b(?:is|are|was|were)\b|:|是)|it's)\W*", answer)
    return answer if answer == gold or not lead else phrase(answer[lead.end():])

@functools.cache
def rouge():
    from rouge_score import rouge_scorer                      # loads nltk: only runs that need it wait
    return rouge_scorer.RougeScorer(["rouge1", "rouge2"], tokenizer=SimpleNamespace(tokenize=words))

def text_similarity(prediction, gold, *_) -> float:
    """Golds up to five words: the same phrase. Longer ones: mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    gold_words, answer_words = words(gold), words(prediction)
    if len(gold_words) <= 5:
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    scores = rouge().score(gold, prediction)
    # rouge-score's own ROUGE-L fills an n x m table in Python; rapidfuzz finds the same length bit-parallel.
    longest = 2 * LCSseq.similarity(gold_words, answer_words) / (len(gold_words) + len(answer_words))
    return (scores["rouge1"].fmeasure + scores["rouge2"].fmeasure + longest) / 3

LATEX = dict(zip(map(ord, "π∞°≤≥×·∪±%"),
                 r"\pi |\infty |^\circ |\le |\ge |\times |\cdot |\cup |\pm |\%".split("|")))

@functools.lru_cache(4096)
def parsed_math(text: str) -> list:
    import math_verify                                        # loads sympy
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)     # its own timeout is off: ours kills
    text = re.sub(r"√\s?(\d+)", r"\\sqrt{\1}", text.replace("\\%", "%").replace("\\$", ""))
    text = re.sub(r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp)\b", r"\\\1", text)
    return math_verify.parse(f"${text.translate(LATEX)}$", parsing_timeout=None)

def read_math(text: str, record: dict, *_) -> tuple[str, str]:
    r"""What follows the last "answer is", in it the last $...$; the whole text where there is neither."""
    if record.get("options"):
        with contextlib.suppress(NoAnswer):
            return read_choice(text, record)[0], "option"
    parts = re.split(r"(?i)\banswer(?:\s+is)?\s*[:=]?|答案(?:是|为)?[:：]?", text)
    text = parts[-1].strip().split("\n")[0] if parts[1:] else text
    text = (re.findall(r"\$([^$]+)\$", text) or [text])[-1]
    text = re.sub(r"\\(?:text|math)(?:rm|bf)?\s*\{([^{}]*)\}", r" \1", text)
    text = unicodedata.normalize("NFKC", re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", r"^{\g<0>}", text)).translate(SIGNS)
    return read_text(text.strip(" .,;*`\n")[:2000])

def same_math(prediction, gold, record, settings) -> float:
    """Equality by math-verify: surds, sets of answers, intervals, equations. Words are compared as words."""
    options = option_phrases(tuple(record.get("options") or ()))
    gold = options[gold] if gold in options and prediction not in options else gold
    if plain(prediction).split() == plain(gold).split():
        return 1.0
    if re.search(r"^\(?[A-Za-z]\)?$|(?<!\\)\b(?!sin|cos|tan|log|sqrt|exp)[A-Za-z]{3,}", gold):
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    p, g = parsed_math(prediction), parsed_math(gold)
    from math_verify import verify
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
sys.stdout.write("\n" + token)
"""

def run_test(code: str, test, limit_s: float) -> bool:
    """Does code pass? A test is Python text run after it, or {"input": stdin, "output": stdout}. It runs in a
    temporary folder, with limits on time, memory (1 GB), file size, processes; no sockets, no files outside.
    This keeps out accidents and cheap tricks; against attacks on purpose, run all of it in a container."""
    token, asks = os.urandom(16).hex(), isinstance(test, dict)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        Path(folder, "answer.py").write_text(code if asks else f"{code}\n{test}", "utf-8", "replace")
        try:                                       # on timeout, run() kills it; it could not start others
            child = subprocess.run(
                [sys.executable, "-I", "-c", CHILD, str(math.ceil(limit_s))], timeout=limit_s, cwd=folder,
                input=str(test["input"] if asks else "").encode(), stdout=out, stderr=subprocess.DEVNULL,
                env={"TOKEN": token})
        except subprocess.TimeoutExpired:
            return False
        out.seek(0)
        printed, ended, _ = out.read(1 << 20).decode(errors="replace").partition("\n" + token)
    right = printed.split() == str(test["output"]).split() if asks else bool(ended)
    return right and child.returncode == 0

def fenced(text: str) -> str:
    """Inside of the last ``` block, or the text."""
    blocks = text.split("```")
    return re.sub(r"^[\w+-]*\n", "", blocks[-2 if len(blocks) % 2 else -1]) if len(blocks) > 1 else text

def read_code(text: str, *_) -> tuple[str, str]:
    code = fenced(text).strip()
    try:
        need(ast.parse(code).body, "no code")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoAnswer(f"not Python: {str(error)[:60]}") from None
    return code, "Python"

def code_score(prediction, gold, record, settings) -> float:
    """Share of `tests` passed if allow_code_execution; else 2 LCS / sum of lengths of the syntax nodes."""
    if record.get("tests") and settings.allow_code_execution:
        tests = [record["tests"]] if isinstance(record["tests"], (str, dict)) else record["tests"]
        deadline = time.monotonic() + 0.8 * settings.timeout_s
        return sum(run_test(prediction, test, deadline - time.monotonic()) for test in tests) / len(tests)
    trees = ast.parse(prediction), ast.parse(gold)
    return Indel.normalized_similarity(*([type(node).__name__ for node in ast.walk(tree)] for tree in trees))

def read_markup(text: str, record: dict, *_) -> tuple[tuple, str]:
    """((tags in document order, Counter of attributes), method). SVG must be well-formed XML; HTML must close
    its tags in order (libxml2 calls HTML5's tag names unknown, which is no error here)."""
    from lxml import etree
    text, svg = fenced(text), "svg" in record["problem_type"].lower()
    start = re.search(r"(?i)<svg\b" if svg else r"(?i)<!doctype|<[a-z]", text)
    parser = etree.XMLParser(resolve_entities=False) if svg else etree.HTMLParser()
    try:
        root = etree.fromstring(text[start.start():text.rfind(">") + 1].encode("utf-8", "replace"), parser)
        nodes = [node for node in root.iter() if isinstance(node.tag, str)]
    except (etree.XMLSyntaxError, AttributeError, ValueError) as error:
        raise NoAnswer(f"no markup that parses: {str(error)[:60]}") from None
    errors = [entry.message for entry in parser.error_log]
    need(svg or not re.search("mismatch|Unexpected end tag", "\n".join(errors)), "tags that do not match")
    attributes = Counter((node.tag, *item) for node in nodes for item in node.items())
    return ([node.tag for node in nodes], attributes), "parsed"

def markup_similarity(prediction, gold, *_) -> float:
    """Mean of 2 LCS / sum of lengths of the tag sequences and F1 of the attributes (tag, name, value)."""
    total = prediction[1].total() + gold[1].total()
    shared = 2 * (prediction[1] & gold[1]).total() / total if total else 1.0
    return (Indel.normalized_similarity(prediction[0], gold[0]) + shared) / 2

# ---------------------------------------------------------------- every type, one response

CHOICE, BOOLEAN, PREFERENCE = ((read, equal) for read in (read_choice, read_boolean, read_preference))
NUMBER, MARKUP = (read_number, same_number), (read_markup, markup_similarity)
TEXT = (read_text, text_similarity)
TYPES = {  # (read(text, record, box scale) -> (value, method), compare(value, gold value, record, settings))
    "multiple choice": CHOICE, "numerical": NUMBER, "regression": (read_number, relative_accuracy),
    "boolean": BOOLEAN, "binary classification": BOOLEAN, "math": (read_math, same_math),
    "ocr": (read_ocr, word_accuracy), "open-ended": TEXT, "free-form": TEXT, "video qa": TEXT,
    "video description": TEXT, "temporal grounding": (read_marks, span_iou),
    "spatial grounding": (read_marks, boxes_iou), "spatial-temporal grounding": (read_marks, tube_iou),
    "tracking": (read_marks, track_iou), "segmentation": (read_marks, segment_score),
    "code": (read_code, code_score), "svg-code": MARKUP, "html-code": MARKUP, "llava preference": PREFERENCE,
    "critic preference": PREFERENCE, "rec": NUMBER, "ssr": BOOLEAN, "crr": BOOLEAN}  # last three: OVO-Bench

@functools.lru_cache(1024)
def canonical(name: str) -> str:
    """Problem type as in TYPES; case, spaces, hyphens, underscores are free. ValueError names the nearest."""
    known = {re.sub("[ -]", "", kind): kind for kind in TYPES} | {"caption": "video description"}
    key = re.sub(r"[\s_-]+", "", str(name)).lower()
    if key not in known:
        near = [known[match] for match in difflib.get_close_matches(key, known, 3, 0.4)] or list(TYPES)
        raise ValueError(f"problem_type {str(name)[:60]!r} is unknown; nearest: {', '.join(near)}")
    return known[key]

def read_gold(kind: str, record: dict):
    """The gold's value; None for code that is judged by its tests."""
    return None if kind == "code" and record.get("tests") else TYPES[kind][0](gold_text(record), record)[0]

def check_record(record: dict, settings: RewardSettings = RewardSettings()) -> None:
    """ValueError (one line, ready to print) for an unknown problem type or a gold that cannot be read."""
    if settings.reward:
        return
    unread = ""
    try:
        kind = canonical(record.get("problem_type"))
        need(record.get("options") or kind != "multiple choice", "`options`, a list of texts, are missing")
        box_scale(record, settings)
        unread = f"answer {gold_text(record)[:80]!r} cannot be read as {kind}: "
        gold = read_gold(kind, record)
        need(kind in ("math", "code") or TYPES[kind][1](gold, gold, record, settings), "it scores 0 itself")
    except ValueError as error:
        where = record.get("where") or record.get("key") or f"record {record.get('problem_id', '')}".strip()
        raise ValueError(f"{where}: {unread}{error}") from None

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
    """The function that "path/to/file.py:function" names."""
    path, _, name = spec.rpartition(":")
    try:
        return runpy.run_path(path)[name]
    except (Exception, SystemExit) as error:      # whatever the user's file does when it is run
        raise RewardError(f"reward {spec!r}: expected path/to/file.py:function ({error!r})") from None

def custom_score(record: dict, response: str, settings: RewardSettings) -> dict:
    """The user's function(record, response): a float is the accuracy, a dict sets any field of the result."""
    function = custom_reward(settings.reward)
    try:
        value = function(record, response)
        value = dict(value) if isinstance(value, dict) else {"accuracy": float(value)}
        value |= {name: float(value[name]) for name in ("accuracy", "format", "overall") if name in value}
        accuracy = value.get("accuracy", value.get("overall", 0.0))
        if not math.isfinite(accuracy + value.get("format", 0.0) + value.get("overall", 0.0)):
            raise ValueError(f"not finite: {value}")
        json.dumps(value)           # it must pass between processes
    except (Exception, SystemExit) as error:      # the user's code: named here, fatal unless told otherwise
        what = f"{settings.reward} on record {record.get('where') or record.get('key')}: {error!r}"
        if settings.on_reward_error != "zero":
            raise RewardError(f"reward {what}") from error
        return {"accuracy": 0.0, "status": "invalid", "method": what}
    return {"accuracy": accuracy, "status": "ok" if accuracy > 0 else "wrong", "method": "custom"} | value

def score_here(record: dict, response: str, settings: RewardSettings, length=None) -> dict:
    """Score in this process, without a time limit."""
    answer, tagged, truncated = answer_region(response)
    out = {"accuracy": 0.0, "format": float(tagged and bool(answer.strip())), "prediction": None,
           "status": "truncated", "method": "thoughts never end"}
    if settings.reward:
        out |= custom_score(record, response, settings)
    elif not truncated:
        kind = canonical(record["problem_type"])
        read, compare = TYPES[kind]
        try:
            prediction, out["method"] = read(unbox(answer), record, box_scale(record, settings))
            accuracy = float(compare(prediction, read_gold(kind, record), record, settings))
            out |= {"accuracy": accuracy, "prediction": str(prediction)[:200],
                    "status": "ok" if accuracy > 0 else "wrong"}
        except (NoAnswer, MemoryError, RecursionError) as error:
            out |= {"status": "wrong" if isinstance(error, Hedge) else "invalid", "format": 0.5 * tagged,
                    "method": str(error) or type(error).__name__}
    overall = settings.accuracy_weight * out["accuracy"] + settings.format_weight * out["format"]
    if settings.overlong_limit:
        if length is None:
            raise ValueError("overlong_limit is set: scoring needs each response's length in tokens")
        out["overlong"] = soft_overlong(length, settings.overlong_limit, settings.overlong_buffer)
        overall += settings.overlong_weight * out["overlong"]
    if settings.repetition_ngram:
        out["repetition"] = repetition(response, settings.repetition_ngram)
        overall += settings.repetition_weight * out["repetition"]
    return {"overall": overall} | out

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
        self.settings, self.idle = settings or RewardSettings(), [None] * max(1, workers)

    def _ask(self, jobs: list) -> list[dict]:
        """Results of a batch from an idle worker (there is one for each thread)."""
        if not (worker := self.idle.pop()):
            worker = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(asdict(self.settings))],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with contextlib.suppress(BrokenPipeError):         # it died; what it finished can still be read
            worker.stdin.write("".join(json.dumps(job, default=str) + "\n" for job in jobs))
            worker.stdin.flush()
        results = [json.loads(line) for line in itertools.islice(worker.stdout, len(jobs))]
        left = jobs[len(results) + 1:]
        if len(results) < len(jobs):               # the first unanswered one was too slow or ended the worker
            worker.communicate()
            results.append({"overall": 0.0, "accuracy": 0.0, "format": 0.0, "prediction": None,
                            "status": "invalid", "method": f"no result within {self.settings.timeout_s} s"})
            worker = None
        self.idle.append(worker)
        if errors := [result["error"] for result in results if "error" in result]:
            raise RewardError(errors[0])
        return results + (self._ask(left) if left else [])

    def score_many(self, records, responses, lengths=None) -> list[dict]:
        """One dict per response, in order. lengths: tokens of each response (for the overlong penalty)."""
        jobs = list(zip(records, responses, lengths or [None] * len(responses), strict=True))
        size = max(1, min(16, len(jobs) // (4 * len(self.idle))))      # a round trip costs more than a score
        with ThreadPoolExecutor(len(self.idle)) as pool:
            batches = pool.map(self._ask, [jobs[i:i + size] for i in range(0, len(jobs), size)])
            return list(itertools.chain.from_iterable(batches))

    def close(self):
        for worker in filter(None, self.idle):
            worker.kill()
            worker.communicate()
        self.idle = [None] * len(self.idle)

shared_scorer = functools.cache(Scorer)

def serve_jobs(settings: RewardSettings):
    """A worker: job lines in, result lines out. What a custom reward prints goes to stderr."""
    results, silence = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")
    os.dup2(2, 1)
    if not settings.reward:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for line in sys.stdin:
        record, response, length = json.loads(line)
        if not settings.reward and canonical(record["problem_type"]) == "math":
            parsed_math("1")                    # a slow import; the clock starts behind it
        # Its own thread ends the process even inside a C loop; SIGALRM is left to custom rewards.
        faulthandler.dump_traceback_later(settings.timeout_s, exit=True, file=silence)
        try:
            result = score_here(record, response, settings, length)
        except (RewardError, ValueError) as error:
            result = {"error": str(error)}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(result), file=results, flush=True)

# ---------------------------------------------------------------- the command

def read_rows(path: str, settings: RewardSettings):
    """One record per response of a responses file, checked. ValueError names the line."""
    lines = enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1)      # U+2028 is no line's end
    for number, line in ((number, line) for number, line in lines if line.strip()):
        try:
            row = json.loads(line) | {"where": f"{path}:{number}"}
            responses = row["responses"] if "responses" in row else [row["response"]]
        except (ValueError, KeyError, TypeError) as error:
            expected = "expected a JSON object with `response` or `responses`"
            raise ValueError(f"{path}:{number}: {expected} ({error!r})") from None
        check_record(row, settings)
        yield from (row | {"response": response} for response in responses)

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
        rows = list(read_rows(args.file, settings))
        rows = rows[args.explain - 1:args.explain] if args.explain else rows
        results = Scorer(settings, args.workers).score_many(rows, [row["response"] for row in rows])
    except (OSError, ValueError, RewardError) as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    rows = [row | result for row, result in zip(rows, results)]

    print(f"{'problem type':28}{'n':>7}{'accuracy':>10}{'format':>9}{'invalid':>9}{'truncated':>11}")
    for kind in dict.fromkeys([row.get("problem_type") for row in rows] + ["all"] * bool(rows)):
        group = [row for row in rows if kind in (row.get("problem_type"), "all")]
        means = [sum(map(value, group)) / len(group) for value in (
            lambda row: row["accuracy"], lambda row: row["format"],
            lambda row: row["status"] == "invalid", lambda row: row["status"] == "truncated")]
        print("{:28}{:7}{:10.4f}{:9.4f}{:9.4f}{:11.4f}".format(str(kind), len(group), *means))
    if args.out:
        Path(args.out + ".tmp").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(args.out + ".tmp", args.out)
    status, most = args.show or (None, 0)
    for row in rows if args.explain else [row for row in rows if row["status"] == status][:int(most)]:
        print(f"\n{row['where']} [{row.get('problem_type')}] {row['status']} {row['accuracy']:.4f}: gold "
              f"{gold_text(row)!r}, read {row['prediction']!r} ({row['method']})\n{row['response'][-600:]}")

if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve_jobs(RewardSettings(**json.loads(sys.argv[2])))
    else:
        main()
