"""Reads the sampling defaults that a target is published with."""

import math

from dflash_toolkit.config import UserError
from dflash_toolkit.models.target_files import load_generation_config
from dflash_toolkit.sampling import COLDEST, LEAST_TOP_P, SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(target: str) -> dict[str, float]:
    """Returns the sampling parameters in generation_config.json; like vLLM and SGLang, ignores `do_sample`.

    Raises:
        UserError: the sampler does not accept a value.
    """
    config = load_generation_config(target)
    found = {name: value for name in NAMES if (value := getattr(config, name, None)) is not None}
    if found.get("top_k") == -1:  # vLLM's value for no limit
        found["top_k"] = 0
    try:
        # as in a request: a value too small to compute with means greedy decoding
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
