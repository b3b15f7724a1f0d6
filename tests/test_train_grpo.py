"""The update against plain Hugging Face forwards, the formulas against numbers, the run against SIGKILL."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import yaml
from conftest import ROOT, RUN, train_command
from transformers import AutoModelForImageTextToText

import rollout
import train_grpo
import video_io

SETTINGS = yaml.safe_load((ROOT / "configs/toy.yaml").read_text())


def config(toy, **changes):
    values = dict(SETTINGS, decode_workers=0, model=str(toy / "model"), train_files=[str(toy / "train.jsonl")],
                  val_files=[str(toy / "val.jsonl")])
    return train_grpo.Config(**dict(values, **changes))


def make_group(run, record, lengths, seed):
    """A group with random responses and rewards."""
    rng = np.random.default_rng(seed)
    (group,), failed = run.prompter.groups([(record, run.loader.submit(record))])
    assert not failed
    group.responses = [rollout.Response(rng.integers(20, 250, n).tolist(), rng.normal(-5.5, 0.3, n).tolist(), "", "stop")
                       for n in lengths]
    group.scores = [dict(overall=float(x)) for x in rng.random(len(lengths))]
    group.advantages = train_grpo.group_advantages(torch.tensor([s["overall"] for s in group.scores]), "grpo")
    return group


def some_groups(toy, run, kinds=("video", "image", "text", "video"), n=4):
    records = video_io.load_records(toy / "train.jsonl")
    picked = []
    for kind in kinds:
        picked.append(next(r for r in records if r["data_type"] == kind and r not in picked))
    rng = np.random.default_rng(1)
    return [make_group(run, r, rng.integers(1, 9, n).tolist(), i) for i, r in enumerate(picked)]


def hf_inputs(run, group):
    """The group's prompt through the Hugging Face processor."""
    media = group.media
    videos = dict(videos=[c.frames for c in media.videos], do_sample_frames=False, video_metadata=[
        dict(fps=c.fps, frames_indices=c.frames_indices, total_num_frames=c.total_num_frames) for c in media.videos])
    inputs = run.prompter.processor(text=[group.text], images=media.images or None, do_resize=False,
                                    return_tensors="pt", **(videos if media.videos else {}))
    assert inputs["input_ids"][0].tolist() == group.prompt_ids
    return inputs


