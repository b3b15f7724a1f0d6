"""Evaluate video VLMs on benchmarks: official metrics with intervals, comparisons, one page to look at.

    python evaluate.py run --model Qwen3-VL-8B --data lvbench videomme --data-root DATA --think
    python evaluate.py run --model merged --data toy/val.jsonl         # any record file
    accelerate launch evaluate.py run --model M --data lvbench ...     # each GPU answers a share of the clips
    python evaluate.py compare results/A/lvbench_... results/B/lvbench_...
    python evaluate.py report results/A --against results/B --training runs/mine
    python evaluate.py check lvbench --data-root DATA                  # no GPU: files, golds, prompts, hours

Reads configs/benchmarks.yaml and, of training, MODEL/nanovideor1.json (merge.py): record files are asked with
its settings, as its validation does, benchmarks with its prompt.  Writes results/MODEL/NAME_f256_fps2.0_.../
    settings.json  what answers depend on: a folder never mixes two of these
    samples.jsonl  one line per record: its fields, response, accuracy, status; with --n also `samples`
    result.json    scores with 95 % intervals clustered by clip, breakdowns, counts, speed
A record that cannot be answered scores 0, status "failed": the denominator is the number of records.  Killed
at any time, the same command goes on; answers are known by record, prompt, media, settings and model.
"""

import argparse, base64, contextlib, difflib, hashlib, json, math, os, random, re, sys, time
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import rewards, rollout, video_io

CONFIGS = Path(__file__).with_name("configs")
TEXTS = video_io.read_yaml(CONFIGS / "evaluate.yaml")  # settings, commands with their flags, what they print
SETTINGS = TEXTS["media"] | TEXTS["settings"]  # what answers depend on besides model and record
ASKED = ("prompts", "prompt_form", "system_prompt", "timestamps")  # of training's settings, for benchmarks

# ---------------------------------------------------------------------------------------- metrics
# A metric gives an answer (row), or a group of them (rows), its value 0..1; None: it does not count.

def accuracy(row, at=None):
    """at: R1@at of times, the share with an IoU of at least that; an answer that cannot be read is a miss."""
    return row["accuracy"] if at is None else row["accuracy"] >= at

def all_right(rows):
    """VideoMathQA's MBin: a group counts if every answer in it is right."""
    return all(row["accuracy"] >= 1 for row in rows)

LADDERS = {"[1,2,3,4]": (0, 1 / 16, 4 / 16, 9 / 16, 1), "[1,[2,3],4]": (0, 1 / 12, 1 / 3, 7 / 12, 1),
           "[[1,2],3,4]": (0, 0.1, 0.2, 0.5, 1)}

def grouped_score(rows):
    """Video-MME-v2: the four questions of a video score together.  relevance: (share right)^2; logic: by the
    number right up to the first step of group_structure that is not wholly right."""
    right = [row["accuracy"] >= 1 for row in sorted(rows, key=lambda row: row["question_id"])]
    if rows[0]["group_type"] != "logic":
        return (sum(right) / len(right)) ** 2
    structure, passed = str(rows[0].get("group_structure") or "[1,2,3,4]").replace(" ", ""), 0
    for step in json.loads(structure):
        step = [right[i - 1] for i in (step if isinstance(step, list) else [step])]
        passed += sum(step)
        if not all(step):
            break
    return LADDERS[structure][passed]

def knowledge_gain(rows):
    """Video-MMMU: (after - before) / (1 - before): the Adaptation track with the lecture and without it."""
    before, after = ([row["accuracy"] for row in rows if row.get("track") == track]
                     for track in ("question_only", "Adaptation"))
    return float((np.mean(after) - np.mean(before)) / (1 - np.mean(before))) if before and after else None

def said_and_gold(row, reader, *scale):
    """(what the answer says, None if it cannot be read; the gold), by a reader of rewards.py"""
    gold = reader(rewards.gold_text(row), row)[0]
    with contextlib.suppress(rewards.NoAnswer):
        return reader(rewards.unbox(rewards.answer_region(row["response"] or "")[0]), row, *scale)[0], gold
    return None, gold

def close_count(row):
    """Molmo2-VideoCountEval: within 1 + floor(gold / 20) of the gold."""
    said, gold = said_and_gold(row, rewards.read_number)
    return said is not None and abs(said[0] - gold[0]) <= 1 + gold[0] // 20

