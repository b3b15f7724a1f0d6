"""Score answers: one scorer for training, validation, evaluate.py and this command.

    python rewards.py responses.jsonl                     # accuracy, format, invalid, truncated per type
    python rewards.py responses.jsonl --out scored.jsonl  # every response with its scores
    python rewards.py responses.jsonl --show wrong 5      # print examples: ok | wrong | invalid | truncated
    python rewards.py responses.jsonl --explain 3         # response 3: what was read, and by which rule

A row is a record with `response` or `responses`, as in training's rollouts/step_*.jsonl. score() returns
    accuracy    0..1; the formula is beside each comparer below
    format      1 = a closed <answer> tag, its content of the type's form; 0.5 = tag, other content; 0 = none
    overlong, repetition   0 down to -1 near the length limit and for repeated words; only when switched on
    overall     the sum of these four PARTS by their weights; they stay apart for GDPO to normalise each
    prediction, method     what was read, and the rule that read it
    status      ok (accuracy > 0) | wrong (read, accuracy 0) | invalid (unreadable) | truncated (in <think>)
A problem type is a reader (text, record, box scale -> value, method) and a comparer (value, gold, record,
settings -> 0..1), paired in configs/rewards.yaml. What may hang runs in workers that can be killed.
"""
import argparse, ast, bisect, collections, contextlib, dataclasses, difflib, faulthandler, functools
import itertools, json, logging, math, os, re, resource, runpy, subprocess, sys, tempfile, types, unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rapidfuzz.distance import Indel, Levenshtein

CONFIGS = Path(__file__).with_name("configs")
PARTS = ("accuracy", "format", "overlong", "repetition")     # each has its <part>_weight in RewardSettings
OUTER = " .,;:!?\"'()[]<>。、"                               # punctuation around words
UNREAD = {"accuracy": 0.0, "format": 0.0, "prediction": None}
FAILED = UNREAD | {"status": "invalid", "failed": True}      # finish() says what failed on which record

@dataclasses.dataclass(frozen=True)
class RewardSettings:
    accuracy_weight: float = 0.9
    format_weight: float = 0.1
    reward: str | None = None            # "path/to/file.py:function" in place of the rules below
    on_reward_error: str = "stop"        # stop | zero, when that function raises, hangs or ends its process
    timeout_s: float = 10.0              # per response
    allow_code_execution: bool = False   # run a record's `tests` on code answers (limits: configs/sandbox.py)
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

def need(condition, reason: str, error=NoAnswer):
    if not condition:
        raise error(reason)

@functools.cache
def vocabulary() -> dict:
    import yaml
    return yaml.safe_load((CONFIGS / "rewards.yaml").read_text("utf-8"))

@functools.lru_cache(20_000)
def pattern(text: str) -> re.Pattern:
    """Compiled. {NAME} stands for another of `patterns`; of a list any item may match."""
    def part(name):
        part = vocabulary()["patterns"][name[1]]
        return pattern(part if isinstance(part, str) else f"(?:{'|'.join(part)})").pattern
    return re.compile(re.sub(r"\{([A-Z]+)\}", part, text), re.I | re.M)

def rewrite(text: str, *tables: str) -> str:
    for old, new in (rule for table in tables for rule in vocabulary()["rewritings"][table]):
        text = pattern(old).sub(globals()[new[1:]] if new.startswith("@") else new, text)
    return text

# ---------------------------------------------------------------- the answer inside the response
def answer_region(response: str) -> tuple[str, bool, bool]:
    """(answer text, in a closed tag?, cut off inside its thoughts?). The last </think> and <answer> count."""
    text = response.rpartition("</think>")[2]
    answer, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    truncated = "<think>" in text
    return "" if truncated else answer, bool(closed and "<answer>" in text and not truncated), truncated

def unbox(text: str) -> str:
    r"""Content of the last \boxed{...}, "" if it never closes; the text itself where there is none."""
    *boxed, content = re.split(r"\\f?box(?:ed)?\s*\{", text)
    depths = itertools.accumulate((c == "{") - (c == "}") for c in content)
    return content[:next((i for i, depth in enumerate(depths) if depth < 0), 0)] if boxed else text

def gold_text(record: dict) -> str:
    """The gold answer. A tagged `solution` wins: benchmarks use `answer` for the option's text beside it."""
    gold, solution = record.get("answer"), record.get("solution")
    gold = solution if gold is None or re.search("<answer>|<think>", str(solution)) else gold
    gold = json.dumps(gold) if isinstance(gold, (dict, list)) else str("" if gold is None else gold)
    text, tagged, _ = answer_region(gold)          # Charades-STA's is in <think>: without a tag take it all
    return (text if tagged else re.sub("</?(?:think|answer)>", " ", gold)).strip()

