"""Evaluate video VLMs on benchmarks: official metrics with intervals, comparisons, one page to look at.

    python evaluate.py run --model Qwen3-VL-8B --data lvbench videomme --data-root DATA --think
    python evaluate.py run --model merged --data toy/val.jsonl         # any record file
    accelerate launch evaluate.py run --model M --data lvbench ...     # each GPU answers a share of the clips
    python evaluate.py compare results/A/lvbench_... results/B/lvbench_...
    python evaluate.py report results/A --against results/B --training runs/mine
    python evaluate.py check lvbench --data-root DATA                  # no GPU: files, golds, prompts, hours

Reads configs/benchmarks.yaml and MODEL/nanovideor1.json (merge.py): record files are asked with training's
settings, as its validation does, benchmarks with its prompt.  Writes results/MODEL/NAME_f256_fps2.0_.../
    settings.json  what answers depend on: a folder never mixes two of these
    samples.jsonl  a line for each record, its answer (`samples`: all of --n) and score; status "failed": 0
    result.json    scores with 95 % intervals clustered by clip, breakdowns, counts, speed
Killed at any time, the same command goes on: answers are known by record, prompt, media, settings and model.
"""

import argparse, base64, contextlib, difflib, hashlib, itertools, json, math, os, random, re, time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np, torch
from transformers import AutoConfig

import rewards, rollout, video_io

CONFIGS = Path(__file__).with_name("configs")
TEXTS = video_io.read_yaml(CONFIGS / "evaluate.yaml")  # settings, commands with their flags, what they print
SETTINGS = TEXTS["media"] | TEXTS["settings"]  # what answers depend on besides model and record

# ---------------------------------------------------------------------------------------- metrics
# A metric gives an answer (row), or a group of them (rows), its value 0..1; None: it does not count.

def accuracy(row, at=None):
    """at: R1@at of times, the share with an IoU of at least that; an answer that cannot be read is a miss."""
    return row["accuracy"] if at is None else row["accuracy"] >= at

def all_right(rows):
    """VideoMathQA's MBin: a group counts if every answer in it is right."""
    return all(row["accuracy"] >= 1 for row in rows)

def grouped_score(rows):
    """Video-MME-v2: (share right)^2 or, of logic, by those right up to the first step that is not."""
    right = [row["accuracy"] >= 1 for row in sorted(rows, key=lambda row: row["question_id"])]
    if rows[0]["group_type"] != "logic":
        return (sum(right) / len(right)) ** 2
    structure, passed = str(rows[0].get("group_structure") or "[1,2,3,4]").replace(" ", ""), 0
    for step in json.loads(structure):
        passed += sum(step := [right[i - 1] for i in np.atleast_1d(step)])
        if not all(step):
            break
    return TEXTS["ladders"][structure][passed] / TEXTS["ladders"][structure][-1]

def knowledge_gain(rows):
    """Video-MMMU: (after - before) / (1 - before): the Adaptation track with the lecture and without it."""
    before, after = (np.mean([row["accuracy"] for row in rows if row.get("track") == track] or [np.nan])
                     for track in ("question_only", "Adaptation"))
    return (after - before) / (1 - before) if before < 1 and after >= 0 else None

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
    """LLaVA-ST: IoU of times (tIoU), of boxes over seconds that both (sIoU) or either has (stIoU); >= at?"""
    said, gold = said_and_gold(row, rewards.read_marks, rewards.box_scale(row, rewards.RewardSettings()))
    a, b = said["boxes"] if said else {}, gold["boxes"]
    both = [rewards.box_iou(a[s], b[s]) for s in a.keys() & b.keys()]
    value = sum(both) / max(1, len(both) if part == "sIoU" else len(a.keys() | b.keys()))
    if part == "tIoU":
        value = rewards.span_iou(said, gold) if said else 0.0
    return None if not b and part != "tIoU" else value if at is None else value >= at