def tube(row, part, at=None):
    """LLaVA-ST: IoU of the times (tIoU), mean IoU of boxes over the seconds that both have (sIoU), over those
    that either has (stIoU).  Golds without a box are in tIoU alone.  at: share of answers that reach it."""
    said, gold = said_and_gold(row, rewards.read_marks, rewards.box_scale(row, rewards.RewardSettings()))
    a, b = said["boxes"] if said else {}, gold["boxes"]
    if part == "tIoU":
        value = rewards.span_iou(said, gold) if said else 0.0
    else:
        both = [rewards.box_iou(a[s], b[s]) for s in a.keys() & b.keys()]
        value = sum(both) / max(1, len(both) if part == "sIoU" else len(a.keys() | b.keys()))
    return None if not b and part != "tIoU" else value if at is None else value >= at

def official(row, patterns):
    """An official scorer that is looser than rewards.py: right if the pattern is found behind the thoughts.
    patterns: one, or {problem type or "*": one}, with {gold}, its {initial}, its digits {spread} in text."""
    gold, text = rewards.gold_text(row), str(row["response"] or "").rpartition("</think>")[2].strip()
    choice = patterns if isinstance(patterns, dict) else {"*": patterns}
    pattern = choice.get(row["problem_type"], choice["*"])
    for name, part in dict(gold=re.escape(gold), initial=gold[:1], spread=r"\D*".join(gold)).items():
        pattern = pattern.replace("{%s}" % name, part)
    return bool(re.search(pattern, text))

METRICS = {f.__name__: f for f in (accuracy, all_right, grouped_score, knowledge_gain, close_count,
                                   tube, official)}

def units_of(rows, spec):
    """[(value, path, clip)] of a metric as benchmarks.yaml names it: [function, arguments, {options}].
    where: {field: value} chooses rows; over: the path, fields whose values weigh alike, one in another."""
    name, *args = spec
    options = args.pop() if name != "official" and args and isinstance(args[-1], dict) else {}
    fits = lambda given, wanted: given == wanted or wanted == "*" and given is not None
    rows = [r for r in rows if all(fits(r.get(f), v) for f, v in options.get("where", {}).items())]
    if name == "knowledge_gain":
        return knowledge_gain(rows)
    if name in ("all_right", "grouped_score"):
        groups = defaultdict(list)  # of several answers to each record, the i-th ones make a group
        for row in rows:
            groups[row.get(args[0] if args else "video_id"), row.get("draw")].append(row)
        values = [(METRICS[name](group), group[0]) for group in groups.values()]
    else:
        values = [(METRICS[name](row, *args), row) for row in rows]
    return [(float(value), tuple(str(row.get(field)) for field in options.get("over", ())), row["clip"])
            for value, row in values if value is not None]

def spread(units):
    """(score, by clip the sums of weight x (value - mean of its branch)).  The weights of units, [(value,
    path, clip)], sum to 1: equal for the branches at each step of the path, then for a branch's units."""
    children, sizes = defaultdict(set), Counter(path for _, path, _ in units)
    for path in sizes:
        for depth, branch in enumerate(path):
            children[path[:depth]].add(branch)
    share = {path: 1 / n / math.prod(len(children[path[:d]]) for d in range(len(path)))
             for path, n in sizes.items()}
    mean, sums = Counter(), Counter()
    for value, path, _ in units:
        mean[path] += value / sizes[path]
    for value, path, clip in units:
        sums[clip] += share[path] * (value - mean[path])
    return sum(share[path] * value for value, path, _ in units), np.array(list(sums.values()))

def measure(units, low=0.0):
    """{"score", "interval": [low, high] of 95 % or None, "n": units, "clips"}; None without units.

    Questions about one clip are no independent draws: the variance is the sum over C clips of their squared
    sums in spread(), times C / (C - 1): of a plain mean the clustered standard error.  None where all clips
    are alike."""
    if not units or isinstance(units, float):
        return dict(score=units, interval=None) if units else None
    score, sums = spread(units)
    n = len(sums)
    half = 1.96 * math.sqrt((sums ** 2).sum() * n / max(1, n - 1))
    return dict(score=score, n=len(units), clips=n,
                interval=[max(low, score - half), min(1.0, score + half)] if half > 1e-9 else None)

def best_of(scores, k):
    """Expected best of k of the scores; of right and wrong, the unbiased pass@k (arXiv 2107.03374, eq. 1)."""
    ranked = enumerate(sorted(scores))
    return sum(x * math.comb(i, k - 1) for i, x in ranked) / math.comb(len(scores), k)

def majority(samples):
    """Score of what most answers say, the earliest of equals; answers that cannot be read have no vote."""
    votes = Counter(s["prediction"] for s in samples if s.get("prediction") is not None).most_common(1)
    return next(s["accuracy"] for s in samples if s.get("prediction") == votes[0][0]) if votes else 0.0