def plain(text: str, most: float = math.inf) -> str:
    r"""One kind of letter, digit, dash, quote; no Markdown or LaTeX dressing (**B**, $B$, \text{B}, `B`)."""
    text = text if len(text) <= most else text[:1000] + "\n" + text[-3000:]     # answers stand at either end
    if not text.isascii():
        text = rewrite(unicodedata.normalize("NFKC", rewrite(text, "unicode")), "signs")
    return rewrite(text, "dressing").strip()

def phrase(text: str) -> str:
    """For comparing words: lower case, single spaces, no outer punctuation, no leading article."""
    return re.sub(r"^(?:an?|the) (?=.)", "", " ".join(plain(text).lower().split()).strip(OUTER))

def words(text: str) -> list[str]:
    """Lower-case words without outer punctuation; CJK text by character."""
    return list(filter(None, (word.strip(OUTER) for word in pattern("{WORDS}").findall(plain(text).lower()))))

# ---------------------------------------------------------------- choices: options, yes or no, preferences
def decide(text: str, mentions: list) -> tuple[str, str]:
    """(label, method) by the first of `choice rules` to find one. mentions: [[label, pattern, free?], ...]"""
    text, labels = re.sub("[\ue000-\ue0ff\uf000]", " ", text), sorted({label for label, *_ in mentions})
    for label, mention, free in mentions:
        text = pattern(mention).sub(chr(0xE000 + labels.index(label)) + "\uf000" * free, text)

    def spots(rule):                               # {place: label} of each match
        places = [match.start(match.lastindex) for match in pattern(rule).finditer(text)]
        return {i: labels[ord(text[i]) - 0xE000] for i in places}

    rejected = {label: i for i, label in spots("{REJECTED}").items()}
    hedged = {match.start(k) for match in pattern("{HEDGED}").finditer(text) for k in (1, 2)
              if match.start(1) not in rejected.values()}
    for method, rule in vocabulary()["choice rules"].items():
        found = [(i, label) for i, label in spots(rule).items() if i > rejected.get(label, -1)]
        found = found[-1:] if method == "declared" else found
        if len({label for _, label in found}) > 1 or hedged & {i for i, _ in found}:
            break
        if found:
            return found[-1][1], method
    raise Hedge("several answers") if found or hedged else NoAnswer("no choice named")

@functools.lru_cache(4096)
def option_table(options: tuple) -> tuple[dict, list]:
    """{letter: phrase}, mentions for decide(): texts that differ, and letters; own letters if they do."""
    need(len(options) <= 26, f"{len(options)} options, more than letters", ValueError)
    own = [re.match(r"\(?([A-Z])(?:[.:)、,]|\s-)\s*(.*)", option, re.S) for option in options]
    if not all(own) or len({match[1] for match in own}) < len(own):
        own = [(option, chr(65 + i), option) for i, option in enumerate(options)]
    texts = {match[1]: phrase(match[2]) for match in own}
    count = collections.Counter(text for text in texts.values() if text.isdigit() or text[1:])
    unique = sorted((a for a in texts if count[texts[a]] == 1), key=lambda a: -len(texts[a]))
    named = [("{TEXT}", a, re.escape(texts[a]).replace("\\ ", r"\s+"), True) for a in unique]
    named += [("{WHOLE}", a, a, True) for a in texts]
    named += [("{PRONOUN}" if a in "AI" else "{LETTER}", a, a, False) for a in texts]
    return texts, [(a, pattern(name).pattern.replace("X", said), free) for name, a, said, free in named]

def read_choice(text: str, record: dict, *_) -> tuple[str, str]:
    """Letter of the chosen option. What names none is read again in figures: ten as 10, 1,000 as 1000."""
    need(isinstance(record.get("options") or "", (list, tuple)), "`options`, a list of texts, are missing")
    text, options = plain(text, 4000), tuple(plain(str(option)) for option in record["options"])
    for tables in ((), ("thousands", "digits")):
        text, options = rewrite(text, *tables), tuple(rewrite(option, *tables) for option in options)
        (texts, mentions), said = option_table(options), phrase(text)
        hit = [letter for letter in texts if texts[letter] == said != ""]
        try:
            return (*hit, "option text") if len(hit) == 1 else decide(rewrite(text, "asides"), mentions)
        except NoAnswer as error:
            if tables or isinstance(error, Hedge):
                raise

def read_label(text: str, record: dict, *_) -> tuple[str, str]:
    """yes or no; 1, 2 or tie. Binary classification also has `options`, or other labels (whole)."""
    kind, gold = canonical(record["problem_type"]), phrase(gold_text(record))
    if record.get("options") and "preference" not in kind:
        return read_choice(text, record)
    if kind == "binary classification" and not pattern("[yntf]|{YES}|{NO}").fullmatch(gold):
        return short_answer(text, gold), "label"
    labels = vocabulary()["labels"]["preference" if "preference" in kind else "boolean"]
    return decide(plain(text, 4000), labels)

