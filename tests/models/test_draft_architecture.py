"""A third draft architecture is one folder and one name: the one that the documents add, from there."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import MASK, make_drafter, make_target
from drafter_configs import make_config
from engines import check_drafts, make_engine, prompts_of, same
from paths import ROOT
from programs import Program

import dflash_toolkit.models
from dflash_toolkit import Drafter, DrafterConfig, SamplingParams, UserError, generate, load_drafter, save_drafter
from dflash_toolkit.decode import propose
from dflash_toolkit.doctor.files import Case, check_weights
from dflash_toolkit.models.dflash import architecture
from dflash_toolkit.models.dflash.serving import serving_commands
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.run.start import load_start
from dflash_toolkit.train.training_options import DrafterOptions

PAGE = ROOT / "docs/extend/architecture.md"
SIZE = {"bias_candidates": 5}


@pytest.fixture(autouse=True, scope="module")
def _added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files of the page, and its registration."""
    folder = tmp_path_factory.mktemp("models")
    files = re.findall(r"^\+\+\+ dflash_toolkit/models/(bias/\w+\.py)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(files) == 3
    for name, added in files:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(line.removeprefix("+") for line in added.splitlines()))
    registration = re.search(r"^\+BUILT_IN = \((.*)\) ", PAGE.read_text(), re.M)
    assert registration
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash_toolkit.models, "__path__", [*dflash_toolkit.models.__path__, str(folder)])
        patch.setattr(architecture, "BUILT_IN", tuple(re.findall(r'"(\w+)"', registration[1])))
        importlib.invalidate_caches()
        yield
    for name in [name for name in sys.modules if name.startswith("dflash_toolkit.models.bias")]:
        del sys.modules[name]
    vars(dflash_toolkit.models).pop("bias", None)  # which the import set


def make_bias(**sizes: int) -> Drafter:
    """A drafter with biases that change its drafts."""
    plain = make_drafter(make_target())
    drafter = Drafter(plain.config.resized(**SIZE | sizes)).eval()
    drafter.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        drafter.token_bias.token_codebook.normal_(std=9, generator=torch.Generator().manual_seed(7))  # type: ignore
    return drafter


def test_a_registered_architecture_drafts_the_same_in_the_engine() -> None:
    target, drafter = make_target(), make_bias()
    engine = make_engine(target, drafter)
    check_drafts(engine, (target, drafter), prompts_of(1, 5, 17, 33), SamplingParams(max_tokens=14))
    context = drafter.context_kv(torch.randn(1, 3, drafter.config.feature_size), torch.arange(3)[None])
    plain = drafter.without_selector()
    with torch.inference_mode():
        assert all(propose(target, drafter, context, i, 3) != propose(target, plain, context, i, 3) for i in range(5))


def test_trees_and_sampled_drafts_are_those_of_decoding() -> None:
    target, drafter = make_target(), make_bias()
    engine, prompts = make_engine(target, drafter, draft_tree=20), prompts_of(4, 19)
    params = SamplingParams(max_tokens=12)
    for prompt, got in zip(prompts, engine.generate(prompts, [params] * 2), strict=True):
        assert same(got, generate(target, drafter, prompt, params, draft_tree=20))
    sampled, params = (
        make_engine(target, drafter, draft_sample_method="probabilistic"),
        SamplingParams(max_tokens=12, temperature=1.2, seed=3),
    )
    for prompt, got in zip(prompts, sampled.generate(prompts, [params] * 2), strict=True):
        assert same(got, generate(target, drafter, prompt, params, "probabilistic"))


def test_registered_architecture_is_trained_and_served(short_run: Program) -> None:
    short_run("drafter.kind=bias", "run.export_selector=always", "optim.steps=6", "optim.learning_rate=1e-2")
    trained = [line for line in short_run.metrics() if "selector_loss" in line]
    assert len(trained) == 6 and any(line["selector_loss"] > 0 for line in trained)
    drafter, target = load_drafter(str(short_run.output)).float(), make_target()
    assert type(drafter.config).__name__ == "BiasConfig" and drafter.config.sizes == {"bias_candidates": 16}
    assert drafter.token_bias.token_codebook.any()  # type: ignore[union-attr]
    check_drafts(make_engine(target, drafter), (target, drafter), prompts_of(9, 12), SamplingParams(max_tokens=14))


