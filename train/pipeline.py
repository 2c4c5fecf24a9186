"""Runs a training run from responses to checkpoint: the work of dflash-train."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from dflash_toolkit import Drafter, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.config import to_mapping
from dflash_toolkit.evaluation.measure.decoders import Decoder
from dflash_toolkit.files import finite, locked, read_json, write_json
from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY, check_fits, read_config
from dflash_toolkit.models.dflash.serving import serving_commands
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.models.spec import context_limit
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.progress import disable_library_bars
from dflash_toolkit.record import RECORD_KEY, export_record, target_signature
from dflash_toolkit.threads import use_threads
from dflash_toolkit.tracking import log_in

from .config import TrainConfig
from .data_options import count_in
from .distributed.parallel import Processes
from .features.served import ServedTarget, layer_ids
from .loop import train
from .objective.loss import use_flex
from .optim.schedule import packing
from .prompts.dataset import described
from .prompts.own import OwnPrompts, own_file, with_own_file, write_own
from .prompts.split import data_digest
from .responses.backends import open_decoder
from .responses.build_corpus import CORPUS
from .responses.collect import discard, gathered
from .responses.conversation import load_chat_tokenizer
from .responses.corpus import Corpus
from .run.definition import WORK, Export, Outcome, Run
from .run.estimate import announced
from .run.metrics_log import WANDB_OPTION
from .run.outlook import point_of_run
from .run.prepare import Prepared, fit_memory, prepare
from .run.provenance import (
    longest_response,
    measured,
    now,
    origin,
    result,
    target_digest,
    thinking_mode,
)
from .run.publish import OTHER_ROLES, make_repository, upload, write_cards
from .run.settings import fingerprint


def run(config: TrainConfig, given: Iterable[str] = ()) -> None:
    """Runs training from configuration to checkpoint; resumes an earlier run.

    Args:
        given: options of the drafter's shape that were given; a start with another shape is refused.
    """
    use_threads(config.threads)
    sharded = config.run.fsdp or config.run.zero > 0
    share = config.run.target_tensor_parallel_size
    with Processes.started(config.device, sharded, share) as processes, contextlib.ExitStack() as held:
        disable_library_bars()
        place = str(resolve_device(processes.device))
        place += f", {processes.world} processes" if processes.world > 1 else ""
        _say(processes, f"dflash-train: target {config.target} on {place}; the drafter goes to {config.output_dir}")
        config = _with_own_prompts(config, given, processes)
        digest = processes.broadcast(processes.rank_zero(data_digest, config))
        prepared = _prepared(config, given, digest, processes)
        if config.push_to_hub:
            processes.rank_zero(make_repository, config.push_to_hub)
        if isinstance(prepared, str):
            _say(processes, prepared)
            if config.push_to_hub:
                processes.rank_zero(_push_finished, Path(config.output_dir), config.push_to_hub)
            return
        if config.run.wandb:
            processes.rank_zero(log_in, WANDB_OPTION, config.run.wandb)  # only the first process logs
        processes.rank_zero(lambda: held.enter_context(locked(prepared.work)))
        if not (prepared.work / CORPUS).exists():
            processes.rank_zero(_announce, prepared.config, processes)
        try:
            answered = gathered(prepared, processes)
        except UserError:
            if processes.main:
                discard(prepared.work)
            raise
        _train(prepared, answered, processes)


def _prepared(config: TrainConfig, given: Iterable[str], digest: str | None, processes: Processes) -> Prepared | str:
    """Prepares a run with steps that fit into the smallest GPU of all processes."""
    prepared, device = processes.barrier(prepare, config, given, digest or ""), resolve_device(processes.device)
    if isinstance(prepared, str) or device.type != "cuda":
        return prepared
    free, total = min(processes.all_gather(torch.cuda.mem_get_info(device)))
    prepared, line = processes.barrier(fit_memory, prepared, free, total, processes.world)
    if line and digest:
        _say(processes, line)
    return prepared


def _with_own_prompts(config: TrainConfig, given: Iterable[str], processes: Processes) -> TrainConfig:
    """Lets the target write the prompts of `self:N`; returns the configuration with their file.

    The first process and its peers write them: prompts are short.
    """
    count, path = count_in(config.data), own_file(Path(config.output_dir))
    if not count:
        return config
    config = replace(config, data=with_own_file(config.data, path))
    if not path.exists():
        _prepared(config, given, "", processes)  # mistakes show before the target writes

    def write() -> None:
        tokenizer = load_chat_tokenizer(config.target, config.responses.thinking, config.rendering)
        plan = OwnPrompts(
            target=config.target, digest=target_digest(config.target), template=template_digest(tokenizer),
            tokenizer=tokenizer, count=count, seed=config.run.seed, similarity=config.prompts.similarity,
            max_length=min(config.prompts.max_length, context_limit(load_config(config.target))),
            options=config.synthesis,
        )  # fmt: skip

        def decoder() -> Decoder:
            return open_decoder(
                config.target, runtime=config.responses.runtime, device=processes.device, dtype=config.dtype,
                batch=config.responses.batch_size, context=plan.max_length, tokens=config.synthesis.max_tokens,
                mesh=processes.peers.mesh, tokenizer=tokenizer,
            )  # fmt: skip

        write_own(plan, path, decoder, processes.peers.main)

    try:
        processes.first_group(write)
    except UserError:
        if processes.main:
            discard(Path(config.output_dir) / WORK)
        raise
    return config


def _announce(config: TrainConfig, processes: Processes) -> None:
    for line in announced(config, processes.world):
        _say(processes, line)
    if not config.data and not config.response_files:
        _say(processes, f"prompts of {described(config.prompts.dataset)}")


def _train(run: Prepared, answered: Corpus, processes: Processes) -> None:
    config, data, shape, record = run.config, run.data, run.shape, run.record
    output = Path(config.output_dir)
    for line in run.start.changed if run.start else ():
        _say(processes, line)
    target, rows = processes.barrier(_loaded, run, answered, processes)
    drafter = run.start.drafter if run.start else Drafter.fresh(shape, config.run.seed)
    drafter.to("cpu" if config.run.offload_target else target.device).train()  # the features first need the memory
    try:
        shape.architecture.fit_head(drafter, target.head_weight.to(drafter.device))
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error
    parameters = sum(p.numel() for p in drafter.parameters())
    kind, attention = shape.architecture.title, "flex" if use_flex(config.run.attention, target.device) else "sdpa"
    several = f", {processes.world} processes" if processes.world > 1 else ""
    if target.mesh:
        several += f", {processes.peers.world} to a target"
    _say(
        processes,
        f"{kind} drafter, {parameters / 1e6:.1f} M parameters, taps {list(shape.target_layer_ids)}, "
        f"mask id {shape.mask_token_id}; {rows.responses} responses, {rows.response_tokens} tokens; "
        f"{attention} attention on {target.device}{several}",
    )

    # at export the server may be gone, or the target's layers
    gone = isinstance(target, ServedTarget) or config.run.offload_target
    signature = target_signature(target, shape.target_layer_ids) if target.mesh or gone else None

    thinking = thinking_mode(run.tokenizer, record["samplers"])
    longest = config.run.final_tokens or longest_response(config, record["samplers"])
    config = replace(config, run=replace(config.run, final_tokens=longest))

    def export(trained: Drafter, made: Export) -> None:
        for left in _place(output, made).glob(".partial-*"):  # by a run that was killed; this one has the lock
            shutil.rmtree(left, ignore_errors=True)
        form = {"num_target_layers": shape.num_target_layers, "trained_block_size": shape.block_size}
        note = (
            measured(made, thinking) | form | origin(record) | {RECORD_KEY: export_record(trained, target, signature)}
        )
        save_drafter(trained, _place(output, made), note)

    training = Run(config, target, drafter, rows, data.held_out, run.work, fingerprint(record), export, record)
    outcome = train(training, processes)
    processes.rank_zero(_finish, run, target, outcome, rows, len(answered), thinking, processes.world)


def _loaded(run: Prepared, answered: Corpus, processes: Processes) -> tuple[Target, Corpus]:
    config = run.config
    target: Target
    if config.run.feature_endpoint:
        taps, url = run.shape.target_layer_ids, config.run.feature_endpoint
        _say(processes, f"hidden states from {url}; its eagle_aux_hidden_state_layer_ids must be {layer_ids(taps)}")
        target = ServedTarget(config.target, url, taps, processes.device, config.dtype)
    else:
        target = Target.load(config.target, processes.device, config.dtype, processes.peers.mesh)
    target.tokenizer = run.tokenizer  # with the template of the options
    check_fits(run.shape, target.config, target.embedding.num_embeddings)
    packed, _ = packing(config, target.device)
    rows = answered.cut(min(packed or sys.maxsize, config.prompts.row_tokens)).with_anchors()
    if not len(rows):
        raise UserError(f"none of {answered.responses} responses has two supervised tokens; give longer responses")
    if dropped := len(answered) - len(rows):
        run.record["data"]["too_short_or_cut_off"] = dropped
        _say(processes, f"dropped {dropped} of {len(answered)} rows: too short for a block, or cut off")
    return target, rows


def _place(output: Path, made: Export) -> Path:
    """Returns the directory of a drafter of the run."""
    return output if made.role == "exported" else output / made.role


def _finish(
    run: Prepared, target: Target, outcome: Outcome, rows: Corpus, answered: int, thinking: str, world: int
) -> None:
    """Writes the record of a finished run and prints how to serve its drafter."""
    config, output, exported = run.config, Path(run.config.output_dir), outcome.exported
    assert exported is not None
    for role in OTHER_ROLES:  # left by an earlier export
        if outcome.other is None or outcome.other.role != role:
            shutil.rmtree(output / role, ignore_errors=True)
    if config.run.speculators:
        drafter, note = load_drafter(str(output)), read_json(output / "config.json").get(PROVENANCE_KEY)
        copies = (target.embedding.weight, target.head_weight)
        save_speculators(drafter, output / "speculators", target.config, *copies, provenance=note)
    found = result(run.data, outcome, rows, answered, thinking) | {"curve": point_of_run(run.work, world)}
    record = run.record | {"finished": now(), "result": finite(found)}
    write_cards(output, record, config.push_to_hub)
    write_json(output / "run.json", record)
    print(f"\n{output}: drafter exported", file=sys.stderr)
    for line in _export_summary(output, outcome, by_clock=config.optim.minutes > 0):
        print(line, file=sys.stderr)
    pair = ["--target", config.target, "--drafter", str(output)]
    print(shlex.join(["dflash-eval", *pair, "--prompts", "gsm8k", "mt_bench", *config.rendering_words]))
    template = ["--chat-template", config.chat_template] if config.chat_template else []
    print(shlex.join(["dflash-serve", *pair, *template]))
    print(serving_commands(config.target, str(output), to_mapping(read_config(output)), record["architecture"]))
    if config.push_to_hub:
        _push(output, config.push_to_hub)


def _push(output: Path, name: str) -> None:
    print(f"uploaded to {upload(output, name)}", file=sys.stderr)


def _push_finished(output: Path, name: str) -> None:
    """Uploads the drafter of an earlier run."""
    write_cards(output, read_json(output / "run.json"), name)
    _push(output, name)


def _export_summary(output: Path, outcome: Outcome, by_clock: bool) -> list[str]:
    """Returns lines on which drafter was exported and how good it is."""
    exported, other, lines = outcome.exported, outcome.other, []
    if exported and outcome.earlier:
        when = f"step {exported.step}" if exported.step else "the drafter that it started from"
        lines.append(
            f"{when} is exported: it is better than the last step, beyond the error of measuring, on prompts that were "
            f"not looked at during training"
        )
    if other and other.evaluation:
        more = "the last step" if other.role == "last" else "the best during training, not clearly better at the end"
        where = f"{_place(output, other)}: step {other.step}, {more}"
        lines.append(f"{where}; {other.evaluation} on {other.evaluation.prompts} prompts")
    if by_clock:  # with steps or epochs they are printed when training begins
        lines += [f"warning: {warning}" for warning in outcome.warnings]
    if exported and exported.evaluation:
        found = exported.evaluation
        lines.append(
            f"acceptance length {found} on {found.prompts} held-out prompts, greedy responses of at most "
            f"{found.max_tokens} tokens"
        )
    return lines


def _say(processes: Processes, message: str) -> None:
    if processes.main:
        print(message, file=sys.stderr)
