# ruff: noqa: E402  # the collector waits for the imports
"""Tiny real models for the tests: random weights, the real architectures, a real tokenizer and chat template."""

import contextlib
import functools
import gc
import importlib.util
import json
import math
import os
import ssl
import subprocess
import sys
from dataclasses import replace

from temporary import own_folder
from triton_interpreter import hasten

gc.disable()  # until everything is imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["XDG_CACHE_HOME"] = own_folder()  # step times are cached in the user's

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the first import of one

from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from forked import GrammarTrials
from programs import dflash_data, dflash_train, prompts, short_run  # noqa: F401  # fixtures
from servers import command, fake  # noqa: F401  # fixtures
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from dflash_toolkit import Drafter, Target, grammar_process
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.kernels.features import KNOWN, VARIABLE, features_of
from dflash_toolkit.models.dflash.checkpoint import stored_tensors
from dflash_toolkit.models.dflash.shape import drafter_shape

with contextlib.suppress(ImportError):  # `save_pretrained` would import DeepSpeed; its engine no test gives it
    import accelerate.utils.other

    accelerate.utils.other.is_deepspeed_available = lambda: False
# every client would read the certificates of all authorities again
ssl.create_default_context = functools.cache(ssl.create_default_context)
torch.set_num_threads(1)  # the models are tiny: threads cost more than they bring
if importlib.util.find_spec("triton") is None:  # only the definitions of kernels are tested
    every = (Path(__file__).parent / "kernels").glob("test_kernels_*.py")
    collect_ignore = [str(path) for path in every if path.stem not in ("test_kernels_draws", "test_kernels_reference")]

