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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import dflash_toolkit
from dflash_toolkit import Drafter, DrafterConfig, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.config import given_values, run_command, to_mapping
from dflash_toolkit.data.prompts import encode_chat, template_hash
from dflash_toolkit.files import finite, locked, read_json, write_json
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY, check_fits, serving_commands
from dflash_toolkit.models.dflash.network import weights_hash
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.models.target import (
    choose_mask_token,
    context_limit,
    declared_stop_ids,
    load_config,
    load_generation_config,
    load_tokenizer,
    resolve_device,
)
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.threads import use_threads

from .config import TrainConfig, configure
from .distributed.parallel import Processes, speaks, without_local_rank
from .distributed.zero import import_deepspeed
from .loop import Export, Outcome, plan_of, train
from .objective.step import use_flex
from .optim.schedule import packing
from .responses.backends import open_backend
from .responses.corpus import Corpus
from .responses.file import Match, resume
from .responses.generate import SAID, Asking, Tally, answer, limit_of, reasons
from .run.data import (
    CORPUS,
    PROMPTS,
    PromptData,
    Reading,
    choose_prompts,
    data_digest,
    write_answered,
    write_given,
    write_recorded,
)
from .run.identity import target_digest
from .run.metrics import import_wandb, log_in
from .run.publish import BESIDE, make_repository, upload, write_cards
from .run.start import Start, load_start, options_of
from .run.state import first_difference, read_plan

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
    """The drafter's shape: the options given, the target's own values for the rest.

    Raises:
        UserError: an impossible combination, or no unused row for the mask token.
    """
    given = config.drafter.mask_token_id
    mask = choose_mask_token(tokenizer, int(target.vocab_size)) if given is None else given
    if mask in {tokenizer.eos_token_id, tokenizer.pad_token_id}:
        raise UserError(f"drafter.mask_token_id {mask} is the end-of-sequence or padding token; choose an unused one")
    try:
        return drafter_shape(target, **(asdict(config.drafter) | {"mask_token_id": mask}))
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error


def run(config: TrainConfig, given: Iterable[str] = ()) -> None:
    """One training run from configuration to checkpoint; continues where an earlier one stopped.

    Args:
        given: options of the drafter's shape that somebody chose, so that a start of another shape is refused.
    """
    use_threads(config.threads)
    sharded = config.run.fsdp or config.run.zero > 0
    with Processes.started(config.device, group=sharded) as processes, contextlib.ExitStack() as held:
        if not processes.main:
            transformers.utils.logging.disable_progress_bar()
        digest = processes.agree(processes.alone(data_digest, config))
        prepared = processes.together(_prepare, config, given, digest)
        if config.push_to_hub:
            processes.alone(make_repository, config.push_to_hub)
        if isinstance(prepared, str):
            _say(processes, prepared)
            if config.push_to_hub:
                processes.alone(_push_finished, Path(config.output_dir), config.push_to_hub)
            return
        if config.run.wandb:
            processes.alone(log_in, config.run.wandb)  # the first process alone will log
        processes.alone(lambda: held.enter_context(locked(prepared.work)))
        try:
            answered = _gathered(prepared, processes)
        except UserError:
            if processes.main:
                _forget(prepared.work)
            raise
        _train(prepared, answered, processes)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known before a model is loaded."""

    config: TrainConfig
    tokenizer: Any
    shape: DrafterConfig
    data: PromptData  # complete once the rows are there
    reading: Reading
    work: Path
    record: dict[str, Any]
    start: Start | None  # what `init_from` names


def _prepare(config: TrainConfig, given: Iterable[str], digest: str) -> _Prepared | str:
    """Everything that can be wrong with a run's inputs; a line to say where nothing is left to do."""
    output = Path(config.output_dir)
    if config.run.wandb:
        import_wandb()  # a mistake is said now, not after hours of answers
    if config.run.zero:
        import_deepspeed()
    device = resolve_device(config.device)
    packing(config, device)  # raises for options that say nothing there
    if config.run.attention == "flex" and device.type != "cuda":
        raise UserError("run.attention=flex has no backward on a CPU; leave it at auto")
    target_config = load_config(config.target)
    context = context_limit(target_config)
    limit = limit_of(config.prompts.max_length, context)
    length = min(config.prompts.max_length, context)  # no answer is longer
    config = replace(config, prompts=replace(config.prompts, max_length=length))
    tokenizer = load_tokenizer(config.target)
    encode_chat(tokenizer, [{"role": "user", "content": "?"}], config.answers.thinking)  # is there a template at all?
    start = None
    if config.init_from:
        start = load_start(config.init_from, target_config, config.drafter, given, output)
        config = replace(config, drafter=options_of(start.drafter.config))
    shape = start.drafter.config if start else drafter_config(config, target_config, tokenizer)
    check_fits(shape, target_config)
    data = PromptData(digest)
    work = output / WORK
    _make(work, f"output {output}")
    record = _provenance(config, shape, data, template_hash(tokenizer))
    if start:
        record["start"] = {"drafter": config.init_from, "sha256": weights_hash(start.drafter)}
    if _finished(output, record):
        return f"{output} holds this run, finished; give another --output to train again"
    if config.run.feature_dir and config.run.features in ("disk", "hybrid"):
        _make(Path(config.run.feature_dir), f"run.feature_dir {config.run.feature_dir}")
    return _Prepared(config, tokenizer, shape, data, Reading(config, tokenizer, limit), work, record, start)


