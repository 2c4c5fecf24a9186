"""The rows of a run: chooses prompts, lets all processes respond, and maps the corpus; a resumed run reuses it."""

import contextlib
import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dflash_toolkit import UserError
from dflash_toolkit.config import to_mapping
from dflash_toolkit.files import read_json, write_json
from dflash_toolkit.models.target_files import load_config, load_generation_config
from dflash_toolkit.stop_tokens import stop_tokens

from ..distributed.parallel import Processes
from ..prompts.split import PROMPTS, PromptData, choose_prompts
from ..run.cost import before_responses
from ..run.estimate import announced
from ..run.prepare import Prepared
from ..run.settings import asked, defaults, first_difference
from .backends import open_decoder
from .build_corpus import CORPUS, write_answered, write_given, write_recorded
from .corpus import Corpus
from .file import Match, of_another_run, resume
from .generate import SAID, ResponsePlan, Tally, reasons, respond
from .join import write_joined

UNJOINED = "corpus.unjoined"  # the corpus before prompts.join_to, inside the work directory


def gathered(run: Prepared, processes: Processes) -> Corpus:
    """Returns the rows of a run, mapped by every process; the first process builds them once."""
    folder = run.work / CORPUS
    wanted, length = _wanted(run), run.config.prompts.join_to
    if not processes.broadcast(processes.main and _is_of(folder, wanted)):
        first = run.work / UNJOINED if length else folder
        if run.config.response_files:
            match = _match(run)
            processes.rank_zero(write_given, run.reading, run.data.digest, match, first, wanted)
        else:
            _answered(run, wanted, first, processes)
        if length:
            processes.rank_zero(write_joined, first, folder, length, run.config.run.seed, run.tokenizer.bos_token_id)
    if not all(processes.all_gather((folder / "meta.json").exists())):
        raise _not_shared(run.work)
    corpus = processes.barrier(Corpus.open, folder)
    if len(set(processes.all_gather(json.dumps(corpus.meta["of"], sort_keys=True)))) > 1:
        raise _not_shared(run.work)
    data = PromptData.of_json(run.data.digest, corpus.meta)
    run.data.held_out, run.data.counts, run.data.samplers = data.held_out, data.counts, data.samplers
    run.record["samplers"] = data.samplers or run.record["samplers"]
    run.record["data"] = data.counts
    if not run.config.response_files and (state := run.work / "answers.json").exists():
        run.record["response_speed"] = read_json(state).get("speed")
    return corpus


def _wanted(run: Prepared) -> dict[str, Any]:
    """Returns the settings on which a run's rows depend, as JSON values."""
    record = run.record
    wanted = {key: record[key] for key in ("target", "target_digest", "template_hash", "data_hash")}
    config = record["config"]
    wanted |= {"responses": asked(config), "prompts": config["prompts"], "seed": run.config.run.seed}
    return json.loads(json.dumps(wanted))


def _is_of(folder: Path, wanted: dict[str, Any]) -> bool:
    try:
        return first_difference(read_json(folder / "meta.json")["of"], wanted, defaults()["config"]) is None
    except (UserError, LookupError, TypeError):
        return False


def _match(run: Prepared) -> Match:
    config, record = run.config, run.record
    return Match(
        config.target, record["target_digest"], run.shape.vocab_size, record["template_hash"], config.trust_responses
    )


def _not_shared(work: Path) -> UserError:
    return UserError(f"the responses in {work} differ between machines; all machines must share the output directory")