def separate_distribution(model, run, group, response, temperature=1.0):
    """(R, V) log-probabilities by an ordinary forward over inputs of the Hugging Face processor."""
    inputs, P = hf_inputs(run, group), len(group.prompt_ids)
    answer = torch.tensor([response.ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    logits = model(**inputs, use_cache=False).logits[0, P - 1:-1] / temperature
    logits[:, run.banned] = -torch.inf
    return logits.log_softmax(-1)


def separate_logprobs(*arguments):
    """One response's logprobs, (R,), by an ordinary forward: arguments of separate_distribution."""
    return separate_distribution(*arguments).gather(1, torch.tensor(arguments[3].ids)[:, None])[:, 0]


def reference_loss(model, run, groups):
    """GRPO's token-mean loss written out over separate forwards (ratio 1, truncated importance weights)."""
    total = sum(len(r.ids) for g in groups for r in g.responses)
    loss = 0.0
    for group in groups:
        for response, advantage in zip(group.responses, group.advantages):
            logprobs = separate_logprobs(model, run, group, response, run.cfg.temperature)
            weight = (logprobs.detach() - torch.tensor(response.logprobs)).exp().clamp(max=run.cfg.importance_cap)
            loss = loss - ((logprobs - logprobs.detach()).exp() * advantage * weight).sum() / total
    return loss


def relative_gaps(model, reference):
    gaps = {}
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        gaps[name] = ((p.grad - q.grad).norm() / (q.grad.norm() + 1e-9)).item()
    return gaps


@pytest.mark.parametrize("max_tokens", [100_000, 300, 1], ids=["one pack", "several packs", "a response per pack"])
def test_packed_loss_and_every_gradient_equal_separate_forwards(toy, max_tokens, monkeypatch):
    monkeypatch.setattr(train_grpo, "LOGITS_ROWS", 7)
    cfg = config(toy, temperature=0.7, max_tokens_per_pack=max_tokens, max_grad_norm=1e9)
    run, *_ = train_grpo.prepare(cfg)
    run.recurrent = max_tokens == 1  # models with recurrent layers take this path
    groups = some_groups(toy, run)
    model = train_grpo.load_policy(cfg, run.device)
    metrics = train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)

    reference = AutoModelForImageTextToText.from_pretrained(cfg.model, dtype=torch.float32, attn_implementation="sdpa")
    loss = reference_loss(reference, run, groups)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    gaps = relative_gaps(model, reference)
    assert any("visual" in name for name in gaps) and max(gaps.values()) < 2e-5, max(gaps.items(), key=lambda x: x[1])


def test_gradient_checkpointing_changes_no_gradient(toy):
    run, *_ = train_grpo.prepare(config(toy, max_grad_norm=1e9))
    groups, grads = some_groups(toy, run), []
    for flag in (0.0, 0.5, 1.0):
        model = train_grpo.load_policy(config(toy, gradient_checkpointing=flag), run.device)
        train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert grads[0].norm() > 0 and all(torch.allclose(grads[0], g, atol=1e-6) for g in grads[1:])


def test_packs_hold_every_response_once_and_keep_to_the_budget():
    rng = np.random.default_rng(0)
    responses = lambda n: [rollout.Response([1] * int(rng.integers(1, 30)), [], "", "stop") for _ in range(n)]
    groups = [rollout.Group({}, None, "", [0] * int(rng.integers(10, 60)), responses(8)) for _ in range(20)]
    packs = train_grpo.make_packs(groups, 200)
    seen = [(id(g), i) for pack in packs for g, indices in pack for i in indices]
    assert sorted(seen) == sorted((id(g), i) for g in groups for i in range(8))
    size = lambda pack: sum(len(g.prompt_ids) + sum(len(g.responses[i].ids) for i in indices) for g, indices in pack)
    assert max(map(size, packs)) <= 200
    assert any(len(pack) > 1 for pack in packs)  # small groups share a pack


def test_token_weights_make_the_sum_over_packs_the_mean_that_is_asked_for():
    lengths = [[3, 5], [2]]
    for kind, expected in [("token", [0.1] * 10), ("sequence", [1 / 9] * 3 + [1 / 15] * 5 + [1 / 6] * 2),
                           ("constant", [1 / 60] * 10)]:
        weights = torch.cat([train_grpo.token_weights(pack, kind, 10, 3, 20) for pack in lengths])
        assert torch.allclose(weights, torch.tensor(expected))


def test_training_order_is_a_permutation_per_epoch_and_fixed_by_the_seed():
    records = list(range(10))
    order = [train_grpo.record_at(p, records, 3) for p in range(30)]
    assert all(sorted(order[i:i + 10]) == records for i in (0, 10, 20))
    assert order[:10] != order[10:20]
    assert order == [train_grpo.record_at(p, records, 3) for p in range(30)]
    assert order != [train_grpo.record_at(p, records, 4) for p in range(30)]


def test_a_frozen_tower_runs_once_for_all_passes_over_a_pack(toy):
    run, *_ = train_grpo.prepare(config(toy, freeze_vision=True, ppo_epochs=2, max_grad_norm=1e9))
    groups = some_groups(toy, run)
    model = train_grpo.load_policy(run.cfg, run.device)
    passes = []
    model.model.visual.patch_embed.register_forward_hook(lambda *args: passes.append(1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    train_grpo.fill_logprobs(run, model, groups, "old_logprobs")
    assert len(passes) == 2  # images and clips have a pass each
    for _ in range(2):
        train_grpo.update(run, model, optimizer, groups)
    assert len(passes) == 2
    cached = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    assert all(p.grad is None for p in model.model.visual.parameters())

    run.cfg.freeze_vision = False
    whole = train_grpo.load_policy(run.cfg, run.device)
    train_grpo.update(run, whole, torch.optim.SGD(whole.parameters(), 0.0), groups)
    others = [p.grad for name, p in whole.named_parameters() if "visual" not in name]
    assert cached[0].norm() > 0 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(cached, others, strict=True))


def test_kl_to_the_reference_is_zero_at_first_and_then_pulls_back(toy):
    """The loss of k2 with zero advantages has the gradient of the mean of (logp - ref)^2 / 2."""
    run, *_ = train_grpo.prepare(config(toy, kl="loss", kl_kind="k2", importance="off", max_grad_norm=1e9))
    groups = some_groups(toy, run)
    model = train_grpo.load_policy(run.cfg, run.device)
    reference = train_grpo.load_policy(run.cfg, run.device, reference=True)
    assert not any(p.requires_grad for p in reference.parameters())
    train_grpo.fill_logprobs(run, reference, groups, "ref_logprobs")
    for g in groups:
        g.advantages = torch.zeros(len(g.responses))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    assert train_grpo.update(run, model, optimizer, groups, kl_coef=3.0)["kl"] == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    metrics = train_grpo.update(run, model, optimizer, groups, kl_coef=3.0)

    other = AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.3)
    gaps = [separate_logprobs(other, run, g, r) - ref for g in groups for r, ref in zip(g.responses, g.ref_logprobs)]
    kl = (torch.cat(gaps) ** 2 / 2).mean()
    (3.0 * kl).backward()
    assert kl > 1e-4 and metrics["kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(3 * kl.item(), rel=1e-4)
    assert max(relative_gaps(model, other).values()) < 1e-4


def test_the_full_kl_and_its_gradient_are_those_of_torch_over_the_vocabulary(toy, monkeypatch):
    """Zero advantages, chunks of 7 rows, banned ids left out: F.kl_div over plain forwards of both models."""
    monkeypatch.setattr(train_grpo, "LOGITS_ROWS", 7)
    run, *_ = train_grpo.prepare(config(toy, kl="loss", kl_kind="full", temperature=0.7, importance="off",
                                        max_tokens_per_pack=300, max_grad_norm=1e9))
    groups = some_groups(toy, run)
    model = train_grpo.load_policy(run.cfg, run.device)
    reference = train_grpo.load_policy(run.cfg, run.device, reference=True)
    run.ref_head = reference.lm_head.weight
    train_grpo.fill_logprobs(run, reference, groups, "ref_logprobs")
    for g in groups:
        g.advantages = torch.zeros(len(g.responses))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    assert train_grpo.update(run, model, optimizer, groups, kl_coef=3.0)["kl"] == pytest.approx(0, abs=1e-7)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    metrics = train_grpo.update(run, model, optimizer, groups, kl_coef=3.0)

    other, first = (AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        other.lm_head.weight.mul_(1.3)
    rows = []
    for group in groups:
        for response in group.responses:
            ours, theirs = (separate_distribution(m, run, group, response, 0.7) for m in (other, first))
            kept = torch.isfinite(ours[0])  # of banned ids there is nothing
            rows.append(torch.nn.functional.kl_div(theirs[:, kept].detach(), ours[:, kept], reduction="none",
                                                   log_target=True).sum(-1))
    kl = torch.cat(rows).mean()
    (3.0 * kl).backward()
    assert kl > 1e-3 and metrics["kl"] == pytest.approx(kl.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(3 * kl.item(), rel=1e-5)
    assert max(relative_gaps(model, other).values()) < 1e-4


def test_masked_responses_train_nothing_and_are_not_counted(toy):
    run, *_ = train_grpo.prepare(config(toy, mask_truncated=True, max_grad_norm=1e9))
    groups = some_groups(toy, run)
    for g in groups:
        g.responses[1].finish_reason = "length"
    model = train_grpo.load_policy(run.cfg, run.device)
    train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)
    reference = AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32)
    for g in groups:
        del g.responses[1]
        g.advantages = torch.cat([g.advantages[:1], g.advantages[2:]])
    reference_loss(reference, run, groups).backward()
    assert max(relative_gaps(model, reference).values()) < 2e-5


def test_offline_tokens_have_their_own_loss_and_weight(toy):
    """luffy at weight 2: the given answer's tokens -2 A p / (p + 0.1), the others as ever."""
    run, *_ = train_grpo.prepare(config(toy, offline="luffy", offline_weight=2.0, max_grad_norm=1e9))
    groups = some_groups(toy, run, kinds=("video", "text"))
    for g in groups:
        g.responses[-1].finish_reason, g.responses[-1].logprobs = "offline", [0.0] * len(g.responses[-1].ids)
    model = train_grpo.load_policy(run.cfg, run.device)
    metrics = train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)
    other = AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32)
    total, loss, given = sum(len(r.ids) for g in groups for r in g.responses), 0.0, 0
    for g in groups:
        for r, a in zip(g.responses, g.advantages):
            logp = separate_logprobs(other, run, g, r)
            if r.finish_reason == "offline":
                loss, given = loss - 2 * (a * logp.exp() / (logp.exp() + 0.1)).sum() / total, given + len(r.ids)
            else:
                weight = (logp.detach() - torch.tensor(r.logprobs)).exp().clamp(max=2.0)
                loss = loss - ((logp - logp.detach()).exp() * a * weight).sum() / total
    loss.backward()
    assert metrics["offline_share"] == pytest.approx(given / total)
    assert max(relative_gaps(model, other).values()) < 2e-5