def official(row, patterns):
    """A scorer looser than rewards.py: is the pattern, or that of the problem type, behind the thoughts?"""
    gold, text = rewards.gold_text(row), str(row["response"] or "").rpartition("</think>")[2].strip()
    pattern = patterns if isinstance(patterns, str) else patterns.get(row["problem_type"], patterns["*"])
    for name, part in dict(gold=re.escape(gold), initial=gold[:1], spread=r"\D*".join(gold)).items():
        pattern = pattern.replace("{%s}" % name, part)
    return bool(re.search(pattern, text))

GROUPED = {all_right: "video_id", grouped_score: "video_id", knowledge_gain: "data"}  # by, if not said
METRICS = {f.__name__: f for f in (accuracy, close_count, tube, official, *GROUPED)}

def units_of(rows, spec):
    """[(value, path, clip)] of a metric as configs/benchmarks.yaml says: [function, arguments, {options}]."""
    metric, args = METRICS[spec[0]], list(spec[1:])
    options = args.pop() if metric is not official and args and isinstance(args[-1], dict) else {}
    rows = [row for row in rows if all(row.get(field) == value or value == "*" and row.get(field) is not None
                                       for field, value in options.get("where", {}).items())]
    if metric in GROUPED:
        groups = defaultdict(list)  # of several answers to each record, the i-th ones make a group
        for row in rows:
            groups[row.get(args[0] if args else GROUPED[metric]), row.get("draw")].append(row)
        values = [(metric(group), group[0]) for group in groups.values()]
    else:
        values = [(metric(row, *args), row) for row in rows]
    return [(float(value), tuple(str(row.get(field)) for field in options.get("over", ())), row["clip"])
            for value, row in values if value is not None]

def spread(units):
    """(score, by clip the sums of weight x (value - mean of its branch)).  The weights of units, [(value,
    path, clip)], sum to 1: equal for the branches at each step of the path, then for a branch's units."""
    sizes = Counter(path for _, path, _ in units)
    forks = Counter(part[:-1] for part in {path[:d + 1] for path in sizes for d in range(len(path))})
    share = {path: 1 / n / math.prod(forks[path[:d]] for d in range(len(path))) for path, n in sizes.items()}
    mean, sums = Counter(), Counter()
    for value, path, _ in units:
        mean[path] += value / sizes[path]
    for value, path, clip in units:
        sums[clip] += share[path] * (value - mean[path])
    return sum(share[path] * value for value, path, _ in units), np.array(list(sums.values()))

def measure(units, low=0.0):
    """{"score", "interval": 95 %, clustered by clip, "n": units, "clips"}; None without units."""
    if not units:
        return None
    score, sums = spread(units)
    half = 1.96 * math.sqrt((sums ** 2).sum() * len(sums) / max(1, len(sums) - 1))
    return dict(score=score, n=len(units), clips=len(sums),
                interval=[max(low, score - half), min(1.0, score + half)] if half > 1e-9 else None)

def several(samples):
    """{"pass@k": expected best of k, of right and wrong unbiased (arXiv 2107.03374, eq. 1); "majority": the
    score of what most say, the earliest of equals; answers that cannot be read have no vote}"""
    scores, n = sorted(sample["accuracy"] for sample in samples), len(samples)
    found = {f"pass@{k}": sum(x * math.comb(i, k - 1) for i, x in enumerate(scores)) / math.comb(n, k)
             for k in (2 ** i for i in range(n.bit_length()))}
    votes = Counter(s["prediction"] for s in samples if s.get("prediction") is not None)
    most = max(samples, key=lambda s: votes[s.get("prediction")])
    return found | {"majority": most["accuracy"] if votes else 0.0}

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
    drawn = [(several(row.get("samples", [row] * n)), row["clip"]) for row in rows] if n > 1 else []
    for name in drawn[0][0] if drawn else ():
        metrics[name] = measure([(found[name], (), clip) for found, clip in drawn])
    plain = measure(units_of(answers, ["accuracy"]))
    metrics = {name: measured for name, measured in metrics.items() if measured} or {"accuracy": plain}
    by = {field: {value: measure(units_of(draws(part), ["accuracy"])) | counts(part)
                  for value, part in parts_of(rows, field).items()} for field in bench["by"]}
    name = next(iter(metrics))
    return dict(metrics[name], metric=name, accuracy=plain["score"], metrics=metrics, by=by, **counts(rows),
                output_tokens=sum(row.get("response_tokens", 0) for row in answers))