def counts(rows):
    """Records expected, scored and failed; of their answers, those unreadable and those cut at max_tokens."""
    failed, answers = sum(row["status"] == "failed" for row in rows), draws(rows)
    cut = sum(row["status"] == "truncated" or row.get("finish_reason") == "length" for row in answers)
    return dict(n_expected=len(rows), n_scored=len(rows) - failed, n_failed=failed, n_truncated=cut,
                n_invalid=sum(row["status"] == "invalid" for row in answers))

def draws(rows):
    """One row for each answer."""
    return [row | sample | {"draw": i} for row in rows for i, sample in enumerate(row.get("samples") or [{}])]

def parts_of(rows, field):
    """{value of the field: its rows}; a row with a list of values is in each of their parts."""
    parts = defaultdict(list)
    for row in rows:
        for value in row[field] if isinstance(row.get(field), list) else [row.get(field)]:
            parts[str(value)].append(row)
    return {} if set(parts) == {"None"} else dict(sorted(parts.items()))

def summarize(rows, bench):
    """Scores, breakdowns and counts of the rows of a data set."""
    answers, n = draws(rows), max(len(row.get("samples", [0])) for row in rows)
    specs = bench["metrics"] | ({"official": ["official", bench["official"]]} if "official" in bench else {})
    metrics = {name: measure(units_of(answers, spec)) for name, spec in specs.items()}
    if n > 1:
        of = lambda value: measure([(value(r.get("samples", [r] * n)), (), r["clip"]) for r in rows])
        for k in (2 ** i for i in range(n.bit_length())):
            metrics[f"pass@{k}"] = of(lambda samples: best_of([s["accuracy"] for s in samples], k))
        metrics["majority"] = of(majority)
    plain = measure(units_of(answers, ["accuracy"]))
    metrics = {name: measured for name, measured in metrics.items() if measured} or {"accuracy": plain}
    by = {field: {value: measure(units_of(part, ["accuracy"])) | counts(part)
                  for value, part in parts_of(answers, field).items()} for field in bench["by"]}
    name = next(iter(metrics))
    return dict(metrics[name], metric=name, accuracy=plain["score"], metrics=metrics, by=by, **counts(rows),
                output_tokens=sum(row.get("response_tokens", 0) for row in answers))

def print_result(results):
    columns = ("expected", "scored", "failed", "invalid", "truncated")
    print(f"{'':42}{'score':>8}  {'95 % interval':14}", *(f"{c:>{len(c) + 1}}" for c in columns))
    for result in results:
        lines = [(f"{result['data']}: {name}", m, {} if i else result)
                 for i, (name, m) in enumerate(result["metrics"].items())]
        lines += [(f"  {field}: {value}", part, part)
                  for field, parts in result["by"].items() for value, part in parts.items()]
        for name, m, of in lines:
            interval = " .. ".join(f"{100 * x:.1f}" for x in m["interval"] or [])
            print(f"{name[:41]:42}{100 * m['score']:8.1f}  {interval:14}",
                  *(f"{of.get('n_' + c, ''):>{len(c) + 1}}" for c in columns))

# ---------------------------------------------------------------------------------------- what to do

def resolve_settings(model, given, bench=None, preset=None):
    """SETTINGS, over them MODEL/nanovideor1.json, the benchmark and the preset, over those the command line
    (None: not given).  bench: the benchmark's entry, None for a record file; preset: some settings."""
    trained = video_io.read_yaml(file) if (file := Path(model, "nanovideor1.json")).is_file() else {}
    length = trained.get("val_max_response_length") or trained.get("max_response_length")
    trained |= {"max_tokens": length} if length else {}
    form = {} if bench is None else {"prompt_form": bench.get("prompt_form", "direct")}
    trained = {name: trained[name] for name in (SETTINGS if bench is None else ASKED) if name in trained}
    given = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    return SETTINGS | form | trained | (preset or {}) | given

