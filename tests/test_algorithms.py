"""The maths of train_grpo.py against the published formulae, written out again in NumPy float64.

The oracles below follow the papers' sums: loops over sequences and tokens of padded (B, L) arrays, where the
trainer works on flat tensors without padding.  Gradients are central differences of the oracle; what a
formula holds constant is handed to it as a separate array that is not moved.  Nothing here needs a model.
"""

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT

import rewards
import rollout
import train_grpo

PRESETS = yaml.safe_load((ROOT / "configs/algorithms.yaml").read_text())
CLOSE = dict(rtol=2e-6, atol=1e-8)  # weights and advantages may be float32

# ------------------------------------------------------------------------------ data and helpers


def config(**fields):
    return train_grpo.Config(model="m", train_files=["t"], **fields)


def padded(flat, lengths):
    """(R,) in the trainer's order as a (B, L) array, zeros behind each sequence's end."""
    out, rest = np.zeros((len(lengths), max(lengths))), list(np.asarray(flat, dtype=np.float64))
    for i, length in enumerate(lengths):
        out[i, :length], rest = rest[:length], rest[length:]
    return out


def flattened(table, lengths):
    return np.concatenate([table[i, :length] for i, length in enumerate(lengths)])


def slopes(function, point, h=1e-6):
    """Central differences of a scalar function at a 1-d array."""
    out = np.zeros_like(point)
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] += h
        down[i] -= h
        out[i] = (function(up) - function(down)) / (2 * h)
    return out


def torched(x, grad=False):
    return torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=grad)


def batch(seed, lengths=(5, 1, 7, 3, 4, 6), spread=0.5):
    """Random (logprobs, old logprobs) (R,), one advantage per sequence and per token (R,)."""
    rng = np.random.default_rng(seed)
    R = sum(lengths)
    old = -rng.gamma(1.0, 1.0, R)
    drift = rng.normal(0, spread, R) + np.repeat(rng.normal(0, spread, len(lengths)), lengths)
    logp = np.minimum(old + drift, -0.01)
    per_sequence = rng.normal(0, 1, len(lengths))
    return logp, old, per_sequence, np.repeat(per_sequence, lengths)


def groups_of(seed, n=4, count=5, parts=("accuracy", "format"), format_weight=0.1):
    """Groups as the trainer fills them: scores, responses of random lengths, old and reference logprobs."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(count):
        group = rollout.Group(record={}, media=None, text="", prompt_ids=[1])
        lengths = rng.integers(1, 9, n)
        group.responses = [rollout.Response(list(range(k)), [0.0] * int(k), "", "stop") for k in lengths]
        accuracy = rng.integers(0, 2, n) * rng.choice([0.5, 1.0], n) if g else np.full(n, 0.3)
        form = rng.integers(0, 2, n).astype(float) if g != 1 else np.ones(n)
        group.scores = [dict(accuracy=float(a), format=float(f), overall=float((1 - format_weight) * a
                             + format_weight * f)) for a, f in zip(accuracy, form)]
        if not g:  # the first group has no spread in anything
            group.scores = [dict(group.scores[0]) for _ in range(n)]
        group.greedy_score = dict(overall=float(rng.random()))
        group.old_logprobs = [torched(-rng.gamma(1.0, 1.0, k)) for k in lengths]
        group.ref_logprobs = [x + torched(rng.normal(0, 0.3, len(x))) for x in group.old_logprobs]
        groups.append(group)
    return groups


def advantages_of(groups):
    """[(tokens,) array per response], one value per token, in batch order."""
    return [np.broadcast_to(np.asarray(g.advantages[i], dtype=np.float64), len(r.ids)).copy()
            for g in groups for i, r in enumerate(g.responses)]


# ------------------------------------------------------------------------------ oracles: advantages


def average(values):
    return math.fsum(values) / len(values)


def deviation(values):
    """Bessel's correction: divided by n - 1."""
    return math.sqrt(math.fsum((v - average(values)) ** 2 for v in values) / (len(values) - 1))


def oracle_group(kind, r, greedy=None):
    """One group's advantages before any whitening.  r: list of numbers."""
    n = len(r)
    if kind in ("grpo", "gdpo"):  # arXiv 2402.03300; ddof 1, eps 1e-6 as in verl's core_algos
        return [(x - average(r)) / (deviation(r) + 1e-6) for x in r]
    if kind in ("dr_grpo", "reinforce_pp_baseline"):  # 2503.20783; 2501.03262, baseline variant
        return [x - average(r) for x in r]
    if kind == "rloo":  # 2402.14740: the others are the baseline
        return [r[i] - average([r[j] for j in range(n) if j != i]) for i in range(n)]
    if kind == "remax":  # 2310.10505: the greedy answer is the baseline
        return [x - greedy for x in r]
    if kind == "reinforce_pp":
        return list(r)
    if kind == "grpo_passk":  # 2503.19595: best of n minus best of n without it, for the best one alone
        ranked = sorted(range(n), key=lambda i: -r[i])
        out = [0.0] * n
        out[ranked[0]] = (r[ranked[0]] - r[ranked[1]]) / (deviation(r) + 1e-6)
        return out
    raise AssertionError(kind)