def offline_records(toy, folder, changes):
    """Five training records of the toy, with offline fields from changes by position."""
    rows = [json.loads(line) for line in open(toy / "train.jsonl")][:5]
    for i, text in changes.items():
        rows[i].update(has_offline_trajectory=True, offline_output=text)
    folder.mkdir()
    for name in ("clips", "images"):
        os.symlink(toy / name, folder / name)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def test_trap_6_given_trajectories_end_as_the_model_would_and_bad_ones_are_refused(toy, tmp_path, capsys):
    good = "<answer>A</answer>"
    path = offline_records(toy, tmp_path / "a", {0: good, 1: good * 30})
    cfg = config(toy, offline="on_policy", train_files=[path], max_response_length=40)
    run, train, _ = train_grpo.prepare(cfg)
    tokenizer = run.prompter.processor.tokenizer
    (response,) = train_grpo.offline_response(cfg, train[0], tokenizer)
    assert response.ids[-1] == tokenizer.eos_token_id and tokenizer.decode(response.ids[:-1]) == good
    assert train_grpo.offline_response(cfg, train[1], tokenizer) == []  # over max_response_length
    assert "train.jsonl:2" in capsys.readouterr().err
    path = offline_records(toy, tmp_path / "b", {2: "<|video_pad|>" + good})
    with pytest.raises(video_io.DataError, match="train.jsonl:3.*placeholder"):
        train_grpo.prepare(config(toy, offline="on_policy", train_files=[path], max_response_length=40))


def test_shares_are_even_in_cost_and_leave_nothing_out(toy):
    run, train, _ = train_grpo.prepare(config(toy))
    rng = np.random.default_rng(0)
    items = [(i, dict(train[0], tokens=int(n))) for i, n in enumerate(rng.integers(100, 20_000, 32))]
    run.world, parts = 4, []
    for run.rank in range(4):
        parts.append(train_grpo.my_share(run, items))
    assert sorted(r["position"] for part in parts for r in part) == list(range(32))
    cost = [sum(r["tokens"] for r in part) for part in parts]
    assert max(cost) < 1.1 * min(cost)  # round robin over these lengths: 1.4
    run.cfg.tensor_parallel = 2  # ranks 0, 1 and 2, 3 share an engine and ask the same
    pairs = []
    for run.rank in range(4):
        pairs.append([r["position"] for r in train_grpo.my_share(run, items)])
    assert pairs[0] == pairs[1] != pairs[2] == pairs[3] and sorted(pairs[0] + pairs[2]) == list(range(32))


# ---------------------------------------------------------------------------------------- whole runs


def final_tensors(run, name=None):
    """Every weight and optimizer tensor of a run's checkpoint, the last if none is named."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = run / "checkpoints" / (name or (run / "checkpoints/latest").read_text())
    dcp_to_torch_save(folder / "dcp", run / "flat.pt")
    flat = torch.load(run / "flat.pt", weights_only=True)
    return {(part, name): tensor for part in flat for name, tensor in flat[part].items()}


def stop_after(command, metrics, lines, sign):
    """Start the run, send it a signal once metrics has so many lines; returns its exit status."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.time() + 400
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None and time.time() < deadline, "the run ended before it could be stopped"
        time.sleep(0.01)
    if sign == signal.SIGKILL:
        os.killpg(process.pid, sign)
    else:
        process.send_signal(sign)
    return process.wait()