VOCAB = 300
EOS, PAD, MASK = 256, 257, 299
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DELTA_NET = {  # on two of three layers
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
    "mistral": functools.partial(MistralConfig, sliding_window=None),
    "qwen3_moe": functools.partial(  # the second layer is dense
        Qwen3MoeConfig, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_next": functools.partial(  # the second layer is dense
        Qwen3NextConfig, **DELTA_NET, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, mlp_only_layers=[1],
    ),
    "qwen3_5": functools.partial(Qwen3_5TextConfig, **DELTA_NET),
    "qwen3_5_moe": functools.partial(
        Qwen3_5MoeTextConfig, **DELTA_NET, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of kernels fresh memory holds NaN or wild integers, so that an element that no kernel writes shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, **kwargs: object) -> Tensor:
            fresh = make(*args, **kwargs)
            with torch.no_grad():  # some that is asked for is a leaf with a gradient
                if fresh.is_floating_point():
                    return fresh.fill_(math.nan)
                return fresh.fill_(fresh.dtype == torch.bool or min(0x7ABCDE, torch.iinfo(fresh.dtype).max))

        return made

    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.startswith("test_kernels_"):
            for name in ("empty", "empty_like"):
                patch.setattr(torch, name, poisoned(getattr(torch, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _interpreted_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Triton's interpreter as `hasten` makes it."""
    runs_kernels = request.module.__name__.startswith(("test_kernels_", "test_bench_experts"))
    with pytest.MonkeyPatch.context() as patch:
        if runs_kernels and "TRITON_INTERPRET" in os.environ:
            hasten(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _grammars_are_tried_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        forked = SimpleNamespace(Popen=GrammarTrials, DEVNULL=subprocess.DEVNULL)
        patch.setattr(grammar_process, "subprocess", forked)
        yield
    for process in GrammarTrials.started:  # of engines that no test has closed
        process.kill()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def _gives_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share a GPU with those of other processes."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class Clock:
    """A time that passes only where a test says so: no test may depend on how fast the machine is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def costs(self, seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which takes so long."""

        @functools.wraps(function)
        def slow(*args: Any, **options: Any) -> Any:
            self.now += seconds
            return function(*args, **options)

        return slow


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Training by a clock of the test: a step takes a second, an evaluation 100, the part of a save that is waited
    for 1000.

    The seam is the name `time` in the modules that read it: all that they know of time is `time.perf_counter()`.
    """
    from dflash_toolkit.train import gradients
    from dflash_toolkit.train.run import metrics_log, save, training_budget
    from dflash_toolkit.train.run.held_out import HeldOut

    for module in (training_budget, save, metrics_log):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(gradients, "compute_loss", clock.costs(1, gradients.compute_loss))
    monkeypatch.setattr(save, "host_copy", clock.costs(1000, save.host_copy))
    monkeypatch.setattr(HeldOut, "__call__", clock.costs(100, HeldOut.__call__))
    return clock


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only what starts nothing, trains nothing and takes no seconds"
    )
    parser.addoption("--emulate-gpu", choices=KNOWN, metavar="NAME", help="run the kernels for a card such as sm_86")


def pytest_configure(config: pytest.Config) -> None:
    if (name := config.getoption("--emulate-gpu")) is not None:
        os.environ[VARIABLE] = name  # also of the processes that tests start


def pytest_collection_finish() -> None:
    """From here on garbage is collected, and no collection looks at what was imported, a quarter of a second long.

    It is seldom looked for: that would be a tenth of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


os.register_at_fork(after_in_child=pytest_collection_finish)


@pytest.fixture(autouse=True, scope="session")
def _compiles_when_needed() -> None:
    """On a GPU, the small engines of the tests need few of the kernels that would be compiled ahead."""
    if torch.cuda.is_available():
        from dflash_toolkit.runtime import precompile

        precompile.MOST_PROCESSES = 1


@pytest.fixture(autouse=True)
def _freezes_imports() -> Iterator[None]:
    """Freezes imported objects of tests, too: closing an engine collects all garbage."""
    before = len(sys.modules)
    yield
    if len(sys.modules) >= before + 20:
        gc.collect()
        gc.freeze()


LONG_RUN = bool(os.environ.get("DFLASH_LONG"))  # `make test-long`
if not LONG_RUN:
    hypothesis.settings.register_profile("suite", max_examples=30)
    hypothesis.settings.load_profile("suite")
SAMPLE = 2  # cases of a `sampled` test that `make test` runs; `sampled(3)` has its own number


def _without_most_of_the_sampled(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps some cases of each test marked `sampled`, spread evenly. DFLASH_LONG=1, or a GPU, runs all of them."""
    if LONG_RUN or torch.cuda.is_available():
        return
    cases: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            count = mark.args[0] if mark.args else SAMPLE
            cases.setdefault((item.path, getattr(item, "originalname", item.name), count), []).append(item)
    kept = {each[i * (len(each) - 1) // (count - 1)] for (_, _, count), each in cases.items() for i in range(count)}
    left_out = [item for each in cases.values() for item in each if item not in kept]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(trylast=True)  # after `-k` and `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _without_most_of_the_sampled(config, items)
    skipped = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    if config.getoption("--fast"):
        skipped["slow"] = "takes seconds"
    if torch.cuda.is_available() and not features_of(torch.device("cuda")).hopper:
        skipped["hopper"] = "needs a Hopper GPU that emulates no other"
    for item in items:
        for mark in skipped.keys() & {mark.name for mark in item.iter_markers()}:  # keywords include folders
            item.add_marker(pytest.mark.skip(reason=skipped[mark]))


@pytest.fixture(autouse=True, scope="session")
def _fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --fast a test ends where it would start Python, step an optimizer or make a target: no list is kept."""

    def refuse(*_: object, **__: object) -> None:
        pytest.skip("starts a process, trains or makes a target")

    def popen(self: subprocess.Popen[Any], args: Any, *rest: Any, **more: Any) -> None:
        if sys.executable in args:
            refuse()
        real(self, args, *rest, **more)

    if not request.config.getoption("--fast"):
        yield
        return
    hook, real = register_optimizer_step_pre_hook(refuse), subprocess.Popen.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", popen)
        patch.setattr(BaseProcess, "start", refuse)
        patch.setattr(PreTrainedModel, "__init__", refuse)
        yield
    hook.remove()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte level: ids 0..255 are bytes, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )


def make_target(
    kind: str = "llama", *, layers: int = 6, tied: bool = True, limit: int = 512, **extra: object
) -> Target:
    """A random target in fp32 with greedy answers that are varied (large initialisation) and reproducible."""
    torch.manual_seed(11)
    config = CONFIGS[kind](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=limit, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, initializer_range=0.3, **extra,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Target(model, make_tokenizer(), f"tiny-{kind}")


def make_drafter(target: Target, *, taps: int = 3, layers: int = 2, block_size: int = 8, **changes: object) -> Drafter:
    """A random drafter that fits `target`."""
    shape = drafter_shape(target.config, taps=taps, layers=layers, block_size=block_size)
    values = {"intermediate_size": 48, "rope_theta": 1e4} | changes
    drafter = Drafter(replace(shape, **values))  # type: ignore[arg-type]
    drafter.init_weights(torch.Generator().manual_seed(5), std=0.1)
    return drafter.eval()


def make_dflash2(target: Target, **changes: object) -> Drafter:
    """A drafter with both parts of DFlash 2; its random weights change the drafts."""
    parts = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}
    drafter = make_drafter(target, **parts | changes)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "_conv." in name or "selector" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return drafter


def make_dspine(target: Target, **changes: object) -> Drafter:
    """A DSpine drafter; its random weights change the drafts."""
    shape = drafter_shape(target.config, taps=3, layers=4, block_size=8, kind="dspine", message_size=12)
    values = {"intermediate_size": 48, "rope_theta": 1e4} | changes
    drafter = Drafter(replace(shape, **values))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    drafter.init_weights(generator, std=0.1)
    shape.architecture.fit_head(drafter, target.head_weight)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "injection" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def drafter(target: Target) -> Drafter:
    return make_drafter(target)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama target as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("target")
    tiny = make_target()
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of ten prompts."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i} and {i * 7}"}) + "\n" for i in range(10)))
    return path


@pytest.fixture(scope="session")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory, drafter: Drafter) -> Path:
    from dflash_toolkit import save_drafter

    path = tmp_path_factory.mktemp("drafter")
    save_drafter(drafter, path)
    return path