def oracle_whitened(table, mask):
    """verl's masked_whiten: mean and unbiased variance over everything unmasked, eps 1e-8 in the root."""
    values = [table[i, t] for i in range(len(table)) for t in range(table.shape[1]) if mask[i, t]]
    variance = math.fsum((v - average(values)) ** 2 for v in values) / (len(values) - 1)
    return (table - average(values)) / math.sqrt(variance + 1e-8) * mask


def oracle_kl(lp, ref, kind):
    """joschu.net/blog/kl-approx.html, with verl's clamps: the log-ratio to 20, k3 to 10."""
    d = min(20.0, max(-20.0, ref - lp))
    if kind == "k1":
        return -d
    if kind == "abs":
        return abs(d)
    if kind == "k2":
        return 0.5 * d * d
    return min(10.0, math.exp(d) - 1 - d)


def oracle_advantages(kind, groups, kl_coef=None, kl_kind="k1", format_weight=0.1):
    """(tokens,) arrays of the batch.  kl_coef: the KL is paid inside the reward."""
    rows, rewards_per_token = [], []
    for g in groups:
        totals, tokens = [], []
        for score, old, ref in zip(g.scores, g.old_logprobs, g.ref_logprobs):
            reward = [0.0] * len(old)
            if kl_coef is not None:
                reward = [-kl_coef * oracle_kl(float(a), float(b), kl_kind) for a, b in zip(old, ref)]
            reward[-1] += score["overall"]
            tokens.append(reward)
            totals.append(math.fsum(reward))
        if kind == "gdpo":  # 2601.05242: every part normalised in its group, then their weighted sum
            parts = {key: oracle_group("gdpo", [s[key] for s in g.scores]) for key in ("accuracy", "format")}
            rows += [(1 - format_weight) * a + format_weight * f
                     for a, f in zip(parts["accuracy"], parts["format"])]
        else:
            rows += oracle_group(kind, totals, g.greedy_score["overall"])
        rewards_per_token += tokens
    lengths = [len(r.ids) for g in groups for r in g.responses]
    table, mask = np.zeros((len(rows), max(lengths))), np.zeros((len(rows), max(lengths)))
    for i, length in enumerate(lengths):
        mask[i, :length] = 1
        table[i, :length] = rows[i]
        if kind == "reinforce_pp":  # undiscounted return, from the last token back
            running = 0.0
            for t in reversed(range(length)):
                running += rewards_per_token[i][t]
                table[i, t] = running
    if kind in ("reinforce_pp", "reinforce_pp_baseline"):
        table = oracle_whitened(table, mask)
    if kind == "gdpo":  # over the batch's sequences, each of them once
        first = mask * (np.arange(mask.shape[1]) == 0)
        table = oracle_whitened(table, first)[:, :1] * mask
    return [table[i, :length] for i, length in enumerate(lengths)]


# ------------------------------------------------------------------------------ oracles: losses


def oracle_loss(kind, logp, still, old, adv, lengths, low=0.2, high=0.28, dual=0.0, cap=5.0):
    """(B, L) loss per token.  still: the values of logp wherever a formula stops the gradient."""
    out = np.zeros_like(logp)
    for i, length in enumerate(lengths):
        steps = range(length)
        sequence = math.exp(sum(logp[i, t] - old[i, t] for t in steps) / length)  # 2507.18071
        sequence_still = math.exp(sum(still[i, t] - old[i, t] for t in steps) / length)
        for t in steps:
            a, ratio = adv[i, t], math.exp(logp[i, t] - old[i, t])
            if kind == "gspo":
                ratio = sequence
            if kind == "gspo_token":  # its token variant: sg[s_i] * pi / sg[pi]
                ratio = sequence_still * math.exp(logp[i, t] - still[i, t])
            if kind == "cispo":  # 2506.13585; capped alone, or with both bounds
                weight = math.exp(still[i, t] - old[i, t])
                weight = min(weight, cap) if cap else min(max(weight, 1 - low), 1 + high)
                out[i, t] = -weight * a * logp[i, t]
                continue
            if kind == "sapo":  # 2511.20347: a soft gate in place of the clip
                tau = 1.0 if a > 0 else 1.05
                out[i, t] = -a * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
                continue
            objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)  # 1707.06347 eq. 7
            if dual and a < 0:  # 1912.09729
                objective = max(objective, dual * a)
            out[i, t] = -objective
    return out


