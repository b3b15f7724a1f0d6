"""The engine against Hugging Face forwards: what it samples, what it reports, and whether new weights reach it."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import time
import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText

import rewards
import rollout
import video_io

SAMPLING = dict(n=4, max_tokens=12, temperature=1.0)


def new_engine(toy, run):
    return rollout.Engine(str(toy / "model"), dtype="float32", max_model_len=512, banned=run.banned.tolist())


@pytest.fixture(scope="module")
def world(toy):
    """Engine, Hugging Face model, what makes prompts, and one group without responses of each kind."""
    torch.manual_seed(0)  # of the perturbations
    model_config = AutoConfig.from_pretrained(toy / "model")
    run = SimpleNamespace(
        loader=video_io.MediaLoader(video_io.media_spec(model_config, max_frames=8, max_pixels=4096), workers=1),
        prompter=rollout.Prompter(video_io.load_processor(toy / "model"), model_config, video_io.load_prompts(),
                                  "direct", None, 400),
        banned=torch.tensor(video_io.vision_token_ids(model_config)))
    engine = new_engine(toy, run)
    model = AutoModelForImageTextToText.from_pretrained(toy / "model", dtype=torch.float32)
    train = video_io.load_records(toy / "train.jsonl")
    records = [dict(next(r for r in train if r["data_type"] == kind)) for kind in ("video", "image", "text")]
    records[0]["problem"] += " Look closely." * 25  # longer than a block of the prefix cache
    groups, _ = run.prompter.groups([(r, run.loader.submit(r)) for r in records])
    yield engine, model, run, groups
    run.loader.close()
    engine.close()


def separate_logprobs(model, run, group, response):
    """One response's logprobs by an ordinary forward over inputs of the Hugging Face processor."""
    media, answer = group.media, torch.tensor([response.ids])
    videos = dict(videos=[c.frames for c in media.videos], do_sample_frames=False, video_metadata=[
        dict(fps=c.fps, frames_indices=c.frames_indices, total_num_frames=c.total_num_frames) for c in media.videos])
    inputs = run.prompter.processor(text=[group.text], images=media.images or None, do_resize=False,
                                    return_tensors="pt", **(videos if media.videos else {}))
    assert inputs["input_ids"][0].tolist() == group.prompt_ids
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    logits = model(**inputs, use_cache=False).logits[0, len(group.prompt_ids) - 1:-1]
    logits[:, run.banned] = -torch.inf
    return logits.log_softmax(-1).gather(1, answer[0][:, None])[:, 0]


def gap(world, groups=None):
    """Largest difference between the engine's logprobs of its samples and the trainer's."""
    engine, model, run, all_groups = world
    groups = groups or all_groups
    engine.generate(groups, **SAMPLING)  # raises where the engine's prompt ids are not ours
    worst = 0.0
    for group in groups:
        for response in group.responses:
            with torch.no_grad():
                ours = separate_logprobs(model, run, group, response)
            worst = max(worst, (ours - torch.tensor(response.logprobs)).abs().max().item())
    return worst


def perturb(model, *names):
    with torch.no_grad():
        for name in names:
            p = model.get_parameter(name)
            p.add_(torch.randn_like(p) * p.std())


VISION = "model.visual.blocks.0.mlp.linear_fc1.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"  # tied: also the output layer
TEXT = "model.language_model.layers.0.mlp.up_proj.weight"


def test_engine_and_trainer_agree_and_follow_each_sync(world):
    engine, model, *_ = world
    assert gap(world) < 1e-4
    for names in [(VISION,), (TEXT,), (EMBEDDING,), (VISION, TEXT)]:
        perturb(model, *names)
        # Only now could both be wrong in the same way: the perturbation must be visible.
        engine.reset_caches()
        assert gap(world, world[3][:1]) > 1e-3
        engine.sync(model.named_parameters())
        assert gap(world) < 1e-4


def test_sync_without_the_prefix_reset_answers_with_stale_keys_and_values(world, monkeypatch):
    engine, model, *_ = world
    gap(world, world[3][:1])  # fills the caches
    perturb(model, TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: None)
        engine.sync(model.named_parameters())
    assert gap(world, world[3][:1]) > 1e-3
    engine.reset_caches()
    assert gap(world, world[3][:1]) < 1e-4


def test_new_frames_under_an_old_name_are_seen_after_a_sync(world):
    """Processed pixels are cached by the clip's key: sync empties that cache too."""
    engine, model, run, (group, *_) = world
    gap(world, [group])
    clip = group.media.videos[0]
    other = dataclasses.replace(group, media=dataclasses.replace(group.media, videos=[
        dataclasses.replace(clip, frames=255 - clip.frames)]))
    engine.sync(model.named_parameters())
    assert gap(world, [other]) < 1e-4
    engine.reset_caches()


