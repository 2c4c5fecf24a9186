"""A drafter with windows, from the options to what serves it: trained, resumed, exported, decoded, served."""

from pathlib import Path

import torch
from programs import Program
from training_runs import interrupted, weights

from dflash_toolkit import SamplingParams, Target, generate, load_drafter
from dflash_toolkit.runtime import EngineOptions, load_engine

SLIDING, FULL = "sliding_attention", "full_attention"
ASKED = ("drafter.layers=3", f"drafter.layer_types=[{SLIDING},{SLIDING},{FULL}]", "drafter.sliding_window=6",
         "optim.learning_rate=1e-2", "run.save_every=1")  # fmt: skip


def test_a_sliding_drafter_drafts_the_same_in_every_runtime(
    target_dir: Path, dflash_train: Program, tmp_path: Path
) -> None:
    with interrupted(5):
        dflash_train(*ASKED, output="killed", code=130)
    dflash_train(*ASKED, output="killed")
    dflash_train(*ASKED)
    assert weights(tmp_path / "killed") == weights(tmp_path / "run"), "resumed as if nothing had been"
    drafter = load_drafter(str(tmp_path / "run"))
    assert drafter.config.layer_types == (SLIDING, SLIDING, FULL)
    assert (drafter.config.sliding_window, drafter.config.is_causal) == (6, False)

    record = dflash_train.record()
    assert record["drafter"]["layer_types"] == record["config"]["drafter"]["layer_types"] == [SLIDING, SLIDING, FULL]
    assert "| layers | 3, of which 2 see 6 tokens |\n" in (tmp_path / "run/README.md").read_text()
    point = torch.load(tmp_path / "run/work/state.pt")["fingerprint"]
    assert not {"layer_types", "sliding_window", "is_causal"} & set(point["config"]["drafter"]), "older runs go on"
    for change, said in (("sliding_window=9", "sliding_window: 6, now 9"), ("is_causal=null", "is_causal: False, now")):
        assert f"run with other settings (drafter.{said}" in dflash_train.refuses(*ASKED, f"drafter.{change}")

    target = Target.load(str(target_dir), "cpu")
    drafter = drafter.float()
    params, prompts = SamplingParams(max_tokens=40, ignore_eos=True), [list(range(40, 40 + n)) for n in (3, 30)]
    engine = load_engine(target, drafter, options=EngineOptions(num_speculative_tokens=3))[0]
    for prompt, served in zip(prompts, engine.generate(prompts, params), strict=True):
        decoded = generate(target, drafter, prompt, params)
        assert (served.tokens, served.steps) == (decoded.tokens, decoded.steps)
        assert served.tokens == generate(target, None, prompt, params).tokens