def oracle_mean(table, lengths, how, max_length):
    """One number from (B, L): what the papers call token-level, sequence-level and Dr. GRPO's constant."""
    rows = [[table[i, t] for t in range(length)] for i, length in enumerate(lengths)]
    if how == "token":
        return math.fsum(x for row in rows for x in row) / sum(lengths)
    if how == "sequence":
        return average([average(row) for row in rows])
    return math.fsum(x for row in rows for x in row) / (len(rows) * max_length)


# ------------------------------------------------------------------------------ advantages

ADVANTAGES = "grpo dr_grpo rloo remax reinforce_pp reinforce_pp_baseline gdpo grpo_passk".split()


def test_every_advantage_of_the_config_has_an_oracle():
    assert sorted(train_grpo.FIELDS["advantage"]["enum"]) == sorted(ADVANTAGES)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_equal_the_published_formula(kind, seed):
    groups = groups_of(seed)
    train_grpo.set_advantages(config(advantage=kind), groups)
    expected = oracle_advantages(kind, groups)
    for mine, theirs in zip(advantages_of(groups), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert max(np.abs(x).max() for x in expected) > 0.05


@pytest.mark.parametrize("kl_kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("kind", [k for k in ADVANTAGES if k != "gdpo"])
def test_kl_in_the_reward_is_paid_before_the_advantage_is_taken(kind, kl_kind):
    groups, coef = groups_of(7), 0.2
    cfg = config(advantage=kind, kl="reward", kl_kind=kl_kind)
    train_grpo.set_advantages(cfg, groups, coef)
    mine, plain = advantages_of(groups), oracle_advantages(kind, groups)
    for got, expected in zip(mine, oracle_advantages(kind, groups, coef, kl_kind), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-8)
    assert max(np.abs(a - b).max() for a, b in zip(mine, plain)) > 1e-2


def test_reinforce_pp_pays_only_for_the_kl_still_to_come():
    """Unwhitened differences within one response: token t's return lacks what tokens before t paid."""
    groups = groups_of(3)
    train_grpo.set_advantages(config(advantage="reinforce_pp", kl="reward", kl_kind="k1"), groups, 0.5)
    ratios = []
    for g in groups:
        for advantage, old, ref in zip(g.advantages, g.old_logprobs, g.ref_logprobs):
            steps = np.diff(np.asarray(advantage))
            ratios += list(steps / (0.5 * np.asarray(old - ref)[:-1]))
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)  # one common 1 / std
    assert ratios[0] > 0


@pytest.mark.parametrize("split", [2, 5, 0])
@pytest.mark.parametrize("kind,kl", [*((k, "off") for k in ADVANTAGES), ("reinforce_pp", "reward"),
                                     ("reinforce_pp_baseline", "reward")])
def test_two_processes_get_the_advantages_of_the_whole_batch(kind, kl, split):
    """Two threads that meet at a barrier in every gather; one of them may have no group at all."""
    whole, shared = groups_of(11), groups_of(11)
    cfg = config(advantage=kind, kl=kl, kl_kind="k1")
    train_grpo.set_advantages(cfg, whole, 0.1)
    sent, barrier = [None, None], threading.Barrier(2, timeout=20)
    calls, failures = [0, 0], []

    def process(rank, groups):
        def everyone(value):
            calls[rank] += 1
            barrier.wait()
            sent[rank] = value
            barrier.wait()
            return list(sent)
        try:
            train_grpo.set_advantages(cfg, groups, 0.1, everyone)
        except BaseException as e:
            failures.append(e)
            barrier.abort()
            raise

    threads = [threading.Thread(target=process, args=(0, shared[:split])),
               threading.Thread(target=process, args=(1, shared[split:]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and calls[0] == calls[1]
    for mine, theirs in zip(advantages_of(shared), advantages_of(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-11)
    if kind.startswith("reinforce_pp") or kind == "gdpo":  # each half by itself would be whitened otherwise
        assert calls[0] > 0
        train_grpo.set_advantages(cfg, half := groups_of(11)[3:], 0.1)
        assert not np.allclose(np.concatenate(advantages_of(half)), np.concatenate(advantages_of(whole[3:])))


def test_whitening_weighs_tokens_and_survives_an_empty_batch():
    """Lengths 1 and 3 with advantages 0 and 4: tokens 0, 4, 4, 4 have mean 3 and variance (ddof 1) 4."""
    out = train_grpo.whiten([torched(0.0), torched(4.0)], [1, 3])
    np.testing.assert_allclose([float(x) for x in out], [-1.5, 0.5], rtol=1e-8)
    per_token = train_grpo.whiten([torched([0.0]), torched([4.0, 4.0, 4.0])], [1, 3])
    np.testing.assert_allclose(torch.cat(per_token).numpy(), [-1.5, 0.5, 0.5, 0.5], rtol=1e-8)
    assert train_grpo.whiten([], []) == []


def test_trap_19_ddof_and_eps_are_pinned_by_numbers():
    """ddof 1: rewards 1, 2, 3, 4 give 1.1619 (ddof 0 would give 1.3416).  eps 1e-6, not 1e-4."""
    scores = torched([1.0, 2.0, 3.0, 4.0])
    grpo = train_grpo.group_advantages(scores, "grpo").numpy()
    np.testing.assert_allclose(grpo, [-1.1618941, -0.3872980, 0.3872980, 1.1618941], atol=2e-7)
    small = train_grpo.group_advantages(torched([0.0, 2e-4]), "grpo").numpy()  # std 1.41421e-4
    np.testing.assert_allclose(small, [-0.7021424, 0.7021424], atol=1e-6)  # 0.4142 with eps 1e-4
    passk = train_grpo.group_advantages(scores, "grpo_passk").numpy()
    np.testing.assert_allclose(passk, [0, 0, 0, 1 / (1.2909944 + 1e-6)], atol=1e-7)
    white = train_grpo.whiten([torched(x) for x in (1.0, 2.0, 3.0, 4.0)], [1, 1, 1, 1])
    white = [float(x) for x in white]
    np.testing.assert_allclose(white, [-1.1618950, -0.3872983, 0.3872983, 1.1618950], atol=1e-7)
    nearly = train_grpo.whiten([torched(0.0), torched(2e-4)], [1, 1])  # var 2e-8, eps 1e-8 inside the root
    np.testing.assert_allclose([float(x) for x in nearly], [-0.5773503, 0.5773503], atol=1e-6)


@pytest.mark.parametrize("kind", [k for k in ADVANTAGES if k != "gdpo"])
def test_equal_rewards_in_float32_give_no_advantage(kind):
    """The float32 mean of n equal numbers may be off by rounding; over eps that would be an advantage."""
    off = 0
    for n in (2, 3, 5, 7, 8, 16):
        for value in (0.1, 0.3, 0.7, 0.1 * 3, 1 / 3):
            r = torch.full((n,), value, dtype=torch.float32)
            off += bool((r - r.mean()).any())
            if kind == "reinforce_pp":  # whitened over the batch afterwards
                assert torch.equal(train_grpo.group_advantages(r, kind), r)
            else:
                assert torch.equal(train_grpo.group_advantages(r, kind, r[0]), torch.zeros(n))
    assert off > 5  # the trap is there


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "grpo_passk", "reinforce_pp_baseline"])
def test_rewards_equal_but_for_rounding_give_no_advantage(kind):
    """0.1 + 0.2 against 0.3 in float64, 0.6 + 0.3 against 0.9 in float32 (6e-8 apart): equal to a reader."""
    single = [float(np.float32(0.6) + np.float32(0.3)), float(np.float32(0.9)), 0.9, 0.9]
    assert len(set(single)) == 3
    for r in (torched([0.1 + 0.2, 0.3, 0.3, 0.1 * 3]), torch.tensor(single), torched(single)):
        assert torch.equal(train_grpo.group_advantages(r, kind), torch.zeros_like(r)), r


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "grpo_passk", "gdpo"])
def test_groups_without_spread_have_advantages_of_exactly_zero(kind):
    """The update skips a forward where all advantages are zero: rounding must not keep a group in."""
    groups = groups_of(5)
    train_grpo.set_advantages(config(advantage=kind), groups)
    assert all(float(a) == 0 for a in groups[0].advantages)
    assert any(float(a) != 0 for g in groups[1:] for a in g.advantages)


def test_gdpo_weighs_each_response_once_and_each_part_by_its_weight():
    groups = groups_of(9)
    train_grpo.set_advantages(config(advantage="gdpo"), groups)
    before = [x[0] for x in advantages_of(groups)]
    for g in groups:
        for r in g.responses[:2]:
            r.ids = r.ids * 7  # longer answers: still one sequence each
    train_grpo.set_advantages(config(advantage="gdpo"), groups)
    np.testing.assert_allclose([x[0] for x in advantages_of(groups)], before, rtol=1e-12)
    train_grpo.set_advantages(config(advantage="gdpo", format_weight=0.6), groups)
    for mine, theirs in zip(advantages_of(groups), oracle_advantages("gdpo", groups, format_weight=0.6)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
    assert not np.allclose([x[0] for x in advantages_of(groups)], before)


def test_trap_2_remax_gives_each_response_its_own_advantage_even_where_n_is_the_length():
    """(n,) rewards against (n, L) tokens broadcast silently, and transposed, where n == L."""
    n = 4
    group = groups_of(2, n=n, count=1)[0]
    group.responses = [rollout.Response([1, 2, 3, 4], [0.0] * 4, "", "stop") for _ in range(n)]
    group.scores = [dict(overall=x, accuracy=x, format=1.0) for x in (0.1, 0.4, 0.8, 1.0)]
    group.greedy_score = dict(overall=0.3)
    train_grpo.set_advantages(config(advantage="remax"), [group])
    table = np.stack(advantages_of([group]))
    np.testing.assert_allclose(table, np.outer([-0.2, 0.1, 0.5, 0.7], np.ones(4)), atol=1e-12)
    assert train_grpo.group_advantages(torched([0.1, 0.4, 0.8]), "remax", 0.3).shape == (3,)


# ------------------------------------------------------------------------------ losses

LOSSES = {
    "ppo": dict(kind="ppo"),
    "ppo symmetric": dict(kind="ppo", low=0.2, high=0.2),
    "dual clip": dict(kind="ppo", dual=3.0),
    "gspo": dict(kind="gspo", low=0.05, high=0.08),
    "gspo as published": dict(kind="gspo", low=3e-4, high=4e-4),
    "gspo_token": dict(kind="gspo_token", low=0.05, high=0.08),
    "cispo capped": dict(kind="cispo", cap=1.5),
    "cispo default": dict(kind="cispo", cap=5.0),
    "cispo two-sided": dict(kind="cispo", cap=0.0),
    "sapo": dict(kind="sapo"),
}
OURS = dict(low="clip_low", high="clip_high", dual="dual_clip", cap="cispo_cap", kind="kind")


def ours(fields):
    return {OURS[key]: value for key, value in fields.items()}


def spread_of(name):
    """Log-ratios wide enough that every branch is taken; near the published clip range for gspo's."""
    return {"gspo as published": 4e-4, "dual clip": 0.9, "cispo default": 1.0}.get(name, 0.4)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_published_formula_and_so_are_their_gradients(name):
    fields, lengths, branches = LOSSES[name], [5, 1, 7, 3, 4, 6], set()
    for seed in range(4):
        logp, old, _, adv = batch(seed, lengths, spread_of(name))
        new = torched(logp, grad=True)
        loss, clipped = train_grpo.policy_loss(new, torched(old), torched(adv), lengths, **ours(fields))
        assert loss.shape == clipped.shape == (sum(lengths),) and clipped.dtype == torch.bool

        def oracle(flat):
            return flattened(oracle_loss(logp=padded(flat, lengths), still=padded(logp, lengths),
                                         old=padded(old, lengths), adv=padded(adv, lengths), lengths=lengths,
                                         **fields), lengths)

        np.testing.assert_allclose(loss.detach().numpy(), oracle(logp), **CLOSE)
        mix = np.random.default_rng(seed).normal(0, 1, len(logp))  # any weights: every token's own gradient
        (loss * torched(mix)).sum().backward()
        expected = slopes(lambda x: float(oracle(x) @ mix), logp)
        np.testing.assert_allclose(new.grad.numpy(), expected, rtol=1e-5, atol=1e-7)
        branches |= set(clipped.tolist())
        if fields["kind"] in ("ppo", "gspo", "gspo_token"):  # the mask is where the gradient is gone
            assert clipped.tolist() == (np.abs(expected) < 1e-8).tolist()
    assert branches == ({False} if name == "sapo" else {False, True})


def test_every_loss_of_the_config_has_an_oracle():
    assert set(train_grpo.FIELDS["loss"]["enum"]) == {f["kind"] for f in LOSSES.values()}


def test_dual_clip_bounds_only_negative_advantages():
    """ratio 5, A -1: 5 without, 3 with the bound; ratio 0.1, A -1: the lower clip 0.8; A +1: untouched."""
    logp, adv = torched(np.log([5.0, 0.1, 2.0, 0.5])), torched([-1.0, -1.0, 1.0, 1.0])
    loss, clipped = train_grpo.policy_loss(logp, torch.zeros(4, dtype=torch.float64), adv, [4], dual_clip=3.0)
    np.testing.assert_allclose(loss.numpy(), [3.0, 0.8, -1.28, -0.5], rtol=1e-12)
    assert clipped.tolist() == [True, True, True, False]
    loss, clipped = train_grpo.policy_loss(logp, torch.zeros(4, dtype=torch.float64), adv, [4])
    np.testing.assert_allclose(loss.numpy(), [5.0, 0.8, -1.28, -0.5], rtol=1e-12)
    assert clipped.tolist() == [False, True, True, False]


def test_gspo_is_one_ratio_per_sequence_and_its_token_variant_has_the_same_value():
    logp, old, _, adv = batch(3)
    lengths = [5, 1, 7, 3, 4, 6]
    arrays = torched(logp), torched(old), torched(adv)
    values = {kind: train_grpo.policy_loss(*arrays, lengths, kind, 0.3, 0.3)[0]
              for kind in ("gspo", "gspo_token", "ppo")}
    assert torch.allclose(values["gspo"], values["gspo_token"])
    assert not torch.allclose(values["gspo"], values["ppo"])
    for part in (values["gspo"] / torched(adv)).split(lengths):
        assert part.max() - part.min() < 1e-12


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """ppo drops the token with ratio 8 and A > 0; cispo keeps it with the capped weight."""
    for kind, slope in (("ppo", 0.0), ("cispo", -5.0)):
        new = torched([math.log(8.0)], grad=True)
        train_grpo.policy_loss(new, torched([0.0]), torched([1.0]), [1], kind)[0].sum().backward()
        assert new.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_of_one_is_the_policy_gradient_and_extreme_ones_stay_finite(name):
    """With one update per rollout old is the policy itself: the gradient is -A for every loss here."""
    lengths, fields = [5, 1, 7, 3, 4, 6], LOSSES[name]
    logp, _, _, adv = batch(1, lengths)
    new = torched(logp, grad=True)
    loss, clipped = train_grpo.policy_loss(new, new.detach(), torched(adv), lengths, **ours(fields))
    loss.sum().backward()
    np.testing.assert_allclose(new.grad.numpy(), -adv, rtol=1e-9)
    assert not clipped.any()
    far = torch.tensor([-1e4, -0.1, -60.0], dtype=torch.float32, requires_grad=True)
    adv = torch.tensor([1.0, -1.0, -1.0])
    loss, _ = train_grpo.policy_loss(far, far.detach().flip(0), adv, [1, 2], **ours(fields))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(far.grad).all()


# ------------------------------------------------------------------------------ aggregation


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo two-sided", "sapo"])
def test_aggregated_losses_and_gradients_equal_the_papers_mean(name, how):
    """The batch in packs of any shape: the sum of what the packs give is the mean over the whole batch."""
    lengths, fields, longest = [5, 1, 7, 3, 4, 6], LOSSES[name], 12
    logp, old, _, adv = batch(5, lengths)
    starts = np.cumsum([0, *lengths])

    def oracle(flat):
        table = oracle_loss(logp=padded(flat, lengths), still=padded(logp, lengths), old=padded(old, lengths),
                            adv=padded(adv, lengths), lengths=lengths, **fields)
        return oracle_mean(table, lengths, how, longest)

    for packs in ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[2, 3], [0], [5, 4, 1]]):
        new, total = torched(logp, grad=True), 0.0
        for pack in packs:
            index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in pack])
            mine = [lengths[i] for i in pack]
            loss, _ = train_grpo.policy_loss(new[index], torched(old[index]), torched(adv[index]), mine,
                                             **ours(fields))
            weights = train_grpo.token_weights(mine, how, sum(lengths), len(lengths), longest)
            assert weights.shape == loss.shape
            part = (loss * weights).sum()
            part.backward()  # a backward per pack, as in the update
            total += part.item()
        assert total == pytest.approx(oracle(logp), rel=2e-6)
        np.testing.assert_allclose(new.grad.numpy(), slopes(oracle, logp), rtol=1e-5, atol=1e-8)


