"""z-lab's own client, in its own environment, decodes an exported drafter as we do: `make test-peers`.

It takes the demo's checkpoint (`make demo`), or the pair in DFLASH_PEERS_TARGET and DFLASH_PEERS_DRAFTER, and a drafter
of DFlash 2 that is trained from that one. Greedy, in fp32 on the CPU. Equal answers alone prove little, as any drafter
gives the target's answer: the tokens drafted and the number accepted at every step are what show that both clients run
the same network on the same context.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny
from conftest import make_dflash2, make_drafter, make_target
from paths import ROOT
from safetensors.torch import load_file
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, decode, generate, load_drafter, save_drafter
from dflash_toolkit.data.prompts import encode_chat, read_prompts
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.loss_terms import LogitScale
from dflash_toolkit.train.cli import main as train

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

PEER = os.environ.get("DFLASH_PEERS_PYTHON")
TARGET = Path(os.environ.get("DFLASH_PEERS_TARGET", ROOT / "demo/target"))
DRAFTER = Path(os.environ.get("DFLASH_PEERS_DRAFTER", ROOT / "demo/drafter"))
PROPOSE = decode.propose
PROMPTS, MAX_NEW_TOKENS = 8, 80  # with the demo, two answers end by the stop token and six at the limit


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one client for one prompt; the logits are the first drafted block's [S - 1, V]."""

    tokens: list[int]
    committed: list[int]  # by each step, bonus included
    drafted: list[list[int]]
    logits: Tensor


@contextmanager
def recorded_blocks(target: Target) -> Iterator[list[Tensor]]:
    """Collect the logits of every block that decoding drafts."""
    blocks: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        blocks.append(Target.head(target, hidden))
        return blocks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "head", head)
        yield blocks


def ours(target: Target, drafter: Drafter, prompt: list[int], limit: int = MAX_NEW_TOKENS) -> tuple[Run, int]:
    """And in how many blocks a slot's best token was not drafted."""
    drafted: list[list[int]] = []

    def propose(*arguments: Any) -> list[int]:
        drafted.append(PROPOSE(*arguments))
        return drafted[-1]

    with recorded_blocks(target) as blocks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose", propose)
        answer: Generation = generate(target, drafter, prompt, SamplingParams(max_tokens=limit))
    chosen = sum(draft != block.argmax(-1).tolist() for draft, block in zip(drafted, blocks, strict=True))
    return Run(answer.tokens, [len(step.tokens) for step in answer.steps], drafted, blocks[0]), chosen


