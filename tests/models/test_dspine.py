"""DSpine: its injection and selection by pairs, its token codes, and its form on disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import check_same, make_drafter, make_dspine
from known_drafts import PROMPT, SAMPLINGS
from refusals import drafter_refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate, load_drafter
from dflash_toolkit.models.dflash.checkpoint import config_json, read_config, save_drafter, tensor_shapes
from dflash_toolkit.models.dflash.network import ContextKV
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.dspine.codes import transfer_space
from dflash_toolkit.models.dspine.injection import Injection

S, D = 8, 32


def injection_of(drafter: Drafter) -> Injection:
    assert isinstance(drafter.injection, Injection)
    return drafter.injection


def context_of(drafter: Drafter, tokens: int = 4) -> ContextKV:
    features = torch.randn(1, tokens, drafter.config.feature_size, generator=torch.Generator().manual_seed(1))
    return drafter.context_kv(features, torch.arange(tokens)[None])


@torch.no_grad()
def run(drafter: Drafter, x: Tensor, tokens: Tensor, replaced: Tensor | None = None) -> Tensor:
    """States of blocks x [1, A * S, D] after four tokens, with masks as in training."""
    blocks = x.shape[1] // S
    own = torch.block_diag(*[torch.ones(S, S).tril()] * blocks).bool()
    mask = torch.cat([torch.ones(len(own), 4, dtype=torch.bool), own], dim=1)[None, None]
    positions = 4 + torch.arange(S).repeat(blocks)[None]
    return drafter(x, positions, context_of(drafter), {"full_attention": mask}, tokens, replaced)


# ---- the injection ---------------------------------------------------------------------------------------------


def test_zero_writes_equal_the_causal_backbone(target: Target) -> None:
    drafter = make_dspine(target)
    plain = make_drafter(target, layers=4, is_causal=True)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    x, tokens = torch.randn(1, S, D), torch.randint(300, (1, S))
    expected = plain(x, 4 + torch.arange(S)[None], context_of(plain))
    assert not torch.equal(drafter.for_head(run(drafter, x, tokens)), expected)
    injection_of(drafter).init_weights()
    assert torch.equal(drafter.for_head(run(drafter, x, tokens)), expected)
    logits = target.head(expected[0, 1:])
    states = run(drafter, x, tokens)[0, 1:]
    assert torch.equal(drafter.choose(states, logits, 5, target.head_weight), logits.argmax(-1))


def test_later_slots_never_change_earlier_ones(target: Target) -> None:
    drafter, tokens = make_dspine(target), torch.randint(300, (1, S))
    x = torch.randn(1, S, D)
    states = run(drafter, x, tokens)
    for j in range(1, S):
        changed = x.clone()
        changed[:, j:] += 1
        found = run(drafter, changed, tokens)
        assert torch.equal(found[:, :j], states[:, :j]) and not torch.equal(found[:, j], states[:, j])
    short = drafter(x[:, :5], 4 + torch.arange(5)[None], context_of(drafter), tokens=tokens[:, :5])
    torch.testing.assert_close(short, states[:, :5])


def test_messages_never_cross_a_block(target: Target) -> None:
    drafter, tokens = make_dspine(target), torch.randint(300, (1, 2 * S))
    x = torch.randn(1, 2 * S, D)
    both, changed = run(drafter, x, tokens), x.clone()
    changed[:, :S] += 1
    tokens[:, :S] = 7
    assert torch.equal(run(drafter, changed, tokens)[:, S:], both[:, S:])


def test_only_the_anchor_token_is_read_without_replacement(target: Target) -> None:
    drafter, x, tokens = make_dspine(target), torch.randn(1, S, D), torch.randint(300, (1, S))
    states, others = run(drafter, x, tokens), (tokens + 1) % 300
    assert not torch.equal(run(drafter, x, others), states)
    others[:, 0] = tokens[:, 0]
    assert torch.equal(run(drafter, x, others), states)
    none = torch.zeros(1, 1, dtype=torch.bool)
    assert torch.equal(run(drafter, x, others, none)[..., : 2 * D], states)


def test_replacement_changes_first_layers_of_replaced_blocks(target: Target) -> None:
    drafter, x, tokens = make_dspine(target), torch.randn(1, 2 * S, D), torch.randint(300, (1, 2 * S))
    injection, first = injection_of(drafter), torch.tensor([[False, True]])
    fixed = dict(drafter.named_buffers())
    for layer in range(4):
        with torch.no_grad():
            plain, _ = injection(layer, x, injection.begin(fixed, tokens, S, torch.zeros_like(first)))
            replaced, _ = injection(layer, x, injection.begin(fixed, tokens, S, first))
        assert torch.equal(plain[:, : S + 2], replaced[:, : S + 2]), "another block, an anchor, a slot after an anchor"
        assert torch.equal(plain, replaced) == (layer >= 3)
    feature = injection.feature(0, x[0, S + 3])
    with torch.no_grad():
        begun = injection.begin(fixed, tokens, S, first)
        expected = injection.write(0, x[0, S + 3], feature, injection.code(fixed["transfer_codes"], tokens[0, S + 2]))
        torch.testing.assert_close(injection(0, x, begun)[0][0, S + 3], expected)


def test_a_block_follows_the_contract_in_float64(target: Target) -> None:
    drafter = make_dspine(target).double()
    injection, x = injection_of(drafter), torch.randn(1, S, D, dtype=torch.float64)
    tokens = torch.randint(300, (1, S))
    weight = {name: p.detach() for name, p in injection.named_parameters()}
    codes, rank = drafter.transfer_codes, injection.rank
    f = [rank**0.5 * F.normalize(weight["readouts.1.weight"] @ row, dim=0) for row in x[0]]
    expected = [x[0, 0]]
    for j in range(1, S):
        p = rank**0.5 * codes[tokens[0, 0]] if j == 1 else f[j - 1]
        gate = weight["receiver_gate.weight"] @ f[j] + weight["predecessor_gate.weight"] @ p + weight["bias"]
        written = weight["writes.1.weight"] @ (gate.sigmoid() * (weight["message.weight"] @ p))
        expected.append(x[0, j] + x[0, j].norm() / D**0.5 * written)
    begun = injection.begin(dict(drafter.named_buffers()), tokens, S, torch.zeros(1, 1, dtype=torch.bool))
    found, cost = injection(1, x, begun)
    torch.testing.assert_close(found[0], torch.stack(expected), rtol=1e-4, atol=1e-4)
    after = torch.stack([F.normalize(weight["readouts.1.weight"] @ row, dim=0) for row in torch.stack(expected)])
    assert cost is not None
    torch.testing.assert_close(cost[0].double(), 1 - (after * codes[tokens[0]]).sum(-1), rtol=1e-3, atol=1e-3)


def test_a_zero_row_has_finite_gradients(target: Target) -> None:
    drafter = make_dspine(target)
    x = torch.randn(1, S, D)
    x[:, 3] = 0
    x.requires_grad_()
    injection, tokens = injection_of(drafter), torch.randint(300, (1, S))
    begun = injection.begin(dict(drafter.named_buffers()), tokens, S, torch.ones(1, 1, dtype=torch.bool))
    found, cost = injection(0, x, begun)
    assert cost is not None
    (found.square().sum() + cost.sum()).backward()
    grads = [x.grad, *(p.grad for p in injection.parameters() if p.grad is not None)]
    assert len(grads) > 6 and all(grad is not None and grad.isfinite().all() for grad in grads)


# ---- the selection ---------------------------------------------------------------------------------------------


@torch.no_grad()
def test_pair_table_equals_sequential_refinement(target: Target) -> None:
    drafter = make_dspine(target, output_multiplier=0.5, final_logit_softcapping=20.0)
    states = run(drafter, torch.randn(1, S, D), torch.randint(300, (1, S)))[0, 1:]
    unary, candidates = drafter.candidates(target.head(drafter.for_head(states)))
    chooser = drafter.config.architecture.chooser(drafter, target.head_weight)
    assert chooser
    table = chooser.lattice(states, unary, candidates, 5)
    injection, last = injection_of(drafter), 3
    for k in range(S - 1):
        h = states[k, D:]
        for a, token in enumerate([5] * 16 if k == 0 else candidates[k - 1].tolist()):
            before = injection.code(drafter.transfer_codes, torch.tensor(token))
            refined = drafter.norm(injection.write(last, h, injection.feature(last, h), before))
            products = 0.5 * (target.head_weight[candidates[k]] @ refined)
            torch.testing.assert_close(table[k, a], 20 * torch.tanh(products / 20), rtol=1e-4, atol=1e-4)
    walked, place = chooser.walk(states, unary, candidates, 5), 0
    for k in range(S - 1):
        place = int(table[k, place].argmax())
        assert walked[k] == candidates[k, place]
    scores, blocks = chooser(
        states[None], unary[None], candidates[None], torch.cat([torch.tensor([5]), walked[:-1]])[None]
    )
    assert torch.equal(blocks[0], walked)
    assert torch.equal(candidates.gather(1, scores[0].argmax(1, keepdim=True))[:, 0], walked)


def test_pair_losses_need_the_label_or_the_targets_mass(target: Target) -> None:
    chooser = make_dspine(target).config.architecture.chooser(make_dspine(target), None)
    assert chooser
    scores = torch.tensor([[2.0, 1.0, 0.0]]).expand(4, 3)
    true = torch.tensor([[0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]]).bool()
    share = torch.tensor([0.2, 0.3, 0.5])
    mass = torch.tensor([0.9, 0.9, 9e-5, 9e-5])  # of the target's probabilities
    teacher = (mass[:, None] * share).log()
    cross = -scores[0].log_softmax(0)[1]
    apart = (scores[0].softmax(0) - share).abs().sum()
    expected = torch.stack([0.1 * cross + 0.9 * apart, 0.9 * apart, 0.1 * cross, torch.tensor(0.0)])
    torch.testing.assert_close(chooser.losses(scores, true, teacher), expected)
    torch.testing.assert_close(chooser.losses(scores, true, None), cross * true.any(1))


@torch.inference_mode()
def test_outputs_are_the_targets_own(target: Target) -> None:
    drafter, steps = make_dspine(target), 0
    for sampling in SAMPLINGS:
        params = SamplingParams(max_tokens=20, **sampling)
        plain = generate(target, None, PROMPT, params)
        found = generate(target, drafter, PROMPT, params)
        assert found.tokens == plain.tokens
        steps += sum(step.drafted for step in found.steps)
    assert steps > 10
    params = SamplingParams(max_tokens=12)
    assert (
        generate(target, drafter, PROMPT, params, draft_tree=20).tokens == generate(target, None, PROMPT, params).tokens
    )


# ---- the codes -------------------------------------------------------------------------------------------------


def test_codes_are_white_unit_vectors_of_the_head(target: Target) -> None:
    codes, directions = transfer_space(target.head_weight, 32)
    torch.testing.assert_close(codes.norm(dim=1), torch.ones(300), rtol=0, atol=4e-3)
    torch.testing.assert_close(directions @ directions.T, torch.eye(32), rtol=0, atol=1e-4)
    rows = F.normalize(target.head_weight.detach().float(), dim=1)
    projected = (rows - rows.mean(0)) @ directions.T
    assert (projected.var(0, correction=0).diff() < 1e-7).all(), "largest variance first"
    white = F.normalize(projected / projected.std(0, correction=0), dim=1)
    torch.testing.assert_close(codes, white, rtol=1e-2, atol=2e-3)
    drafter = Drafter.fresh(drafter_shape(target.config, kind="dspine", taps=3), 0)
    drafter.config.architecture.fit_head(drafter, target.head_weight)
    assert all(torch.equal(readout.weight, directions) for readout in injection_of(drafter).readouts)
    with pytest.raises(ValueError, match="transfer_rank is 32, but the rows of the target's head span 3 directions"):
        transfer_space(torch.randn(50, 3) @ torch.randn(3, 32), 32)


def test_ranks_larger_than_the_hidden_size_are_refused(target: Target) -> None:
    assert drafter_shape(target.config, kind="dspine", taps=3).sizes["transfer_rank"] == D
    with pytest.raises(ValueError, match="transfer_rank is 33; it must be at most hidden_size 32"):
        drafter_shape(target.config, kind="dspine", taps=3, transfer_rank=33)


# ---- on disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(target: Target, tmp_path: Path) -> Path:
    save_drafter(make_dspine(target), tmp_path)
    return tmp_path


def test_dspine_round_trips_in_the_published_form(target: Target, saved: Path) -> None:
    drafter = make_dspine(target)
    check_same(load_drafter(str(saved)), drafter)
    written, stored = json.loads((saved / "config.json").read_text()), load_file(saved / "model.safetensors")
    assert written["architectures"] == ["DSpineDraftModel"] and written["block_size"] == S
    assert written["dspine_config"] == {"transfer_rank": 32, "message_size": 12, "top_k": 16}
    assert written["dflash_config"].keys() == {"block_size", "mask_token_id", "target_layer_ids"}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == tensor_shapes(drafter.config)
    assert stored["transfer_codes"].shape == (300, 32) and stored["transfer_ready"].dtype == torch.bool
    own = {name for name in stored if name.split(".")[0] in ("injection", "transfer_codes", "transfer_ready")}
    gates = {f"{name}.weight" for name in ("message", "receiver_gate", "predecessor_gate")}
    layers = {f"{name}.{i}.weight" for name in ("readouts", "writes") for i in range(4)}
    expected = {f"injection.{name}" for name in {*gates, *layers, "bias"}}
    assert own == expected | {"transfer_codes", "transfer_ready"}


def test_published_configurations_of_dspine_load(target: Target, saved: Path) -> None:
    values = json.loads((saved / "config.json").read_text())
    del values["is_causal"]
    values["dspine_config"] |= {"alignment_weight": 0.5, "replacement_layers": 3}
    (saved / "config.json").write_text(json.dumps(values))
    assert load_drafter(str(saved)).config == make_dspine(target).config
    assert read_config(saved).causal_inside_block(0)
    published = {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "num_hidden_layers": 5, "num_target_layers": 36,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669, "block_size": 16},
        "dspine_config": {"transfer_rank": 1024, "message_size": 512, "top_k": 16},
    }  # fmt: skip
    (saved / "config.json").write_text(json.dumps(values | published | {"block_size": 16}))
    shapes = tensor_shapes(read_config(saved))
    assert len(shapes) == 58 + 2 * 5 + 4 + 2 and shapes["transfer_codes"] == (151936, 1024)
    assert shapes["injection.readouts.4.weight"] == (1024, 4096)
    assert shapes["injection.writes.4.weight"] == (4096, 512)


def test_an_uninitialised_transfer_space_is_refused(target: Target, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | {"transfer_ready": torch.tensor(False)}, saved / "model.safetensors")
    with pytest.raises(UserError, match=r"transfer codes were never computed \(transfer_ready is false\)"):
        load_drafter(str(saved))
    with pytest.raises(UserError, match="transfer codes were never computed"):
        save_drafter(Drafter.fresh(make_dspine(target).config, 0), saved / "fresh")
    assert not (saved / "fresh/config.json").exists()


def test_broken_configurations_of_dspine_are_refused(saved: Path) -> None:
    text = (saved / "config.json").read_text()
    for change, said in (
        (('"DSpineDraftModel"', '"DFlashDraftModel"'), "'transfer_rank' is of DSpineDraftModel, but"),
        (('"dspine_config"', '"other_config"'), "'transfer_rank' is missing, but 'architectures' is"),
        (('"message_size": 12', '"message_size": 0'), "give a number >= 1 for each, or for none"),
        (('"top_k": 16', '"top_k": 999'), "refine_top_k is 999; the vocabulary has 300"),
        (('"top_k": 16', '"top_k": "many"'), "'refine_top_k' is 'many', which has the wrong type"),
        (('"DSpineDraftModel"', '"LiLiCorrDraftModel"'), "start vllm 0.33.0 or sglang 0.5.23 directly to serve it"),
        (('"DSpineDraftModel"', '"Qwen3XPressModel"'), "start vllm 0.33.0 directly to serve it"),
        (('"DSpineDraftModel"', '"Qwen3DSparkModel"'), "start vllm 0.33.0 or sglang 0.5.23 directly to serve it"),
    ):
        (saved / "config.json").write_text(text.replace(*change))
        assert said in drafter_refusal(saved)


def test_a_domino_drafter_is_refused_by_who_serves_it(target: Target, tmp_path: Path) -> None:
    save_drafter(make_drafter(target), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["dflash_config"] |= {"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "'emb_dim' belongs to an unsupported variant of DFlash; start sglang 0.5.23" in drafter_refusal(tmp_path)


def test_a_plain_drafter_gets_injections_without_effect(target: Target) -> None:
    plain = make_drafter(target, is_causal=True)
    grown = Drafter.fresh(plain.config.resized(transfer_rank=8, message_size=4, refine_top_k=16), 0)
    assert grown.config.architecture.kind == "dspine" and config_json(grown.config)["is_causal"] is True
    grown.load_state_dict(plain.state_dict(), strict=False)
    grown.config.architecture.fit_head(grown, target.head_weight)
    x, tokens = torch.randn(1, S, D), torch.randint(300, (1, S))
    expected = plain(x, 4 + torch.arange(S)[None], context_of(plain))
    assert torch.equal(grown.for_head(run(grown, x, tokens)), expected)
    assert replace(grown.config, is_causal=False).is_causal