def equal(prediction, gold, *_) -> float:
    return float(prediction == gold)

# ---------------------------------------------------------------- numbers, first rewritten as digits
def words_value(match) -> str:
    total, values, scales = 0, vocabulary()["number words"], vocabulary()["scale words"]
    for word in pattern(r"\d+|{WORD}|{HANZI}").findall(match[0].lower()):
        scale = scales.get(word)               # multiplies what is smaller: 2 thousand 3 | hundred
        total += max(total % scale, 1) * scale - total % scale if scale else int(values.get(word, word))
    return str(total)

def clock_value(match) -> str:
    hours, minutes, seconds = (float((part or "0").replace(",", ".")) for part in match.groups())
    return str(hours * 3600 + minutes * 60 + seconds)

def power_value(match) -> str:
    return str(float(match[1]) ** int(match[2]))

def quantity(match) -> float:
    sign, whole, top, low, _ = match.groups()
    return (-1 if sign else 1) * (float(whole or 0) + float(top) / (float(low or 1) or math.nan))

def read_number(text: str, *_) -> tuple[tuple[float, bool], str]:
    """((value, has a percent sign), method): the first number behind the last of `number cues`."""
    text = rewrite(plain(text, 4000), "thousands", "digits")
    if pattern("{NONE}").fullmatch(text):
        return (0.0, False), "none is zero"
    bare = pattern("{ASIDE}").sub(lambda match: " " * len(match[0]), text)       # without "(10.5 ft)"
    found = list(pattern("{QUANTITY}").finditer(bare)) or list(pattern("{QUANTITY}").finditer(text))
    need(found, "no number")
    ends = {method: match.end() for method, cue in vocabulary()["number cues"].items()
            for match in pattern(cue).finditer(text) if match.end() <= found[-1].end()}
    method, start = next(iter(ends.items()), ("last sentence", 0))
    first, *others = (match for match in found if match.end() >= start)
    end = first.end()
    need(math.isfinite(quantity(first)) and not re.match(r"[.,]\d|\^", text[end:end + 2]), "malformed number")
    bound = pattern("{BOUND}").search(text[max(0, first.start() - 20):first.start()])
    need(not bound and not pattern("{OPENEND}").match(text, end), "one end of a range", Hedge)
    for other in others:
        if pattern("{ALSO}").fullmatch(text, end, other.start()):
            need(quantity(other) == quantity(first), "several numbers", Hedge)
            end = other.end()
    return (quantity(first), bool(first[5])), method

def same_number(prediction, gold, *_) -> float:
    """1 if equal after rounding to 2 decimals. 50% is .5, and 50 if the gold has no %."""
    (p, p_percent), (g, g_percent) = prediction, gold
    pairs = [(p, g)] + [(p / 100, g) if p_percent else (p, g / 100)] * (p_percent != g_percent)
    return float(any(round(a, 2) == round(b, 2) for a, b in pairs))

def relative_accuracy(prediction, gold, *_) -> float:
    """MRA (VSI-Bench): share of t in numpy.linspace(.5, .95, 10) with |p - g| / |g| <= 1 - t."""
    (p, p_percent), (g, g_percent) = prediction, gold
    off = min(abs(p - g), abs(p / 100 - g) if p_percent > g_percent else math.inf)
    error = off / abs(g) if g else math.inf if off else 0.0
    return sum(error <= 1 - t for t in vocabulary()["mra thresholds"]) / 10

# ---------------------------------------------------------------- times, boxes and points: one JSON reader
def json_value(text: str):
    """The last JSON object or list in the text, None where there is none. Python's are read too."""
    need(text.count("[") == text.count("]") and text.count("{") == text.count("}"), "brackets left open")
    text, value, end = rewrite(text if '"' in text else text.replace("'", '"'), "keys"), None, 0
    for opening in itertools.islice(re.finditer(r"[\[{]", text), 5000):
        with contextlib.suppress(ValueError):      # too deep a nesting ends the search
            if opening.start() >= end:
                value, end = json.JSONDecoder().raw_decode(text, opening.start())
    return value

def numbers(value, scale=(1, 1)) -> list[float]:
    """Numbers of a JSON value, of objects those of times and boxes, without words. scale: (x, y) factors."""
    if isinstance(value, dict):
        value = [value[key] for key in value if pattern("{FIELDS}").search(key)] or list(value.values())
    found = ([number for item in value for number in numbers(item)] if isinstance(value, list) else
             [] if pattern("{LABELLED}").search(str(value)) else pattern("{SIGNED}").findall(str(value)))
    need(all(abs(float(number)) < 1e9 for number in found), "too large a number")
    return [float(number) * scale[i % 2] for i, number in enumerate(found)]

