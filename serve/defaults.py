"""How a target's makers would have it sampled, for requests that do not say."""

import math

from dflash_toolkit.config import UserError
from dflash_toolkit.models.target import load_generation_config
from dflash_toolkit.sampling import COLDEST, LEAST_TOP_P, SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(target: str) -> dict[str, float]:
    """What the target's generation_config.json says of these, as vLLM and SGLang take it; `do_sample` is not looked at.

    Raises:
        UserError: a value that the sampler does not take.
    """
    config = load_generation_config(target)
    found = {name: value for name in NAMES if (value := getattr(config, name, None)) is not None}
    if found.get("top_k") == -1:  # vLLM's word for all of them
        found["top_k"] = 0
    try:
        # as in a request: what is too small to compute with means the most likely token alone
        if 0.0 < found.get("temperature", 0.0) < COLDEST:
            found["temperature"] = 0.0
        if 0.0 < found.get("top_p", 0.0) < LEAST_TOP_P:
            found["top_p"] = LEAST_TOP_P
        if not math.isfinite(found.get("top_k", 0)):
            raise ValueError(f"top_k is {found['top_k']}; it must be a whole number")
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"target {target}: its generation_config.json: {error}; correct it, or give --sampling-defaults openai"
        ) from error
    return found