def _answered(run: Prepared, wanted: dict[str, Any], folder: Path, processes: Processes) -> None:
    """Chooses the prompts, has them answered and builds the corpus in `folder`; resumes an earlier run.

    Each process, or group of peers, writes its share to its own file. All files count, whichever process wrote them.
    """
    config, work, options = run.config, run.work, run.config.responses
    meta, prompts = work / "answers.json", work / PROMPTS
    state = processes.broadcast(processes.rank_zero(_chosen, run, wanted))
    assert state is not None
    if len(set(processes.all_gather(meta.read_bytes() if meta.exists() else b""))) > 1:
        raise _not_shared(work)
    data = PromptData.of_json(run.data.digest, state)
    if not options.regenerate:
        stops = stop_tokens(load_config(config.target), load_generation_config(config.target), run.tokenizer)
        processes.rank_zero(write_recorded, run.reading, data, prompts, stops, folder, wanted)
        return
    if "answered" not in state:
        if processes.main:
            print(*before_responses(config, run.shape, data.counts["prompts"], work), sep="\n", file=sys.stderr)
        done = processes.broadcast(processes.rank_zero(_done, work)) or set()
        plan = ResponsePlan(
            tokenizer=run.tokenizer,
            params=options.params(),
            length=config.prompts.max_length,
            thinking=options.thinking,
            samples=options.samples,
            greedy_first=options.greedy_first,
            vocab_size=run.shape.vocab_size,
            strict=config.prompts.strict,
        )
        total = options.samples * data.counts["prompts"]
        tallies = processes.all_gather(processes.barrier(_share, run, plan, done, total, processes))
        tally = Tally()
        for each in tallies:
            tally.add(each)
        processes.rank_zero(_end_of_responses, run, state, tally)
    files = [path for path in _response_files(work) if path.stat().st_size]
    processes.rank_zero(write_answered, data, files, _match(run), folder, wanted)


def _response_files(work: Path) -> list[Path]:
    return sorted(path for path in work.glob("answers*.jsonl") if path.exists())  # without dangling links


def _chosen(run: Prepared, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns `answers.json` after the prompts are chosen. Raises UserError if another run's is there."""
    work, meta = run.work, run.work / "answers.json"
    if meta.exists():
        state = read_json(meta)
        answered = any(path.is_dir() or path.stat().st_size for path in _response_files(work))
        if not isinstance(state, dict) or "of" not in state:
            raise UserError(f"{meta}: from an earlier version; choose another --output or remove {work}")
        difference = first_difference(state["of"], wanted, defaults()["config"])
        if not difference:
            return state
        if answered:
            raise of_another_run(work, difference)
    state = {"of": wanted} | choose_prompts(run.reading, work).to_json()
    write_json(meta, state)
    return state


def _done(work: Path) -> set[tuple[int, int]]:
    """Returns all complete responses; cuts off a torn line before anything is appended."""
    return set().union(*(resume(path)[0] for path in _response_files(work)))


def _share(run: Prepared, plan: ResponsePlan, done: set[tuple[int, int]], total: int, processes: Processes) -> Tally:
    """Writes this process's share of the missing responses; peers write one share together."""
    config, work, record = run.config, run.work, run.record
    share = processes.group
    if next(plan.conversations(work / PROMPTS, done, *share), None) is None:
        return Tally()
    backend = open_decoder(
        config.target,
        runtime=config.responses.runtime,
        device=processes.device,
        dtype=config.dtype,
        batch=config.responses.batch_size,
        context=config.prompts.max_length,
        tokens=config.responses.max_tokens,
        drafter=copy.deepcopy(run.start.drafter) if run.start and config.responses.draft else None,
        mesh=processes.peers.mesh,
        tokenizer=run.tokenizer,
    )
    own = {"vocab_size": run.shape.vocab_size, "sampler": to_mapping(config.responses)}
    common = {key: own.get(key, record.get(key)) for key in SAID}
    output = work / (f"answers.{processes.rank}.jsonl" if processes.rank else "answers.jsonl")
    try:
        tally = respond(
            backend, plan, work / PROMPTS, output, common, done, total, *share, processes.peers,
            on_pace=partial(announced, config, processes.world) if processes.main else None,
        )  # fmt: skip
        return tally if processes.peers.main else Tally()
    finally:
        backend.close()


def _end_of_responses(run: Prepared, state: dict[str, Any], tally: Tally) -> None:
    """Records that all prompts are answered, and what was dropped."""
    if not any(path.stat().st_size for path in _response_files(run.work)):
        why = reasons(tally.dropped, run.reading.limit, tally.first)
        raise UserError(f"none of {state['counts']['prompts']} prompts was answered: {why}")
    print(f"responses: {tally.speed_in_words}", file=sys.stderr)
    if tally.dropped or tally.left_out:
        print(tally.in_words(run.reading.limit), file=sys.stderr)
    state["counts"] |= tally.dropped
    write_json(run.work / "answers.json", state | {"answered": True, "speed": tally.speed})


def discard(work: Path) -> None:
    """Removes the files of a run that has no responses."""
    files = _response_files(work)
    if (work / CORPUS).exists() or any(path.is_dir() or path.stat().st_size for path in files):
        return
    for path in (work / PROMPTS, work / "answers.json", *files):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for folder in (work, work.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()