def test_trap_3_sequence_mean_is_not_token_mean_under_any_micro_batching():
    """Lengths 1 and 9 with losses 1 and 0: sequence mean 1/2, token mean 1/10, constant (20) 1/40."""
    loss = [torch.ones(1), torch.zeros(9)]
    for how, expected in (("sequence", 0.5), ("token", 0.1), ("constant", 0.025)):
        alone = sum((x * train_grpo.token_weights([len(x)], how, 10, 2, 20)).sum() for x in loss)
        together = (torch.cat(loss) * train_grpo.token_weights([1, 9], how, 10, 2, 20)).sum()
        assert float(alone) == pytest.approx(expected) and float(together) == pytest.approx(expected)


# ------------------------------------------------------------------------------ KL, importance, offline


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_estimators_and_gradients(kind):
    """Random differences, and ones over both clamps: d = 30 and -30 (to 20), d = 4 (k3 is over 10)."""
    rng = np.random.default_rng(0)
    logp = -rng.gamma(1.0, 1.0, 40)
    ref = logp + rng.normal(0, 1, 40)
    ref[:4] = logp[:4] + [30.0, -30.0, 4.0, -4.0]
    new = torched(logp, grad=True)
    out = train_grpo.kl_penalty(new, torched(ref), kind)
    out.sum().backward()

    def oracle(flat):
        return [oracle_kl(a, b, kind) for a, b in zip(flat, ref)]

    np.testing.assert_allclose(out.detach().numpy(), oracle(logp), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(new.grad.numpy(), slopes(lambda x: sum(oracle(x)), logp), rtol=1e-5, atol=1e-7)
    assert float(train_grpo.kl_penalty(torched([0.0]), torched([4.0]), "k3")) == 10.0
    assert float(train_grpo.kl_penalty(torched([-30.0]), torched([0.0]), "k1")) == -20.0


def test_kl_estimators_average_to_the_kl_of_two_distributions():
    """Over tokens drawn from the policy k1 and k3 have the expectation KL(policy, reference), k2 nearly."""
    rng = np.random.default_rng(1)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (rng.normal(0, 1, 6), rng.normal(0, 1, 6)))
    exact = float((p * np.log(p / q)).sum())
    for kind in ("k1", "k3"):
        values = train_grpo.kl_penalty(torched(np.log(p)), torched(np.log(q)), kind).numpy()
        assert float((p * values).sum()) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("kind", ["token", "sequence", "off"])
