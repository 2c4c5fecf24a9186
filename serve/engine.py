"""What decodes for the server: our own runtime. The server uses the names of `Engine` and nothing else of the model."""

from typing import Any

from dflash_toolkit.runtime import AsyncEngine, EngineClosedError, EngineOptions, Progress, load_engine
from dflash_toolkit.runtime import Engine as Runtime

__all__ = ["Engine", "EngineClosedError", "Progress"]


class Engine(AsyncEngine):
    """The runtime and what HTTP needs beside it.

    Attributes:
        tokenizer: the target's.
        context_limit: prompt and answer together, in tokens.
        vocabulary: prompt ids must be below this.
    """

    def __init__(self, runtime: Runtime, tokenizer: Any) -> None:
        super().__init__(runtime)
        self.tokenizer = tokenizer
        self.context_limit, self.vocabulary = runtime.context_limit, runtime.vocabulary

    @classmethod
    def load(cls, target: str, drafter: str | None, device: str, dtype: str, options: EngineOptions) -> "Engine":
        """Raises UserError for whatever is wrong with the names or does not fit the device."""
        return cls(*load_engine(target, drafter, device, dtype, options))