def test_vision_placeholders_are_never_sampled(world):
    engine, model, run, groups = world
    pad = run.prompter.model_config.video_token_id
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        kept = embedding[pad].clone()
        likely = run.prompter.processor.tokenizer.encode("<answer>")[0]
        embedding[pad] = 1.5 * embedding[likely]  # tied head: now likelier than what all answers start with
    engine.sync(model.named_parameters())
    engine.generate(groups, n=16, max_tokens=12)
    ids = {token for g in groups for r in g.responses for token in r.ids}
    assert ids and not ids & set(run.banned.tolist())
    engine.banned, kept_bans = [], engine.banned
    engine.generate(groups, n=16, max_tokens=12)  # without the ban it is sampled: the ban is what kept it out
    assert pad in {token for g in groups for r in g.responses for token in r.ids}
    engine.banned = kept_bans
    with torch.no_grad():
        embedding[pad] = kept
    engine.sync(model.named_parameters())


def test_a_seed_fixes_the_samples_whatever_else_is_in_the_batch(world):
    engine, *_, groups = world
    engine.generate(groups, seeds=[1, 2, 3], **SAMPLING)
    together = [r.ids for r in groups[1].responses]
    engine.generate(groups[1:2], seeds=[2], **SAMPLING)
    assert [r.ids for r in groups[1].responses] == together
    assert len({tuple(r.ids) for r in groups[0].responses}) > 1


def test_sync_refuses_an_incomplete_set_of_weights(world):
    engine, model, *_ = world
    with pytest.raises(RuntimeError, match="1 names were not sent"):
        engine.sync((n, p) for n, p in model.named_parameters() if n != VISION)
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        engine.sync([*model.named_parameters(), ("model.visual.nonsense", torch.zeros(1))])
    engine.sync(model.named_parameters())
    assert gap(world) < 1e-4


def test_priming_computes_a_prompt_once_and_samples_what_plain_n_samples(world, monkeypatch):
    engine, *_, groups = world
    cached, take = [], engine._take
    monkeypatch.setattr(engine, "_take", lambda out: (cached.append(out.num_cached_tokens), take(out)))
    samples = {}
    for prime in (False, True):
        monkeypatch.setattr(engine, "prime", prime)
        engine.reset_caches()
        cached.clear()
        engine.generate(groups[:1], seeds=[5], **SAMPLING)
        samples[prime] = [r.ids for r in groups[0].responses]
        assert len(cached) == 1 + prime
    assert cached[0] == 0 and cached[1] >= 128  # a block of the CPU build; the clip comes first in the prompt
    assert samples[True] == samples[False] and len(set(map(tuple, samples[True]))) > 1


def test_the_greedy_baseline_is_the_likeliest_answer_and_changes_no_sample(world):
    engine, model, run, groups = world
    engine.generate(groups, seeds=[1, 2, 3], greedy=True, **SAMPLING)
    baselines, sampled = [g.greedy for g in groups], [[r.ids for r in g.responses] for g in groups]
    engine.generate(groups, seeds=[1, 2, 3], **SAMPLING)
    assert [[r.ids for r in g.responses] for g in groups] == sampled and groups[0].greedy is None
    engine.generate(groups, temperature=0.0, max_tokens=12)
    assert [g.greedy or g.responses[0].ids for g in groups] == [b.ids for b in baselines]
    engine.generate(groups, min_p=1.0, max_tokens=12)  # only tokens as likely as the likeliest
    assert [g.responses[0].ids for g in groups] == [b.ids for b in baselines]
    for group, baseline in zip(groups, baselines):
        group.greedy = baseline
    assert rollout.self_check(groups, trainer_logprobs(world), 1e-4) < 1e-4


def trainer_logprobs(world):
    _, model, run, groups = world
    with torch.no_grad():
        return [separate_logprobs(model, run, g, g.greedy) for g in groups]


