"""Parses command lines with vLLM's or SGLang's own parser, without a GPU.

    PYTHONPATH=SITE python scripts/peers/parse.py vllm|sglang < COMMAND_LINES

SITE holds the package (`make test-peers` fills it). COMMAND_LINES is a JSON list of command lines, each a list of
the words after `vllm serve` or `python -m sglang.launch_server`. Prints a JSON list with the options of each that
JSON can express.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


def vllm_parser() -> Callable[[list[str]], Any]:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()  # else it looks for a device to take defaults from
    from vllm.config.speculative import SpeculativeConfig
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    known = ModelRegistry.get_supported_archs()

    def parse(words: list[str]) -> Any:
        found = parser.parse_args(words)
        validate_parsed_serve_args(found)
        unknown = (found.speculative_config or {}).keys() - SpeculativeConfig.__dataclass_fields__.keys()
        assert not unknown, unknown
        return {**vars(found), "drafters": [name for name in known if name.startswith("DFlash")]}

    return parse


def sglang_parser() -> Callable[[list[str]], Any]:
    import ast
    import importlib.util
    from pathlib import Path

    from sglang.srt.server_args import prepare_server_args

    package = importlib.util.find_spec("sglang")
    assert package is not None and package.origin is not None
    # not imported: kernels and more belong to it
    tree = ast.parse((Path(package.origin).parent / "srt/models/dflash.py").read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]

    def parse(words: list[str]) -> Any:
        found = prepare_server_args(words)
        names = [name for name in found.__struct_fields__ if not name.startswith("_")]
        return {**{name: getattr(found, name) for name in names}, "drafters": classes}

    return parse


def main(engine: str) -> None:
    parse = {"vllm": vllm_parser, "sglang": sglang_parser}[engine]()
    out, sys.stdout = sys.stdout, sys.stderr  # for their logs
    results = [parse(words) for words in json.load(sys.stdin)]
    json.dump(results, out, default=str)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("engine", choices=("vllm", "sglang"))
    main(arguments.parse_args().engine)