def test_registered_architecture_checkpoints_are_validated(tmp_path: Path) -> None:
    drafter = make_bias()
    save_drafter(drafter, tmp_path / "bias")
    assert load_drafter(str(tmp_path / "bias")).config == drafter.config
    text = (tmp_path / "bias/config.json").read_text()
    assert '"BiasDraftModel"' in text and '"bias_candidates": 5' in text
    for change, said in (
        (('"BiasDraftModel"', '"DFlashDraftModel"'), "'bias_candidates' is of BiasDraftModel, but"),
        (('"BiasDraftModel"', '"DFlash2DraftModel"'), "'bias_candidates' is of BiasDraftModel, but"),
        (('"bias_candidates": 5', '"bias_candidates": 999'), "bias_candidates is 999; the vocabulary has 300"),
        (('"bias_candidates": 5', '"bias_candidates": -1'), "bias_candidates is -1; give a number >= 1"),
        (('"bias_candidates": 5', '"bias_candidates": 0'), "'bias_candidates' is missing, but 'architectures' is"),
        (('"BiasDraftModel"', '"Other"'), "DFlash2DraftModel, DSpineDraftModel or BiasDraftModel)"),
    ):
        (tmp_path / "bias/config.json").write_text(text.replace(*change))
        with pytest.raises(UserError, match=re.escape(said)):
            load_drafter(str(tmp_path / "bias"))


def test_plain_drafter_converts_to_bias_drafter_and_back(tmp_path: Path) -> None:
    target, plain = make_target(), make_drafter(make_target())
    save_drafter(plain, tmp_path / "plain")
    options = DrafterOptions(kind="bias", mask_token_id=MASK)
    start = load_start(str(tmp_path / "plain"), target.config, options, ["kind"], tmp_path / "out", 0)
    assert "gets parts of DFlash with biases, which have no effect yet: bias_candidates 16" in start.changed[0]
    grown = start.drafter
    assert not grown.token_bias.token_codebook.any()  # type: ignore[union-attr]
    hidden, logits = torch.randn(7, 32), torch.randn(7, 300)
    assert torch.equal(grown.choose(hidden, logits, 5), plain.choose(hidden, logits, 5))
    back = grown.without_selector()
    assert type(back.config) is DrafterConfig and back.config == load_drafter(str(tmp_path / "plain")).config


def test_missing_parts_of_an_architecture_are_named(tmp_path: Path) -> None:
    target, fresh = make_target(), make_bias()
    fresh.init_weights(torch.Generator().manual_seed(1))
    save_drafter(fresh, tmp_path)
    case = Case.read(str(tmp_path), target.config, target.tokenizer, None)
    with torch.no_grad():  # only the bias was not trained
        for name, tensor in case.tensors.items():
            tensor.mul_(1 if "codebook" in name else 1.5)
    assert [(found.check, found.remedy) for found in check_weights(case)] == [("bias", "train it longer, or remove it")]
    sizes = {"block_size": 8} | SIZE
    assert "serve no DFlash with biases drafter; dflash-serve" in serving_commands("T", "D", sizes, "Qwen3ForCausalLM")
    with pytest.raises(ValueError, match="bias_candidates is 4, which is a part of kind bias; kind is dflash2"):
        drafter_shape(target.config, taps=3, kind="dflash2", bias_candidates=4)
    with pytest.raises(ValueError, match="bias_candidates is 0: kind bias without its parts is kind dflash"):
        drafter_shape(target.config, taps=3, kind="bias", bias_candidates=0)
    assert TrainConfig(target="x", drafter=DrafterOptions(kind="bias"))


def test_the_architecture_follows_from_the_sizes() -> None:
    plain = make_drafter(make_target()).config
    convolved = plain.resized(conv_kernel_size=2, conv_group_size=8)
    pairs = plain.resized(selector_rank=4, selector_top_k=3)
    kinds = [each.architecture.kind for each in (plain, convolved, pairs, plain.resized(**SIZE))]
    assert kinds == ["dflash", "dflash2", "dflash2", "bias"]
    assert [each.has_selector for each in (plain, convolved, pairs)] == [False, False, True]
    assert [each.draft_candidates for each in (plain, convolved, pairs)] == [16, 16, 3]
    with pytest.raises(ValueError, match="selector_rank, selector_top_k, bias_candidates"):
        pairs.resized(**SIZE)
    with pytest.raises(ValueError, match="conv_kernel_size and selector_rank are 0: kind dflash2"):
        drafter_shape(make_target().config, taps=3, kind="dflash2", conv_kernel_size=0, selector_rank=0)
    assert pairs.architecture.is_initial("candidate_selector.successor_codebook", torch.zeros(3, 2))
    assert not pairs.architecture.is_initial("candidate_selector.successor_codebook", torch.eye(3, 2))


def test_plain_dflash_adds_no_products_and_comes_first() -> None:
    plain, dflash2 = architecture.of_kind("dflash"), architecture.of_kind("dflash2")
    config = make_config()
    assert (plain.layer_products(config), plain.selector_products(config)) == (0, 0)
    assert architecture.kinds()[:2] == ("dflash", "dflash2")
    sizes = dict.fromkeys(dflash2.sizes, 4)
    assert architecture.asked_by(sizes) is dflash2, "all of its sizes"
    assert architecture.asked_by({"selector_rank": 4}) is dflash2 and architecture.asked_by({}) is None