def fingerprint(model):
    """{file: hash} of what decides on answers, so that another model never resumes a folder.  Of big files
    some 4,096 bytes spread over them: no training step leaves all of those as they were."""
    prints = {}
    for file in sorted(Path(model).iterdir()):
        if file.suffix in (".json", ".jinja", ".safetensors") and file.name != "nanovideor1.json":
            content = np.memmap(file, np.uint8, "r")
            some = content[::len(content) // 4096 + 1 if len(content) > 1 << 20 else 1]
            prints[file.name] = hashlib.sha256(b"%d " % len(content) + some.tobytes()).hexdigest()[:16]
    return prints

def load_benchmarks(extra=None):
    """configs/benchmarks.yaml with a user's entries over it."""
    book = video_io.read_yaml(CONFIGS / "benchmarks.yaml")
    try:
        own = video_io.read_yaml(extra) if extra else {}
        for name, entry in own.get("benchmarks", own).items():
            book["benchmarks"][name] = book["benchmarks"].get(name, {}) | entry
            if unknown := {spec[0] for spec in entry.get("metrics", {}).values()} - set(METRICS):
                raise ValueError(f"{name}: no metric {', '.join(unknown)}; there are {', '.join(METRICS)}")
    except (AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise video_io.DataError(f"{extra}: expected NAME: {{json: FILE, video: FOLDER}}: {reason}") from None
    book["benchmarks"] = {name: book["plain"] | entry for name, entry in book["benchmarks"].items()}
    return book

def with_fields(row, fields):
    """The row with the fields that its layout lacks, made from its own by a template or by patterns."""
    made = {"options": row["options"].split("\n")} if isinstance(row.get("options"), str) else {}
    for name, rule in fields.items():
        if isinstance(rule, str):  # "{field}" alone keeps the field's type
            whole = re.fullmatch(r"{(\w+)}", rule)
            made[name] = row.get(name, row.get(whole[1]) if whole else rule.format_map(row))
            continue
        for source, pattern, *label in rule[::-1]:
            if found := re.search(pattern, str(row.get(source) or "")):
                made[name] = label[0] if label else found[0]
    return row | made

def oddities(row):
    """What is wrong with a published row; video_io.py and rewards.py read all of these."""
    options = row.get("options") if isinstance(row.get("options"), list) else []
    marks = [(re.match(r"\(?([A-Z])[.:)]", str(option).strip()) or ["", ""])[1] for option in options]
    found = {"answer tags lost": re.search("<think>(?!.*<answer>)", str(row.get("solution")), re.S),
             "options without letters": "" in marks, "letters out of order": marks != sorted(set(marks)),
             "options alike": len({str(option)[2:].strip() for option in options}) < len(options)}
    return [name for name, odd in found.items() if odd]

def load_task(name, bench, args, prompts, problems):
    """(records, {oddity: count}) of a benchmark or file; what is missing or unreadable goes to `problems`."""
    file, root = bench.get("file"), args.data_root
    if not file:
        files = [Path(root or "", f) for f in np.atleast_1d(bench["json"])]
        file = next((f for f in files if f.exists()), files[0])
        root = Path(root or "", bench.get("video", ""))
    records, faults, sources = video_io.read_records(
        file, root, prompts, change=lambda row: with_fields(row, bench.get("fields", {})))
    if not sources:
        raise video_io.DataError(f"{file}: holds no records")
    gone = Counter(fault.split(": no file ")[1].split(";")[0] for fault in faults if ": no file " in fault)
    problems += [f"{name}: no media file {path} ({n} records)" for path, n in gone.items()]
    problems += [fault for fault in faults if ": no file " not in fault]
    sizes, items = {}, {r["key"]: video_io.media_items(r)[0] for r in records if bench.get("box_space")}
    if items:  # boxes in pixels mean nothing without the clip's size
        with contextlib.closing(video_io.MediaLoader(video_io.MediaSpec(), args.decode_workers)) as loader:
            sizes = loader.ask_all("probe", items.values(), "reading sizes")
    for record in records:
        files = "|".join(map(str, record["videos"] + record["images"]))
        record |= dict(data=name, clip=files or record["key"])
        size = sizes.get(json.dumps(items.get(record["key"])))
        if isinstance(size, dict):
            record |= dict(box_space=bench["box_space"], width=size["width"], height=size["height"])
        try:
            rewards.check_record(record)
        except ValueError as error:
            problems.append(str(error))
    try:  # better now than when all is answered
        blank = dict(accuracy=0.0, status="wrong", response="")
        summarize([record | blank for record in records], bench) if records else None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        problems.append(f"{name}: its metrics need other fields than the records have: {error!r}")
    return records[:args.limit], dict(Counter(odd for row in sources.values() for odd in oddities(row)))

def load_tasks(args, model):
    """({data set: its name, bench, settings, spec, prompter, records, odd}, what is wrong with them)."""
    from transformers import AutoConfig

    book, tasks, problems = load_benchmarks(args.dataset_config), {}, []
    processor, config = model and video_io.load_processor(model), model and AutoConfig.from_pretrained(model)
    args.decode_workers = args.decode_workers or max(2, os.cpu_count() // 2)
    given = vars(args) | ({"prompt_form": "reason"} if args.think else {})
    for name in dict.fromkeys(args.data):
        own = name not in book["benchmarks"]
        if own and not Path(name).suffix:
            near = difflib.get_close_matches(name, book["benchmarks"], 3) or list(book["benchmarks"])
            raise video_io.DataError(f"--data {name}: no file or benchmark; nearest: {', '.join(near)}")
        bench = book["file"] | dict(file=name) if own else book["benchmarks"][name]
        preset = args.preset or "easyvideor1" * (not own)
        over = book["presets"].get(preset, {}) | bench.get("settings", {}) | bench.get(preset, {})
        settings = resolve_settings(model, given, None if own else bench, over)
        name = Path(name).stem if own else name
        if name in tasks:
            raise video_io.DataError(f"--data: two data sets are called {name}; run them apart")
        prompts = video_io.load_prompts(settings["prompts"] or None)
        prompter = rollout.Prompter(processor, config, prompts, settings["prompt_form"],
                                    settings["system_prompt"] or None, settings["max_prompt_length"])
        media = {field: settings[field] or None for field in TEXTS["media"]}
        spec = video_io.media_spec(config, **media) if config else video_io.MediaSpec(**media)
        try:
            records, odd = load_task(name, bench, args, prompts, problems)
            tasks[name] = SimpleNamespace(name=name, bench=bench, settings=settings, spec=spec,
                                          prompter=prompter, records=records, odd=odd)
        except (video_io.DataError, KeyError) as error:
            problems.append(f"{name}: {'no field ' * isinstance(error, KeyError)}{error}")
    return tasks, problems

def name_contents(task, identity):
    """Give each record `content`, a hash of all that its answer depends on."""
    @cache
    def key_of(item):
        try:
            return video_io.item_key(json.loads(item), task.spec)
        except video_io.MediaError as error:
            return str(error)

    for record in task.records:
        media = [key_of(json.dumps(item)) for item in video_io.media_items(record)]
        messages = video_io.build_messages(record, task.prompter.prompts, task.prompter.form)
        parts = json.dumps([identity, record["key"], messages, media])
        record["content"] = hashlib.sha256(parts.encode()).hexdigest()[:20]

def open_folder(task, out, identity):
    """Settle the task's folder and find what is answered there.  DataError if it holds other settings."""
    name_contents(task, identity)
    stored = out / "settings.json"
    before = json.loads(stored.read_text()) if stored.is_file() else identity
    if other := sorted(name for name in identity if before.get(name) != identity[name]):
        raise video_io.DataError(f"{out}: holds answers with other {', '.join(other)}; choose another --out")
    rollout.write_text(stored, json.dumps(identity, indent=1))
    task.folder, task.rows = out, rollout.stored_rows(out / "samples.jsonl", "content")
    n = sum(record["content"] in task.rows for record in task.records)
    print(f"{out}: {n} of {len(task.records)} samples are answered already", flush=True)

# ---------------------------------------------------------------------------------------- answers

def row_of(group):
    """The line of an answered and scored, or of a failed, group."""
    row = {name: value for name, value in group.record.items() if name not in (
        "offline_output", "has_offline_trajectory", "preprocessed_video", "steps", "process", "tests")}
    samples = [score | dict(response=r.text, response_tokens=len(r.ids), finish_reason=r.finish_reason)
               for r, score in zip(group.responses, group.scores)]
    if not samples:
        return row | dict(response=None, accuracy=0.0, format=0.0, overall=0.0, status="failed",
                          reason=group.error)
    several = dict(samples=samples, accuracy=sum(s["accuracy"] for s in samples) / len(samples))
    return row | dict(samples[0], prompt_tokens=len(group.prompt_ids)) | (several if samples[1:] else {})

def answer_all(todo, tasks, engine, scorer, sampling, queue_bytes):
    """Answer records; tasks: {data set: its loader, prompter and open file}."""
    def waiting():
        last = None, None
        for record in todo:
            loader = tasks[record["data"]].loader
            clip = loader.spec, json.dumps(video_io.media_items(record))
            if clip != last[0]:  # questions about one clip stand together: it is decoded once
                last = clip, loader.submit(record)
            yield record, last[1]

    prompter = SimpleNamespace(group=lambda r, future: tasks[r["data"]].prompter.group(r, future))
    rollout.answer_all(
        engine, prompter, scorer, waiting(), len(todo), lambda g: (tasks[g.record["data"]].file, row_of(g)),
        name="content", queue_bytes=queue_bytes, **sampling)

def run(args):
    import torch

    (rank, world), model = rollout.launched(), rollout.model_folder(args.model)
    tasks, problems = load_tasks(args, model)
    temperature = float(args.n > 1) if args.temperature is None else args.temperature
    if args.n > 1 and not temperature:
        problems.append("--n: greedy answers are all alike; give a --temperature above 0")
    if problems:
        raise video_io.DataError("\n".join(problems))
    sampling = dict(n=args.n, temperature=temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    common = dict(sampling=sampling, dtype=dtype, model_files=fingerprint(model))
    cache_dir = args.cache_dir or ("frame_cache" if args.mode in ("cache", "eval", "both") else None)
    with contextlib.ExitStack() as stack:
        use = lambda resource: stack.enter_context(contextlib.closing(resource))
        loaders = {spec: use(video_io.MediaLoader(
            spec, args.decode_workers, cache_dir=cache_dir, cache_mode=(
                "cache_only" if args.mode == "eval" else "prefer_cache")))
            for spec in {task.spec for task in tasks.values()}}
        for task in tasks.values():
            task.loader = loaders[task.spec]
            if args.mode in ("cache", "both") and rank == 0:
                items = [item for record in task.records for item in video_io.media_items(record)]
                done = task.loader.ask_all("load", items, f"caching {task.name}", cache_dir).values()
                print(*[error for error in done if not isinstance(error, dict)], sep="\n")
        if args.mode == "cache":
            return
        for task in tasks.values():
            out = Path(args.out or f"results/{Path(model).resolve().name}")
            out = out if args.out and len(tasks) == 1 else out / folder_name(task, sampling)
            open_folder(task, out, dict(settings=task.settings, prompts=task.prompter.prompts, **common))
        clips = dict.fromkeys(record["clip"] for task in tasks.values() for record in task.records)
        number = {clip: i for i, clip in enumerate(clips)}
        todo = [r for task in tasks.values() for r in sorted(task.records, key=lambda r: number[r["clip"]])
                if r["content"] not in task.rows and number[r["clip"]] % world == rank]
        speed = {}
        if todo:
            longest = max(t.settings["max_prompt_length"] + t.settings["max_tokens"] for t in tasks.values())
            config = task.prompter.model_config
            for record in todo[:args.decode_workers]:
                tasks[record["data"]].loader.submit(record)  # workers start while the engine does
            for task in tasks.values():
                task.file = use(rollout.open_shard(task.folder / "samples.jsonl", rank, world))
            scorer = use(rewards.Scorer(rewards.RewardSettings(), args.reward_workers))
            engine = use(rollout.Engine(
                model, dtype=dtype, seed=args.seed, memory_share=args.engine_memory,
                max_model_len=min(longest, config.get_text_config().max_position_embeddings),
                banned=video_io.vision_token_ids(config)))
            started = time.monotonic()
            for length, part in groupby(todo, lambda r: tasks[r["data"]].settings["max_tokens"]):
                sampling |= {"max_tokens": length}
                answer_all(list(part), tasks, engine, scorer, sampling, args.queue_bytes)
            seconds = time.monotonic() - started
            speed = dict(seconds=seconds, samples=len(todo), idle=1 - engine.busy / seconds, processes=world)
    if rank == 0:
        finish(tasks.values(), model, {r["content"] for r in todo}, speed)

def folder_name(task, sampling):
    """lvbench_f256_fps2.0_mp256k_tp32768k, and in what the answers are unlike direct, greedy ones."""
    spec = task.spec
    pixels, total = spec.max_pixels or 768 * spec.token, spec.total_pixels or 115200 * spec.token
    return (f"{task.name}_f{spec.max_frames}_fps{spec.fps}_mp{pixels // 1024}k_tp{total // 1024}k"
            + "_think" * (task.settings["prompt_form"] == "reason")
            + (f"_t{sampling['temperature']:g}_n{sampling['n']}" if sampling["temperature"] else ""))

def finish(tasks, model, mine, speed):
    """Merge what all processes wrote, in the order of the records; score, print, write result.json.
    mine: content of the samples that this process answered; speed: how fast it did."""
    for task in tasks:
        task.rows = rollout.merge(task.folder / "samples.jsonl", task.records, "content")
    if speed:
        answers = draws([row for task in tasks for row in task.rows if row["content"] in mine])
        tokens = sum(row.get("response_tokens", 0) for row in answers)
        speed |= dict(answers=len(answers), output_tokens=tokens, tokens_per_s=tokens / speed["seconds"])
    results = []
    for task in tasks:
        file, identity = task.folder / "result.json", json.loads((task.folder / "settings.json").read_text())
        before = json.loads(file.read_text()).get("speed", {}) if file.exists() else {}
        result = dict(data=task.name, model=model, **summarize(task.rows, task.bench), odd_records=task.odd,
                      speed=speed or before, benchmark=task.bench, **identity)
        rollout.write_text(file, json.dumps(result, indent=1, ensure_ascii=False))
        results.append(result)
        assert result["n_scored"] + result["n_failed"] == result["n_expected"] == len(task.records)
        print(f"{task.folder}: n_ok {result['n_scored']} + n_failed {result['n_failed']} = n_total "
              f"{result['n_expected']}", *(f"{n} {odd}" for odd, n in task.odd.items()), sep="; ")
    print_result(results)
    print(TEXTS["speed"].format(**speed) if speed else "")

# ---------------------------------------------------------------------------------------- compare

def results_in(path):
    """{data set: (result, rows of its records)} of a folder of evaluate.py, or of the folders in it."""
    found = {}
    for file in sorted([*Path(path).glob("result.json"), *Path(path).glob("*/result.json")]):
        result, rows = json.loads(file.read_text()), video_io.read_rows(file.with_name("samples.jsonl"))
        name = result["data"] if result["data"] not in found else file.parent.name
        found[name] = result, [row for _, row in rows][:result["n_expected"]]
    if not found:
        raise video_io.DataError(f"{path}: no result.json here or one folder down; run evaluate.py run first")
    return found

def bootstrap(units, times=10_000, seed=0):
    """(times,) scores of resamples of whole clips; to first order, where clips differ in size."""
    score, sums = spread(units)
    n = len(sums)
    return score + np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), times) @ sums

def mcnemar(only_a, only_b):
    """Exact two-sided p value: of the samples that one side alone has right, is it as often either one?"""
    n = only_a + only_b
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1)) / 2 ** n)

