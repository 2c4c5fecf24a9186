"""Parses the command line of each program, as the program itself does."""

from collections.abc import Callable

from dflash_toolkit.command_line import given_values, parse_cli
from dflash_toolkit.doctor.cli import DoctorConfig
from dflash_toolkit.evaluation import check, compare
from dflash_toolkit.evaluation.cli import EvalConfig
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.serve.external import split
from dflash_toolkit.serve.vllm_flags import translate_vllm_flags
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.data_cli import DataConfig
from dflash_toolkit.train.export_cli import ExportConfig

EVALUATION = {"check": check, "compare": compare}
PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "dflash-train": lambda words: (
        parse_cli(ExportConfig, words[1:], "dflash-train export", "")
        if words[:1] == ["export"]
        else configure(*given_values(TrainConfig, words, "dflash-train", ""))
    ),
    "dflash-data": lambda words: parse_cli(DataConfig, words, "dflash-data", ""),
    "dflash-eval": lambda words: (
        EVALUATION[words[0]].parse(words[1:])
        if words[0] in EVALUATION
        else parse_cli(EvalConfig, words, "dflash-eval", "")
    ),
    "dflash-serve": lambda words: parse_cli(ServeConfig, translate_vllm_flags(split(words)[0]), "dflash-serve", ""),
    "dflash-doctor": lambda words: parse_cli(DoctorConfig, words, "dflash-doctor", ""),
}
