"""Translates flags of `vllm serve`, so that its command lines work or fail with the way out."""

import json
import sys
from collections.abc import Callable, Sequence

from dflash_toolkit.config import UserError

Words = Callable[[str, str], list[str]]  # translates a flag and its value


def _unneeded(why: str) -> Words:
    def words(flag: str, _: str) -> list[str]:
        print(f"notice: {flag} is not needed: {why}", file=sys.stderr)
        return []

    return words


def _error(way_out: str) -> Words:
    def words(flag: str, value: str) -> list[str]:
        raise UserError(f"{flag} {value}".strip() + f" is not supported: {way_out}")

    return words


def _renamed(*words: str) -> Words:
    return lambda _, value: [*words, *([value] if value else [])]


def _generation_config(flag: str, value: str) -> list[str]:
    if value not in ("auto", "vllm"):
        return _error("put it into the target's directory as generation_config.json")(flag, value)
    return ["--sampling-defaults", "model" if value == "auto" else "openai"]


def _log_level(flag: str, value: str) -> list[str]:
    if value in ("warning", "error", "critical"):
        return ["--no-access-log"]
    return _unneeded("warnings and a line a request are logged")(flag, value)


def _max_model_len(flag: str, value: str) -> list[str]:
    if value in ("auto", "-1"):
        return _unneeded("the default fits into the GPU's memory")(f"{flag} {value}", "")
    return [flag, value]


def _revision(flag: str, value: str) -> list[str]:
    if value == "main":
        return []
    way_out = f"run `hf download TARGET --revision {value} --local-dir DIR`, then give --target DIR"
    return _error(way_out)(flag, value)


def _speculative(flag: str, value: str) -> list[str]:
    try:
        given = json.loads(value)
        drafter, method = given.pop("model"), given.pop("method", "dflash")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f'{flag} {value}: must be {{"model": DRAFTER, "num_speculative_tokens": N}}') from error
    if given.pop("enable_adaptive_verification", False):
        _unneeded("draft lengths are chosen at run time unless num_speculative_tokens is given")(
            "enable_adaptive_verification", ""
        )
    flags = {"num_speculative_tokens": "--num-speculative-tokens", "draft_sample_method": "--draft-sample-method"}
    values = {own: given.pop(key, None) for key, own in flags.items()}
    words = [word for own, each in values.items() if each is not None for word in (own, str(each))]
    if method not in ("dflash", "dflash2") or given:
        wrong = ", ".join(given) or f"method {method}"
        raise UserError(f"{flag}: {wrong} is not supported; give --drafter and --num-speculative-tokens instead")
    return ["--drafter", str(drafter), *words]


# flag -> whether a value follows, and the translation
FLAGS: dict[str, tuple[bool, Words]] = {
    "--model": (True, _renamed("--target")),
    "--chat-template-content-format": (True, _unneeded("a template always gets the text of all parts")),
    "--enable-auto-tool-choice": (
        False,
        _unneeded("tools are enabled if --tool-call-parser knows the form"),
    ),
    "--enable-prefix-caching": (False, _unneeded("prefixes are cached, see --prefix-cache")),
    "--no-enable-prefix-caching": (False, _renamed("--no-prefix-cache")),
    "--enable-chunked-prefill": (False, _unneeded("prompts are computed in chunks, see --max-num-batched-tokens")),
    "--enable-prompt-tokens-details": (False, _unneeded("`usage` always has the cached tokens")),
    "--disable-log-requests": (False, _unneeded("the content of requests is never logged")),
    "--no-enable-log-requests": (False, _unneeded("the content of requests is never logged")),
    "--enable-log-requests": (
        False,
        _error("the content of requests is never logged; --access-log writes one line for each"),
    ),
    "--max-model-len": (True, _max_model_len),
    "--max-log-len": (True, _unneeded("the content of requests is never logged")),
    "--disable-log-stats": (False, _unneeded("statistics are at /metrics, not in the log")),
    "--uvicorn-log-level": (True, _log_level),
    "--disable-uvicorn-access-log": (False, _renamed("--no-access-log")),
    "--generation-config": (True, _generation_config),
    "--trust-remote-code": (False, _unneeded("code in checkpoints never runs")),
    "--enforce-eager": (False, _error("a GPU always runs CUDA graphs; remove it, or give --device cpu")),
    "--tokenizer": (True, _error("the target's own tokenizer is used; put other files into the target's directory")),
    "--tokenizer-mode": (True, _unneeded("the target's own tokenizer is used")),
    "--revision": (True, _revision),
    "--speculative-config": (True, _speculative),
    "--shutdown-timeout": (True, _renamed("--drain-timeout")),
}


def translate_vllm_flags(argv: Sequence[str]) -> list[str]:
    """Translates vLLM's flags in a command line; flags of `dflash-serve` stay as they are.

    Raises:
        UserError: a flag has no equivalent; the message says what to use.
    """
    left = list(argv)
    if left and left[0][:1] not in "-" and "=" not in left[0]:  # vLLM's target has no flag
        left.insert(0, "--target")
    found: list[str] = []
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag == "--allowed-origins" and (text := value or (left[0] if left else "")).startswith("["):
            if not equals:
                left.pop(0)
            found += [flag, *_origins(text)]
        elif flag not in FLAGS:
            found.append(word)
        else:
            takes, words = FLAGS[flag]
            if takes and not equals:
                if not left or left[0].startswith("--"):
                    raise UserError(f"{flag} has no value; give one")
                value = left.pop(0)
            found += words(flag, value)
    return found


def _origins(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"--allowed-origins {text}: is not a JSON list ({error}); give URLs separated by spaces"
        ) from error
    return [str(origin) for origin in found]