def theirs(request: dict[str, Any], folder: Path, target: Path, drafter: Path) -> list[Run]:
    requests, logits = folder / "requests.json", folder / "logits.safetensors"
    requests.write_text(json.dumps(request))
    # -I: the peer sees neither this checkout nor this environment's PYTHONPATH
    command = [str(PEER), "-I", str(ROOT / "scripts/peers/zlab.py"), *map(str, (target, drafter, requests, logits))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"z-lab's client failed:\n{done.stderr[-4000:]}"
    blocks, answers = load_file(logits), json.loads(done.stdout)["answers"]
    return [Run(**answer, logits=blocks[str(i)]) for i, answer in enumerate(answers)]


@pytest.fixture(scope="module", params=["dflash", "dflash2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of dflash-train: the demo's drafter, or that one with the parts of DFlash 2, after some steps."""
    if not PEER:
        pytest.skip("DFLASH_PEERS_PYTHON is not set: run `make test-peers`")
    for path in (TARGET, DRAFTER):
        if not (path / "config.json").is_file():
            pytest.skip(f"no checkpoint in {path}: run `make demo` first")
    if request.param == "dflash":
        return DRAFTER
    output = tmp_path_factory.mktemp("dflash2") / "drafter"
    argv = [
        "--target", str(TARGET), "--init-from", str(DRAFTER), "--output", str(output), "--device", "cpu",
        "--dtype", "float32", "--data", str(ROOT / "scripts/demo/prompts/count_train.jsonl"), "drafter.kind=dflash2",
        "prompts.max_prompts=24", "prompts.held_out=0", "prompts.max_length=160", "responses.samples=1",
        "responses.max_tokens=48", "optim.batch_size=4", "loss.anchors=6", "optim.steps=40",
        "optim.learning_rate=3e-3", "optim.optimizer=adamw", "run.export_selector=always",
    ]  # fmt: skip
    assert train(argv) == 0
    return output


@pytest.fixture(scope="module")
def drafter(exported: Path) -> Drafter:
    return load_drafter(str(exported), dtype=torch.float32)


@pytest.fixture(scope="module")
def pairs(exported: Path, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Run, Run]]:
    """Ours and theirs, for every prompt."""
    target = Target.load(str(TARGET), "cpu", "float32")
    rows = read_prompts(ROOT / "scripts/demo/prompts/count_held_out.jsonl", PROMPTS)
    prompts = [encode_chat(target.tokenizer, row.messages) for row in rows]
    request = {"max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": list(target.stop_token_ids), "prompts": prompts}
    runs = theirs(request, tmp_path_factory.mktemp("peer"), TARGET, exported)
    own = [ours(target, drafter, prompt) for prompt in prompts]
    chosen = sum(count for _, count in own)
    assert chosen > 4 if drafter.selector else not chosen, "a selector that changes nothing shows nothing"
    return [(run, peer) for (run, _), peer in zip(own, runs, strict=True)]


def full_steps(run: Run, block_size: int, limit: int = MAX_NEW_TOKENS) -> int:
    """How many steps z-lab's client ran on a whole block.

    It shortens the block to the tokens that are still wanted plus the anchor, and a non-causal drafter drafts
    otherwise in a shorter block. We always draft a whole one and cut it, so only the last steps before
    `max_new_tokens` may differ in what they draft and how much of it is right; the answer cannot.
    """
    done = 1  # the prefill gives the first token
    for step, count in enumerate(run.committed):
        if limit - done < block_size - 1:
            return step
        done += count
    return len(run.committed)


def test_peer_answers_equal_our_answers(pairs: list[tuple[Run, Run]]) -> None:
    assert len(pairs) == PROMPTS
    for own, peer in pairs:
        assert own.tokens == peer.tokens


def test_full_blocks_draft_and_commit_the_same(drafter: Drafter, pairs: list[tuple[Run, Run]]) -> None:
    steps, accepted = 0, 0
    for own, peer in pairs:
        count = full_steps(peer, drafter.config.block_size)
        assert own.committed[:count] == peer.committed[:count]
        assert own.drafted[:count] == peer.drafted[:count]
        steps, accepted = steps + count, accepted + sum(n - 1 for n in own.committed[:count])
    assert accepted > steps > PROMPTS, "a drafter that is never right would hide a misplaced context"


def test_first_block_logits_are_equal(pairs: list[tuple[Run, Run]]) -> None:
    for own, peer in pairs:
        torch.testing.assert_close(own.logits, peer.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if not each.recurrent])
def test_every_architecture_drafts_the_same(name: str, tmp_path: Path) -> None:
    """Without recurrent targets: that client does not roll back their states."""
    if not PEER:
        pytest.skip("DFLASH_PEERS_PYTHON is not set: run `make test-peers`")
    target, limit = tiny(name), 24
    target.model.save_pretrained(tmp_path / "target")
    _drop_image_rope(tmp_path / "target/config.json")
    save_drafter(make_drafter(target, block_size=6), tmp_path / "drafter")
    drafter = load_drafter(str(tmp_path / "drafter"), dtype=torch.float32)
    prompt = list(range(40, 60))
    request = {"max_new_tokens": limit, "stop_token_ids": list(target.stop_token_ids), "prompts": [prompt]}
    (peer,) = theirs(request, tmp_path, tmp_path / "target", tmp_path / "drafter")
    with recorded_blocks(target) as blocks:
        answer = generate(target, drafter, prompt, SamplingParams(max_tokens=limit))
    assert answer.tokens == peer.tokens
    count = full_steps(peer, 6, limit)
    assert count > 5
    assert [logits.argmax(-1).tolist() for logits in blocks[:count]] == peer.drafted[:count]
    scale = LogitScale(drafter.config.output_multiplier, drafter.config.final_logit_softcapping)
    logits = blocks[0].clone()
    scale.apply_(logits)  # their client scales after the head
    torch.testing.assert_close(logits, peer.logits, rtol=1e-4, atol=1e-4)


def _drop_image_rope(path: Path) -> None:
    """Removes the rope of an image encoder: versions of transformers name it differently, and all know the default."""
    config = json.loads(path.read_text())
    if config.get("vision_config", {}).pop("rope_parameters", None):
        path.write_text(json.dumps(config))


SCALES = {"output_multiplier": 0.2, "final_logit_softcapping": 2.0, "input_embedding_scale": 1.5}


@pytest.mark.parametrize(
    "changes", [{}, SCALES, {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9}], ids=str
)
def test_peer_drafts_equal_tokens_with_dflash2(changes: dict[str, Any], tmp_path: Path) -> None:
    if not PEER:
        pytest.skip("DFLASH_PEERS_PYTHON is not set: run `make test-peers`")
    target, limit = make_target("qwen3"), 40
    target.model.save_pretrained(tmp_path / "target")
    save_drafter(make_dflash2(target, **changes), tmp_path / "drafter")
    drafter = load_drafter(str(tmp_path / "drafter"), dtype=torch.float32)
    prompts = [list(range(first, first + 20)) for first in range(40, 200, 20)]
    request = {"max_new_tokens": limit, "stop_token_ids": list(target.stop_token_ids), "prompts": prompts}
    chosen = 0
    for prompt, peer in zip(prompts, theirs(request, tmp_path, tmp_path / "target", tmp_path / "drafter"), strict=True):
        own, changed = ours(target, drafter, prompt, limit)
        assert own.tokens == peer.tokens
        count = full_steps(peer, 8, limit)
        assert own.drafted[:count] == peer.drafted[:count] and count
        assert own.committed[:count] == peer.committed[:count]
        chosen += changed
    assert chosen > 8, "a selector that changes nothing shows nothing"
