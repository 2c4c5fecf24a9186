"""Flags of `vllm serve` that have another name here, or are not needed: what people paste works, or is told its way."""

import json
import sys
from collections.abc import Callable, Sequence

from dflash_toolkit.config import UserError

Words = Callable[[str, str], list[str]]  # of a flag and its value, in our words


def _needless(why: str) -> Words:
    def words(flag: str, _: str) -> list[str]:
        print(f"notice: {flag} is not needed: {why}", file=sys.stderr)
        return []

    return words


def _refused(way: str) -> Words:
    def words(flag: str, value: str) -> list[str]:
        raise UserError(f"{flag} {value}".strip() + f": {way}")

    return words


def _meant(*words: str) -> Words:
    return lambda _, value: [*words, *([value] if value else [])]


def _generation_config(flag: str, value: str) -> list[str]:
    if value not in ("auto", "vllm"):
        return _refused("put it into the target's directory as generation_config.json")(flag, value)
    return ["--sampling-defaults", "model" if value == "auto" else "openai"]


def _log_level(flag: str, value: str) -> list[str]:
    if value in ("warning", "error", "critical"):
        return ["--no-access-log"]
    return _needless("warnings and a line a request are logged")(flag, value)


def _revision(flag: str, value: str) -> list[str]:
    if value == "main":
        return []
    return _refused("download it (hf download TARGET --revision ... --local-dir DIR) and give --target DIR")(
        flag, value
    )


def _speculative(flag: str, value: str) -> list[str]:
    try:
        given = json.loads(value)
        drafter, method = given.pop("model"), given.pop("method", "dflash")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f'{flag} {value}: must be {{"model": DRAFTER, "num_speculative_tokens": N}}') from error
    ours = {"num_speculative_tokens": "--num-speculative-tokens", "draft_sample_method": "--draft-sample-method"}
    values = {own: given.pop(key, None) for key, own in ours.items()}
    words = [word for own, asked in values.items() if asked is not None for word in (own, str(asked))]
    if method not in ("dflash", "dflash2") or given:
        wrong = ", ".join(given) or f"method {method}"
        raise UserError(f"{flag}: {wrong} is not supported here; give --drafter and --num-speculative-tokens")
    return ["--drafter", str(drafter), *words]


# flag -> whether a value follows, and what becomes of it
FLAGS: dict[str, tuple[bool, Words]] = {
    "--model": (True, _meant("--target")),
    "--chat-template-content-format": (True, _needless("a template gets the text of all parts")),
    "--enable-auto-tool-choice": (False, _needless("tools may be called where --tool-call-parser knows their form")),
    "--enable-prefix-caching": (False, _needless("prefixes are cached, see --prefix-cache")),
    "--no-enable-prefix-caching": (False, _meant("--no-prefix-cache")),
    "--enable-chunked-prefill": (False, _needless("prompts are computed in chunks, see --max-num-batched-tokens")),
    "--enable-prompt-tokens-details": (False, _needless("usage has cached tokens")),
    "--disable-log-requests": (False, _needless("what requests say is never logged")),
    "--no-enable-log-requests": (False, _needless("what requests say is never logged")),
    "--enable-log-requests": (
        False,
        _refused("what requests say is never logged; --access-log writes a line for each"),
    ),
    "--max-log-len": (True, _needless("what requests say is never logged")),
    "--disable-log-stats": (False, _needless("statistics are at /metrics, not in the log")),
    "--uvicorn-log-level": (True, _log_level),
    "--disable-uvicorn-access-log": (False, _meant("--no-access-log")),
    "--generation-config": (True, _generation_config),
    "--trust-remote-code": (False, _needless("no checkpoint's code is run")),
    "--enforce-eager": (False, _refused("steps are CUDA graphs on a GPU; leave it out, or give --device cpu")),
    "--tokenizer": (True, _refused("the target's own is used; put its files into the target's directory")),
    "--tokenizer-mode": (True, _needless("the target's own tokenizer is used")),
    "--revision": (True, _revision),
    "--speculative-config": (True, _speculative),
    "--shutdown-timeout": (True, _meant("--drain-timeout")),
}


def translate_vllm_flags(argv: Sequence[str]) -> list[str]:
    """A command line of `vllm serve` as one of `dflash-serve`, whose own words stay.

    Raises:
        UserError: a flag that cannot do what it says, and what to use.
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
                    raise UserError(f"{flag}: a value is missing")
                value = left.pop(0)
            found += words(flag, value)
    return found


def _origins(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"--allowed-origins {text}: is no JSON list ({error})") from error
    return [str(origin) for origin in found]