@pytest.fixture(scope="session")
def dflash2_dir(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    from dflash_toolkit import save_drafter

    path = tmp_path_factory.mktemp("dflash2")
    save_drafter(make_dflash2(target), path)
    return path


def check_same(reread: Drafter, drafter: Drafter) -> None:
    assert reread.config == drafter.config
    for (name, written), read in zip(stored_tensors(drafter).items(), reread.state_dict().values(), strict=True):
        assert read.dtype == written.dtype and not read.requires_grad, name
        assert torch.equal(read, written), name


def prompts_of(config: Any, tokenizer: Any, work: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the rendered prompts that `dflash-train --data` would train and evaluate on, in `work`."""
    from dflash_toolkit.data.prompts import encode_chat
    from dflash_toolkit.train.prompts.choosing import chosen
    from dflash_toolkit.train.prompts.split import PROMPTS, Reading, choose_prompts

    work.mkdir(parents=True, exist_ok=True)
    data = choose_prompts(Reading(config, tokenizer, "prompts.max_length"), work)
    training = [
        encode_chat(tokenizer, each.conversation.turns[0], config.responses.thinking, each.conversation.tools)
        for each in chosen(work / PROMPTS)
    ]
    return training, [prompt.tokens for prompt in data.held_out]


def answers_of(config: Any, tokenizer: Any, work: Path, vocab_size: int = VOCAB) -> tuple[Any, list[list[int]]]:
    """The corpus and the held-out prompts of a run of `dflash-train --responses`, in `work`."""
    from dflash_toolkit.train.prompts.split import PromptData, Reading
    from dflash_toolkit.train.responses.build_corpus import write_given
    from dflash_toolkit.train.responses.corpus import Corpus
    from dflash_toolkit.train.responses.file import Match
    from dflash_toolkit.train.run.provenance import target_digest

    work.mkdir(parents=True, exist_ok=True)
    digest, template = target_digest(config.target), template_digest(tokenizer)
    match = Match(config.target, digest, vocab_size, template, config.trust_responses)
    write_given(Reading(config, tokenizer, "prompts.max_length"), "", match, work / "corpus", {})
    corpus = Corpus.open(work / "corpus")
    return corpus, [prompt.tokens for prompt in PromptData.of_json("", corpus.meta).held_out]
