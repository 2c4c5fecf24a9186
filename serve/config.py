"""Declares the options of dflash-serve. Without torch: command lines are checked before it is imported."""

from dataclasses import dataclass

from dflash_toolkit.config import Options, option, options
from dflash_toolkit.options import ModelOptions
from dflash_toolkit.runtime.options import EngineOptions
from dflash_toolkit.threads import usable_cores

from .parsing.choice import REASONING_PARSERS, TOOL_CALL_PARSERS

MAX_FRONT_ENDS, REQUESTS_PER_FRONT_END, CORES_PER_FRONT_END = 8, 16, 4  # when their number is chosen
OWN = "dflash"
ENGINES = (OWN, "vllm", "sglang")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalOptions(Options):
    """Chooses the engine and the number of GPUs.

    Raises:
        ValueError: a number below 1.
    """

    engine: str = option(
        OWN,
        "engine: dflash is this project's own, on one GPU; options of vllm or sglang follow after --",
        ENGINES,
        common=True,
    )
    engine_python: str | None = option(
        None, "Python in which vllm or sglang is installed (default: the one that runs this command)", metavar="PATH"
    )
    tensor_parallel_size: int = option(1, "GPUs that share one copy of the target, with vllm or sglang", within=">= 1")
    data_parallel_size: int = option(1, "copies of the target, with vllm or sglang", within=">= 1")
    adaptive_verification: bool | None = option(
        None,
        "choose how many drafts of each request are verified, with vllm (default: on where its release, the target and "
        "the GPU support it, unless --max-num-seqs is below 32)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptOptions(Options):
    """How the drafter learns from the requests that are served.

    Raises:
        ValueError: a value outside its range, or one without --adapt.
    """

    adapt: bool = option(
        False,
        "train the drafter on the requests that are served; answers do not change (without --drafter: from random "
        "weights)",
        common=True,
    )
    adapt_share: float = option(
        0.1, "share of its speed that the engine gives up to the trainer while requests run", within="in (0, 1]"
    )
    adapt_device: str | None = option(None, "device of the trainer (default: the engine's)")
    adapt_memory_gib: float = option(4.0, "host memory for captured requests, in GiB", within="> 0")
    adapt_output: str | None = option(
        None, "directory that each new drafter is saved to (default: nothing is written)", metavar="PATH"
    )
    adapt_learning_rate: float | None = option(
        None,
        "learning rate of the trainer (default: that of dflash-train, lower if --drafter is given)",
        within="> 0",
    )
    adapt_opt_in: bool = option(False, 'learn only from requests with "store": true')
    adapt_exclude_key_file: str | None = option(
        None, "file with API keys, one per line; their requests are never learned from (default: none)", metavar="PATH"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        for name in ("adapt_device", "adapt_output", "adapt_exclude_key_file", "adapt_learning_rate"):
            if getattr(self, name) is not None and not self.adapt:
                raise ValueError(f"{name} is given, but not adapt; add --adapt")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(ModelOptions):
    """Holds the options of `dflash-serve`."""

    drafter: str | None = option(
        None, "drafter: Hugging Face id or directory (default: none, decode plainly)", common=True, metavar="PATH"
    )
    from_report: str | None = option(
        None,
        "report.json of dflash-eval: takes the recommended draft length or tree and --max-num-seqs, unless they are "
        "given (default: none)",
        metavar="PATH",
    )
    host: str = option(
        "127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 interface", common=True, metavar="ADDRESS"
    )
    port: int = option(8000, "port to listen on; 0 takes a free one", common=True, within="in 0..65535")
    external: ExternalOptions = options(ExternalOptions, flat=True)
    runtime: EngineOptions = options(EngineOptions, flat=True)
    adaptation: AdaptOptions = options(AdaptOptions, flat=True)
    api_server_count: int | None = option(
        None, "number of HTTP front-end processes (default: chosen from the cores and --max-num-seqs)", within=">= 1"
    )
    uds: str | None = option(
        None, "Unix socket to listen on instead of --host and --port (default: none)", metavar="PATH"
    )
    ssl_keyfile: str | None = option(None, "private key for HTTPS (default: serve HTTP)", metavar="PATH")
    ssl_certfile: str | None = option(None, "certificate chain for HTTPS (default: serve HTTP)", metavar="PATH")
    root_path: str = option("", "path under which a proxy exposes this server (default: none)", metavar="PATH")
    allowed_origins: tuple[str, ...] = option(
        (), "sites with pages that may send requests from a browser; * is every site (default: none)", metavar="URL"
    )
    api_key_file: str | None = option(
        None,
        "file with accepted API keys, one per line; keys in $DFLASH_API_KEY, separated by commas, are also accepted "
        "(default: no key is required)",
        common=True,
        metavar="PATH",
    )
    admin_key_file: str | None = option(
        None,
        "file with admin keys, one per line, for /update_weights_from_disk; keys in $DFLASH_ADMIN_KEY, separated by "
        "commas, are also accepted (default: the route does not exist)",
        metavar="PATH",
    )
    max_queue: int = option(1024, "requests that may wait for a place in the batch; more get status 429", within=">= 0")
    scheduling_policy: str = option(
        "fair",
        "order of waiting requests: fair shares time among API keys and requests; priority follows the requests' "
        "priority field, lowest first",
        choices=("fair", "priority"),
    )
    prefix_cache_per_key: bool = option(
        False,
        "share cached prefixes only between requests with the same API key, so that times reveal nothing about prompts "
        "of other keys",
    )
    request_timeout: float | None = option(
        None, "seconds after which a request is aborted (default: never)", within="> 0"
    )
    client_timeout: float = option(
        30.0, "seconds that a client has to send its header, to send its body, and to read a response", within="> 0"
    )
    max_connections: int | None = option(
        None, "connections open at a time (default: as many as the limit on open files allows)", within=">= 1"
    )
    log_json: bool = option(False, "write the log as JSON, one object per line")
    access_log: bool = option(True, "log a line for every request")
    restart: bool = option(False, "restart the engine if it ends by itself")
    sampling_defaults: str = option(
        "model",
        "defaults for sampling parameters: model reads the target's generation_config.json, openai uses temperature 1",
        choices=("model", "openai"),
    )
    tool_call_parser: str = option(
        "auto",
        "format of the target's tool calls; auto detects it from the chat template, none disables tools",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "format of the target's reasoning, which is returned as reasoning_content; auto detects it from the chat "
        "template",
        choices=REASONING_PARSERS,
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "draft statistics in a response, next to `usage`: none, a summary, or also every step",
        choices=("none", "summary", "detailed"),
    )
    strict_parameters: bool = option(
        False, "refuse requests with an unknown parameter (status 400) instead of ignoring it"
    )
    drain_timeout: float = option(
        25.0, "seconds that running requests get to finish when the server stops", within=">= 0"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "model names that requests may use; responses have the first (default: the target, as given)",
        common=True,
    )
    chat_template: str | None = option(
        None, "file with a chat template (default: the target's own template)", metavar="PATH"
    )

    def __post_init__(self) -> None:
        ModelOptions.__post_init__(self)
        for name in ("host", "uds", "api_key_file", "admin_key_file", "chat_template"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty")
        if "" in self.served_model_name:
            raise ValueError("served_model_name is empty")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path is {self.root_path!r}; it must begin with /")
        runtime = self.runtime
        if runtime.kv_cache_tokens and runtime.kv_cache_tokens < (runtime.max_model_len or 0):
            raise ValueError(
                f"kv_cache_tokens is {runtime.kv_cache_tokens}, less than max_model_len, {runtime.max_model_len}; "
                f"raise the one or lower the other"
            )
        if self.adaptation.adapt and self.external.engine != OWN:
            raise ValueError(f"adapt needs --engine {OWN}, not {self.external.engine}")
        drafts = self.drafter is not None or self.adaptation.adapt
        if runtime.num_speculative_tokens and not drafts and self.external.engine == OWN:
            raise ValueError(f"num_speculative_tokens is {runtime.num_speculative_tokens}, but there is no drafter")
        if self.per_request_spec_decode_metrics != "none" and self.drafter is None:
            raise ValueError("per_request_spec_decode_metrics needs a drafter")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("https needs both ssl_keyfile and ssl_certfile")

    @property
    def front_ends(self) -> int:
        """Returns the number of front-end processes: one for 16 requests and 4 cores, unless it is given."""
        if self.api_server_count is not None or self.device == "cpu":  # there the engine needs the cores
            return self.api_server_count or 1
        requests = self.runtime.max_num_seqs or MAX_FRONT_ENDS * REQUESTS_PER_FRONT_END
        return max(
            1, min(usable_cores() // CORES_PER_FRONT_END, -(-requests // REQUESTS_PER_FRONT_END), MAX_FRONT_ENDS)
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Returns the names that requests may use; responses have the first."""
        return self.served_model_name or (self.target,)