def test_importance_weights_equal_the_oracle_and_carry_no_gradient(kind):
    """token: truncated, as in verl and in TRL's token_truncate.  sequence: TRL's sequence_mask drops the same
    responses, but weighs the kept ones by their ratio; here they count once, as in verl's rejection."""
    seen = set()
    for seed in range(6):
        logp, sampled, _, _ = batch(seed, spread=0.3)
        lengths, cap, at = [5, 1, 7, 3, 4, 6], 2.0, 0
        trainer = torched(logp, grad=True)
        out = train_grpo.importance_weights(trainer, torched(sampled), cap, kind, lengths)
        assert not out.requires_grad and out.shape == (sum(lengths),)
        expected = []
        for length in lengths:
            gaps = [logp[at + t] - sampled[at + t] for t in range(length)]
            at += length
            whole = math.exp(sum(gaps))
            expected += [{"token": min(math.exp(x), cap), "sequence": float(whole <= cap), "off": 1.0}[kind]
                         for x in gaps]
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-9)
        seen |= {round(x, 6) for x in expected}
    if kind == "token":
        assert max(seen) == 2.0 and len(seen) > 20
    else:
        assert seen == ({0.0, 1.0} if kind == "sequence" else {1.0})


@pytest.mark.parametrize("kind", ["luffy", "sft"])
def test_offline_losses_and_gradients(kind):
    """luffy, arXiv 2504.14945: f(p) = p / (p + 0.1) with the behaviour policy taken as 1, no clip."""
    logp, _, _, adv = batch(2)
    new = torched(logp, grad=True)
    loss = train_grpo.offline_loss(new, torched(adv), kind)

    def oracle(flat):
        if kind == "sft":
            return [-lp for lp in flat]
        return [-a * math.exp(lp) / (math.exp(lp) + 0.1) for lp, a in zip(flat, adv)]

    np.testing.assert_allclose(loss.detach().numpy(), oracle(logp), rtol=1e-9)
    loss.sum().backward()
    np.testing.assert_allclose(new.grad.numpy(), slopes(lambda x: sum(oracle(x)), logp), rtol=1e-6, atol=1e-8)


