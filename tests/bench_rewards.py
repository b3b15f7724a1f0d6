"""Time 10,000 mixed responses: Scorer against plain per-sample scoring as public video RL kits do it.

    python tests/bench_rewards.py [N] [--workers W] [--toy toy]

The plain way: extract the tag, compare strings, round numbers, json.loads for times, a new ROUGE scorer for
every sample, math-verify with its own alarm. It reads far fewer answers right; only its time is of interest.
Then: the slowest of several nasty answers of 20 kB for each type, and scoring while a MediaLoader decodes clips of
the toy data (tests/toy.py makes them): alone, and both at once.
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rewards  # noqa: E402


def plain_score(record, response):
    from math_verify import parse, verify
    from rouge_score import rouge_scorer

    match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    answer, gold, kind = (match[1] if match else response).strip(), record["answer"], record["problem_type"]
    try:
        if kind == "numerical":
            return float(round(float(answer), 2) == round(float(gold), 2))
        if kind == "temporal grounding":
            (a, b), (c, d) = json.loads(answer)["time"], json.loads(gold)["time"]
            return max(0.0, min(b, d) - max(a, c)) / (max(b, d) - min(a, c))
    except (ValueError, TypeError, KeyError):
        return 0.0
    if kind == "math":
        return float(verify(parse(gold), parse(answer)))
    if kind == "open-ended":
        scores = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(
            gold, answer
        )
        return sum(score.fmeasure for score in scores.values()) / 3
    return float(answer == gold)


def responses(n, seed=0):
    rng, pairs = random.Random(seed), []
    words = "a man opens the red door then walks into a bright kitchen where two dogs sleep on it".split()
    options = ["A. a red ball", "B. a blue box", "C. a green cone", "D. none of these"]
    thoughts = "<think>" + " ".join(words * 12) + "</think>\n"
    for _ in range(n):
        kind = rng.choices(
            ["multiple choice", "numerical", "boolean", "temporal grounding", "open-ended", "ocr", "math"],
            [40, 20, 10, 10, 10, 5, 5],
        )[0]
        start = rng.randint(0, 50)
        gold, answer = {
            "multiple choice": lambda: (
                rng.choice("ABCD"),
                rng.choice(["B", "C. a green cone", "The answer is A."]),
            ),
            "numerical": lambda: (str(start), rng.choice([str(start), f"{start}.0", "about seven apples"])),
            "boolean": lambda: (rng.choice(["yes", "no"]), rng.choice(["Yes", "No, it is not"])),
            "temporal grounding": lambda: (
                json.dumps({"time": [start, start + 9]}),
                rng.choice([json.dumps({"time": [start + 2, start + 9]}), f"from {start} to {start + 5} s"]),
            ),
            "open-ended": lambda: (" ".join(words), " ".join(rng.sample(words, 15))),
            "ocr": lambda: ("NO EXIT 12", rng.choice(["NO EXIT 12", "NO EXIT"])),
            "math": lambda: (
                f"\\frac{{{start}}}{{7}}",
                rng.choice([f"{start}/7", f"\\boxed{{\\frac{{{2 * start}}}{{14}}}}", "x = 3"]),
            ),
        }[kind]()
        pairs.append(
            (
                {
                    "problem_type": kind,
                    "answer": gold,
                    "options": options if kind == "multiple choice" else None,
                },
                f"{thoughts}<answer>{answer}</answer>",
            )
        )
    return pairs


NASTY = [
    "A or B ", "answer is A. ", "1 or ", "1/", "[", "[1, 2], ", '{"time": [1, 2]} ', '"', "(", "not ", "one ",
    "十", "<svg>", "<div>", "½", "0:", "yes or ", "a man walks ",
]  # fmt: skip
GOLDS = {
    "multiple choice": "A", "boolean": "yes", "binary classification": "fake", "llava preference": "1",
    "numerical": "4", "regression": "4", "ocr": "NO EXIT 12", "open-ended": " ".join(["a red door opens"] * 50),
    "temporal grounding": "[3, 7]", "spatial grounding": "[1, 2, 3, 4]",
    "spatial-temporal grounding": '{"time": [3, 7], "boxes": {"3": [1, 2, 3, 4]}}',
    "tracking": '{"boxes": {"3": [1, 2, 3, 4]}}', "segmentation": '{"boxes": [1, 2, 3, 4]}',
    "svg-code": "<svg><g/></svg>", "html-code": "<p>hi</p>",
}  # fmt: skip


def slowest(kind):
    """(ms, unit) of the slowest answer of 20 kB, best of 3 runs each."""
    record = {"problem_type": kind, "answer": GOLDS[kind], "options": ["a man", "a dog"] * (kind[:8] == "multiple")}
    found = []
    for unit in NASTY:
        text, times = unit * (20_000 // len(unit.encode())), []
        for _ in range(3):
            start = time.process_time()
            rewards.score_here(record, text, rewards.RewardSettings())
            times.append(time.process_time() - start)
        found.append((1e3 * min(times), unit))
    return max(found)


def overlap(toy, scorer, records, texts):
    """Seconds to decode clips, to score, and for both at once."""
    from transformers import AutoConfig

    import video_io

    spec = video_io.media_spec(AutoConfig.from_pretrained(toy / "model"))
    clips = video_io.load_records(str(toy / "train.jsonl"), None, video_io.load_prompts(None))[:200]
    loader = video_io.MediaLoader(spec, workers=1)
    loader.submit(clips[0]).result()  # starts the worker

    def timed(decode, score):
        start = time.perf_counter()
        futures = [loader.submit(clip) for clip in clips] if decode else []
        if score:
            scorer.score_many(records, texts)
        for future in futures:
            future.result()
        return time.perf_counter() - start

    seconds = [timed(*which) for which in ((True, False), (False, True), (True, True))]
    loader.close()
    print("decode of {} clips {:.2f} s, scoring {:.2f} s, both at once {:.2f} s".format(len(clips), *seconds))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("n", type=int, nargs="?", default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--toy", type=Path, help="folder of the toy model and clips: measure the overlap too")
    args = parser.parse_args()
    pairs = responses(args.n)
    records, texts = zip(*pairs)
    for pair in pairs[:200]:
        plain_score(*pair)  # imports
    scorer = rewards.Scorer(workers=args.workers)
    scorer.score_many(records[:200], texts[:200])  # starts the workers
    for name, run in (
        ("plain, one process", lambda: [plain_score(*pair) for pair in pairs]),
        (f"Scorer, {args.workers} workers", lambda: scorer.score_many(records, texts)),
    ):
        start, cpu = time.perf_counter(), time.process_time()
        run()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        print(f"{name:22} {seconds:7.2f} s  {1e6 * seconds / args.n:7.0f} us per response, {cpu:6.2f} s of CPU here")
    for kind in sorted({record["problem_type"] for record in records} - {"math"}):
        chosen = [pair for pair in pairs if pair[0]["problem_type"] == kind][:500]
        start = time.process_time()
        for pair in chosen:
            rewards.score(*pair)
        print(f"  {kind:28} {1e6 * (time.process_time() - start) / len(chosen):7.0f} us in process")
    print("slowest answer of 20 kB:")
    for kind in GOLDS:
        print("  {:28} {:7.1f} ms  {!r} repeated".format(kind, *slowest(kind)))
    if args.toy:
        overlap(args.toy, scorer, records, texts)
    scorer.close()


if __name__ == "__main__":
    main()