def test_frozen_parts_are_not_sent_and_one_that_changed_fails_the_check(world):
    engine, model, run, groups = world
    frozen = {name for name, _ in model.named_parameters() if ".visual." in name}
    trained = lambda: ((name, p) for name, p in model.named_parameters() if name not in frozen)
    perturb(model, TEXT)
    engine.generate(groups, greedy=True, max_tokens=12)
    with pytest.raises(RuntimeError, match=r"differ by .* train.jsonl:\d"):  # not synced yet
        rollout.self_check(groups, trainer_logprobs(world), 1e-4)
    with pytest.raises(RuntimeError, match=f"{len(frozen)} names were not sent"):
        engine.sync(trained())
    engine.sync(trained(), frozen)
    assert gap(world) < 1e-4
    perturb(model, VISION)
    engine.sync(trained(), frozen)
    engine.generate(groups, greedy=True, max_tokens=12)
    with pytest.raises(RuntimeError, match="frozen ones that changed"):
        rollout.self_check(groups, trainer_logprobs(world), 1e-4)
    engine.needs_all = True  # as after sleep level 2: nothing may be left out
    with pytest.raises(RuntimeError, match="call sync"):
        engine.generate(groups, max_tokens=12)
    with pytest.raises(RuntimeError, match=f"{len(frozen)} names were not sent"):
        engine.sync(trained(), frozen)
    with pytest.raises(RuntimeError, match="1 names belong to layers sent in part"):
        engine.needs_all = False
        engine.sync(((n, p) for n, p in model.named_parameters() if n != TEXT), {TEXT})
    engine.sync(model.named_parameters())
    engine.generate(groups, greedy=True, max_tokens=12)
    assert not engine.needs_all and rollout.self_check(groups, trainer_logprobs(world), 1e-4) < 1e-4


def test_a_sync_holds_one_layer_at_a_time(world):
    engine, model, *_ = world
    alive, most = weakref.WeakSet(), 0

    def copies():
        nonlocal most
        for name, p in model.named_parameters():
            alive.add(copy := p.detach().double())  # as gathered from shards; cast to the engine's dtype
            most = max(most, sum(x.nbytes for x in alive))
            yield name, copy
            del copy

    engine.sync(copies())
    total = sum(8 * p.numel() for p in model.parameters())
    assert most < total / 2 and gap(world) < 1e-4


def test_the_engine_scores_given_answers_as_the_trainer_does(world, monkeypatch):
    engine, model, run, groups = world
    answer = rollout.Response([275, 48, 276, 2], [], "", "stop")
    monkeypatch.setattr(run, "banned", torch.tensor([], dtype=torch.long))
    with torch.no_grad():
        ours = [separate_logprobs(model, run, g, answer) for g in groups]
    for fresh in (True, False):  # the second time, prompts are in the prefix cache
        fresh and engine.reset_caches()
        theirs = engine.logprobs([(g, answer.ids) for g in groups])
        assert max((a - torch.tensor(b)).abs().max() for a, b in zip(ours, theirs)) < 1e-4


def test_stop_strings_least_lengths_and_allowed_ids(world, monkeypatch):
    engine, *_, run, groups = world
    engine.generate(groups, n=8, max_tokens=12, min_tokens=9)
    assert {len(r.ids) >= 9 for g in groups for r in g.responses} == {True}
    engine.generate(groups, n=8, max_tokens=12, seeds=[1, 2, 3])
    whole = [r.text for g in groups for r in g.responses]
    word = next(found[0] for text in whole if (found := re.search(r"(?<=[ -~]{2})[A-Za-z]{2}", text)))
    engine.generate(groups, n=8, max_tokens=12, seeds=[1, 2, 3], stop=[word])
    pairs = list(zip([r for g in groups for r in g.responses], whole, strict=True))
    stopped = [(r, text) for r, text in pairs if r.finish_reason == "stop" and r.ids[-1] != 2]
    assert stopped and all(r.text == text.partition(word)[0] for r, text in stopped)
    assert not any(word in r.text for r, _ in pairs)
    monkeypatch.setattr(engine, "allowed", [40, 41, 42])
    engine.generate(groups, n=8, max_tokens=12)
    assert {token for g in groups for r in g.responses for token in r.ids} == {40, 41, 42}


def test_a_request_that_fails_costs_its_sample_alone(world, monkeypatch):
    engine, *_, groups = world
    long = dataclasses.replace(groups[2], text=groups[2].text + " word" * 600, prompt_ids=groups[2].prompt_ids * 9)
    engine.generate([groups[0], long, groups[1]], **SAMPLING)
    assert "maximum context length is 512" in long.error and not long.responses and "\n" not in long.error
    assert [len(g.responses) for g in groups[:2]] == [4, 4]
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm.input_processor, "mm_encoder_cache_size", 3)
        engine.generate(groups, greedy=True, **SAMPLING)
    assert "exceeds the pre-allocated encoder cache size 3" in groups[0].error and groups[0].greedy is None
    assert len(groups[2].responses) == 4 and not groups[2].error  # text alone
    engine.submit(groups[0], **SAMPLING)
    while not engine.requests:
        engine.step()
    engine.vllm.abort_request(list(engine.requests))
    assert engine.step() == [groups[0]] and "dropped" in groups[0].error
    assert gap(world) < 1e-4


