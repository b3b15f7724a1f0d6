"""The update against plain Hugging Face forwards, the formulas against numbers, the run against SIGKILL."""


import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
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


def separate_logprobs(model, run, group, response, temperature=1.0):
    """One response's logprobs by an ordinary forward over inputs of the Hugging Face processor."""
    media = group.media
    videos = dict(videos=[c.frames for c in media.videos], do_sample_frames=False, video_metadata=[
        dict(fps=c.fps, frames_indices=c.frames_indices, total_num_frames=c.total_num_frames) for c in media.videos])
    inputs = run.prompter.processor(text=[group.text], images=media.images or None, do_resize=False,
                                    return_tensors="pt", **(videos if media.videos else {}))
    P = inputs["input_ids"].shape[1]
    assert inputs["input_ids"][0].tolist() == group.prompt_ids
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