def test_a_stopped_and_a_killed_run_go_on_and_end_with_the_same_weights(toy, trained, tmp_path):
    """SIGTERM saves and exits with 0; SIGKILL loses the steps since the last checkpoint, which come again."""
    whole, _ = trained
    run = tmp_path / "killed"
    command, metrics, latest = train_command(toy, run), run / "metrics.jsonl", run / "checkpoints/latest"
    assert stop_after(command, metrics, 1, signal.SIGTERM) == 0
    stopped = int(latest.read_text()[-1])
    assert stopped == metrics.read_text().count("\n") < 6
    assert stop_after(command, metrics, max(3, stopped + 1), signal.SIGKILL) == -signal.SIGKILL
    saved = int(latest.read_text()[-1])
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"after step {saved}" in done.stdout

    steps = lambda run: [(r["step"], r["reward"], r["loss"]) for r in map(json.loads, open(run / "metrics.jsonl"))]
    assert [s for s, *_ in steps(whole)] == [1, 2, 3, 4, 5, 6]
    assert steps(run) == steps(whole)
    ours, theirs = final_tensors(run), final_tensors(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_an_engine_with_other_weights_than_the_trainer_stops_the_first_step(toy, tmp_path):
    (tmp_path / "other.py").write_text(f"""import sys; sys.path.insert(0, {str(ROOT)!r})
import torch, train_grpo
load = train_grpo.load_policy
def other(*args, **kwargs):
    model = load(*args, **kwargs)
    with torch.no_grad():
        model.model.visual.patch_embed.proj.weight.mul_(1.3)
    return model
train_grpo.load_policy = other
train_grpo.main(train_grpo.load_config(sys.argv[1], sys.argv[2:]))
""")
    command = train_command(toy, tmp_path / "run", steps=1, val_files=[])
    done = subprocess.run([command[0], str(tmp_path / "other.py"), *command[2:]], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: engine and trainer differ by" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_host_memory_is_flat_over_sixty_steps(toy, tmp_path):
    """Kept frames would add 3 MB a step, 10 % here.  The allocator is told to hand back what is free, oneDNN to keep
    few of its kernels for each new shape: both fill pools for 40 steps else."""
    command = train_command(toy, tmp_path / "run", steps=60, prompts_per_step=32, n=2, max_refills=0, save_every=0,
                            val_every=0, val_files=[], log_rollouts_every=0)
    frugal = dict(ONEDNN_PRIMITIVE_CACHE_CAPACITY="8", MALLOC_ARENA_MAX="1", MALLOC_TRIM_THRESHOLD_="65536",
                  MALLOC_MMAP_THRESHOLD_="65536")
    subprocess.run(command, check=True, capture_output=True, env=os.environ | frugal)
    gib = [json.loads(line)["host_gib"] for line in open(tmp_path / "run/metrics.jsonl")]
    assert np.median(gib[-12:]) / np.median(gib[8:20]) < 1.02


def test_dynamic_sampling_keeps_groups_with_spread_and_carries_over_what_is_left(trained):
    run, _ = trained
    left, refilled = 0, 0
    for m in map(json.loads, open(run / "metrics.jsonl")):
        rows = [json.loads(line) for line in open(run / f"rollouts/step_{m['step']:06d}.jsonl")]
        groups = [rows[i:i + RUN["n"]] for i in range(0, len(rows), RUN["n"])]
        assert all(len({r["where"] for r in group}) == 1 for group in groups) and len(groups) == m["n_asked"]
        kept = left + sum(len({r["accuracy"] for r in group}) > 1 for group in groups)
        assert m["n_groups"] == min(kept, RUN["prompts_per_step"])
        left = m["n_surplus"]
        assert left == kept - m["n_groups"]
        refilled += m["n_asked"] > RUN["prompts_per_step"]
    assert refilled  # at this accuracy many groups have no spread


def resumable(trained, tmp_path, *words):
    """(run, model, optimizer, data) of the trained run's copy under other settings."""
    shutil.copytree(trained[0], tmp_path / "copy", dirs_exist_ok=True)
    cfg = train_grpo.load_config(trained[0] / "config.json", [
        f"output={tmp_path / 'copy'}", "decode_workers=0", *words])
    run, *_ = train_grpo.prepare(cfg)
    model = train_grpo.load_policy(cfg, run.device)
    data = json.loads((trained[0] / "checkpoints/step_000006/state.json").read_text())["data"]
    return run, model, torch.optim.AdamW(model.parameters()), data


def test_a_run_with_other_settings_or_data_is_refused_unless_forced(trained, tmp_path):
    run, model, optimizer, data = resumable(trained, tmp_path, "lr=0.5", "steps=9")
    with pytest.raises(video_io.DataError, match="lr was 0.0003, is 0.5; .*resume=force|lr was 0.0003, is 0.5: ") as error:
        train_grpo.load_checkpoint(run, model, optimizer, data)
    assert "steps" not in str(error.value)  # more steps are no other run
    run.cfg.resume = "force"
    assert train_grpo.load_checkpoint(run, model, optimizer, data)["step"] == 6
    run.cfg.resume, run.cfg.lr = "auto", 3e-4
    changed = {path: "0" * 64 for path in data}
    with pytest.raises(video_io.DataError, match="train.jsonl has changed"):
        train_grpo.load_checkpoint(run, model, optimizer, changed)
    assert train_grpo.load_checkpoint(run, model, optimizer, data)["step"] == 6


@pytest.mark.parametrize("damage", ["state.json", "dcp/__0_0.distcp", "dcp/.metadata"])
def test_a_damaged_checkpoint_is_one_clear_line(trained, tmp_path, damage):
    run, model, optimizer, data = resumable(trained, tmp_path)
    file = tmp_path / "copy/checkpoints/step_000006" / damage
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(video_io.DataError, match="step_000006: no whole checkpoint.*step_") as error:
        train_grpo.load_checkpoint(run, model, optimizer, data)
    assert "\n" not in str(error.value)


def test_init_from_takes_the_weights_alone(trained, tmp_path):
    checkpoint = trained[0] / "checkpoints/step_000004"
    run, model, optimizer, data = resumable(trained, tmp_path, f"init_from={checkpoint}")
    shutil.rmtree(tmp_path / "copy/checkpoints")
    assert train_grpo.load_checkpoint(run, model, optimizer, data) is None and not optimizer.state
    saved = final_tensors(trained[0], "step_000004")
    assert all(torch.equal(p, saved["model", name]) for name, p in model.named_parameters())
    run.cfg.init_from = str(tmp_path)
    with pytest.raises(video_io.DataError, match="init_from"):
        train_grpo.load_checkpoint(run, model, optimizer, data)


def test_the_best_checkpoint_is_kept(trained):
    validation = json.loads((trained[0] / "checkpoints/step_000006/state.json").read_text())["validation"]
    best = max((3, 6), key=lambda step: (validation[str(step)]["all"], -step))
    assert (trained[0] / "checkpoints/best").read_text() == f"step_{best:06d}"
    assert (trained[0] / f"checkpoints/step_{best:06d}/dcp/.metadata").exists()


def test_old_checkpoints_go_but_the_newest_and_the_best_stay(toy, tmp_path):
    run, *_ = train_grpo.prepare(config(toy, output=str(tmp_path), keep=2))
    folder = tmp_path / "checkpoints"
    for step in range(1, 6):
        made = folder / f".step_{step:06d}.tmp"
        made.mkdir(parents=True)
        run.saving = None, made, folder / f"step_{step:06d}", 2
        train_grpo.finish_save(run)
    assert sorted(p.name for p in folder.iterdir()) == ["best", "latest", "step_000002", "step_000004", "step_000005"]
    assert (folder / "latest").read_text() == "step_000005" and (folder / "best").read_text() == "step_000002"


def test_a_dry_run_shows_the_plan_and_trains_nothing(toy, tmp_path, capsys):
    cfg = config(toy, output=str(tmp_path / "dry"), dry_run=True)
    train_grpo.main(cfg)
    printed = capsys.readouterr().out
    assert "<|video_pad|>" in printed or "<answer>" in printed
    assert "training" in printed and "GiB" in printed and "epochs" in printed
    assert not (tmp_path / "dry/metrics.jsonl").exists()


@pytest.mark.parametrize("pack,response,recomputed,measured", [
    (10_983, 512, 1.0, 39.8), (33_255, 2048, 1.0, 41.3), (10_983, 512, 0.5, 53.4)])
def test_the_estimate_of_memory_is_near_what_was_measured(toy, pack, response, recomputed, measured):
    """GiB of an update with AdamW on one H200 with random weights of Qwen3-VL-2B's shape, a group of 8."""
    run, *_ = train_grpo.prepare(config(toy, n=8, max_response_length=response, gradient_checkpointing=recomputed,
                                        max_tokens_per_pack=65536))
    text = run.prompter.model_config.get_text_config()
    text.update(dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, vocab_size=151936))
    on_gpu = dataclasses.replace(run, device=torch.device("cuda"))
    parts = train_grpo.memory_estimate(run.cfg, on_gpu, 2_127_532_032, pack)
    assert parts["together"] / 2**30 == pytest.approx(measured, rel=0.1)


TENSORBOARD = """import json, os
class SummaryWriter:
    def __init__(self, logdir, **kwargs):
        os.makedirs(logdir, exist_ok=True)
        self.file = open(os.path.join(logdir, "board.jsonl"), "a")
    def add_hparams(self, values, metric_dict):
        assert all(isinstance(value, (bool, int, float, str)) for value in values.values()), values
        self.add_scalar("hparams", values)
    def add_scalar(self, name, value, global_step=None):
        print(json.dumps([name, value, global_step]), file=self.file, flush=True)
    add_text = add_scalar
    def flush(self):
        self.file.flush()
    close = flush
"""


def test_saving_aside_writes_the_same_checkpoints_and_trackers_get_every_number(toy, trained, tmp_path):
    """async_save: the weights go on changing while a checkpoint is written.  The tracker is a stand-in that takes
    what tensorboard's takes."""
    (tmp_path / "tensorboardX.py").write_text(TENSORBOARD)
    (tmp_path / "tensorboardX-2.0.dist-info").mkdir()
    (tmp_path / "tensorboardX-2.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: tensorboardX\nVersion: 2.0\n")
    run = tmp_path / "aside"
    done = subprocess.run(train_command(toy, run, async_save=True, save_every=1, trackers="[tensorboard]"),
                          capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=str(tmp_path)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((run / "checkpoints").glob("step_*"))) == 6 and not list((run / "checkpoints").glob(".step_*"))
    for step in ("step_000002", "step_000004", "step_000006"):
        ours, theirs = final_tensors(run, step), final_tensors(trained[0], step)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    (board,) = run.rglob("board.jsonl")
    (first, values, _), *rest = map(json.loads, open(board))
    assert first == "hparams" and values["lr"] == SETTINGS["lr"] and "train.jsonl" in values["train_files"]
    logged = {(name, step): value for name, value, step in rest}
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert logged == {(name, row["step"]): value for row in rows for name, value in row.items() if name != "dropped"}


def test_a_tracker_that_is_not_installed_is_named(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(train_grpo, "get_available_trackers", lambda: [])
    with pytest.raises(video_io.DataError, match="trackers: mlflow, wandb not installed"):
        train_grpo.prepare(config(toy, output=str(tmp_path), trackers=["wandb", "mlflow"]))


def test_the_coefficient_of_the_kl_is_steered_towards_its_target(toy, tmp_path):
    """The proportional controller of arXiv 1909.08593: by a fifth at most in 10,000 responses.  Two processes with
    sharded weights and a sharded reference."""
    command = train_command(toy, tmp_path / "run", steps=4, kl="loss", kl_kind="full", kl_coef=0.5, kl_target=1e-4,
                            val_every=0, val_files=[], save_every=2)
    done = subprocess.run([*LAUNCH, "29616", *command[1:]], capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in open(tmp_path / "run/metrics.jsonl")]
    expected = 0.5
    for row in rows:
        assert row["kl_coef"] == pytest.approx(expected, rel=1e-12)
        error = min(0.2, max(-0.2, row["kl"] / 1e-4 - 1)) if "kl" in row else 0.0
        expected *= 1 + error * row["n_groups"] * RUN["n"] / 10_000
    assert len({row["kl_coef"] for row in rows}) > 1 and any(row.get("kl", 0) > 1e-5 for row in rows)
    state = json.loads((tmp_path / "run/checkpoints/step_000004/state.json").read_text())
    assert state["kl_coef"] == pytest.approx(expected, rel=1e-12)  # a resumed run goes on with it


def test_compiled_layers_give_the_same_loss_and_gradients(toy):
    found = []
    for flag in (False, True):
        run, *_ = train_grpo.prepare(config(toy, compile=flag, max_grad_norm=1e9))
        model = train_grpo.load_policy(run.cfg, run.device)
        metrics = train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), some_groups(toy, run))
        found.append((metrics["loss"], torch.cat([p.grad.flatten() for p in model.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert (found[0][1] - found[1][1]).norm() < 1e-4 * found[0][1].norm()


@pytest.mark.parametrize("asked,reference,expected", [
    (False, False, "OffloadPolicy"), (True, False, "CPUOffloadPolicy"), (True, True, "OffloadPolicy")])
def test_offloaded_weights_are_the_policys_not_the_references(toy, monkeypatch, asked, reference, expected):
    """FSDP refuses a model that waits in host memory once it has been moved, as a reference is in each step."""
    calls = []
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda block, **options: calls.append(options))
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *args, **kwargs: dict(shard=None))
    monkeypatch.setattr(train_grpo.dist, "is_initialized", lambda: True)
    cfg = config(toy, cpu_offload=asked)
    model = train_grpo.load_policy(cfg, torch.device("cpu"), reference)
    train_grpo.shard(model, cfg, torch.device("cuda"), 1)
    text, vision = model.config.text_config, model.config.vision_config
    assert len(calls) == text.num_hidden_layers + vision.depth + 1
    assert {type(options["offload_policy"]).__name__ for options in calls} == {expected}


# on CPU `accelerate launch` starts one process whatever it is told; on GPUs it starts them as this does
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
ALONE = dict(os.environ, OMP_NUM_THREADS="1")


def test_two_processes_with_sharded_weights_train_as_one_does(toy, trained, tmp_path):
    """FSDP2 over gloo, an engine in each process: same losses, weights and optimizer state as the whole run.
    Micro-batches differ, too: one process packs what two pack apart.  Then one process goes on with that run."""
    whole, _ = trained
    done = subprocess.run([*LAUNCH, "29613", *train_command(toy, tmp_path / "two", steps=3)[1:]],
                          capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    same_as_whole(tmp_path / "two", whole, 3)
    done = subprocess.run(train_command(toy, tmp_path / "two"), capture_output=True, text=True)
    assert done.returncode == 0 and "after step 3" in done.stdout, done.stderr[-3000:]
    read = lambda run: [json.loads(line) for line in open(run / "metrics.jsonl")]
    for ours, theirs in zip(read(tmp_path / "two"), read(whole), strict=True):
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-12)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


KILLS = int(os.environ.get("KILLS", 1))  # KILLS=20 pytest -k random_moments: the long way


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_random_moments_a_run_ends_with_the_weights_of_an_uninterrupted_one(toy, tmp_path, processes):
    """SIGKILL to all processes at any time from the first new step on, in the middle of a save as well."""
    def command(name):
        python, *rest = train_command(toy, tmp_path / name, steps=5 + 2 * KILLS, save_every=1, keep=2, val_every=0,
                                      val_files=[])
        return [*LAUNCH, str(random.randrange(20000, 30000)), *rest] if processes > 1 else [python, *rest]

    whole = subprocess.run(command("whole"), capture_output=True, text=True, env=ALONE)
    assert whole.returncode == 0, whole.stderr[-3000:]
    latest, killed = tmp_path / "killed/checkpoints/latest", 0
    for _ in range(KILLS):
        before = latest.read_text() if latest.exists() else ""
        process = psutil.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ALONE)
        while process.poll() is None and (not latest.exists() or latest.read_text() == before):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 2))
        killed += process.poll() is None
        if process.poll() is None:  # the launcher's processes have sessions of their own
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()
    done = subprocess.run(command("killed"), capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{processes} processes, killed {killed} times")
    assert killed >= KILLS / 2
    killed, whole = ([(r["step"], r["reward"], r["loss"]) for r in map(json.loads, open(
        tmp_path / name / "metrics.jsonl"))] for name in ("killed", "whole"))
    assert killed == whole
    ours, theirs = (final_tensors(tmp_path / name) for name in ("killed", "whole"))
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_copies_of_the_weights_and_a_shared_engine_train_as_one_does(toy, trained, tmp_path):
    """Tensor parallel 2 in vLLM; shard_size 1: each process has whole weights, gradients are averaged (HSDP)."""
    whole, _ = trained
    done = subprocess.run([*LAUNCH, "29614", *train_command(toy, tmp_path / "tp", steps=2, val_every=0, val_files=[],
                                                            tensor_parallel=2, shard_size=1)[1:]],
                          capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0, done.stderr[-3000:]
    same_as_whole(tmp_path / "tp", whole, 2)


def same_as_whole(run, whole, steps):
    read = lambda run: [json.loads(line) for line in open(run / "metrics.jsonl")][:steps]
    for ours, theirs in zip(read(run), read(whole), strict=True):
        for key in ("reward", "n_asked", "n_groups", "n_surplus"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-12)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    name = f"step_{steps:06d}"
    assert len(list((run / "checkpoints" / name / "dcp").glob("*.distcp"))) == 2  # both processes were there
    ours, theirs = final_tensors(run, name), final_tensors(whole, name)
    assert ours.keys() == theirs.keys()
    gaps = torch.cat([(ours[key] - theirs[key]).abs().flatten() for key in ours])
    # AdamW divides a gradient by its own size: where it all but cancels, rounding decides the step
    assert (gaps > 1e-5).sum() <= 1e-5 * len(gaps) and gaps.max() < 1e-4, gaps.topk(9)


def test_traps_4_and_5_uneven_processes_go_on_and_a_dead_one_ends_the_others(toy, tmp_path):
    """Two prompts a step over two processes, of video, image or text alone; after some steps all clips vanish, so
    that a process often has nothing.  30 steps later one process is killed: the launcher ends with its reason."""
    shutil.copytree(toy, tmp_path / "toy", ignore=shutil.ignore_patterns("model"))
    command = [*LAUNCH, "29615", *train_command(
        toy, tmp_path / "run", prompts_per_step=2, n=2, max_refills=0, steps=10_000, val_files=[], save_every=0,
        train_files=tmp_path / "toy/train.jsonl", log_rollouts_every=0)[1:]]
    metrics = tmp_path / "run/metrics.jsonl"
    read = lambda: [json.loads(line) for line in metrics.read_text().splitlines(True) if line.endswith("\n")]
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(command, stdout=err, stderr=err, env=ALONE, start_new_session=True)
        deadline = time.time() + 400
        while not metrics.exists() or len(read()) < 3:
            assert process.poll() is None and time.time() < deadline, (tmp_path / "err").read_text()[-2000:]
            time.sleep(0.05)
        shutil.rmtree(tmp_path / "toy/clips")
        while len(read()) < 33:
            assert process.poll() is None and time.time() < deadline, (tmp_path / "err").read_text()[-2000:]
            time.sleep(0.05)
        assert any(m["n_dropped"] == 2 for m in read()) and any(m["n_dropped"] == 1 for m in read())
        children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "train_grpo.py"], capture_output=True, text=True)
        os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
        assert process.wait(timeout=120) != 0
    assert "SIGKILL" in (tmp_path / "err").read_text()


