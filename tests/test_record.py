"""The record of an export: the same everywhere except for rounding, another for every change."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS, make_drafter, make_target

from dflash_toolkit import Drafter, Target, load_drafter, save_drafter
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY, read_config, stored_tensors
from dflash_toolkit.record import (
    PROJECTIONS,
    RECORD_KEY,
    TOKENS,
    distance,
    drafter_signature,
    export_record,
    fixed_ids,
    signs,
    summary,
    target_signature,
)


def test_a_checkpoint_record_is_reproduced_by_its_weights(drafter: Drafter, target: Target, tmp_path: Path) -> None:
    record = export_record(drafter, target)
    save_drafter(drafter, tmp_path, {RECORD_KEY: record})
    written = json.loads((tmp_path / "config.json").read_text())[PROVENANCE_KEY][RECORD_KEY]
    assert written == record and len(json.dumps(record)) < 4096
    assert export_record(load_drafter(str(tmp_path)), target) == record, "bf16 weights give what fp32 ones gave"
    assert read_config(tmp_path) == drafter.config, "no key of the record is taken for one of the configuration"
    assert set(record["tensors"]) == {name for name, _ in drafter.named_parameters()}
    assert list(record["drafter"]) == ["context", "layers.0", "layers.1", "output"]
    assert list(record["target"]["places"]) == ["embedding", "layers.1", "layers.2", "layers.3", "final"]


def test_the_fixed_inputs_are_the_same_in_every_version_of_everything() -> None:
    assert fixed_ids(151936)[:6].tolist() == [28291, 146811, 74225, 93127, 17160, 125335]
    assert [int(sign > 0) for sign in signs(16, 1)] == [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1]
    for rows in (1, 300, 151936, 2**31):
        ids = fixed_ids(rows)
        assert len(ids) == TOKENS and 0 <= int(ids.min()) <= int(ids.max()) < rows
    many = signs(4096, 7)
    assert abs(float(many.mean())) < 0.05 and abs(float((many * signs(4096, 8)).mean())) < 0.05


def test_summary_distance_estimates_the_tensor_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    for share in (0.003, 0.03, 0.3):
        ratios = []
        for _ in range(20):
            one, other = torch.randn(2, TOKENS, 64, generator=generator)
            # after squashing, a difference is about its share
            ratios.append(distance(summary(one), summary(one + share * other)) / share)
        assert 0.5 < sum(ratios) / len(ratios) < 1.5, share
    assert distance(summary(one), summary(other)) > 0.7
    assert distance(summary(one), summary(one)) == 0
    assert distance(summary(one), summary(3 * one)) > 0.6, "the scale is a part of it"
    assert distance([], summary(one)) == math.inf
    assert len(summary(one)) == 1 + PROJECTIONS


def test_a_huge_channel_does_not_hide_the_others() -> None:
    one, other = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(0))
    one[:, 5] = other[:, 5] = 4000.0
    assert distance(summary(one), summary(other)) > 0.5


# not random delta nets: their states amplify rounding
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if not kind.startswith(("qwen3_5", "qwen3_next"))])
def test_another_dtype_changes_less_than_another_layer(kind: str) -> None:
    target, taps = make_target(kind), range(5)
    wide = target_signature(target, taps)
    target.model.bfloat16()
    narrow = target_signature(target, taps)
    assert (wide["dtype"], narrow["dtype"], narrow["device"]) == ("float32", "bfloat16", "cpu")
    moved = [distance(wide["places"][place], narrow["places"][place]) for place in wide["places"]]
    layers = [wide["places"][f"layers.{i}"] for i in taps]
    apart = [distance(one, other) for i, one in enumerate(layers) for other in layers[:i]]
    assert 0 < max(moved) < 0.12 < 0.3 < min(apart)


@pytest.mark.parametrize(
    ("doubled", "first"),
    [
        ("fc.weight", ""),  # hidden_norm takes the scale out again
        ("hidden_norm.weight", "context"),
        ("layers.0.self_attn.k_norm.weight", "layers.0"),
        ("layers.1.mlp.up_proj.weight", "layers.1"),
        ("norm.weight", "output"),
    ],
)
def test_the_first_different_place_is_the_changed_one(doubled: str, first: str) -> None:
    drafter = make_drafter(make_target())
    tensors = {name: tensor.clone() for name, tensor in stored_tensors(drafter).items()}
    before = drafter_signature(drafter.config, tensors)
    tensors[doubled].mul_(2)
    after = drafter_signature(drafter.config, tensors)
    departed = [place for place in before if distance(after[place], before[place]) > 1e-3]
    assert (departed or [""])[0] == first


def test_the_numbers_are_those_of_the_layers_that_decoding_runs(drafter: Drafter) -> None:
    tensors = stored_tensors(drafter)
    signature = drafter_signature(drafter.config, tensors)
    twin = Drafter.of_tensors(drafter.config, {name: tensor.float() for name, tensor in tensors.items()})
    size, width = drafter.config.hidden_size, drafter.config.feature_size
    with torch.no_grad():
        context = twin.context_kv(signs(16 * width, 101).view(1, 16, -1), torch.arange(16)[None])
        out = twin(signs(8 * size, 102).view(1, 8, -1), torch.arange(16, 24)[None], context)
    assert distance(summary(out[0]), signature["output"]) < 1e-5
    other = drafter_signature(replace(drafter.config, rope_theta=1e6), tensors)
    assert distance(other["context"], signature["context"]) == 0 < distance(other["layers.0"], signature["layers.0"])