# ---------------------------------------------------------------------------------------- answers
def resolve_settings(model, given, bench=None, preset=None):
    """SETTINGS, over them those of training, the benchmark (None: a file), the preset, and given ones."""
    said = video_io.read_yaml(file) if (file := Path(model, "nanovideor1.json")).is_file() else {}
    said["max_tokens"] = said.get("val_max_response_length") or said.get("max_response_length")
    said = {n: said[n] for n in (SETTINGS if bench is None else TEXTS["asked"]) if said.get(n) is not None}
    form = {} if bench is None else {"prompt_form": bench.get("prompt_form", "direct")}
    given = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    return SETTINGS | form | said | (preset or {}) | given

def fingerprint(model):
    """{file: hash} of what decides on answers; of big files 4,096 bytes, spread: training changes those."""
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
        raise video_io.DataError(f"{extra}: expected NAME: {{json: FILE, video: FOLDER}}: {error}") from None
    book["benchmarks"] = {name: book["plain"] | entry for name, entry in book["benchmarks"].items()}
    return book

def with_fields(row, fields):
    """The row with the fields that its layout lacks, made from its own by a template or by patterns."""
    made = {"options": row["options"].split("\n")} if isinstance(row.get("options"), str) else {}
    for name, rule in fields.items():
        if isinstance(rule, str):  # "{field}" alone keeps the field's type
            kept = row.get(rule[1:-1]) if re.fullmatch(r"{\w+}", rule) else rule.format_map(row)
            made[name] = row.get(name, kept)
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

def load_task(task, args, problems):
    """Give the task records and `odd`, {oddity: count}; what is missing or unreadable goes to `problems`."""
    bench, own, root = task.bench, "file" in task.bench, Path(args.data_root or "")
    files = [Path(bench["file"])] if own else [root / file for file in np.atleast_1d(bench["json"])]
    file = next((f for f in files if f.exists()), files[0])
    task.records, faults, sources = video_io.read_records(
        file, args.data_root if own else root / bench.get("video", ""), task.prompter.prompts,
        rewards.check_record, lambda row: with_fields(row, bench.get("fields", {})))
    problems += [f"{file}: holds no records"] * (not sources)
    task.odd = dict(Counter(odd for row in sources.values() for odd in oddities(row)))
    gone = Counter(fault.split(": no file ")[1].split(";")[0] for fault in faults if ": no file " in fault)
    problems += [f"{task.name}: no media file {path} ({n} records)" for path, n in gone.items()]
    problems += [fault for fault in faults if ": no file " not in fault]
    for record in task.records:
        files = "|".join(map(str, record["videos"] + record["images"]))
        record |= dict(data=task.name, clip=files or record["key"])
    if "box_space" in bench:  # boxes in pixels mean nothing without the clip's size
        items = [video_io.media_items(record)[0] for record in task.records]
        with contextlib.closing(video_io.MediaLoader(video_io.MediaSpec(), args.decode_workers)) as loader:
            sizes = loader.ask_all("probe", items, "reading sizes")
        for record, item in zip(task.records, items):
            if isinstance(size := sizes[json.dumps(item)], dict):
                record |= dict(box_space=bench["box_space"], width=size["width"], height=size["height"])
    try:  # better now than when all is answered
        task.records and summarize([record | TEXTS["failed"] for record in task.records], bench)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        problems.append(f"{task.name}: its metrics need other fields than the records have: {error!r}")
    task.records = task.records[:args.limit]

