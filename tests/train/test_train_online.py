"""`OnlineTrainer`: the step of `dflash-train` on records in memory, and the walk that measures acceptance."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_dflash2, make_drafter, make_target
from torch import Tensor
from training_runs import repeating_rows

from dflash_toolkit import Target, UserError
from dflash_toolkit.decode import generate
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.sampling import SamplingParams
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.target_head import HeadWeights
from dflash_toolkit.train.online import OnlineTrainer, Record
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions

OPTIM: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 3e-3, "batch_size": 4}
CONFIG = TrainConfig(target="", loss=LossOptions(anchors=8), optim=OptimOptions(**OPTIM))


def record_of(target: Target, drafter: Drafter, tokens: list[int], start: int, source: str = "") -> Record:
    """Returns a record with the taps of all tokens but the last, as an engine captures them."""
    features = target.forward(torch.tensor([tokens[:-1]]), taps=drafter.config.target_layer_ids).features
    assert features is not None
    return Record(tokens, features[0].clone(), [(start, len(tokens))], source)


def records_of(target: Target, drafter: Drafter, count: int = 8) -> list[Record]:
    rows = repeating_rows(count)
    return [record_of(target, drafter, list(row.tokens), row.prompt_tokens) for row in rows]


def answers(target: Target, drafter: Drafter, count: int = 4, tokens: int = 24) -> list[tuple[list[int], Any]]:
    """Returns prompts with their greedy answers."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, 250, (count, 6), generator=generator).tolist()
    return [(prompt, generate(target, drafter, prompt, SamplingParams(max_tokens=tokens))) for prompt in prompts]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_equals_the_step_of_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same rows, anchors and rate: the weights are equal bit for bit."""
    target, rows = make_target(), repeating_rows(4)
    optim = OptimOptions(**OPTIM, steps=1, warmup=0.0)
    config = TrainConfig(target="", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=64), optim=optim)
    trained: list[dict[str, Tensor]] = []
    run_drafter = make_drafter(target).train()
    train(Run(config, target, run_drafter, rows, [], tmp_path, {}, lambda d, _: trained.append(d.state_dict())))
    drafter = make_drafter(target)
    # all candidates are anchors, and the rows are in the order of the run's only batch
    order = [rows[i] for i in _batch(config, rows)]
    trainer = OnlineTrainer(target, drafter, config, warmup=1)
    records = []
    for row in order:
        whole = target.forward(torch.tensor([list(row.tokens)]), taps=drafter.config.target_layer_ids).features
        assert whole is not None
        records.append(Record(list(row.tokens), whole[0].clone(), row.supervised))
    trainer.step(records)
    assert same(trained[0], trainer.drafter.state_dict())
    assert not same(make_drafter(target).state_dict(), trainer.drafter.state_dict())


def _batch(config: TrainConfig, rows: Any) -> list[int]:
    from dflash_toolkit.train.optim.schedule import make_schedule
    from dflash_toolkit.train.responses.corpus import lengths_of

    return make_schedule(config, torch.device("cpu"), lengths_of(rows), 1, None).indices(0)


@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_the_walk_counts_the_steps_of_greedy_decoding(make: Any) -> None:
    target = make_target()
    drafter = make(target)
    # a trained drafter accepts some drafts and rejects others
    trainer = OnlineTrainer(target, drafter, CONFIG, warmup=1)
    found = answers(target, drafter)
    records = [record_of(target, drafter, prompt + g.tokens, len(prompt)) for prompt, g in found]
    for _ in range(12):
        trainer.step(records)
    trained = copy.deepcopy(trainer.drafter).eval()
    decoded = [generate(target, trained, prompt, SamplingParams(max_tokens=24)) for prompt, _ in found]
    measured = trainer.held_out(records)
    assert measured.steps == tuple(len(g.steps) for g in decoded)
    assert measured.tokens == tuple(sum(len(s.tokens) for s in g.steps) for g in decoded)
    assert 1.2 < measured.tau < 8 and measured.standard_error > 0


def test_training_lifts_the_held_out_acceptance_length() -> None:
    target = make_target()
    drafter = make_drafter(target)
    records = records_of(target, drafter)
    trainer = OnlineTrainer(target, drafter, CONFIG)
    before = trainer.held_out(records)
    metrics = [trainer.step(records) for _ in range(30)]
    after = trainer.held_out(records)
    assert after.clearly_better_than(before) and metrics[-1]["loss"] < metrics[0]["loss"]
    assert [round(m["learning_rate"] / 3e-3, 6) for m in metrics[:2]] == [0.05, 0.1]
    assert metrics[-1]["learning_rate"] == 3e-3 and metrics[-1]["records"] == 8
    assert trainer.held_out(records, drafter.float()) == replace(before, step=30)


def test_a_loaded_state_continues_exactly() -> None:
    target = make_target()
    drafter = make_drafter(target)
    records = records_of(target, drafter)
    averaged = replace(CONFIG, optim=replace(CONFIG.optim, ema=0.9))
    whole, first, second = (OnlineTrainer(target, drafter, averaged) for _ in range(3))
    for _ in range(4):
        whole.step(records)
    for _ in range(2):
        first.step(records)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        second.step(records)
    assert same(whole.drafter.state_dict(), second.drafter.state_dict()) and second.steps == 4
    assert not same(whole.drafter.state_dict(), whole.state_dict()["drafter"])


def test_the_served_drafter_is_not_changed_by_a_step() -> None:
    target = make_target()
    drafter = make_drafter(target)
    before = copy.deepcopy(drafter.state_dict())
    OnlineTrainer(target, drafter, CONFIG).step(records_of(target, drafter))
    assert same(before, drafter.state_dict())


def test_head_weights_train_as_the_target_does() -> None:
    target = make_target()
    drafter = make_drafter(target)
    records = records_of(target, drafter)
    head = HeadWeights(target.embedding.weight, target.head_weight, target.head_bias, target.config)
    trainers = [OnlineTrainer(each, drafter, CONFIG) for each in (target, head)]
    assert trainers[0].step(records) == trainers[1].step(records)
    assert same(trainers[0].drafter.state_dict(), trainers[1].drafter.state_dict())


def test_taps_that_are_not_finite_are_skipped() -> None:
    target = make_target()
    drafter = make_drafter(target)
    good = records_of(target, drafter, 4)
    spoiled = good[0].taps.clone()
    spoiled[3] = math.nan
    bad = replace(good[0], taps=spoiled)
    trainers = [OnlineTrainer(target, drafter, CONFIG) for _ in range(2)]
    assert trainers[0].step([bad, *good]) == trainers[1].step(good)
    assert trainers[0].held_out([bad]).steps == (0,)
    with pytest.raises(ValueError, match="no record has two supervised tokens and finite taps"):
        trainers[0].step([bad])


def test_a_gradient_that_is_no_number_is_reported() -> None:
    target = make_target()
    drafter = make_drafter(target)
    records = records_of(target, drafter, 2)
    trainer = OnlineTrainer(target, drafter, CONFIG)
    state = copy.deepcopy(trainer.state_dict())
    with torch.no_grad():
        trainer.drafter.fc.weight.fill_(math.nan)
    with pytest.raises(UserError, match="step 1: the gradient is not a number; load an earlier state"):
        trainer.step(records)
    trainer.load_state_dict(state)
    assert math.isfinite(trainer.step(records)["loss"])


def test_a_long_record_is_trained_on_its_end() -> None:
    target = make_target()
    drafter = make_drafter(target)
    record = records_of(target, drafter, 1)[0]
    short = record.cut(16)
    assert list(short.tokens) == list(record.tokens[-16:]) and len(short.taps) == 15
    assert list(short.supervised) == [(0, 16)]
    config = replace(CONFIG, prompts=replace(CONFIG.prompts, max_length=16))
    assert OnlineTrainer(target, drafter, config).step([record])["tokens"] == 16


@pytest.mark.parametrize(
    "taps, spans, words",
    [
        (torch.zeros(7, 4), [(2, 10)], "must be those of 10 tokens"),
        (torch.zeros(10, 4), [(2, 11)], "outside of 10 tokens"),
    ],
)
def test_a_record_checks_its_shapes(taps: Tensor, spans: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Record(range(10), taps, spans)


def test_a_distribution_loss_is_refused_without_final_states() -> None:
    target = make_target()
    with pytest.raises(UserError, match="records do not have it"):
        OnlineTrainer(target, make_drafter(target), replace(CONFIG, loss=LossOptions(kl=1.0)))