def boxes_of(value, scale) -> dict:
    """{second: (x1, y1, x2, y2)}, corners sorted. Boxes without seconds are counted from 0."""
    if not isinstance(value, dict) or not all(re.fullmatch(r"\d+(\.\d*)?", key) for key in value):
        xs = numbers(value)
        need(len(xs) % 4 == 0, "no box of four numbers")
        value = {i: xs[4 * i:4 * i + 4] for i in range(len(xs) // 4)}
    boxes = {round(float(second), 3): numbers(box, scale) for second, box in value.items()}    # "8.0" is "8"
    return {t: (*map(min, xs[:2], xs[2:]), *map(max, xs[:2], xs[2:])) if len(xs) == 4 else (0, 0, 0, 0)
            for t, xs in boxes.items()}

def box_scale(record: dict, *_) -> tuple[float, float]:
    """Factors (x, y) from answers in 0-1000 to the gold's declared `box_space`; (1, 1) where none is."""
    space, frame = record.get("box_space") or "0-1000", (record.get("width"), record.get("height"))
    size = {"0-1000": (1000, 1000), "0-1": (1, 1), "pixels": frame}.get(space, [None])
    need(all(size), f"box_space {space!r}: choose 0-1000, 0-1, pixels (then give width, height)", ValueError)
    return size[0] / 1000, size[1] / 1000

def read_marks(text: str, record: dict, scale=(1, 1)) -> tuple[dict, str]:
    """{"time": [s, e], "boxes": {"8": [x1, y1, x2, y2], ...} or one box, "positive_points": [[x, y], ...],
    "negative_points", "mask"} as needed, or times or boxes alone. Of ranges in prose the last is meant."""
    kind = canonical(record["problem_type"])
    text = rewrite(plain(text)[-20_000:], "clocks", "digits", "durations")
    main, value, method = "time" if kind == "temporal grounding" else "boxes", json_value(text), "JSON"
    if value is None:
        ranges, method = pattern("{RANGE}").findall(text) or pattern("{PAIR}").findall(text) or [()], "prose"
        value = list(ranges[-1]) if main == "time" else pattern("{SIGNED}").findall(text[:4000])[:99]
    fields = value if isinstance(value, dict) and {"time", "boxes"} & set(value) else {main: value}
    marks = {name: numbers(fields.get(name), scale) for name in ("positive_points", "negative_points")}
    marks |= {"time": numbers(fields.get("time")), "mask": fields.get("mask"),
              "boxes": boxes_of(fields.get("boxes", {}), scale)}
    if kind == "spatial-temporal grounding" and isinstance(fields.get("boxes"), dict) and marks["boxes"]:
        marks["time"] = marks["time"] or [min(marks["boxes"]), max(marks["boxes"])]
    need("temporal" not in kind or marks["time"] and len(marks["time"]) % 2 == 0, "no pair of times")
    need("temporal" in kind or marks["boxes"], "no box")
    return marks, method

def covered(times: list) -> float:
    """Seconds in any of the windows, from times[0] to times[1], times[2] to times[3], ..., or back."""
    total, end = 0.0, -math.inf
    for s, e in sorted(sorted(window) for window in zip(times[::2], times[1::2])):
        total, end = total + max(0.0, e - max(s, end)), max(e, end)
    return total

def box_iou(a, b) -> float:
    both = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return both / max((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both, 1e-9)

def span_iou(prediction, gold, *_) -> float:
    """Seconds in both over seconds in either: a window too many costs what it covers in vain."""
    p, g, either = map(covered, (prediction["time"], gold["time"], prediction["time"] + gold["time"]))
    return round((p + g - either) / max(either, 1e-9), 9)

def boxes_iou(prediction, gold, record, *_) -> float:
    """Mean box IoU over the seconds (or places in the list) of either; in tracking over the gold's alone."""
    p, g = prediction["boxes"], gold["boxes"]
    seconds = g if canonical(record["problem_type"]) == "tracking" else p | g
    return sum(box_iou(p[t], g[t]) for t in seconds if t in p and t in g) / max(len(seconds), 1)

def tube_iou(*marks) -> float:
    """.5 span_iou + .5 boxes_iou; span_iou alone if the gold has no box."""
    return 0.5 * span_iou(*marks) + 0.5 * boxes_iou(*marks) if marks[1]["boxes"] else span_iou(*marks)

def inside(x, y, gold) -> bool:
    """In a box, or in a mask: COCO run lengths {"size": [h, w], "counts": [...]} by column, zeros first."""
    if not gold["mask"]:
        return any(box[0] <= x <= box[2] and box[1] <= y <= box[3] for box in gold["boxes"].values())
    (height, width), ends = gold["mask"]["size"], list(itertools.accumulate(gold["mask"]["counts"]))
    return 0 <= x < width and 0 <= y < height and bisect.bisect_right(ends, int(x) * height + int(y)) % 2 == 1

def segment_score(prediction, gold, record, *_) -> float:
    """.5 box IoU + .25 share of positive points inside + .25 of negative points outside the gold box or mask.
    With a time in the gold (video): .3, .2, .2 and .3 exp(-|seconds off| / 2). OneThinker's weights."""
    points, box = 0.0, boxes_iou(prediction, gold, record)
    for xy, wanted in ((prediction["positive_points"], True), (prediction["negative_points"], False)):
        points += sum(inside(x, y, gold) == wanted for x, y in zip(xy[::2], xy[1::2])) / max(len(xy) // 2, 1)
    off = abs((prediction["time"] or [math.inf])[0] - (gold["time"] or [0])[0])
    return 0.3 * box + 0.2 * points + 0.3 * math.exp(-off / 2) if gold["time"] else 0.5 * box + 0.25 * points

# ---------------------------------------------------------------- text, math, code and markup
def read_text(text: str, *_) -> tuple[str, str]:
    need(text.strip(), "empty answer")
    return text.strip(), "text"

def read_ocr(text: str, record: dict, *_) -> tuple[str, str]:
    """The text, or the part that a sentence quotes or announces: The sign reads "STOP"; Text: STOP."""
    quotes = pattern("{QUOTED}").findall(plain(text))
    one = len(quotes) == 1 and '"' not in plain(gold_text(record))
    return ("".join(quotes[0]), "quoted text") if one else read_text(text)

def word_accuracy(prediction, gold, *_) -> float:
    """1 - word error rate, at least 0."""
    return max(0.0, 1 - Levenshtein.distance(gold := words(gold), words(prediction)) / max(len(gold), 1))

def short_answer(text: str, gold: str) -> str:
    """An answer as a phrase to compare with the gold's, without "It is a" or "The answer is" in front."""
    answer = phrase(text)
    return answer if answer == gold else phrase(pattern(r"\A{LEAD}").sub("", answer))

@functools.cache
def rouge():
    from rouge_score.rouge_scorer import RougeScorer          # loads nltk: only runs that need it wait
    return RougeScorer(["rouge1", "rouge2"], tokenizer=types.SimpleNamespace(tokenize=words))

def text_similarity(prediction, gold, *_) -> float:
    """Golds up to five words: the same phrase. Longer ones: mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L."""
    if len(words(gold)) <= 5:
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    longest = Indel.normalized_similarity(words(gold), words(prediction))    # ROUGE-L, quicker than theirs
    return (longest + sum(part.fmeasure for part in rouge().score(gold, prediction).values())) / 3

@functools.lru_cache(4096)
def parsed_math(text: str) -> list:
    import math_verify                                        # loads sympy
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)     # its own timeout is off: ours kills
    return math_verify.parse(f"${rewrite(text, 'latex')}$", parsing_timeout=None)

def read_math(text: str, record: dict, *_) -> tuple[str, str]:
    r"""What follows the last "answer is", in it the last $...$; the whole text where there is neither."""
    if record.get("options"):
        with contextlib.suppress(NoAnswer):
            return read_choice(text, record)[0], "option"
    parts = pattern("{ANSWERS}").split(text)
    text = parts[-1].strip().split("\n")[0] if parts[1:] else text
    text = (re.findall(r"(?<!\\)\$((?:[^$\\]|\\.)+)\$", text) or [text])[-1]
    return read_text(plain(text).strip(" .,;")[:2000])

def same_math(prediction, gold, record, _) -> float:
    """Equality by math-verify: surds, sets of answers, intervals, equations. Words are compared as words."""
    options = option_table(tuple(record.get("options") or ()))[0]
    gold = options[gold] if gold in options and prediction not in options else gold
    if prediction.split() == gold.split():
        return 1.0
    if re.search(r"^\(?[A-Za-z]\)?$|(?<!\\)\b(?!sin|cos|tan|log|sqrt|exp)[A-Za-z]{3,}", gold):
        return float(short_answer(prediction, phrase(gold)) == phrase(gold))
    p, g = parsed_math(prediction), parsed_math(gold)
    from math_verify import verify
    return float(bool(p and g) and verify(g, p, timeout_seconds=None, allow_set_relation_comp=True))

def fenced(text: str) -> str:
    """Inside of the last ``` block that defines something or holds tags, else of the last, or the text."""
    blocks = re.findall(r"```(?:[\w+-]*\n)?(.*?)(?:```|\Z)", text, re.S) or [text]
    return next((b for b in blocks[::-1] if re.search(r"^[ \t]*(?:def |class |<)", b, re.M)), blocks[-1])

def read_code(text: str, *_) -> tuple[str, str]:
    code = fenced(text).replace("\0", "").encode(errors="replace").decode().strip()
    need(ast.parse(code).body, "no code")
    return code, "Python"

def code_score(prediction, gold, record, settings) -> float:
    """Share of `tests` passed if allow_code_execution; else 2 LCS / sum of lengths of the syntax nodes."""
    if gold is None:
        command = [sys.executable, "-I", CONFIGS / "sandbox.py", str(0.8 * settings.timeout_s)]
        job = json.dumps([prediction, record["tests"]]).encode()
        with tempfile.TemporaryDirectory() as folder:
            return float(subprocess.check_output(command, input=job, cwd=folder, env={}))
    trees = ast.parse(prediction), ast.parse(gold)
    return Indel.normalized_similarity(*([type(node).__name__ for node in ast.walk(tree)] for tree in trees))

def read_markup(text: str, record: dict, *_) -> tuple[tuple, str]:
    """((tags, Counter of attributes), method). SVG must be well-formed, no stray end tags in HTML."""
    from lxml import etree
    text, svg = fenced(text), canonical(record["problem_type"]) == "svg-code"
    need(start := re.search(r"<svg\b" if svg else r"<!doctype|<[a-z]", text, re.I), "no markup")
    parser = etree.XMLParser(resolve_entities=False) if svg else etree.HTMLParser()
    root = etree.fromstring(text[start.start():text.rfind(">") + 1].encode("utf-8", "replace"), parser)
    errors = " ".join(entry.message for entry in parser.error_log)      # "invalid": a tag name of HTML5's
    need(svg or not re.search("mismatch|Unexpected end tag", errors), "tags that do not match")
    nodes = [(node.tag, node.items()) for node in root.iter() if isinstance(node.tag, str)]
    attributes = collections.Counter((tag, *item) for tag, items in nodes for item in items)
    return ([tag for tag, _ in nodes], attributes), "parsed"

def markup_similarity(prediction, gold, *_) -> float:
    """Mean of 2 LCS / sum of lengths of the tag sequences and F1 of the attributes (tag, name, value)."""
    total = prediction[1].total() + gold[1].total()
    shared = 2 * (prediction[1] & gold[1]).total() / total if total else 1.0
    return (Indel.normalized_similarity(prediction[0], gold[0]) + shared) / 2

# ---------------------------------------------------------------- every type, one response
@functools.lru_cache(1024)
def canonical(name: str) -> str:
    """The type's name in `types`; case and separators are free. ValueError names the nearest."""
    known = {re.sub("[ -]", "", kind): kind for kind in vocabulary()["types"]} | vocabulary()["aliases"]
    key = re.sub(r"[\s_-]+", "", str(name)).lower()
    near = {known[match]: 0 for match in difflib.get_close_matches(key, known, 3, 0.4)} or known.values()
    need(key in known, f"problem_type {str(name)[:60]!r} is unknown; nearest: {', '.join(near)}", ValueError)
    return known[key]

def rules(record: dict, settings: RewardSettings) -> tuple:
    """(reader, comparer, value of the gold: None for code that is judged by its tests)"""
    kind = canonical(record.get("problem_type"))
    read, compare = (globals()[name] for name in vocabulary()["types"][kind])
    tested = kind == "code" and record.get("tests") and settings.allow_code_execution
    return read, compare, None if tested else read(gold_text(record), record)[0]

def may_hang(record: dict, settings: RewardSettings) -> bool:
    return bool(settings.reward) or canonical(record.get("problem_type")) in ("math", "code")

def place(record: dict) -> str:
    return record.get("where") or record.get("key") or f"record {record.get('problem_id', '')}".strip()

def check_record(record: dict, settings: RewardSettings = RewardSettings()) -> None:
    """ValueError (one line, ready to print) for an unknown problem type or a gold that cannot be read."""
    if settings.reward:
        return
    try:
        scale = box_scale(record)
        read, compare, gold = rules(record, settings)
        need(isinstance(record.get("tests") or [], list), "`tests` must be a list of texts", ValueError)
        boxes = gold["boxes"].values() if "box_space" in record and read is read_marks else ()
        need(all(0 <= x <= 1010 * scale[i % 2] for box in boxes for i, x in enumerate(box)),
             f"boxes {[*boxes][:2]} are not in the declared box_space, {record.get('box_space')}", ValueError)
        need(may_hang(record, settings) or compare(gold, gold, record, settings), "it scores 0 itself")
    except (ValueError, SyntaxError, TypeError, LookupError) as error:
        unread = f"answer {gold_text(record)[:80]!r} cannot be read as {record.get('problem_type')}: "
        raise ValueError(f"{place(record)}: {unread * (type(error) != ValueError)}{error}") from None

@functools.cache
def custom_reward(spec: str):
    """The function(record, response) that "path/to/file.py:function" names."""
    path, _, name = spec.rpartition(":")
    try:
        return runpy.run_path(path)[name]
    except (Exception, SystemExit) as error:      # whatever the user's file does when it is run
        raise RewardError(f"reward {spec!r}: expected path/to/file.py:function ({error!r})") from None

def score_here(record: dict, response: str, settings: RewardSettings) -> dict:
    """Score in this process, without a time limit: all but what finish() adds."""
    answer, tagged, truncated = answer_region(response)
    out = UNREAD | {"format": float(tagged and bool(answer.strip()))}
    if settings.reward:                            # a number is the accuracy, a dict sets any fields
        value = custom_reward(settings.reward)(record, response)
        value = dict(value) if isinstance(value, dict) else {"accuracy": float(value)}
        need({"accuracy", "overall"} & set(value), f"it returned a dict with {[*value]}; add `accuracy` "
             "or `overall`, or return a number", ValueError)
        value |= {name: float(value[name]) for name in ("overall", *PARTS) if name in value}
        return out | {"accuracy": value.get("overall"), "method": "custom"} | value
    if truncated:
        return out | {"status": "truncated", "method": "thoughts never end"}
    try:
        read, compare, gold = rules(record, settings)
        prediction, method = read(unbox(answer), record, box_scale(record))
        accuracy = float(compare(prediction, gold, record, settings))
    except (NoAnswer, SyntaxError, RecursionError, MemoryError) as error:
        return out | {"status": "wrong" if isinstance(error, Hedge) else "invalid", "format": 0.5 * tagged,
                      "method": str(error) or type(error).__name__}
    return out | {"accuracy": accuracy, "prediction": str(prediction)[:200], "method": method}

def finish(out: dict, record: dict, response: str, length: int | None, settings: RewardSettings) -> dict:
    """Adds penalties, and status and `overall` where not yet set. RewardError if a custom reward failed."""
    out = {"status": "ok" if out["accuracy"] > 0 else "wrong"} | out
    if out.pop("failed", False) and settings.reward:
        why = out["method"] = f"reward {settings.reward} on {place(record)}: {out['method']}"
        need(settings.on_reward_error == "zero", f"{why} (on_reward_error: zero counts it as 0)", RewardError)
        logging.warning("%s; scored 0", why)
    if settings.overlong_limit:                    # DAPO, eq. 13: linear to -1 over the buffer
        need(length is not None, "overlong_limit is set: scoring needs the lengths in tokens", ValueError)
        beyond = length + settings.overlong_buffer - settings.overlong_limit
        out["overlong"] = -min(1.0, max(0.0, beyond / max(settings.overlong_buffer, 1)))
    if settings.repetition_ngram:                  # minus the share of n-grams that are repeats
        grams = list(zip(*(words(response)[i:] for i in range(settings.repetition_ngram))))
        out["repetition"] = len(set(grams)) / len(grams) - 1 if grams else 0.0
    return {"overall": sum(getattr(settings, f"{part}_weight") * out.get(part, 0) for part in PARTS)} | out

def score(record: dict, response: str, settings: RewardSettings | None = None, length=None) -> dict:
    """Score one response (fields: module docstring; length: tokens). What may hang goes to a worker."""
    return shared_scorer(settings or RewardSettings()).score_many([record], [response], [length])[0]

# ---------------------------------------------------------------- many responses, workers, the command
class Scorer:
    """Scores batches: quick types here, others in workers, where a response that hangs or ends its worker
    costs no other. Workers are new interpreters, so no GPU is forked; they end with their input, our end."""
    def __init__(self, settings: RewardSettings | None = None, workers: int = 1):
        self.settings, self.idle = settings or RewardSettings(), [None] * max(1, workers)
        self.askers = ThreadPoolExecutor(len(self.idle))       # each thread holds one worker while it asks
        self.settings.reward and custom_reward(self.settings.reward)       # fails now rather than in a worker

    def ask(self, record: dict, response: str) -> dict:
        worker = self.idle.pop() or subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(vars(self.settings))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        with contextlib.suppress(BrokenPipeError):         # it has died: so it does not answer either
            print(json.dumps([record, response], default=str), file=worker.stdin, flush=True)
        line = worker.stdout.readline()
        self.idle.append(worker if line else None)
        if line:
            return json.loads(line)
        worker.communicate()
        return FAILED | {"method": f"no result in {self.settings.timeout_s} s (exit {worker.returncode})"}

    def score_many(self, records, responses, lengths=None) -> list[dict]:
        """One dict per response, in order. lengths: tokens of each response (for the overlong penalty)."""
        jobs = list(zip(records, responses, lengths or [None] * len(responses), strict=True))
        asked = {i: self.askers.submit(self.ask, record, response) for i, (record, response, _) in
                 enumerate(jobs) if may_hang(record, self.settings)}
        try:
            here = {i: score_here(*job[:2], self.settings) for i, job in enumerate(jobs) if i not in asked}
            outs = (here.get(i) or asked[i].result() for i in range(len(jobs)))
            return [finish(out, *job, self.settings) for out, job in zip(outs, jobs)]
        finally:                                   # after an error, the rest need not be asked
            [future.cancel() for future in asked.values()]

    def close(self):
        self.askers.shutdown(cancel_futures=True)
        [worker.communicate() for worker in self.idle if worker]           # its input ends, and so does it

shared_scorer = functools.cache(Scorer)

def serve_jobs(settings: RewardSettings):
    """A worker: job lines in, result lines out. A custom reward prints to stderr, and may use SIGALRM."""
    results, silence = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")
    os.dup2(2, 1)
    settings.reward or resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    custom_reward(settings.reward) if settings.reward else parsed_math("1")     # slow imports are not timed
    for record, response in map(json.loads, sys.stdin):
        faulthandler.dump_traceback_later(settings.timeout_s, exit=True, file=silence)     # ends C loops too
        try:
            result = json.dumps(score_here(record, response, settings), allow_nan=False)
        except (Exception, SystemExit) if settings.reward else () as error:
            result = json.dumps(FAILED | {"method": repr(error)})
        faulthandler.cancel_dump_traceback_later()
        print(result, file=results, flush=True)

def read_rows(path: str, settings: RewardSettings):
    """One record per response of a responses file, checked. ValueError names the line."""
    expected = "expected a JSON object with a text as `response` or a list of texts as `responses`"
    lines = Path(path).read_text("utf-8").split("\n")                     # U+2028 ends no line
    for where, line in ((f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()):
        try:
            row = json.loads(line) | {"where": where}
            responses = row["responses"] if "responses" in row else [row["response"]]
            need(isinstance(responses, list) and set(map(type, responses)) <= {str}, f"not {responses!r:.60}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: {expected} ({error!r})") from None
        check_record(row, settings)
        yield from (row | {"response": response} for response in responses)

def main():
    parser = argparse.ArgumentParser(description="Score a file of responses.")
    for flag, options in vocabulary()["flags"].items():
        parser.add_argument(flag, **options)
    args = parser.parse_args()
    settings = RewardSettings(reward=args.reward, allow_code_execution=args.allow_code_execution)
    try:
        n, explained, workers = map(int, (args.show[1], args.explain, args.workers))
        rows = list(read_rows(args.file, settings))
        need(0 <= explained <= len(rows), f"--explain {explained}: there are 1 to {len(rows)}", ValueError)
        rows = rows[explained - 1:explained] if explained else rows
        out = open(args.out + ".tmp", "w") if args.out else None      # a folder that is missing shows now
        results = Scorer(settings, workers or os.cpu_count()).score_many(rows, [r["response"] for r in rows])
    except (OSError, ValueError, RewardError) as error:
        sys.exit(print(error, file=sys.stderr) or 2)
    rows = [row | result for row, result in zip(rows, results)]
    print(f"{'problem type':28}{'n':>7}{'accuracy':>10}{'format':>9}{'invalid':>9}{'truncated':>11}")
    for kind in dict.fromkeys([row.get("problem_type") for row in rows] + ["all"] * bool(rows)):
        values = [(row["accuracy"], row["format"], row["status"] == "invalid", row["status"] == "truncated")
                  for row in rows if kind in (row.get("problem_type"), "all")]
        means = [sum(column) / len(values) for column in zip(*values)]
        print("{:28}{:7}{:10.4f}{:9.4f}{:9.4f}{:11.4f}".format(str(kind), len(values), *means))
    if out:
        with out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(args.out + ".tmp", args.out)
    for row in rows if explained else [row for row in rows if row["status"] == args.show[0]][:n]:
        print(f"\n{row['where']} [{row.get('problem_type')}] {row['status']} {row['accuracy']:.4f}: gold "
              f"{gold_text(row)!r}, read {row['prediction']!r} ({row['method']})\n{row['response'][-600:]}")

if __name__ == "__main__":
    serve_jobs(RewardSettings(**json.loads(sys.argv[2]))) if sys.argv[1:2] == ["--worker"] else main()