def load_tasks(args, model):
    """({data set: its name, bench, settings, spec, prompter, records, odd}, what is wrong with them)."""
    book, tasks, problems = load_benchmarks(args.dataset_config), {}, []
    processor, config = model and video_io.load_processor(model), model and AutoConfig.from_pretrained(model)
    args.decode_workers = args.decode_workers or max(2, os.cpu_count() // 2)
    for name in dict.fromkeys(args.data):
        own = name not in book["benchmarks"]
        if own and not Path(name).suffix:
            near = difflib.get_close_matches(name, book["benchmarks"], 3) or list(book["benchmarks"])
            raise video_io.DataError(f"--data {name}: no file or benchmark; nearest: {', '.join(near)}")
        bench = book["file"] | dict(file=name) if own else book["benchmarks"][name]
        preset = args.preset or "easyvideor1" * (not own)
        over = book["presets"].get(preset, {}) | bench.get("settings", {}) | bench.get(preset, {})
        settings = resolve_settings(model, vars(args), None if own else bench, over)
        name = Path(name).stem if own else name
        if name in tasks:
            raise video_io.DataError(f"--data: two data sets are called {name}; run them apart")
        prompts = video_io.load_prompts(settings["prompts"] or None)
        prompter = rollout.Prompter(processor, config, prompts, settings["prompt_form"],
                                    settings["system_prompt"] or None, settings["max_prompt_length"])
        media = {field: settings[field] or None for field in TEXTS["media"]}
        spec = video_io.media_spec(config, **media) if config else video_io.MediaSpec(**media)
        task = SimpleNamespace(name=name, bench=bench, settings=settings, spec=spec, prompter=prompter)
        try:
            load_task(task, args, problems)
            tasks[name] = task
        except (video_io.DataError, KeyError) as error:
            problems.append(f"{name}: {'no field ' * isinstance(error, KeyError)}{error}")
    return tasks, problems

def name_contents(task, identity):
    """Give each record `content`, a hash of all that its answer depends on."""
    for record in task.records:
        media = []
        for item in video_io.media_items(record):
            with contextlib.suppress(video_io.MediaError):  # the answer will say so
                media.append(video_io.item_key(item, task.spec))
        messages = video_io.build_messages(record, task.prompter.prompts, task.prompter.form)
        parts = json.dumps([identity, record["key"], messages, media])
        record["content"] = hashlib.sha256(parts.encode()).hexdigest()[:20]

def open_folder(task, args, common):
    """Settle the task's folder, like lvbench_f256_fps2.0_mp256k_tp32768k, and find what is answered there."""
    spec, sampling = task.spec, common["sampling"]
    pixels, total = spec.max_pixels or 768 * spec.token, spec.total_pixels or 115200 * spec.token
    name = f"{task.name}_f{spec.max_frames}_fps{spec.fps}_mp{pixels // 1024}k_tp{total // 1024}k"
    name += "_think" * (task.settings["prompt_form"] == "reason")
    name += f"_t{sampling['temperature']:g}_n{sampling['n']}" if sampling["temperature"] else ""
    out = Path(args.out or f"results/{Path(args.model).resolve().name}")
    task.folder = out = out if args.out and len(args.data) == 1 else out / name
    task.identity = identity = dict(settings=task.settings, prompts=task.prompter.prompts, **common)
    stored = out / "settings.json"
    before = json.loads(stored.read_text()) if stored.is_file() else identity
    if other := sorted(name for name in identity if before.get(name) != identity[name]):
        raise video_io.DataError(f"{out}: holds answers with other {', '.join(other)}; choose another --out")
    rollout.write_text(stored, json.dumps(identity, indent=1))
    name_contents(task, identity)
    task.rows = rollout.stored_rows(out / "samples.jsonl", "content")
    n = sum(record["content"] in task.rows for record in task.records)
    print(f"{out}: {n} of {len(task.records)} samples are answered already", flush=True)

def answer_all(todo, tasks, engine, scorer, **sampling):
    """Answer records; tasks: {data set: its loader, prompter and open file}; sampling: also queue_bytes."""
    def waiting():
        clip = None
        for record in todo:
            last, clip = clip, (tasks[record["data"]].loader, video_io.media_items(record))
            if clip != last:  # questions about one clip stand together: it is decoded once
                future = clip[0].submit(record)
            yield record, future
    def line_of(group):
        row = {name: value for name, value in group.record.items() if name not in TEXTS["left_out"]}
        samples = [score | dict(response=r.text, response_tokens=len(r.ids), finish_reason=r.finish_reason)
                   for r, score in zip(group.responses, group.scores)]
        if samples:
            row |= samples[0] | {"prompt_tokens": len(group.prompt_ids)}
        if samples[1:]:
            row |= dict(samples=samples, accuracy=sum(s["accuracy"] for s in samples) / len(samples))
        return tasks[row["data"]].file, row if samples else row | TEXTS["failed"] | {"reason": group.error}
    prompter = SimpleNamespace(group=lambda r, future: tasks[r["data"]].prompter.group(r, future))
    rollout.answer_all(engine, prompter, scorer, waiting(), len(todo), line_of, name="content", **sampling)

def run(args):
    (rank, world), model = rollout.launched(), rollout.model_folder(args.model)
    tasks, problems = load_tasks(args, model)
    temperature = float(args.n > 1) if args.temperature is None else args.temperature
    problems += ["--n: greedy answers are all alike; give a --temperature"] * (args.n > 1 and not temperature)
    if problems:
        raise video_io.DataError("\n".join(problems))
    sampling = dict(n=args.n, temperature=temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    common = dict(sampling=sampling, dtype=dtype, model_files=fingerprint(model))
    cache = dict(cache_dir=args.cache_dir or (None if args.mode == "auto" else "frame_cache"),
                 cache_mode="cache_only" if args.mode == "eval" else "prefer_cache")
    with contextlib.ExitStack() as stack:
        use = lambda resource: stack.enter_context(contextlib.closing(resource))
        loaders = {spec: use(video_io.MediaLoader(spec, args.decode_workers, **cache))
                   for spec in {task.spec for task in tasks.values()}}
        for task in tasks.values():
            task.loader = loaders[task.spec]
            if args.mode in ("cache", "both") and rank == 0:
                items = [item for record in task.records for item in video_io.media_items(record)]
                done = task.loader.ask_all("load", items, f"caching {task.name}").values()
                print(*[error for error in done if not isinstance(error, dict)], sep="\n")
        if args.mode == "cache":
            return
        for task in tasks.values():
            open_folder(task, args, common)
        number, speed = defaultdict(itertools.count().__next__), {}  # number of each clip, as they come
        todo = [r for task in tasks.values() for r in sorted(task.records, key=lambda r: number[r["clip"]])
                if r["content"] not in task.rows and number[r["clip"]] % world == rank]
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
            for n, part in itertools.groupby(todo, lambda r: tasks[r["data"]].settings["max_tokens"]):
                answer_all(list(part), tasks, engine, scorer, **sampling, max_tokens=n,
                           queue_bytes=args.queue_bytes)
            seconds = time.monotonic() - started
            speed = dict(seconds=seconds, samples=len(todo), idle=1 - engine.busy / seconds, processes=world)
    if rank == 0:
        finish(tasks.values(), model, {record["content"] for record in todo}, speed)

def finish(tasks, model, mine, speed):
    """Merge the rows of all processes, score, print, write result.json.  mine: content of this one's rows."""
    for task in tasks:
        task.rows = rollout.merge(task.folder / "samples.jsonl", task.records, "content")
    answers = draws([row for task in tasks for row in task.rows if row["content"] in mine])
    tokens = sum(row.get("response_tokens", 0) for row in answers)
    if speed:
        speed |= dict(answers=len(answers), output_tokens=tokens, tokens_per_s=tokens / speed["seconds"])
    print(TEXTS["line"].format(*TEXTS["columns"]))
    for task in tasks:
        file = task.folder / "result.json"
        before = json.loads(file.read_text()).get("speed", {}) if file.exists() else {}
        result = dict(data=task.name, model=model, **summarize(task.rows, task.bench), odd_records=task.odd,
                      speed=speed or before, benchmark=task.bench, **task.identity)
        rollout.write_text(file, json.dumps(result, indent=1, ensure_ascii=False))
        assert result["n_scored"] + result["n_failed"] == result["n_expected"] == len(task.records)
        found = {f"{task.name}: {name}": result if name == result["metric"] else measured
                 for name, measured in result["metrics"].items()}
        found |= {f"  {f}: {name}": part for f, parts in result["by"].items() for name, part in parts.items()}
        for name, measured in found.items():
            interval = " .. ".join(f"{100 * x:.1f}" for x in measured["interval"] or [])
            numbers = (measured.get(f"n_{column}", "") for column in TEXTS["columns"][3:])
            print(TEXTS["line"].format(name[:41], f"{100 * measured['score']:.1f}", interval, *numbers))
        print(TEXTS["counted"].format(task.folder, odd=task.odd or "none", **result))
    print(TEXTS["speed"].format(**speed) if speed else "")

# ---------------------------------------------------------------------------------------- results
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
    (score, sums), rng = spread(units), np.random.default_rng(seed)
    return score + rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), times) @ sums