def compare(a, b):
    """B - A on the samples that both have: {data set: numbers, breakdowns, flips}."""
    left, right, found = results_in(a), results_in(b), {}
    good = lambda row: row["accuracy"] >= 0.5
    for name, (result, rows) in left.items():
        others = {row["key"]: row for row in right.get(name, ({}, []))[1]}
        pairs = {row["key"]: (row, others[row["key"]]) for row in rows if row["key"] in others}
        if not pairs:
            continue
        spec = result["benchmark"]["metrics"].get(result["metric"], ["accuracy"])
        units = [units_of(side, spec) for side in zip(*pairs.values())]
        gains = [(y - x, path, clip) for (x, path, clip), (y, _, _) in zip(*units)]
        scores = bootstrap(gains)
        p = 2 * (1 + min((scores <= 0).sum(), (scores >= 0).sum())) / (1 + len(scores))
        flips = [dict(key=key, a=x["response"], b=y["response"], better="b" if good(y) else "a")
                 for key, (x, y) in pairs.items() if good(x) != good(y)]
        wins = Counter(flip["better"] for flip in flips)
        rises = [x | {"accuracy": y["accuracy"] - x["accuracy"]} for x, y in pairs.values()]
        found[name] = dict(
            metric=result["metric"], n_shared=len(pairs), n_only_a=len(rows) - len(pairs),
            n_only_b=len(others) - len(pairs), a=measure(units[0])["score"], b=measure(units[1])["score"],
            difference=measure(gains, -1.0)["score"], interval=np.percentile(scores, [2.5, 97.5]).tolist(),
            p_bootstrap=min(1.0, float(p)), wins_a=wins["a"], wins_b=wins["b"],
            p_mcnemar=mcnemar(wins["a"], wins["b"]), flips=flips, by={
                field: {value: measure(units_of(part, ["accuracy"]), -1.0)
                        for value, part in parts_of(rises, field).items()} for field in result["by"]})
    if not found:
        raise video_io.DataError(f"{a} and {b} share no samples: {', '.join(left)}; {', '.join(right)}")
    return found