def test_luffy_learns_most_from_unlikely_tokens():
    """The shaped weight p f'(p) = 0.1 p / (p + 0.1)^2 is largest at p = 0.1, while plain pi falls with p."""
    p = np.array([0.001, 0.1, 0.9])
    new = torched(np.log(p), grad=True)
    train_grpo.offline_loss(new, torched([1.0, 1.0, 1.0]), "luffy").sum().backward()
    np.testing.assert_allclose(-new.grad.numpy(), 0.1 * p / (p + 0.1) ** 2, rtol=1e-9)


# ------------------------------------------------------------------------------ filter


def test_trap_1_a_group_all_wrong_but_well_formatted_has_no_spread():
    """Scored by the real rules.  Overall reward 0.1 > 0 for all is no reason to train; where the format alone
    differs there is spread in the overall reward and none in accuracy."""
    record = dict(problem="Which?", answer="B", problem_type="multiple choice", options=["A. up", "B. down"])
    wrong, right, bare = ("<think>so</think><answer>A</answer>", "<think>so</think><answer>B</answer>", "A")

    def spread(*texts):
        group = rollout.Group({}, None, "", [], scores=[rewards.score(record, text) for text in texts])
        return train_grpo.has_spread(group, "accuracy"), train_grpo.has_spread(group, "overall")

    assert rewards.score(record, wrong)["overall"] > 0 == rewards.score(record, wrong)["accuracy"]
    assert spread(wrong, wrong, wrong, wrong) == (False, False)
    assert spread(right, right, right, right) == (False, False)
    assert spread(wrong, bare, wrong, wrong) == (False, True)
    assert spread(wrong, right, wrong, wrong) == (True, True)
    assert config().filter_key == "accuracy"