def test_an_engine_that_dies_is_one_clear_error(world, monkeypatch):
    engine, *_, groups = world

    def broken():
        raise ValueError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm.engine_core, "get_output", broken)
        with pytest.raises(RuntimeError, match="engine died with 1 requests under way .ValueError: out of memory"):
            engine.generate(groups[:1], **SAMPLING)
    engine.vllm.abort_request(list(engine.requests))
    engine.requests.clear()
    engine.jobs.clear()
    engine.prepared.clear()
    assert gap(world) < 1e-4


def test_prompts_are_prepared_while_others_are_answered_the_longest_first(world, monkeypatch):
    engine, *_, groups = world
    began, prepare = [], engine.llm._preprocess_cmpl
    monkeypatch.setattr(engine, "max_num_seqs", 1)
    seen = lambda prompts: began.append((prompts[0]["prompt"], len(engine.requests))) or prepare(prompts)
    monkeypatch.setattr(engine.llm, "_preprocess_cmpl", seen)
    copies = [dataclasses.replace(g) for g in groups for _ in range(3)]
    engine.generate(copies, **SAMPLING)
    by_length = sorted(copies, key=lambda g: -len(g.prompt_ids))
    assert [text for text, _ in began] == [g.text for g in by_length]  # once each
    assert max(busy for _, busy in began) > 0


class Late(Future):
    """A decoded clip that arrives when the test says so."""


def test_one_slow_clip_holds_nobody_up_and_what_fails_says_why(world):
    engine, _, run, groups = world
    records, late, broken = [dict(g.record) for g in groups], Late(), Future()
    broken.set_exception(video_io.MediaError("clip.mp4", "cannot be opened"))
    clips = [run.loader.submit(r) for r in records]
    waiting = [(records[0], late, 1), (dict(records[1], where="b"), broken, 2), (records[1], clips[1], 2),
               (records[2], clips[2], 3), (dict(records[2], problem="very " * 600 + "long", where="l"), clips[2], 4)]
    order = []
    for group in rollout.answers(engine, run.prompter, waiting, 4, max_tokens=12, greedy=True):
        order.append(group)
        assert bool(group.error) == (not group.responses) == (group.greedy is None)
        if len(order) == 4:  # all others came while that clip was being decoded
            late.set_result(clips[0].result())
    assert [g.record for g in order if not g.error][-1] is records[0] and len(order) == 5
    reasons = {g.record["where"]: g.error for g in order if g.error}
    assert reasons["b"] == "clip.mp4: cannot be opened" and "over max_prompt_length" in reasons["l"]
    engine.generate(groups, seeds=[1, 2, 3], **SAMPLING)
    ids = {g.record["where"]: [r.ids for r in g.responses] for g in groups}
    assert all([r.ids for r in g.responses] == ids[g.record["where"]] for g in order if not g.error)


def test_frames_that_wait_for_answers_keep_within_the_bound(world):
    engine, _, run, (group, *_) = world
    size, alive, most = group.media.nbytes, weakref.WeakSet(), [0]

    def clips():
        for i in range(12):
            frames = group.media.videos[0].frames.clone()
            alive.add(frames)
            most[0] = max(most[0], len(alive))
            clip = dataclasses.replace(group.media.videos[0], frames=frames, key=f"clip {i}")
            future = Future()
            future.set_result(dataclasses.replace(group.media, videos=[clip]))
            del clip, frames
            yield dict(group.record, where=i), future, i
            del future

    seen = []
    for answered in rollout.answers(engine, run.prompter, clips(), 2, max_tokens=4, queue_bytes=3 * size):
        seen.append(answered.record["where"])
        del answered
    assert sorted(seen) == list(range(12)) and 1 < most[0] <= 4  # three wait, one has just been answered


def test_sync_without_the_encoder_reset_fails_or_sees_with_old_eyes(toy, world, monkeypatch):
    """In an engine of its own: the failed request leaves it unusable."""
    _, model, run, groups = world
    engine = new_engine(toy, run)
    engine.sync(model.named_parameters())
    lonely = (engine, model, run, groups[:1])
    assert gap(lonely) < 1e-4
    perturb(model, VISION)
    monkeypatch.setattr(engine.vllm, "reset_encoder_cache", lambda: None)
    engine.sync(model.named_parameters())
    try:
        stale = gap(lonely)
    except RuntimeError as e:
        assert "Encoder cache miss" in str(e)
    else:
        assert stale > 1e-3


