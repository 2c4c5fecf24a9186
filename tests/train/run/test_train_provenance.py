"""What the record of a run says, and which of its options may change before it resumes."""

from programs import Program

from dflash_toolkit.files import write_json
from dflash_toolkit.train.run.definition import WORK
from dflash_toolkit.train.run.provenance import OLD_NAMES, fingerprint
from dflash_toolkit.train.run.resume_point import load_state


def test_a_run_resumes_with_another_response_batch_size(short_run: Program) -> None:
    short_run()
    answers = (short_run.output / WORK / "answers.jsonl").read_bytes()
    (short_run.output / "run.json").unlink()
    short_run("responses.batch_size=1")
    assert (short_run.output / WORK / "answers.jsonl").read_bytes() == answers


def test_records_with_old_option_names_are_read(short_run: Program) -> None:
    short_run()
    record = short_run.record()
    old = {new: old for old, new in OLD_NAMES.items()}
    config = {old.get(key, key): value for key, value in record["config"].items()}
    assert {"answers", "answer_files", "trust_answers"} < config.keys()
    write_json(short_run.output / "run.json", record | {"config": config})
    assert "finished" in short_run("answers.batch_size=1")[-1]
    state = load_state(short_run.output / WORK / "state.pt", fingerprint(record | {"config": config}))
    assert state and "answers" in state.fingerprint["config"] and "responses" not in state.fingerprint["config"]