def test_a_run_folder_says_what_ran_and_what_came_of_it(toy, trained):
    run, printed = trained
    config = json.loads((run / "config.json").read_text())
    assert config["n"] == RUN["n"] and config["lr"] == SETTINGS["lr"] and set(config) == set(vars(config_of_toy(toy)))
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["packages"]["torch"] == torch.__version__.split("+")[0]
    assert provenance["command"][0].endswith("train_grpo.py")
    assert (run / "scripts/train_grpo.py").read_text() == (ROOT / "train_grpo.py").read_text()
    rows = [json.loads(line) for line in open(run / "rollouts/step_000002.jsonl")]
    metrics = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert len(rows) == metrics[1]["n_asked"] * RUN["n"]
    assert metrics[1]["reward"] == pytest.approx(sum(r["overall"] for r in rows) / len(rows))
    assert metrics[1]["accuracy"] == pytest.approx(sum(r["accuracy"] for r in rows) / len(rows))
    assert all(m["logprob_gap_max"] < 1e-4 for m in metrics if "loss" in m)  # float32: every sync arrived
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == [
        "step_000002", "step_000003", "step_000004", "step_000006"]  # 3: the first validation is the best so far
    n_val = sum(1 for _ in open(toy / "val.jsonl"))
    for step in (0, 3, 6):
        answers = [json.loads(line) for line in open(run / f"validation/step_{step:06d}.jsonl")]
        assert len({a["key"] for a in answers}) == len(answers) == n_val
    assert "merge.py" in printed and "evaluate.py" in printed and "validation accuracy" in printed