def print_comparison(args):
    found = compare(args.a, args.b)
    for name, c in found.items():
        print(TEXTS["compared"].format(name, *c["interval"], **c))
        for field, parts in c["by"].items():
            for value, m in sorted(parts.items(), key=lambda item: -item[1]["score"]):
                print(f"    {field}: {value[:36]:38}{100 * m['score']:+6.1f}  n {m['n']}")
        print(*(f"    {flip['better'].upper()} right: {flip['key']}" for flip in c["flips"][:10]), sep="\n")
    if args.out:
        rollout.write_text(Path(args.out), json.dumps(found, indent=1, ensure_ascii=False))

# ---------------------------------------------------------------------------------------- report, check

def thumbnails(rows):
    """{row's key: up to eight frames spread over its clips, JPEG as data: URIs}; broken clips have none."""
    from torchvision.io import encode_jpeg

    spec = video_io.MediaSpec(nframes=8, min_pixels=4096, max_pixels=24576, image_max_pixels=65536)
    found = defaultdict(list)
    with contextlib.closing(video_io.MediaLoader(spec)) as loader:
        for key, future in [(row["key"], loader.submit(row)) for row in rows]:
            with contextlib.suppress(video_io.MediaError):  # the row itself says what is wrong
                media = future.result()
                for frame in [*(f for clip in media.videos for f in clip.frames), *media.images][:8]:
                    jpeg = base64.b64encode(encode_jpeg(frame, 72).numpy()).decode()
                    found[key].append(f"data:image/jpeg;base64,{jpeg}")
    return found

