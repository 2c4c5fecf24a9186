"""Declares options that several commands share. Without torch: command lines are checked before it is imported."""

from dataclasses import dataclass
from typing import get_args

from .config import Options, option
from .data.conversations import BY_NAME, FORM_CHOICES
from .data.prompts import Prompt, PromptSet, parse_prompt_sets, read_prompt_sets
from .data.skipped import Skipped
from .sampling import DraftSampleMethod, SamplingParams
from .templates import FORMATS

DTYPES = ("auto", "bfloat16", "float16", "float32")
DRAFT_DTYPES = ("auto", "fp8", "full")
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")
LEAST_FOR_TREES = 3_000_000_000  # parameters of a target: a step of a smaller one is short compared with a tree
DRAFT_TREE = "maximum nodes of a request's draft tree, the likeliest drafts; 0 or --no-draft-tree drafts a chain"
MOST_TREE_NODES = 63  # the engine's limit: with the anchor they fill the kernels' tiles
THINKING = "thinking mode of the chat template, for templates that have one"
DRAFT_SAMPLE_METHODS: tuple[DraftSampleMethod, ...] = get_args(DraftSampleMethod)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions(Options):
    """The target and the hardware. The base of every command's options."""

    target: str = option(help="target model: Hugging Face id or directory", common=True, metavar="PATH")
    device: str = option("auto", "device: auto, cpu, cuda, cuda:1, ...; auto is the GPU, if there is one", common=True)
    dtype: str = option("auto", "number format; auto is bfloat16 on a GPU, float32 on a CPU", DTYPES)
    threads: int | None = option(
        None, "CPU threads that compute (default: OMP_NUM_THREADS, or one per core)", within="in 1..4096"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateOptions(ModelOptions):
    """The target, and how prompts are rendered for it."""

    chat_template: str | None = option(
        None, "file with a chat template in Jinja (default: the target's own template)", metavar="PATH"
    )
    prompt_format: str = option(
        "chat",
        "rendering of prompts: chat uses the chat template, text completes them as they are, for base models",
        FORMATS,
    )

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        if self.chat_template and self.prompt_format == "text":
            raise ValueError("prompt_format is text, which uses no template; remove chat_template")

    @property
    def rendering(self) -> dict[str, str | None]:
        """The arguments of `choose_template`."""
        return {"chat_template": self.chat_template, "prompt_format": self.prompt_format}

    @property
    def rendering_words(self) -> list[str]:
        """The options on a command line, without defaults."""
        words = ["--prompt-format", self.prompt_format] if self.prompt_format != "chat" else []
        return [*words, *(["--chat-template", self.chat_template] if self.chat_template else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions(Options):
    """The length of responses and the tokens that may be sampled."""

    max_tokens: int = option(2048, "longest response, in tokens", common=True)
    top_p: float = option(1.0, "sample from the most probable tokens with this total probability; 1 is all")
    top_k: int = option(0, "sample from this many most probable tokens; 0 is all")
    min_p: float = option(0.0, "minimum probability of a token, as a share of the most probable token's")

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
    """How the target samples its responses."""

    temperature: float = option(0.0, "sampling temperature; 0 is greedy", common=True)
    thinking: bool | None = option(None, f"{THINKING} (default: the template's own)", flag="thinking", common=True)

    def __post_init__(self) -> None:
        AnswerOptions.__post_init__(self)
        self.params()  # raises for a value outside its range

    def params(self, seed: int = 0) -> SamplingParams:
        """Raises ValueError for a value outside its range."""
        return self.params_at(self.temperature, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions(Options):
    """The prompts of the training responses."""

    split: str = option("train", "split of datasets to read")
    form: str = option(
        BY_NAME,
        "prompt template of a benchmark; auto: only for sources given as NAME=SOURCE; none: no template",
        FORM_CHOICES,
    )
    max_prompts: int = option(0, "number of prompts from all sources; 0 uses all", common=True, within=">= 0")
    max_length: int = option(3072, "tokens of prompt and response together; longer rows are cut", within=">= 8")
    similarity: float = option(
        0.8,
        "share of pairs of words in common with an earlier prompt at which a prompt is dropped, without text that "
        "several prompts share; 1 drops only copies",
        within="in (0, 1]",
    )
    strict: bool = option(False, "end the run at the first row that cannot be used; off skips and counts such rows")


PROMPT_SETS = (
    "prompt sets: benchmarks by name (gsm8k, mt_bench, ...), NAME=SOURCE, or SOURCE; a SOURCE is a JSONL, JSON, "
    "Parquet or text file, or a dataset as DATASET[:SUBSET], and SOURCE[a:b] takes rows a to b-1"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSetOptions(Options):
    """The prompts that measure a drafter."""

    prompts: tuple[str, ...] = option(
        (),
        f"{PROMPT_SETS} (required, unless --protocol names them)",
        named=True,
        common=True,
        metavar="SOURCE",
    )
    form: str = option(
        BY_NAME,
        "prompt template of a benchmark for all sets; auto: each set's own, by its name; none: no template",
        FORM_CHOICES,
    )
    split: str = option("test", "split of datasets to read, in their order")
    strict: bool = option(False, "stop at the first unusable row, instead of skipping and counting such rows")
    limit: int | None = option(
        None, "number of prompts used from the start of each set (default: all)", common=True, within=">= 1"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        _ = self.sets  # raises for another form

    @property
    def sets(self) -> list[PromptSet]:
        """Raises ValueError for an item of another form."""
        return parse_prompt_sets(self.prompts, self.form)

    def read(self, skipped: Skipped) -> dict[str, list[Prompt]]:
        """The prompts, by the names of their sets. Raises UserError."""
        return read_prompt_sets(self.prompts, self.limit, form=self.form, split=self.split, skipped=skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions(Options):
    """How the drafter drafts, and the format of the KV cache of both models."""

    num_speculative_tokens: int | None = option(
        None,
        "tokens drafted per step; 0 decodes plainly (default: chosen at run time from measured step times)",
        common=True,
        within=">= 0",
    )
    draft_dtype: str = option(
        "auto",
        "number format of the drafter: fp8, full (as loaded), or auto (the faster one); the output stays the same",
        DRAFT_DTYPES,
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto (that of the model), or fp8, which holds about twice the tokens and "
        "changes the target's output slightly; fp8_e4m3 is fp8",
        KV_CACHE_DTYPES,
    )
    draft_tree: int | None = option(
        None,
        f"{DRAFT_TREE} (default: {MOST_TREE_NODES} on a GPU for a target without experts and of "
        f"{LEAST_FOR_TREES // 10**9} billion parameters or more, if --num-speculative-tokens is not given and drafts "
        "are greedy; else 0)",
        off=True,
        within=">= 0",
    )
    draft_tree_width: int | None = option(
        None, "maximum children of a tree node; 1 drafts chains of adaptive length (default: 8)", within=">= 1"
    )
    draft_sample_method: str = option(
        "greedy",
        "drafts of requests with a temperature: greedy takes the most probable tokens and keeps the output identical; "
        "probabilistic samples them and keeps the output's distribution",
        DRAFT_SAMPLE_METHODS,
    )

    @property
    def fp8_cache(self) -> bool:
        """Whether the KV cache holds fp8."""
        return self.kv_cache_dtype.startswith("fp8")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.draft_tree and self.draft_sample_method != "greedy":
            raise ValueError(
                f"draft_tree is {self.draft_tree}, but trees hold no sampled drafts; set draft_sample_method to greedy"
            )

    @property
    def block_size(self) -> int | None:
        """The size of a draft block: the anchor and the drafted tokens."""
        return None if self.num_speculative_tokens is None else self.num_speculative_tokens + 1
