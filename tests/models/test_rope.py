"""Scaled RoPE of a drafter: transformers' own numbers, in the module, in the engine, and in config.json."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny
from conftest import check_same, make_drafter, make_target
from engines import make_engine, prompts_of, same
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, decode, generate, load_drafter, save_drafter
from dflash_toolkit.doctor.files import Case, check_rope
from dflash_toolkit.doctor.probe import Setting
from dflash_toolkit.doctor.sweeps import rope
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.models.rope import RopeScaling
from dflash_toolkit.models.spec import Rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-given": YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)


def scaled(target: Target, scaling: dict[str, Any]) -> Drafter:
    return make_drafter(target, rope_scaling=RopeScaling(**scaling))


def write_config(path: Path, drafter_dir: Path, changes: dict[str, Any]) -> Path:
    """A drafter's config.json with other values; None removes a key."""
    values = json.loads((drafter_dir / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


@scalings
def test_the_frequencies_are_those_of_transformers(scaling: dict[str, Any], target: Target) -> None:
    config = Qwen3Config(head_dim=8, max_position_embeddings=512, rope_parameters=scaling | {"rope_theta": 1e4})
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    drafter = scaled(target, scaling)
    assert torch.equal(drafter.config.rope_frequencies(), theirs) and drafter.config.rope_factor == factor
    assert drafter.config.spec().attention[0].rope == Rope(tuple(theirs.double().tolist()), factor)
    assert not torch.equal(theirs, make_drafter(target).config.rope_frequencies())


@scalings
def test_transformers_reads_the_same_rope_out_of_an_exported_config(
    scaling: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = scaled(target, scaling)
    save_drafter(drafter, tmp_path)
    check_same(load_drafter(str(tmp_path)), drafter)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["rope_scaling"] == scaling, "all that transformers 4 reads, with the flat theta"
    assert values["rope_parameters"] == scaling | {"rope_theta": 1e4} and values["rope_theta"] == 1e4
    positions = torch.tensor([[0, 1, 70, 300]])
    theirs = Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(tmp_path))(torch.zeros(1), positions)
    for ours, their in zip(drafter.rope(positions), theirs, strict=True):
        assert torch.allclose(ours, their, atol=1e-6)


def test_a_whole_factor_is_exported_as_vllm_takes_it(target: Target, tmp_path: Path) -> None:
    save_drafter(scaled(target, {"rope_type": "linear", "factor": 4}), tmp_path)
    assert '"factor": 4.0' in (tmp_path / "config.json").read_text(), "its linear rope takes 4 for a list of factors"


@scalings
def test_the_engine_drafts_as_the_reference_does(scaling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tied=False)  # its own embedding of the mask would be the best token of every slot
    drafter, plain = scaled(target, scaling), make_drafter(target)
    for module in (drafter, plain):  # attention far from uniform, so that the position of a key matters
        module.init_weights(torch.Generator().manual_seed(5), std=1.0)
    (prompt,) = prompts_of(50)
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def noting(where: Any) -> list[list[int]]:
        """Every draft that is proposed from now on."""
        drafts: list[list[int]] = []
        propose = where.propose

        def noted(*args: Any) -> Any:
            draft = propose(*args)
            drafts.extend([draft] if isinstance(draft, list) else draft.tokens.tolist())
            return draft

        monkeypatch.setattr(where, "propose", noted)
        return drafts

    engine = make_engine(target, drafter)
    drafts, reference = noting(engine.runner.proposer), noting(decode)
    (got,) = engine.generate([prompt], params)
    assert same(got, generate(target, drafter, prompt, params))
    assert drafts[: len(reference)] == reference and len(reference) > 9, "but for a step that was run ahead"
    unscaled = noting(decode)
    generate(target, plain, prompt, params)
    assert unscaled != drafts[: len(unscaled)]


# ---- the doctor ------------------------------------------------------------------------------------------------


def case_of(target: Target, drafter: Drafter) -> Case:
    return Case("tiny", {}, drafter.config, "", {}, target.config, target.tokenizer, None)


def test_the_doctor_names_and_tries_both_scalings() -> None:
    target = make_target(rope_parameters=YARN | {"rope_theta": 5e5})
    drafter = scaled(target, SCALINGS["linear"])
    case = case_of(target, drafter)
    (finding,) = check_rope(case)
    assert finding.measured == "theta 10000, linear x 3; the target's theta 500000, yarn x 8"
    ways = {way.words: way for way in rope(case, Setting.of(drafter))}
    own = "theta 500000, yarn x 8 (the target's)"
    assert {own, "theta 10000, yarn x 8", "theta 10000", "theta 1e+06, linear x 3"} <= set(ways)
    assert "theta 10000, linear x 3" not in ways, "as it is configured"
    assert ways[own].setting.rope_scaling == RopeScaling(**YARN) and ways[own].setting.rope_theta == 5e5
    assert "to 1000000.0 in" in ways["theta 1e+06, linear x 3"].remedy


@pytest.mark.parametrize(
    ("name", "words"), [("Gemma 3", "theta 1e+06"), ("OLMo 3", "theta 500000"), ("Gemma 4", "theta 1e+06, scaled")]
)
def test_the_rope_of_full_attention_layers_is_used(name: str, words: str) -> None:
    target = tiny(name)
    (finding,) = check_rope(case_of(target, make_drafter(target)))
    assert f"; the target's {words}" in finding.measured


@pytest.mark.parametrize("theta", [5e5, 11158840.0, 1234567])
@scalings
def test_the_rope_remedy_can_be_pasted(
    scaling: dict[str, Any], theta: float, drafter_dir: Path, tmp_path: Path
) -> None:
    target = make_target(rope_parameters=scaling | {"rope_theta": theta})
    drafter = make_drafter(target)
    ways = list(rope(case_of(target, drafter), Setting.of(drafter)))
    way = next(way for way in ways if (way.setting.rope_theta, way.setting.rope_scaling is None) == (theta, False))
    pasted = json.loads(re.search(r" to (\{.*\}) in config.json$", way.remedy)[1])
    config = read_config(write_config(tmp_path, drafter_dir, {"rope_parameters": pasted, "rope_theta": None}))
    assert (config.rope_theta, config.rope_scaling) == (theta, RopeScaling(**scaling))
    way = next(way for way in ways if (way.setting.rope_theta, way.setting.rope_scaling) == (theta, None))
    assert json.loads(way.remedy.removesuffix(" in config.json").rpartition(" ")[2]) == theta


def test_a_target_s_scaling_that_no_drafter_has_is_not_tried(target: Target) -> None:
    other = make_target(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    drafter = make_drafter(target)
    plain, dynamic = ([way.words for way in rope(case_of(t, drafter), Setting.of(drafter))] for t in (target, other))
    assert plain == dynamic and all("," not in words for words in plain)
    (finding,) = check_rope(case_of(other, drafter))
    assert finding.measured == "theta 10000; the target's theta 10000, scaled as no drafter is (dynamic)"


@pytest.mark.parametrize(
    ("more", "keys", "factor"),
    [
        ({"attention_factor": 1.25}, "attention_factor", "1.25"),
        ({"attention_factor": 1.0, "mscale": 0.7}, "attention_factor and mscale", "1"),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, "mscale and mscale_all_dim", "1"),
        ({}, "", ""),
        ({"mscale": 0.7}, "", ""),
        ({"attention_factor": 1.20794, "beta_fast": 16, "truncate": False}, "", ""),  # as it is computed
    ],
    ids=str,
)
def test_a_rope_factor_that_vllm_ignores_is_a_warning(
    more: dict[str, float],
    keys: str,
    factor: str,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = scaled(target, YARN | more)
    said = f"vLLM 0.26 ignores {keys} of a YaRN rope: cosines and sines are scaled by 1.20794 there, by {factor} here"
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        for _ in range(2):  # a run exports many times
            if path.name == "ours":
                save_drafter(drafter, path)
            else:
                save_speculators(drafter, path, target.config, target.embedding.weight, target.head_weight)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == bool(factor)
        assert all(line.startswith(f"warning: drafter {path}: {said}") for line in lines)
        assert load_drafter(str(path)).config.rope_scaling == drafter.config.rope_scaling
    findings = check_rope(case_of(target, drafter))
    assert [(finding.check, finding.severity) for finding in findings[1:]] == [("rope", "warning")] * len(lines)
    assert all(finding.measured in lines[0] and "train it without" in finding.remedy for finding in findings[1:])


@pytest.mark.parametrize("key", ["rope_type", "type", "partial_rotary_factor"])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_null_that_vllm_fails_on_is_named(name: str, key: str, target: Target) -> None:
    group = {"rope_type": "linear", "type": "linear", "factor": 3.0} | {key: None}
    raws = ({name: group}, {"transformer_layer_config": {name: group}})
    for raw in raws:
        case = replace(case_of(target, scaled(target, SCALINGS["linear"])), raw=raw)
        _, finding = check_rope(case)
        assert (finding.severity, finding.measured) == ("warning", f"{name} has null for {key}")
        assert f"from {name} of config.json" in finding.remedy
    assert len(check_rope(replace(case, raw={name: group | {key: "linear"}}))) == 1


# ---- config.json of others -------------------------------------------------------------------------------------


def theirs(path: Path) -> Qwen3RotaryEmbedding:
    return Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(path))


LINEAR = SCALINGS["linear"]
OLDER = {"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": None}, "rope_theta": 5e5}
READ: dict[str, dict[str, Any]] = {
    "the older group, with the whole context outside it": OLDER,
    "the older group and an original context outside it": OLDER | {"original_max_position_embeddings": 128},
    "mscale_all_dim 0": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}},
    "mscale 0": {"rope_parameters": YARN | {"mscale": 0.0, "mscale_all_dim": 1.2}},
    "finetuned": {"rope_parameters": YARN | {"finetuned": True}},
    "linear finetuned": {"rope_scaling": {"type": "linear", "factor": 3.0, "finetuned": False}},
    "linear original": {"rope_parameters": LINEAR | {"original_max_position_embeddings": 64}},
    "truncate null": {"rope_parameters": YARN | {"truncate": None}},
    "partial 1.0": {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}},
    "partial 1 outside": {"rope_parameters": LLAMA3, "partial_rotary_factor": 1},
    "partial 1.0 within": {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "partial_rotary_factor": 0.5},
    "partial null, plain": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": None}},
    "theta alone": {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LINEAR},
    "theta of the older group": {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN | {"rope_theta": 2e4}},
    "theta outside": {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LINEAR, "rope_theta": 2e4},
    "an original outside and in the group": {"rope_parameters": YARN, "original_max_position_embeddings": 16},
    "an original outside, llama3": {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("changes", READ.values(), ids=READ)
def test_keys_are_read_from_where_transformers_reads_them(
    changes: dict[str, Any], drafter_dir: Path, tmp_path: Path
) -> None:
    path = write_config(tmp_path, drafter_dir, {"rope_parameters": None, "head_dim": 32} | changes)
    config, expected = read_config(path), theirs(path)
    assert torch.allclose(config.rope_frequencies(), expected.inv_freq, rtol=1e-6, atol=0)
    assert config.rope_factor == expected.attention_scaling


@pytest.mark.parametrize("nulls", [{"rope_type": None, "type": "yarn"}, {"partial_rotary_factor": None}], ids=str)
def test_rope_nulls_equal_missing_keys(nulls: dict[str, Any], drafter_dir: Path, tmp_path: Path) -> None:
    clean = read_config(write_config(tmp_path, drafter_dir, {"rope_parameters": YARN}))
    path = write_config(tmp_path, drafter_dir, {"rope_parameters": YARN | nulls})
    with pytest.raises((KeyError, TypeError)):
        theirs(path)
    assert read_config(path) == clean


@scalings
def test_rope_frequencies_are_real_on_the_meta_device(scaling: dict[str, Any]) -> None:
    with torch.device("meta"):
        found = RopeScaling(**scaling).frequencies(1e4, 8)
    assert found == RopeScaling(**scaling).frequencies(1e4, 8)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported; known: default, linear, "),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope type 'longrope' is not supported"),
        ({"rope_type": ["yarn"]}, "rope type ['yarn'] is not supported"),
        ({"rope_type": None, "factor": 2.0}, "rope type None is not supported"),
        ({"rope_type": None, "type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported"),
        ({"rope_type": "linear"}, "rope type 'linear' needs 'factor'"),
        (LLAMA3 | {"low_freq_factor": None}, "rope type 'llama3' needs 'low_freq_factor'"),
        (LLAMA3 | {"low_freq_factor": 5}, "low_freq_factor is 5, above high_freq_factor 4.0"),
        (LLAMA3 | {"beta_fast": 32}, "rope type 'llama3' knows no 'beta_fast' (it is 32); remove it if"),
        (YARN | {"attn_factor": 1.5}, "rope type 'yarn' knows no 'attn_factor' (it is 1.5); remove it if"),
        (YARN | {"mscale": -1, "mscale_all_dim": 1.0}, "mscale is -1; it must be a number > 0"),
        (YARN | {"attention_factor": 0}, "attention_factor is 0; it must be a number > 0"),
        (YARN | {"factor": "4"}, "factor is '4'; it must be a number > 0"),
        (YARN | {"factor": True}, "factor is True; it must be a number > 0"),
        (YARN | {"factor": 0}, "factor is 0; it must be a number > 0"),
        (YARN | {"attention_factor": float("inf")}, "attention_factor is inf; it must be a number > 0"),
        (YARN | {"truncate": 1}, "truncate is 1; it must be true or false"),
        (YARN | {"rope_theta": 1.0}, "makes no frequencies (float division by zero)"),
        (YARN | {"factor": 1e-320}, "makes frequencies that are not numbers"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
        ({"full_attention": YARN}, "a rope of its own for 'full_attention' is not supported"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_scaling_that_no_drafter_has_is_one_line(
    name: str, scaling: dict[str, Any], said: str, drafter_dir: Path, tmp_path: Path
) -> None:
    changes = {"rope_parameters": None} | {name: scaling}
    with pytest.raises(UserError) as caught:
        read_config(write_config(tmp_path, drafter_dir, changes))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_two_scalings_that_differ_are_refused(drafter_dir: Path, tmp_path: Path) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(UserError, match="'rope_parameters' and 'rope_scaling' differ"):
        read_config(write_config(tmp_path, drafter_dir, {"rope_parameters": plain, "rope_scaling": YARN}))
    both = {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": YARN}
    assert read_config(write_config(tmp_path, drafter_dir, both)).rope_scaling == RopeScaling(**YARN)
    lost = {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": None}
    with pytest.raises(UserError, match=r"rope_theta is 500000\.0 in 'rope_parameters'"):
        read_config(write_config(tmp_path, drafter_dir, lost))