def write_report(args):
    """One HTML file: configs/report.html around JSON of results, comparison, curves and a gallery."""
    runs, samples, training = results_in(args.dir), [], []
    compared = compare(args.dir, args.against) if args.against else {}
    if args.training:
        lines = Path(args.training, "metrics.jsonl").read_text().splitlines()
        training = [json.loads(line, parse_constant=lambda name: None) for line in lines]
    for name, (_, rows) in runs.items():
        flips = {flip["key"]: flip for flip in compared.get(name, {}).get("flips", [])}
        kinds = defaultdict(list)
        for row in random.Random(0).sample(rows, len(rows)):
            kind = "right" if row["accuracy"] >= 0.5 else "wrong"
            kind = row["status"] if row["status"] in ("invalid", "truncated", "failed") else kind
            kinds[kind, row["key"] in flips].append(row | dict(kind=kind, flip=flips.get(row["key"])))
        chosen = [row for kind in kinds.values() for row in kind[:args.samples]]
        frames = thumbnails(chosen)
        samples += [row | dict(data=name, frames=frames[row["key"]]) for row in chosen]
    data = dict(title=args.title or Path(args.dir).resolve().name, runs=[run for run, _ in runs.values()],
                sources=load_benchmarks()["sources"], samples=samples, compared=compared,
                against=args.against, training=training)
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    out = Path(args.out or f"{args.dir}/report.html")
    rollout.write_text(out, (CONFIGS / "report.html").read_text().replace("/*DATA*/null", text))
    print(f"{out}: {len(samples)} samples of {len(runs)} data sets, {out.stat().st_size / 1e6:.1f} MB")