def _train(run: _Prepared, answered: Corpus, processes: Processes) -> None:
    config, data, shape, record = run.config, run.data, run.shape, run.record
    output = Path(config.output_dir)
    for line in run.start.changed if run.start else ():
        _say(processes, line)
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

    outcome = train(
        config, target, drafter, rows, data.held_out, run.work, _fingerprint(record), export, processes, record=record
    )
    processes.alone(_finish, run, target, outcome, rows, len(answered))


def _loaded(run: _Prepared, answered: Corpus, processes: Processes) -> tuple[Target, Corpus]:
    config = run.config
    target = Target.load(config.target, processes.device, config.dtype)
    check_fits(run.shape, target.config, target.embedding.num_embeddings)
    packed, _ = packing(config, target.device)
    rows = answered.cut(min(packed or sys.maxsize, config.prompts.max_length)).with_anchors()
    if not len(rows):
        raise UserError(f"none of {len(answered)} answers has two supervised tokens; there is nothing to train on")
    if dropped := len(answered) - len(rows):
        run.record["data"]["too_short_or_cut_off"] = dropped
        _say(processes, f"dropped {dropped} of {len(answered)} answers: too short for a block, or cut off")
    return target, rows


def _place(output: Path, made: Export) -> Path:
    """Where a drafter of a run is."""
    return output if made.role == "exported" else output / made.role


def _finish(run: _Prepared, target: Target, outcome: Outcome, rows: Corpus, answered: int) -> None:
    """The record that says the run is over, and how to serve what came of it."""
    config, output, exported = run.config, Path(run.config.output_dir), outcome.exported
    assert exported is not None
    for role in BESIDE:  # of an earlier end
        if outcome.beside is None or outcome.beside.role != role:
            shutil.rmtree(output / role, ignore_errors=True)
    if config.run.speculators:
        drafter, note = load_drafter(str(output)), read_json(output / "config.json").get(PROVENANCE_KEY)
        copies = (target.embedding.weight, target.head_weight)
        save_speculators(drafter, output / "speculators", target.config, *copies, provenance=note)
    result = _result(run, outcome, rows, answered)
    record = run.record | {"finished": _now(), "result": finite(result)}
    write_cards(output, record, config.push_to_hub)
    write_json(output / "run.json", record)
    print(f"\n{output}: drafter exported", file=sys.stderr)
    for line in _said(output, outcome):
        print(line, file=sys.stderr)
    print(serving_commands(config.target, str(output), run.shape.block_size))
    if config.push_to_hub:
        _push(output, config.push_to_hub)


def _push(output: Path, name: str) -> None:
    print(f"uploaded to {upload(output, name)}", file=sys.stderr)


