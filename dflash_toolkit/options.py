"""Groups of options that several commands share. Without torch: command lines are checked before it is imported."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from .config import option
from .data.conversations import BY_NAME, FORM_CHOICES
from .data.prompts import Prompt, PromptSet, parse_prompt_sets, read_prompt_sets
from .sampling import DraftSampleMethod, SamplingParams
from .threads import check_threads

DTYPES = ("auto", "bfloat16", "float16", "float32")
DRAFT_DTYPES = ("auto", "fp8", "full")
LEAST_FOR_TREES = 3_000_000_000  # parameters of a target: beside a smaller one's step a tree takes long
DRAFT_TREE = "nodes of a request's draft tree, at most; the likeliest are verified; 0 or --no-draft-tree: a chain"
MOST_TREE_NODES = 63  # that the engine takes: with the anchor they fill the kernels' tiles
DRAFT_SAMPLE_METHODS: tuple[DraftSampleMethod, ...] = get_args(DraftSampleMethod)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The target, and what computes it. The base of every command's options."""

    target: str = option(help="the target: Hugging Face id or directory")
    device: str = option("auto", "auto, cpu, cuda, cuda:1, ...")
    dtype: str = option("auto", "what is computed in; auto is bfloat16 on a GPU, float32 on a CPU", DTYPES)
    threads: int | None = option(None, "CPU threads that compute (default: OMP_NUM_THREADS, or one a core)")

    def __post_init__(self) -> None:
        check_threads(self.threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """How long answers are, and which tokens may be picked for them."""

    renamed: ClassVar[dict[str, Any]] = {"max_new_tokens": "max_tokens"}
    max_tokens: int = option(2048, "longest answer, in tokens")
    top_p: float = option(1.0, "nucleus sampling")
    top_k: int = option(0, "keep the most probable tokens; 0 is all")
    min_p: float = option(0.0, "keep tokens at least so probable, relative to the best")

    def params_at(self, temperature: float, seed: int = 0) -> SamplingParams:
        """Raises ValueError for a value outside its range."""
        return SamplingParams(
            seed=seed,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(AnswerOptions):
    """How the target picks the tokens of its answers."""

    temperature: float = option(0.0, "0 is greedy")
    thinking: bool | None = option(None, "for templates with a thinking mode (default: the template's own)")

    def __post_init__(self) -> None:
        self.params()  # raises for a value outside its range

    def params(self, seed: int = 0) -> SamplingParams:
        """Raises ValueError for a value outside its range."""
        return self.params_at(self.temperature, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """Which prompts are read of sources, for responses to train on."""

    split: str = option("train", "of datasets")
    form: str = option(
        BY_NAME, "ask as this benchmark does; auto: only sources given as its NAME=SOURCE; none: never", FORM_CHOICES
    )
    max_prompts: int = option(0, "prompts to use, of all sources; 0 is all")
    max_length: int = option(3072, "tokens of prompt and responses together; longer rows are cut")
    similarity: float = option(
        0.8, "drop a prompt that shares so much of its word triples with one before; 1: only if equal"
    )
    strict: bool = option(True, "a malformed row of a file ends the run; false skips and counts it, as in datasets")

    def __post_init__(self) -> None:
        if self.max_prompts < 0:
            raise ValueError(f"prompts.max_prompts is {self.max_prompts}; it must be >= 0")
        if self.max_length < 8:
            raise ValueError(f"prompts.max_length is {self.max_length}; it must be >= 8")
        if not 0 < self.similarity <= 1:
            raise ValueError(f"prompts.similarity is {self.similarity}; it must be in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSetOptions:
    """Which prompts are decoded to judge a drafter by."""

    prompts: tuple[str, ...] = option(
        (),
        "prompt sets: benchmarks by name (gsm8k, mt_bench, ...), or each as NAME=SOURCE, or a SOURCE named after "
        "itself: JSONL, JSON, Parquet or text, or a dataset as DATASET[:SUBSET]; SOURCE[a:b] takes its rows a..b-1",
        named=True,
    )
    form: str = option(
        BY_NAME, "ask all sets as this benchmark does; auto: each by its name; none: rows as they are", FORM_CHOICES
    )
    split: str = option("test", "of datasets, whose rows are taken in their order")
    limit: int | None = option(None, "use the first LIMIT prompts of each set")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be >= 1")
        _ = self.sets  # raises for another form

    @property
    def sets(self) -> list[PromptSet]:
        """Raises ValueError for an item of another form."""
        return parse_prompt_sets(self.prompts, self.form)

    def read(self) -> dict[str, list[Prompt]]:
        """The prompts, by the names of their sets. Raises UserError."""
        return read_prompt_sets(self.prompts, self.limit, form=self.form, split=self.split)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """How a drafter is used."""

    renamed: ClassVar[dict[str, Any]] = {"block_size": ("num_speculative_tokens", lambda size: size - 1)}
    num_speculative_tokens: int | None = option(None, "tokens drafted a step; 0 decodes plainly (default: as it pays)")
    draft_dtype: str = option(
        "auto", "of drafts, the answers stay the same: fp8, full (as loaded) or what is faster here", DRAFT_DTYPES
    )
    draft_tree: int | None = option(
        None, f"{DRAFT_TREE} (default: {MOST_TREE_NODES} on a GPU for a dense target of {LEAST_FOR_TREES // 10**9} "
        "billion parameters or more, if num_speculative_tokens is left open and drafts are greedy; else 0)", off=True,
    )  # fmt: skip
    draft_tree_width: int | None = option(
        None, "children of a node at most; 1: chains, each of its own length (default: 8, or 1 where the target has "
        "recurrent layers)",
    )  # fmt: skip
    draft_sample_method: str = option(
        "greedy",
        "of requests with a temperature: greedy drafts the most probable tokens, and answers are those without a "
        "drafter; probabilistic samples drafts too, and answers are distributed as those",
        DRAFT_SAMPLE_METHODS,
    )

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; it must be >= 0")
        if (self.draft_tree or 0) < 0:
            raise ValueError(f"draft_tree is {self.draft_tree}; it must be >= 0")
        if self.draft_tree_width is not None and self.draft_tree_width < 1:
            raise ValueError(f"draft_tree_width is {self.draft_tree_width}; it must be >= 1")
        if self.draft_tree and self.draft_sample_method != "greedy":
            raise ValueError(f"draft_tree is {self.draft_tree}; trees hold the most probable tokens, none sampled")

    @property
    def block_size(self) -> int | None:
        """Tokens of a draft block: the anchor and what is drafted."""
        return None if self.num_speculative_tokens is None else self.num_speculative_tokens + 1