def command(toy, out, *more):
    return ["python", str(ROOT / "rollout.py"), "--model", str(toy / "model"), "--data",
            str(toy / "train.jsonl"), "--n", "3", "--out", str(out), "--prompt-form", "direct", "--max-tokens", "12",
            "--max-prompt-length", "400", "--max-frames", "8", "--max-pixels", "4096", "--workers", "1", *more]


def test_the_command_killed_and_on_two_processes_writes_the_same(toy, tmp_path):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    two = [subprocess.Popen(command(toy, tmp_path / "two.jsonl"), stderr=subprocess.PIPE, text=True, env=dict(
        env, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")) for rank in "01"]
    for process in two:  # as a launcher starts them
        errors = process.communicate(timeout=900)[1]
        assert process.returncode == 0, errors[-3000:]

    out = tmp_path / "one.jsonl"
    killed = subprocess.Popen(command(toy, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              start_new_session=True)
    while not out.exists() or b"\n" not in out.read_bytes():
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = out.read_bytes()
    n_before, n_total = before.count(b"\n"), (toy / "train.jsonl").read_text().count("\n")
    assert 0 < n_before < n_total
    out.write_bytes(before + b'{"key": "half a li')
    done = subprocess.run(command(toy, out), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"| {n_total - n_before}/{n_total - n_before} " in done.stderr  # only the others were asked

    rows, others = ([json.loads(line) for line in open(tmp_path / name)] for name in ("one.jsonl", "two.jsonl"))
    assert rows == others and len({row["key"] for row in rows}) == len(rows) == n_total
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"]
    assert {len(row["responses"]) for row in rows} == {3}
    assert f"n_ok {n_total} + n_failed 0 = n_total {n_total}" in done.stdout
    rates = [sum(s["accuracy"] for s in row["scores"]) / 3 for row in rows]
    assert [row["pass_rate"] for row in rows] == pytest.approx(rates)
    assert f"accuracy {sum(rates) / n_total:.3f}" in done.stdout
    assert sum(int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("pass rate")) == n_total

    some, offline = tmp_path / "elsewhere/some.jsonl", tmp_path / "offline.jsonl"
    again = subprocess.run(command(toy, out, "--filter", str(some), "--pass-rate-filter", "0,0.6", "--best-offline",
                                   str(offline)), capture_output=True, text=True)
    assert again.returncode == 0 and "prompt/s" not in again.stderr, again.stderr[-2000:]  # nothing asked again
    partly = video_io.load_records(some, check=rewards.check_record)
    assert [r["problem"] for r in partly] == [r["problem"] for r, x in zip(rows, rates) if 0 < x < 0.6] and partly
    records = video_io.load_records(offline, check=rewards.check_record)
    assert len(records) == n_total
    for record, row in zip(records, rows):
        right = {t for t, s, f in zip(row["responses"], row["scores"], row["finish_reasons"])
                 if s["accuracy"] > 0 and f == "stop"}
        assert record["has_offline_trajectory"] == bool(right)
        assert record["offline_output"] in right or not right
        assert record["videos"] == row["videos"] and record["answer"] == row["answer"]

    other = subprocess.run(command(toy, out, "--seed", "1"), capture_output=True, text=True)
    assert other.returncode == 2 and "other settings" in other.stderr and other.stderr.count("\n") == 1


def test_the_command_counts_clips_that_fail_and_names_bad_input(toy, tmp_path):
    rows = [json.loads(line) for line in open(toy / "train.jsonl")][:4]
    bad = next(row for row in rows if row.get("videos"))
    (tmp_path / "broken.mp4").write_bytes(b"no clip" * 99)
    bad["videos"] = [str(tmp_path / "broken.mp4")]
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = lambda *more: subprocess.run(command(toy, tmp_path / "r.jsonl", "--data-root", str(toy), *more),
                                       capture_output=True, text=True)
    done = run("--data", str(data))
    assert done.returncode == 0 and "n_ok 3 + n_failed 1 = n_total 4" in done.stdout, done.stderr[-2000:]
    assert f"few.jsonl:{rows.index(bad) + 1}: " in done.stdout and "broken.mp4" in done.stdout
    for word, *more in (("no.jsonl", "--data", "no.jsonl"), ("r.jsonl/x", "--out", str(tmp_path / "r.jsonl/x"))):
        wrong = run(*more)
        assert wrong.returncode == 2 and word in wrong.stderr and wrong.stderr.count("\n") == 1, wrong.stderr
