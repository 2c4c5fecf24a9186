"""dflash-train: prompts -> the target's own answers -> a trained drafter -> a checkpoint every server loads."""

import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_toolkit
from dflash_toolkit import Drafter, DrafterConfig, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.checkpoint import PROVENANCE_KEY, check_fits, serving_commands
from dflash_toolkit.config import given_values, run_command, to_mapping
from dflash_toolkit.drafter import default_target_layer_ids, weights_hash
from dflash_toolkit.files import finite, locked, read_json, write_json
from dflash_toolkit.prompts import template_hash
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.speculators import save_speculators
from dflash_toolkit.target import choose_mask_token, context_limit, load_config, load_tokenizer, resolve_device
from dflash_toolkit.threads import use_threads

from .answers import Row, read_rows, regenerate
from .backends import Backend, open_backend
from .config import TrainConfig, configure
from .corpus import Corpus
from .data import PromptData, load_prompts, rows_from_answers
from .held_out import HeldOutPrompt
from .identity import target_digest
from .loop import Export, Outcome, plan_of, train
from .metrics import import_wandb, log_in
from .parallel import Processes, speaks, without_local_rank
from .schedule import packing
from .start import Start, knobs_of, load_start
from .state import first_difference, read_plan
from .step import use_flex
from .zero import import_deepspeed

WORK = "work"  # inside the output directory: answers, metrics, resume point


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line), 130 interrupted (run again to resume)."""
    description = "Distil a DFlash drafter for TARGET from its own answers and export it for vLLM, SGLang and z-lab."

    def command() -> None:
        try:
            words = without_local_rank(sys.argv[1:] if argv is None else list(argv))
            values, source = given_values(TrainConfig, words, "dflash-train", description)
            run(configure(values, source), given=values.get("drafter") or {})
        except UserError:
            if not speaks():
                raise SystemExit(2) from None
            raise

    return run_command(command)


def drafter_config(config: TrainConfig, target: Any, tokenizer: Any) -> DrafterConfig:
    """The drafter's shape: the knobs given, the target's own values for the rest.

    Raises:
        UserError: an impossible combination, or no unused row for the mask token.
    """
    knobs = config.drafter
    layers = int(target.num_hidden_layers)
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    mask = choose_mask_token(tokenizer, int(target.vocab_size)) if knobs.mask_token_id is None else knobs.mask_token_id
    if mask in {tokenizer.eos_token_id, tokenizer.pad_token_id}:
        raise UserError(f"drafter.mask_token_id {mask} is the end-of-sequence or padding token; choose an unused one")
    try:
        return DrafterConfig(
            hidden_size=target.hidden_size,
            num_layers=knobs.layers,
            num_heads=_given(knobs.num_heads, target.num_attention_heads),
            num_kv_heads=_given(knobs.num_kv_heads, target.num_key_value_heads),
            head_dim=_given(knobs.head_dim, head_dim),
            intermediate_size=_given(knobs.intermediate_size, target.intermediate_size),
            vocab_size=target.vocab_size,
            num_target_layers=layers,
            target_layer_ids=knobs.target_layer_ids or default_target_layer_ids(layers, knobs.taps),
            mask_token_id=mask,
            block_size=knobs.block_size,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=float(target.rope_parameters["rope_theta"]),
            max_position_embeddings=target.max_position_embeddings,
        )
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def run(config: TrainConfig, given: Iterable[str] = ()) -> None:
    """One training run from configuration to checkpoint; continues where an earlier one stopped.

    Args:
        given: knobs of the drafter's shape that somebody chose, so that a start of another shape is refused.
    """
    use_threads(config.threads)
    sharded = config.run.fsdp or config.run.zero > 0
    with Processes.started(config.run.device, group=sharded) as processes, contextlib.ExitStack() as held:
        if not processes.main:
            transformers.utils.logging.disable_progress_bar()
        prepared = processes.together(_prepare, config, given)
        if isinstance(prepared, str):
            _say(processes, prepared)
            return
        if config.run.wandb:
            processes.alone(log_in, config.run.wandb)  # the first process alone will log
        processes.alone(lambda: held.enter_context(locked(prepared.work)))
        _train(prepared, processes)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known before a model is loaded."""

    config: TrainConfig
    tokenizer: Any
    shape: DrafterConfig
    data: PromptData
    work: Path
    record: dict[str, Any]
    start: Start | None  # what `init_from` names