def test_validation_evaluate_and_plain_generate_agree_answer_by_answer(toy, trained, tmp_path):
    run, _ = trained
    merged, out = tmp_path / "merged", tmp_path / "eval"
    for command in (["merge.py", run, merged],
                    ["evaluate.py", "run", "--model", merged, "--data", toy / "val.jsonl", "--out", out]):
        done = subprocess.run(["python", ROOT / command[0], *command[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    read = lambda file: {row["key"]: row for row in map(json.loads, open(file))}
    validation, evaluated = read(run / "validation/step_000006.jsonl"), read(out / "samples.jsonl")
    assert {k: (v["response"], v["accuracy"]) for k, v in validation.items()} == {
        k: (v["response"], v["accuracy"]) for k, v in evaluated.items()}
    assert len({v["response"] for v in validation.values()}) > 3

    cfg = train_grpo.load_config(run / "config.json")
    part, _, val = train_grpo.prepare(dataclasses.replace(cfg, decode_workers=0))
    model = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    groups, _ = part.prompter.groups([(r, part.loader.submit(r)) for r in val[::7]])
    for group in groups:
        inputs = hf_inputs(part, group)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=cfg.max_response_length)
        text = part.prompter.processor.decode(ids[0, len(group.prompt_ids):], skip_special_tokens=True)
        assert text == validation[group.record["key"]]["response"]


def config_of_toy(toy):
    return train_grpo.load_config(ROOT / "configs/toy.yaml", [f"model={toy / 'model'}"])


def damaged(toy, folder, change):
    """The toy with a few records, changed by change(rows, folder); returns overrides of a run on it."""
    folder.mkdir()
    for name in ("clips", "images"):
        os.symlink(toy / name, folder / name)
    rows = [json.loads(line) for line in open(toy / "train.jsonl")][:5]
    lines = change(rows, folder)
    (folder / "train.jsonl").write_text("\n".join(lines or map(json.dumps, rows)) + "\n")
    return dict(model=toy / "model", train_files=folder / "train.jsonl", val_files=[], output=folder / "run",
                decode_workers=0)


def no_file(rows, folder):
    rows[2]["videos"] = ["clips/nowhere.mp4"]


def broken_line(rows, folder):
    return [json.dumps(rows[0]), '{"problem": "half a rec']


def unknown_type(rows, folder):
    rows[1]["problem_type"] = "multiple chioce"


def no_options(rows, folder):
    rows[0].update(problem_type="multiple choice", options=[], answer="A")


def bad_gold(rows, folder):
    rows[3].update(problem_type="numerical", answer="several")


def broken_clip(rows, folder):
    (folder / "broken.mp4").write_bytes(b"this is no clip" * 100)
    rows[4]["videos"] = ["broken.mp4"]


@pytest.mark.parametrize("change,words", [
    (no_file, ["train.jsonl:3", "clips/nowhere.mp4"]), (broken_line, ["train.jsonl:2"]),
    (unknown_type, ["train.jsonl:2", "multiple chioce", "multiple choice"]), (no_options, ["train.jsonl:1", "options"]),
    (bad_gold, ["train.jsonl:4", "several"]), (broken_clip, ["train.jsonl:5", "broken.mp4"])])
def test_bad_data_is_named_before_a_model_is_loaded(toy, tmp_path, monkeypatch, change, words):
    overrides = damaged(toy, tmp_path / "data", change)
    monkeypatch.setattr(train_grpo, "load_policy", None)  # calling it would be a TypeError
    with pytest.raises(video_io.DataError) as error:
        train_grpo.main(train_grpo.load_config(ROOT / "configs/toy.yaml", [f"{k}={v}" for k, v in overrides.items()]))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value).splitlines()) <= 2
    assert not (tmp_path / "data/run/metrics.jsonl").exists()


