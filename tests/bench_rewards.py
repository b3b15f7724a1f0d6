"""Time 10,000 mixed responses: Scorer against plain per-sample scoring as public video RL kits do it.

    python tests/bench_rewards.py [N] [--workers W]

The plain way: extract the tag, compare strings, round numbers, json.loads for times, a new ROUGE scorer for
every sample, math-verify with its own alarm. It reads far fewer answers right; only its time is of interest.
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("n", type=int, nargs="?", default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    pairs = responses(args.n)
    records, texts = zip(*pairs)
    for pair in pairs[:200]:
        plain_score(*pair)  # imports
    scorer = rewards.Scorer(workers=args.workers)
    scorer.score_many(records[:200], texts[:200])  # starts the workers
    timings = {}
    for name, run in (
        ("plain, one process", lambda: [plain_score(*pair) for pair in pairs]),
        (f"Scorer, {args.workers} workers", lambda: scorer.score_many(records, texts)),
    ):
        start, cpu = time.perf_counter(), time.process_time()
        run()
        timings[name] = time.perf_counter() - start
        print(
            f"{name:22} {timings[name]:7.2f} s  {1e6 * timings[name] / args.n:7.0f} us per response, "
            f"{time.process_time() - cpu:6.2f} s of this process's CPU"
        )
    for kind in sorted({record["problem_type"] for record in records} - {"math"}):
        chosen = [pair for pair in pairs if pair[0]["problem_type"] == kind][:500]
        start = time.process_time()
        for pair in chosen:
            rewards.score(*pair)
        print(f"  {kind:20} {1e6 * (time.process_time() - start) / len(chosen):7.0f} us in process")
    scorer.close()


if __name__ == "__main__":
    main()
