"""Restrictions that a target's generation_config.json puts on every answer, as sampling parameters.

Temperature, top_p, top_k, min_p and repetition_penalty belong to requests and are not read here. Of the other keys that
change an answer in transformers' `generate` (5.23), those in `Restrictions` are followed and the others refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..config import UserError
from ..sampling import SamplingParams

# added to the logit of a suppressed token; finite, so that a token of a grammar remains
BANNED = -1e30
# keys that are refused -> values with which `generate` ignores them
REFUSED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "stop_strings": (),
    "token_healing": (False,),
}
REFUSED_IF_SAMPLED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0, 1.0),
    "eta_cutoff": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Changes to the sampling parameters of every request.

    Attributes:
        logit_bias: of suppress_tokens, and of the single tokens in bad_words_ids and sequence_bias.
        begin_suppress_tokens: tokens that do not begin an answer.
        min_length: tokens of prompt and answer before a stop token.
        min_new_tokens: tokens of the answer before a stop token.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0

    def apply(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Returns the parameters of a request with these restrictions; a grammar decides alone when its answer ends."""
        if self == Restrictions():
            return params
        least = max(params.min_tokens, self.min_new_tokens, self.min_length - prompt_tokens)
        return replace(
            params,
            logit_bias=params.logit_bias + self.logit_bias,
            begin_suppress_tokens=params.begin_suppress_tokens + self.begin_suppress_tokens,
            min_tokens=0 if params.grammar else min(least, params.max_tokens),
        )

    def for_server(self, name: str, params: SamplingParams) -> SamplingParams:
        """Returns the parameters for requests to another engine, with any prompt.

        Raises:
            UserError: a restriction that the APIs of servers lack.
        """
        for key in ("begin_suppress_tokens", "min_length", "min_new_tokens"):
            if value := getattr(self, key):
                raise _refused(name, key, value, "is not supported with vLLM or an endpoint")
        return self.apply(params, 0)


def server_bias(params: SamplingParams) -> dict[str, float]:
    """Returns `logit_bias` for OpenAI's API, which accepts values within +-100."""
    return {str(token): max(-100.0, min(100.0, bias)) for token, bias in params.logit_bias}


def restrictions(name: str, generation: Any, vocabulary: int) -> Restrictions:
    """Returns the restrictions in a generation_config.json.

    Args:
        name: the target's, for messages.
        generation: a transformers `GenerationConfig`, or None.
        vocabulary: the number of tokens; `generate` ignores suppressed tokens beyond.

    Raises:
        UserError: a key that is not followed, or an invalid value.
    """
    if generation is None:
        return Restrictions()
    checked = REFUSED | (REFUSED_IF_SAMPLED if generation.do_sample else {})
    for key, neutral in checked.items():
        value = getattr(generation, key, None)
        if value is not None and value not in neutral:
            raise _refused(name, key, value, "is not supported")
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    bias = [(token, BANNED) for token in _tokens(name, "suppress_tokens", generation)]
    bias += [(token, value) for token, value in _words(name, generation) if value > BANNED or token not in ends]
    return Restrictions(
        tuple((token, value) for token, value in bias if 0 <= token < vocabulary),
        tuple(token for token in _tokens(name, "begin_suppress_tokens", generation) if 0 <= token < vocabulary),
        _count(name, "min_length", generation),
        _count(name, "min_new_tokens", generation),
    )


def _refused(name: str, key: str, value: Any, reason: str) -> UserError:
    return UserError(
        f"target {name}: its generation_config.json: {key} is {str(value)[:60]}, which {reason}; "
        f"remove {key} from generation_config.json"
    )


def _is_token(value: Any) -> bool:
    return type(value) is int


def _tokens(name: str, key: str, generation: Any) -> list[int]:
    value = getattr(generation, key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(map(_is_token, value)):
        raise _refused(name, key, value, "is not a list of token ids")
    return value


def _words(name: str, generation: Any) -> Iterator[tuple[int, float]]:
    """Yields the tokens of bad_words_ids and sequence_bias with their biases."""
    words = [("bad_words_ids", word, BANNED) for word in generation.bad_words_ids or ()]
    pairs = generation.sequence_bias or ()
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], (int, float)):
            raise _refused(name, "sequence_bias", pair, "is not a pair of token ids and a number")
        words.append(("sequence_bias", pair[0], max(float(pair[1]), BANNED)))
    for key, word, bias in words:
        if not isinstance(word, (list, tuple)) or not word or not all(map(_is_token, word)):
            raise _refused(name, key, word, "is not a list of token ids")
        if len(word) > 1:
            raise _refused(name, key, word, "is a sequence of several tokens and not supported")
        yield word[0], bias


def _count(name: str, key: str, generation: Any) -> int:
    value = getattr(generation, key)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise _refused(name, key, value, "is not a number of tokens")
    return value