def mcnemar(a, b):
    """Exact two-sided p value: of the samples that one side alone has right, a and b, is either as likely?"""
    return min(1.0, 2 * sum(math.comb(a + b, i) for i in range(min(a, b) + 1)) / 2 ** (a + b))

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
            metric=result["metric"], n_shared=len(pairs), n_only_a=len(rows) - len(pairs), flips=flips,
            n_only_b=len(others) - len(pairs), a=spread(units[0])[0], b=spread(units[1])[0],
            difference=spread(gains)[0], interval=np.percentile(scores, [2.5, 97.5]).tolist(),
            p_bootstrap=min(1.0, float(p)), p_mcnemar=mcnemar(wins["a"], wins["b"]), wins_a=wins["a"],
            wins_b=wins["b"], by={field: {name: measure(units_of(part, ["accuracy"]), -1.0) for name, part in
                                          parts_of(rises, field).items()} for field in result["by"]})
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
    args.out and rollout.write_text(Path(args.out), json.dumps(found, indent=1, ensure_ascii=False))

def write_report(args):
    """One HTML file: configs/report.html around JSON of results, comparison, curves and a gallery."""
    from torchvision.io import encode_jpeg
    runs, samples = results_in(args.dir), []
    compared = compare(args.dir, args.against) if args.against else {}
    curves = Path(args.training, "metrics.jsonl").read_text() if args.training else ""
    training = [json.loads(line, parse_constant=lambda name: None) for line in curves.splitlines()]
    for name, (_, rows) in runs.items():
        flips = {flip["key"]: flip for flip in compared.get(name, {}).get("flips", [])}
        kinds = defaultdict(list)
        for row in random.Random(0).sample(rows, len(rows)):
            right, flip = "right" if row["accuracy"] >= 0.5 else "wrong", flips.get(row["key"])
            kind = {"ok": right, "wrong": right}.get(row["status"], row["status"])
            kinds[kind, flip is None].append(row | dict(data=name, kind=kind, flip=flip))
        samples += [row for kind in kinds.values() for row in kind[:args.samples]]
    spec = video_io.MediaSpec(nframes=8, min_pixels=4096, max_pixels=24576, image_max_pixels=65536)
    with contextlib.closing(video_io.MediaLoader(spec)) as loader:
        for row, future in [(row, loader.submit(row)) for row in samples]:
            row["frames"] = []
            with contextlib.suppress(video_io.MediaError):  # the row itself says what is wrong
                media = future.result()
                frames = [*(frame for clip in media.videos for frame in clip.frames), *media.images][:8]
                jpegs = (base64.b64encode(encode_jpeg(frame, 72).numpy()).decode() for frame in frames)
                row["frames"] = [f"data:image/jpeg;base64,{jpeg}" for jpeg in jpegs]
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
        print(TEXTS["cost"].format(args, np.median(tokens), tokens.max(), tokens.sum(), hours, most))
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
        parser.exit(args.function(args))
    except (video_io.DataError, rewards.RewardError, OSError) as error:
        parser.exit(2, f"{error}\n")

if __name__ == "__main__":
    main()