def test_spread_is_not_rounding():
    """A custom reward may add up in float32."""
    for values in ((0.1 + 0.2, 0.3, 0.1 * 3), (float(np.float32(0.6) + np.float32(0.3)), 0.9)):
        scores = [dict(accuracy=x) for x in values]
        assert not train_grpo.has_spread(rollout.Group({}, None, "", [], scores=scores), "accuracy")
    scores = [dict(accuracy=x) for x in (0.5, 0.501)]
    assert train_grpo.has_spread(rollout.Group({}, None, "", [], scores=scores), "accuracy")


# ------------------------------------------------------------------------------ presets


def load(tmp_path, text="", **overrides):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ntrain_files: [t]\n" + text)
    return train_grpo.load_config(path, [f"{key}={value}" for key, value in overrides.items()])


def another(name, value):
    """A valid value of that field other than this one."""
    if kinds := train_grpo.FIELDS[name].get("enum"):
        return next(x for x in reversed(kinds) if x != value and x not in ("reinforce_pp", "off"))
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2


@pytest.mark.parametrize("algo", PRESETS)
def test_preset_sets_exactly_its_fields_and_explicit_ones_win(algo, tmp_path):
    plain, chosen = load(tmp_path), load(tmp_path, algo=algo)
    changed = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)
               if getattr(chosen, f.name) != getattr(plain, f.name)}
    assert all(getattr(chosen, name) == value for name, value in PRESETS[algo].items())
    assert set(changed) - {"algo"} <= set(PRESETS[algo]) and chosen.algo == algo
    assert load(tmp_path, f"algo: {algo}\n") == chosen  # in the file or on the command line
    for name, value in PRESETS[algo].items():
        mine = another(name, value)
        for given in (load(tmp_path, f"{name}: {mine}\n", algo=algo),
                      load(tmp_path, f"algo: {algo}\n", **{name: mine})):
            assert getattr(given, name) == mine
            others = set(PRESETS[algo]) - {name}
            assert all(getattr(given, other) == PRESETS[algo][other] for other in others)


