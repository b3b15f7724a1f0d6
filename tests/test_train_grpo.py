"""The update against plain Hugging Face forwards, the formulas against numbers, the run against SIGKILL."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
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


def separate_logprobs(model, run, group, response, temperature=1.0):
    """One response's logprobs by an ordinary forward over inputs of the Hugging Face processor."""
    inputs, P = hf_inputs(run, group), len(group.prompt_ids)
    answer = torch.tensor([response.ids])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    logits = model(**inputs, use_cache=False).logits[0, P - 1:-1] / temperature
    logits[:, run.banned] = -torch.inf
    return logits.log_softmax(-1).gather(1, answer[0][:, None])[:, 0]


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
def test_packed_loss_and_every_gradient_equal_separate_forwards(toy, max_tokens):
    cfg = config(toy, temperature=0.7, max_tokens_per_pack=max_tokens, logits_chunk=7, max_grad_norm=1e9)
    run, *_ = train_grpo.prepare(cfg)
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
    for flag in (False, True):
        model = train_grpo.load_policy(config(toy, gradient_checkpointing=flag), run.device)
        train_grpo.update(run, model, torch.optim.SGD(model.parameters(), 0.0), groups)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert grads[0].norm() > 0 and torch.allclose(*grads, atol=1e-6)


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


def test_advantages_have_ddof_1_and_eps_1e_6():
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = torch.tensor([-1.161894, -0.387298, 0.387298, 1.161894])  # (r - 2.5) / 1.290994; ddof 0 gives 1.3416
    assert torch.allclose(train_grpo.group_advantages(scores, "grpo"), expected, atol=1e-5)
    tiny = torch.tensor([0.0, 1e-6])  # std 7.07e-7: eps 1e-6 halves and more, 1e-4 would give 0.005
    assert train_grpo.group_advantages(tiny, "grpo")[1].item() == pytest.approx(0.5e-6 / (7.0711e-7 + 1e-6), rel=1e-3)
    assert torch.equal(train_grpo.group_advantages(scores, "dr_grpo"), scores - 2.5)


def test_loss_clips_each_side_by_its_own_range():
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5])
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])
    loss, clipped = train_grpo.policy_loss(ratio.log(), torch.zeros(5), advantages, 0.2, 0.28)
    assert torch.allclose(loss, torch.tensor([-0.5, 0.8, -2.0, -1.28, 1.5]))
    assert clipped.tolist() == [False, True, False, True, False]


def test_importance_weights_are_truncated_and_carry_no_gradient():
    trainer = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-1.0, -3.0, 0.0])
    weights = train_grpo.importance_weights(trainer, sampled, 2.0)
    assert torch.allclose(weights, torch.tensor([1.0, 2.0, np.exp(-1.0)], dtype=torch.float32))
    assert not weights.requires_grad
    assert torch.equal(train_grpo.importance_weights(trainer, sampled, 0.0), torch.ones(3))


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


# ---------------------------------------------------------------------------------------- whole runs


def final_tensors(run, name=None):
    """Every weight and optimizer tensor of a run's checkpoint, the last if none is named."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = run / "checkpoints" / (name or (run / "checkpoints/latest").read_text())
    dcp_to_torch_save(folder / "dcp", run / "flat.pt")
    flat = torch.load(run / "flat.pt", weights_only=True)
    return {(part, name): tensor for part in flat for name, tensor in flat[part].items()}


def test_a_killed_run_goes_on_and_ends_with_the_same_weights(toy, trained, tmp_path):
    whole, _ = trained
    command = train_command(toy, tmp_path / "killed")
    metrics = tmp_path / "killed/metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.time() + 300
    while not metrics.exists() or metrics.read_text().count("\n") < 3:  # step 2 is saved, step 3 is not
        assert process.poll() is None and time.time() < deadline, "the run ended before it could be killed"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    saved = (tmp_path / "killed/checkpoints/latest").read_text()
    assert saved in ("step_000002", "step_000004")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"after step {int(saved[-1])}" in done.stdout

    ours, theirs = final_tensors(tmp_path / "killed"), final_tensors(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = lambda run: [(r["step"], r["reward"], r["loss"]) for r in map(json.loads, open(run / "metrics.jsonl"))]
    assert [s for s, *_ in steps(whole)] == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "killed") == steps(whole)


def test_two_processes_with_sharded_weights_train_as_one_does(toy, trained, tmp_path):
    """FSDP2 over gloo, an engine in each process: same losses, weights and optimizer state as the whole run."""
    whole, _ = trained
    launch = ["accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no", "--main_process_port", "29613"]
    done = subprocess.run([*launch, *train_command(toy, tmp_path / "two", steps=2, val_every=0)[1:]],
                          capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-3000:]
    read = lambda run: [json.loads(line) for line in open(run / "metrics.jsonl")][:2]
    for ours, theirs in zip(read(tmp_path / "two"), read(whole), strict=True):
        assert ours["reward"] == theirs["reward"] and ours["n_groups"] == theirs["n_groups"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    ours, theirs = final_tensors(tmp_path / "two"), final_tensors(whole, "step_000002")
    assert ours.keys() == theirs.keys()
    worst = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert worst < 1e-5, worst


def test_a_run_folder_says_what_ran_and_what_came_of_it(toy, trained):
    run, printed = trained
    config = json.loads((run / "config.json").read_text())
    assert config["n"] == RUN["n"] and config["lr"] == SETTINGS["lr"] and set(config) == set(vars(config_of_toy(toy)))
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["packages"]["torch"] == torch.__version__.split("+")[0]
    assert provenance["command"][0].endswith("train_grpo.py")
    assert (run / "scripts/train_grpo.py").read_text() == (ROOT / "train_grpo.py").read_text()
    rows = [json.loads(line) for line in open(run / "rollouts/step_000002.jsonl")]
    assert len(rows) == RUN["prompts_per_step"] * RUN["n"]
    metrics = [json.loads(line) for line in open(run / "metrics.jsonl")]
    assert metrics[1]["reward"] == pytest.approx(sum(r["overall"] for r in rows) / len(rows))
    assert metrics[1]["accuracy"] == pytest.approx(sum(r["accuracy"] for r in rows) / len(rows))
    assert all(m["logprob_gap_max"] < 1e-4 for m in metrics if "loss" in m)  # float32: every sync arrived
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == [
        "step_000002", "step_000004", "step_000006"]
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
    groups, _ = part.prompter.groups(train_grpo.submit(part, val[::7]))
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
    ("lr=fast", "lr must be float, got 'fast'"), ("advantage=grop", "must be one of grpo, dr_grpo"),
    ("steps=true", "steps must be int"), ("max_tokens_per_pack=10", "max_tokens_per_pack is 10")])
def test_bad_config_is_one_clear_line(word, message):
    with pytest.raises(video_io.DataError) as error:
        train_grpo.load_config(ROOT / "configs/toy.yaml", [word])
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
