"""dflash-train: prompts -> the target's own responses -> a trained drafter -> a checkpoint that every server loads.

`pipeline.py` does the work and imports torch; this file does not.
"""

import sys
from collections.abc import Sequence

from dflash_toolkit.command_line import given_values, run_command
from dflash_toolkit.config import UserError

from .config import TrainConfig, configure

PROG = "dflash-train"
DESCRIPTION = """\
Trains a drafter for a target: the target responds to prompts, the drafter learns from the responses and is exported as
a checkpoint that dflash-serve, vLLM, SGLang and z-lab's client load. You can stop it at any time; run the same command
again to resume.

dflash-train export writes a drafter in FP8 or INT8; it has its own --help."""
EXAMPLE = "dflash-train --target Qwen/Qwen3-8B --output out/qwen3-8b optim.epochs=3"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit codes: 0 done, 2 an error (one line), 130 interrupted (run again to resume)."""
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] == "export":
        from .export_cli import main as export

        return export(given[1:])

    def command() -> None:
        from .distributed.ranks import speaks, without_local_rank

        try:
            words = without_local_rank(list(given))
            values, source = given_values(TrainConfig, words, PROG, DESCRIPTION, EXAMPLE)
            config = configure(values, source)
            if config.estimate:
                from .run.estimate import show

                show(config, words)
                return
            from .pipeline import run

            run(config, given=values.get("drafter") or {})
        except UserError:
            if not speaks():
                raise SystemExit(2) from None
            raise

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