@pytest.mark.parametrize("field", ["top_p: 0.9", "top_k: 20", "min_p: 0.05"])
def test_trap_16_a_truncated_distribution_turns_the_importance_correction_off(field, tmp_path, capsys):
    """The engine's log-probabilities are then of another distribution than the trainer's."""
    assert load(tmp_path, f"{field}\n").importance == "off"
    assert "importance is off" in capsys.readouterr().err
    assert load(tmp_path, "top_k: -1\ntop_p: 1.0\n").importance == "token" and not capsys.readouterr().err


def test_presets_hold_the_published_numbers_and_cover_the_named_algorithms(tmp_path):
    assert set("grpo dapo gspo cispo dr_grpo rloo sapo remax reinforce_pp gdpo".split()) <= set(PRESETS)
    published = dict(dapo=("token", 0.2, 0.28), grpo=("sequence", 0.2, 0.2), gspo=("sequence", 3e-4, 4e-4),
                     dr_grpo=("constant", 0.2, 0.2))
    for algo, expected in published.items():
        cfg = load(tmp_path, algo=algo)
        assert (cfg.aggregate, cfg.clip_low, cfg.clip_high) == expected, algo
    assert load(tmp_path, algo="cispo").cispo_cap == 5.0 and load(tmp_path, algo="dapo").max_refills > 0
    for algo in ("dr_grpo", "rloo", "remax", "gdpo", "grpo_passk", "reinforce_pp", "reinforce_pp_baseline"):
        assert load(tmp_path, algo=algo).advantage == algo
    assert load(tmp_path, algo="reinforce_pp").kl == "reward"


@pytest.mark.parametrize("algo", ["rloo", "remax"])
def test_reinforce_presets_weigh_a_response_by_all_its_tokens(algo, tmp_path):
    """Both papers (2402.14740, 2310.10505) take the gradient of a response's log-probability, the sum over
    its tokens: a token of a long answer counts as much as one of a short answer."""
    how = load(tmp_path, algo=algo).aggregate
    weights = train_grpo.token_weights([2, 8], how, 10, 2, 16)
    assert torch.equal(weights, weights[:1].expand(10))


def test_an_unknown_algorithm_is_named_with_the_known_ones(tmp_path):
    with pytest.raises(train_grpo.video_io.DataError, match="dpao.*dapo.*rloo"):
        load(tmp_path, algo="dpao")