def _prepare(config: TrainConfig, given: Iterable[str]) -> _Prepared | str:
    """Everything that can be wrong with a run's inputs; a line to say where nothing is left to do."""
    output = Path(config.output_dir)
    if config.run.wandb:
        import_wandb()  # a mistake is said now, not after hours of answers
    if config.run.zero:
        import_deepspeed()
    device = resolve_device(config.run.device)
    packing(config, device)  # raises for knobs that say nothing there
    if config.run.attention == "flex" and device.type != "cuda":
        raise UserError("run.attention=flex has no backward on a CPU; leave it at auto")
    target_config = load_config(config.target)
    length = min(config.prompts.max_length, context_limit(target_config))  # no answer is longer
    config = replace(config, prompts=replace(config.prompts, max_length=length))
    tokenizer = load_tokenizer(config.target)
    start = None
    if config.init_from:
        start = load_start(config.init_from, target_config, config.drafter, given, output)
        config = replace(config, drafter=knobs_of(start.drafter.config))
    shape = start.drafter.config if start else drafter_config(config, target_config, tokenizer)
    check_fits(shape, target_config)
    data = load_prompts(config, tokenizer)
    work = output / WORK
    _make(work, f"output {output}")
    record = _provenance(config, shape, data, template_hash(tokenizer))
    if start:
        record["start"] = {"drafter": config.init_from, "sha256": weights_hash(start.drafter)}
    if _finished(output, record):
        return f"{output} holds this run, finished; give another --output to train again"
    if config.run.feature_dir and config.run.features in ("disk", "hybrid"):
        _make(Path(config.run.feature_dir), f"run.feature_dir {config.run.feature_dir}")
    return _Prepared(config, tokenizer, shape, data, work, record, start)


def _train(run: _Prepared, processes: Processes) -> None:
    config, data, shape, record = run.config, run.data, run.shape, run.record
    output = Path(config.output_dir)
    for line in run.start.changed if run.start else ():
        _say(processes, line)
    answered = data.rows
    if config.answers.regenerate and not config.answer_files:
        answered = _answered(run, processes)  # before the target is loaded: the engine has its own copy
    target, rows = processes.together(_loaded, run, answered, processes)
    drafter = run.start.drafter if run.start else Drafter.fresh(shape, config.run.seed)
    drafter.to(target.device).train()
    parameters = sum(p.numel() for p in drafter.parameters())
    attention = "flex" if use_flex(config.run.attention, target.device) else "sdpa"
    several = f", {processes.world} processes" if processes.world > 1 else ""
    _say(
        processes,
        f"drafter {parameters / 1e6:.1f} M parameters, taps {list(shape.target_layer_ids)}, mask id "
        f"{shape.mask_token_id}; {len(rows)} answers, {rows.answer_tokens} tokens; "
        f"{attention} attention on {target.device}{several}",
    )

    def export(trained: Drafter, made: Export) -> None:
        form = {"num_target_layers": shape.num_target_layers, "trained_block_size": shape.block_size}
        note = _measured(made) | form | _origin(record) | {RECORD_KEY: export_record(trained, target)}
        save_drafter(trained, _place(output, made), note)

    held_out = _held_out(data.held_out, config)
    outcome = train(
        config, target, drafter, rows, held_out, run.work, _fingerprint(record), export, processes, record=record
    )
    processes.alone(_finish, run, target, outcome, rows, len(answered or rows))


def _loaded(run: _Prepared, answered: list[Row] | None, processes: Processes) -> tuple[Target, Corpus]:
    config = run.config
    target = Target.load(config.target, processes.device, config.run.dtype)
    check_fits(run.shape, target.config, target.embedding.num_embeddings)
    if not answered:
        answered = rows_from_answers(
            run.data, run.tokenizer, target.stop_token_ids, config.prompts.max_length, config.answers.thinking
        )
    packed, _ = packing(config, target.device)
    rows = Corpus.of_rows(answered).cut(min(packed or sys.maxsize, config.prompts.max_length)).with_anchors()
    if not len(rows):
        raise UserError(f"none of {len(answered)} answers has two supervised tokens; there is nothing to train on")
    if len(rows) < len(answered):
        _say(
            processes,
            f"dropped {len(answered) - len(rows)} of {len(answered)} answers: too short for a block, or cut off",
        )
    return target, rows


def _place(output: Path, made: Export) -> Path:
    """Where a drafter of a run is."""
    return output if made.role == "exported" else output / made.role


def _held_out(prompts: Sequence[HeldOutPrompt | list[int]], config: TrainConfig) -> list[HeldOutPrompt]:
    """The held-out prompts, with a source where the reader names none."""
    files = config.held_out or config.data or config.answer_files
    source = Path(files[0]).name if files else config.prompts.dataset
    return [p if isinstance(p, HeldOutPrompt) else HeldOutPrompt(p, source) for p in prompts]