def _push_finished(output: Path, name: str) -> None:
    """Upload what an earlier run made."""
    write_cards(output, read_json(output / "run.json"), name)
    _push(output, name)


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


# ---- prompts and answers -----------------------------------------------------------------------------------------


def _gathered(run: _Prepared, processes: Processes) -> Corpus:
    """The rows of a run, mapped by every process: made once, by the first, and there for every resume."""
    folder = run.work / CORPUS
    wanted = _wanted(run)
    if not processes.agree(processes.main and _is_of(folder, wanted)):
        if run.config.answer_files:
            match = _match(run)
            processes.alone(write_given, run.reading, run.data.digest, match, folder, wanted)
        else:
            _answered(run, wanted, processes)
    if not all(processes.gather((folder / "meta.json").exists())):
        raise _not_shared(run.work)
    corpus = processes.together(Corpus.open, folder)
    if len(set(processes.gather(json.dumps(corpus.meta["of"], sort_keys=True)))) > 1:
        raise _not_shared(run.work)
    data = PromptData.of_json(run.data.digest, corpus.meta)
    run.data.held_out, run.data.counts, run.data.samplers = data.held_out, data.counts, data.samplers
    run.record["samplers"] = data.samplers or run.record["samplers"]
    run.record["data"] = data.counts
    return corpus


def _wanted(run: _Prepared) -> dict[str, Any]:
    """What the rows of a run depend on, as JSON has it."""
    record = run.record
    wanted = {key: record[key] for key in ("target", "target_digest", "template_hash", "data_hash")}
    wanted |= {"answers": _asked(record["config"]), "prompts": record["config"]["prompts"], "seed": run.config.run.seed}
    return json.loads(json.dumps(wanted))


def _is_of(folder: Path, wanted: dict[str, Any]) -> bool:
    try:
        return read_json(folder / "meta.json")["of"] == wanted
    except (UserError, LookupError, TypeError):
        return False


def _match(run: _Prepared) -> Match:
    config, record = run.config, run.record
    return Match(
        config.target, record["target_digest"], run.shape.vocab_size, record["template_hash"], config.trust_answers
    )


def _not_shared(work: Path) -> UserError:
    return UserError(f"{work} has not the same answers everywhere: all machines must share the output directory")


def _answered(run: _Prepared, wanted: dict[str, Any], processes: Processes) -> None:
    """Choose the prompts, have them answered, and make the corpus; what an earlier run has done of it is kept.

    Each process answers its share into a file of its own. All files count, whoever wrote them.
    """
    config, work, options = run.config, run.work, run.config.answers
    meta, prompts = work / "answers.json", work / PROMPTS
    state = processes.agree(processes.alone(_chosen, run, wanted))
    assert state is not None
    if len(set(processes.gather(meta.read_bytes() if meta.exists() else b""))) > 1:
        raise _not_shared(work)
    data = PromptData.of_json(run.data.digest, state)
    if not options.regenerate:
        stops = declared_stop_ids(load_config(config.target), load_generation_config(config.target))
        processes.alone(write_recorded, run.reading, data, prompts, stops, work / CORPUS, wanted)
        return
    if "answered" not in state:
        done = processes.agree(processes.alone(_done, work)) or set()
        asking = Asking(
            tokenizer=run.tokenizer,
            params=options.params(),
            length=config.prompts.max_length,
            thinking=options.thinking,
        )
        tallies = processes.gather(processes.together(_share, run, asking, done, data.counts["prompts"], processes))
        tally = Tally()
        for each in tallies:
            tally.add(each)
        processes.alone(_end_of_answers, run, state, tally)
    files = [path for path in _answer_files(work) if path.stat().st_size]
    processes.alone(write_answered, data, files, _match(run), work / CORPUS, wanted)


def _answer_files(work: Path) -> list[Path]:
    return sorted(path for path in work.glob("answers*.jsonl") if path.exists())  # no link to nowhere


