"""The engine against Hugging Face forwards: what it samples, what it reports, and whether new weights reach it."""

import dataclasses
import json
import subprocess
from collections import Counter

import pytest
import torch
from conftest import ROOT
from test_train_grpo import config, separate_logprobs
from transformers import AutoModelForImageTextToText

import rollout
import train_grpo

SAMPLING = dict(n=4, max_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def world(toy):
    """Engine, trainer's model, run and one group without responses of each kind."""
    run, train, _ = train_grpo.prepare(config(toy))
    engine = rollout.Engine(run.cfg.model, dtype="float32", max_model_len=512, banned=run.banned.tolist())
    model = AutoModelForImageTextToText.from_pretrained(run.cfg.model, dtype=torch.float32)
    records = [dict(next(r for r in train if r["data_type"] == kind)) for kind in ("video", "image", "text")]
    records[0]["problem"] += " Look closely." * 25  # longer than a block of the prefix cache
    groups, _ = run.prompter.groups(train_grpo.submit(run, records))
    yield engine, model, run, groups
    engine.close()


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
    with pytest.raises(RuntimeError, match="1 names of .* were not sent"):
        engine.sync((n, p) for n, p in model.named_parameters() if n != VISION)
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        engine.sync([*model.named_parameters(), ("model.visual.nonsense", torch.zeros(1))])
    engine.sync(model.named_parameters())
    assert gap(world) < 1e-4


def test_sync_without_the_encoder_reset_fails_or_sees_with_old_eyes(world, monkeypatch):
    """In an engine of its own: the failed request leaves it unusable."""
    _, model, run, groups = world
    engine = rollout.Engine(run.cfg.model, dtype="float32", max_model_len=512, banned=run.banned.tolist())
    engine.sync(model.named_parameters())
    lonely = (engine, model, run, groups[:1])
    assert gap(lonely) < 1e-4
    perturb(model, VISION)
    monkeypatch.setattr(engine.llm.llm_engine, "reset_encoder_cache", lambda: None)
    engine.sync(model.named_parameters())
    try:
        stale = gap(lonely)
    except RuntimeError as e:
        assert "Encoder cache miss" in str(e)
    else:
        assert stale > 1e-3


def test_the_command_writes_n_scored_responses_for_each_record(toy, tmp_path):
    lines = (toy / "val.jsonl").read_text().splitlines()[:6]
    (toy / "few.jsonl").write_text("\n".join(lines) + "\n")
    done = subprocess.run([
        "python", str(ROOT / "rollout.py"), "--model", str(toy / "model"), "--data", str(toy / "few.jsonl"), "--n", "3",
        "--out", str(tmp_path / "r.jsonl"), "--prompt-form", "direct", "--max-tokens", "12", "--batch", "4",
        "--max-prompt-length", "400", "--max-frames", "8", "--max-pixels", "4096"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in open(tmp_path / "r.jsonl")]
    assert Counter(Counter(row["key"] for row in rows).values()) == {3: 6}
    assert "n_ok 6 + n_failed 0 = n_total 6" in done.stdout
    assert f"accuracy {sum(row['accuracy'] for row in rows) / 18:.3f}" in done.stdout
    missing = subprocess.run(["python", str(ROOT / "rollout.py"), "--model", str(toy / "model"), "--data", "no.jsonl",
                              "--out", str(tmp_path / "x.jsonl")], capture_output=True, text=True)
    assert missing.returncode == 2 and "no.jsonl" in missing.stderr and missing.stderr.count("\n") == 1