def _finish(run: _Prepared, target: Target, outcome: Outcome, rows: Corpus, answered: int) -> None:
    """The record that says the run is over, and how to serve what came of it."""
    config, output, exported = run.config, Path(run.config.output_dir), outcome.exported
    assert exported is not None
    for role in ("best", "last"):  # of an earlier end
        if outcome.beside is None or outcome.beside.role != role:
            shutil.rmtree(output / role, ignore_errors=True)
    if config.run.speculators:
        drafter, note = load_drafter(str(output)), read_json(output / "config.json").get(PROVENANCE_KEY)
        copies = (target.embedding.weight, target.head_weight)
        save_speculators(drafter, output / "speculators", target.config, *copies, provenance=note)
    result = _result(run, outcome, rows, answered)
    write_json(output / "run.json", run.record | {"finished": _now(), "result": finite(result)})
    print(f"\n{output}: drafter exported", file=sys.stderr)
    for line in _said(output, outcome):
        print(line, file=sys.stderr)
    print(serving_commands(config.target, str(output), run.shape.block_size))


def _said(output: Path, outcome: Outcome) -> list[str]:
    """What was exported and how good it is, for people."""
    exported, beside, lines = outcome.exported, outcome.beside, []
    if exported and outcome.earlier:
        when = f"step {exported.step}" if exported.step else "the drafter that it started from"
        lines.append(f"{when} is exported: it is better than the end, by more than the error of measuring")
    if beside and beside.evaluation:
        more = "the end" if beside.role == "last" else "measured higher, though not beyond the error of measuring"
        where = f"{_place(output, beside)}: step {beside.step}, {more}"
        lines.append(f"{where}; {beside.evaluation} on {beside.evaluation.prompts} prompts")
    lines += [f"warning: {warning}" for warning in outcome.warnings]
    if exported and exported.evaluation:
        lines.append(f"acceptance length {exported.evaluation} on {exported.evaluation.prompts} held-out prompts")
    return lines


def _say(processes: Processes, message: str) -> None:
    if processes.main:
        print(message, file=sys.stderr)


def _answered(run: _Prepared, processes: Processes) -> list[Row]:
    """The target's answers to every prompt; those of an earlier run are kept.

    Each process answers its share into a file of its own. All files count, whoever wrote them.
    """
    config, work, record, questions = run.config, run.work, run.record, run.data.training
    wanted = {k: record[k] for k in ("target", "target_digest", "template_hash", "data_hash")}
    # the prompt knobs and the seed fix which prompt an index means
    wanted |= {"answers": _asked(record["config"]), "prompts": record["config"]["prompts"], "seed": config.run.seed}
    meta = work / "answers.json"
    if meta.exists() and (difference := first_difference(read_json(meta), wanted)):
        raise UserError(f"{work} holds answers of another run ({difference}); choose another --output or remove it")

    def begin() -> Backend:
        knobs, length = config.answers, config.prompts.max_length
        backend = open_backend(
            config.target, runtime=knobs.runtime, device=processes.device, dtype=config.run.dtype,
            batch=knobs.batch_size, context=length,
        )  # fmt: skip
        if processes.main:  # the first to have a share
            write_json(meta, wanted)
        return backend

    def written() -> dict[int, Row]:
        found = (read_rows(path, run.shape.vocab_size) for path in sorted(work.glob("answers*.jsonl")))
        return {row.index: row for rows in found for row in rows}

    done = processes.together(written)  # a torn line is cut off before anyone writes
    share = [q for q in questions if q.index not in done][processes.rank :: processes.world]
    path = work / (f"answers.{processes.rank}.jsonl" if processes.rank else "answers.jsonl")
    processes.together(regenerate, begin, share, path, config.answers, config.prompts.max_length)
    done = written()
    if not all(processes.gather(all(q.index in done for q in questions))):
        raise UserError(f"{work} has not the same answers everywhere: all machines must share the output directory")
    return [done[q.index] for q in questions]