def _chosen(run: _Prepared, wanted: dict[str, Any]) -> dict[str, Any]:
    """What `answers.json` says, once the prompts are chosen. Raises UserError: the directory has another run's."""
    work, meta = run.work, run.work / "answers.json"
    if meta.exists():
        state = read_json(meta)
        answered = any(path.is_dir() or path.stat().st_size for path in _answer_files(work))
        if not isinstance(state, dict) or "of" not in state:
            raise UserError(f"{meta}: of an earlier version; choose another --output or remove {work}")
        difference = first_difference(state["of"], wanted)
        if not difference:
            return state
        if answered:
            raise UserError(f"{work} holds answers of another run ({difference}); choose another --output or remove it")
    state = {"of": wanted} | choose_prompts(run.reading, work).to_json()
    write_json(meta, state)
    return state


def _done(work: Path) -> set[tuple[int, int]]:
    """Every answer that is there; a torn line is cut off before anyone writes."""
    return set().union(*(resume(path)[0] for path in _answer_files(work)))


def _share(run: _Prepared, asking: Asking, done: set[tuple[int, int]], total: int, processes: Processes) -> Tally:
    """This process's part of the answers that are missing."""
    config, work, record = run.config, run.work, run.record
    share = (processes.rank, processes.world)
    if next(asking.dialogues(work / PROMPTS, done, *share), None) is None:
        return Tally()
    backend = open_backend(
        config.target, runtime=config.answers.runtime, device=processes.device, dtype=config.dtype,
        batch=config.answers.batch_size, context=config.prompts.max_length,
    )  # fmt: skip
    own = {"vocab_size": run.shape.vocab_size, "sampler": to_mapping(config.answers)}
    common = {key: own.get(key, record.get(key)) for key in SAID}
    output = work / (f"answers.{processes.rank}.jsonl" if processes.rank else "answers.jsonl")
    try:
        return answer(backend, asking, work / PROMPTS, output, common, done, total, *share)
    finally:
        backend.close()


def _end_of_answers(run: _Prepared, state: dict[str, Any], tally: Tally) -> None:
    """Write down that all is answered, and what was left out."""
    if not any(path.stat().st_size for path in _answer_files(run.work)):
        why = reasons(tally.dropped, run.reading.limit)
        raise UserError(f"none of {state['counts']['prompts']} prompts was answered: {why}")
    if tally.dropped or tally.left_out:
        print(tally.in_words(run.reading.limit), file=sys.stderr)
    state["counts"] |= tally.dropped
    write_json(run.work / "answers.json", state | {"answered": True})


def _forget(work: Path) -> None:
    """Leave nothing behind if nothing came of the prompts that were chosen."""
    files = _answer_files(work)
    if (work / CORPUS).exists() or any(path.is_dir() or path.stat().st_size for path in files):
        return
    for path in (work / PROMPTS, work / "answers.json", *files):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in (work, work.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _make(folder: Path, asked: str) -> None:
    """A folder that can be written to. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{asked}: cannot be created ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{asked}: {folder} cannot be written to; give another")


# ---- provenance ------------------------------------------------------------------------------------------------

# options that may change between a run and its resumption: they change no weight, or, where the number of processes
# times `accumulate` changes, only how many micro batches a step takes
FREE_OPTIONS = ("log_every", "save_every", "save_minutes", "evaluate_every", "evaluate_runtime", "features",
              "feature_dir", "feature_gpu_share", "feature_cache_gb", "wandb", "speculators", "zero", "fsdp",
              "fsdp_reshard_after_forward", "accumulate", "recompute", "head_rows")  # fmt: skip
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
    # what the files hold is in the hashes; devices and threads change how fast it is
    places = (
        "output",
        "data",
        "held_out",
        "answer_files",
        "trust_answers",
        "init_from",
        "push_to_hub",
        "device",
        "threads",
    )
    config = {k: v for k, v in record["config"].items() if k not in places}
    for part in ("run", "optim", "loss"):
        config[part] = {k: v for k, v in config[part].items() if k not in (*FREE_OPTIONS, *ENDS)}
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
        "prompts": run.data.counts["prompts"],
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