def test_bad_clips_are_dropped_and_counted_if_asked(toy, tmp_path, capsys):
    overrides = damaged(toy, tmp_path / "data", broken_clip)
    cfg = train_grpo.load_config(ROOT / "configs/toy.yaml", [f"{k}={v}" for k, v in overrides.items()]
                                 + ["on_bad_media=drop"])
    _, train, _ = train_grpo.prepare(cfg)
    assert [r["where"] for r in train] == [f"train.jsonl:{i}" for i in (1, 2, 3, 4)]
    assert "dropped 1 of 5" in capsys.readouterr().err


def test_a_model_folder_without_processor_is_named(toy, tmp_path):
    shutil.copytree(toy / "model", tmp_path / "bare")
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (tmp_path / "bare" / name).unlink(missing_ok=True)
    cfg = config(toy, model=str(tmp_path / "bare"))
    with pytest.raises(video_io.DataError, match="bare"):
        train_grpo.prepare(cfg)


def test_a_model_that_is_nowhere_is_one_clear_line(toy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(video_io.DataError, match="no/such-model.*neither a folder nor a Hub name") as error:
        train_grpo.prepare(config(toy, model="no/such-model"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("word,message", [
    ("learning_rate=1", "unknown key 'learning_rate'"), ("step=3", "did you mean steps"), ("n=1", "n is 1"),
    ("lr=fast", "lr is 'fast'"), ("advantage=grop", "'grpo', 'dr_grpo'"), ("steps=true", "steps is True"),
    ("max_tokens_per_pack=10", "max_tokens_per_pack is 10"), ("algo=ppo", "not one of grpo, dapo"),
    ("val={max_frame: 8}", "it may hold"), ("val={max_frames: many}", "max_frames is 'many'"),
    ("temperature=0", "temperature is 0"), ("overlong_buffer=24", "overlong_buffer is 24"),
    ("kl=reward kl_kind=full", "kl_kind is full"), ("trackers=tensorbord", "'tensorbord' is not one of")])
def test_bad_config_is_one_clear_line(word, message):
    with pytest.raises(video_io.DataError) as error:
        train_grpo.load_config(ROOT / "configs/toy.yaml", word.split(" ") if "kl=" in word else [word])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_command_exits_with_2_and_prints_that_line_alone(tmp_path):
    (tmp_path / "c.yaml").write_text("model: m\ntrain_files: [x.jsonl]\nlearning_rate: 1\n")
    done = subprocess.run(["python", str(ROOT / "train_grpo.py"), str(tmp_path / "c.yaml")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "learning_rate" in done.stderr


def test_a_step_that_is_not_finite_stops_before_the_optimizer_and_names_samples(toy):
    run, *_ = train_grpo.prepare(config(toy))
    groups = some_groups(toy, run)
    model = train_grpo.load_policy(run.cfg, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    before = [p.clone() for p in model.parameters()]
    groups[1].advantages[0] = float("nan")
    with pytest.raises(FloatingPointError, match=groups[1].record["where"]):
        train_grpo.update(run, model, optimizer, groups)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_groups_without_spread_change_no_gradient_but_count_as_tokens(toy):
    """Their advantages are zero: leaving them out of the forward must equal taking them along."""
    run, *_ = train_grpo.prepare(config(toy, max_grad_norm=1e9))
    groups = some_groups(toy, run)
    groups[0].scores = [dict(overall=0.5)] * len(groups[0].responses)
    groups[0].advantages = torch.zeros(len(groups[0].responses))
    model = train_grpo.load_policy(run.cfg, run.device)
    metrics = train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)
    assert metrics["trained_tokens"] == sum(len(r.ids) for g in groups[1:] for r in g.responses)
    reference = AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32)
    reference_loss(reference, run, groups).backward()
    assert max(relative_gaps(model, reference).values()) < 2e-5