def _make(folder: Path, asked: str) -> None:
    """A folder that can be written to. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{asked}: cannot be created ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{asked}: {folder} cannot be written to; give another")


# ---- provenance ------------------------------------------------------------------------------------------------

# knobs that may change between a run and its resumption: they change no weight, or, where the number of processes times
# `accumulate` changes, only how many micro batches a step takes
FREE_KNOBS = ("device", "log_every", "save_every", "save_minutes", "evaluate_every", "evaluate_runtime", "features",
              "feature_dir", "feature_gpu_share", "feature_cache_gb", "wandb", "speculators", "zero", "fsdp",
              "fsdp_reshard_after_forward", "accumulate", "recompute")  # fmt: skip
ENDS = ("epochs", "steps", "minutes")  # when a run ends: a longer one goes on from a shorter one


def _provenance(config: TrainConfig, shape: DrafterConfig, data: PromptData, template: str) -> dict[str, Any]:
    return {
        "target": config.target,
        "target_digest": target_digest(config.target),
        "config": to_mapping(config),
        "drafter": to_mapping(shape),
        "data_hash": data.digest,
        "samplers": data.samplers or [to_mapping(config.answers)],
        "template_hash": template,
        "argv": sys.argv,
        "versions": {
            "dflash_toolkit": dflash_toolkit.__version__,
            "git": _git_revision(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "started": _now(),
    }


def _asked(config: dict[str, Any]) -> dict[str, Any]:
    """How prompts are answered, but for how many at a time: with fewer a run that ran out of memory goes on."""
    return {k: v for k, v in config["answers"].items() if k != "batch_size"}


def _fingerprint(record: dict[str, Any]) -> dict[str, Any]:
    """What must not change for a resumed run to be the same run."""
    # what the files hold is in the hashes; threads change how fast it is
    places = ("output", "data", "held_out", "answer_files", "init_from", "threads")
    config = {k: v for k, v in record["config"].items() if k not in places}
    for part in ("run", "optim"):
        config[part] = {k: v for k, v in config[part].items() if k not in (*FREE_KNOBS, *ENDS)}
    config["answers"] = _asked(config)
    start = {"start": record["start"]["sha256"]} if "start" in record else {}
    same = ("drafter", "target_digest", "data_hash", "template_hash")
    return {"config": config} | {k: record[k] for k in same} | start


def _origin(record: dict[str, Any]) -> dict[str, Any]:
    """The part of the record that travels in the checkpoint's config.json."""
    start = {"start": record["start"]} if "start" in record else {}
    return start | {
        "version": record["versions"]["dflash_toolkit"],
        "git": record["versions"]["git"],
        "target": record["target"],
        "target_digest": record["target_digest"],
        "template_hash": record["template_hash"],
        "data_hash": record["data_hash"],
        "answers": record["samplers"],
    }


def _finished(output: Path, record: dict[str, Any]) -> bool:
    try:
        old = json.loads((output / "run.json").read_text())
        # round trip: JSON has no tuples
        same = first_difference(_fingerprint(old), json.loads(json.dumps(_fingerprint(record)))) is None
        plan = plan_of(old["config"]["optim"])
        ended = plan == plan_of(record["config"]["optim"]) and read_plan(output / WORK / "state.pt") in (None, plan)
        finished = same and ended and bool(old["finished"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, or not one of ours
        return False
    exports = [output, output / "speculators"] if record["config"]["run"]["speculators"] else [output]
    return finished and all((path / "model.safetensors").exists() for path in exports)


def _measured(made: Export) -> dict[str, Any]:
    """What is recorded of a drafter that a run leaves behind."""
    found: dict[str, Any] = {"step": made.step, "acceptance_length": None}
    if made.evaluation:
        values = made.evaluation.values()
        found |= {name: _rounded(value) for name, value in values.items() if name.startswith("acceptance_length")}
        found["measured_on"] = {"prompts": made.evaluation.prompts, "tokens": sum(made.evaluation.tokens)}
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 4) if math.isfinite(value) else None


def _result(run: _Prepared, outcome: Outcome, rows: Corpus, answered: int) -> dict[str, Any]:
    assert outcome.exported is not None
    beside = {outcome.beside.role: _measured(outcome.beside)} if outcome.beside else {}
    exported = _measured(outcome.exported)
    return {
        "steps": outcome.steps,
        "exported_step": exported.pop("step"),
        **exported,
        **beside,
        "warnings": outcome.warnings,
        "prompts": len(run.data.training) or len({tuple(row.tokens[: row.prompt_tokens]) for row in run.data.rows}),
        "held_out_prompts": len(run.data.held_out),
        "answers": len(rows),
        "answer_tokens": rows.answer_tokens,
        "tokens": int(rows.lengths.sum()),
        "left_out": {"too short for a block, or cut off": answered - len(rows)},
        "training_seconds": round(outcome.elapsed_s, 1),
    }


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    raise SystemExit(main())