def check(args):
    """All that can be known without a GPU.  Exit code 1 if something is missing or cannot be used."""
    tasks, problems = load_tasks(args, rollout.model_folder(args.model) if args.model else "")
    for task in tasks.values():
        p, most = task.prompter, task.settings["max_tokens"]
        with contextlib.closing(video_io.MediaLoader(task.spec, args.decode_workers)) as loader:
            survey = video_io.survey(
                task.records, loader, p.prompts, p.processor, p.form, p.max_prompt_length, p.system)
        problems += [f"{task.name}: {record['where']}: {why}" for record, _, _, why, _ in survey if why]
        tokens = np.array([visual + text for _, visual, text, _, _ in survey] or [0])
        hours = (tokens.sum() / args.prompt_speed + len(survey) * most / args.output_speed) / 3600
        print(f"\n{task.name}: {len(survey)} records", dict(Counter(r["problem_type"] for r in task.records)),
              *(f"{n} {odd}" for odd, n in task.odd.items()), sep="; ")
        print(TEXTS["cost"].format(args, np.median(tokens), tokens.max(), tokens.sum(), hours, most,
                                   rough="" if args.model else " (roughly: no --model)"))
        for record in task.records[:3]:
            messages = video_io.build_messages(record, p.prompts, p.form, p.system)
            text = (video_io.prompt_text(record, p.prompts, p.processor, p.form, p.system) if p.processor else
                    "".join(part.get("text", f"<{part['type']}>") for m in messages for part in m["content"]))
            print(f"  {record['where']}, gold {record['answer'][:200]!r}\n" + re.sub("(?m)^", "  | ", text))
    print(*problems, f"{len(problems)} problems", sep="\n")
    return int(bool(problems))

COMMANDS = {"run": run, "compare": print_comparison, "report": write_report, "check": check}

def main():
    parser = argparse.ArgumentParser(description="Evaluate a model, compare results, show them.")
    commands = parser.add_subparsers(required=True)
    for name, entry in TEXTS["commands"].items():
        sub = commands.add_parser(name, help=entry["help"], description=entry["help"])
        sub.set_defaults(function=COMMANDS[name])
        rollout.add_flags(sub, entry["flags"])
    args = parser.parse_args()
    try:
        sys.exit(args.function(args))
    except (video_io.DataError, rewards.RewardError, OSError) as error:
        parser.exit(2, f"{error}\n")

if __name__ == "__main__":
    main()
