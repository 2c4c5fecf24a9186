"""What the record of a run says, and which of its options may change before it resumes."""

import shutil

import torch
from programs import Program

from dflash_toolkit.files import read_json, write_json
from dflash_toolkit.train.responses.build_corpus import CORPUS
from dflash_toolkit.train.run.definition import WORK
from dflash_toolkit.train.run.settings import defaults, first_difference


def test_a_run_resumes_with_another_response_batch_size(short_run: Program) -> None:
    short_run()
    answers = (short_run.output / WORK / "answers.jsonl").read_bytes()
    (short_run.output / "run.json").unlink()
    short_run("responses.batch_size=1")
    assert (short_run.output / WORK / "answers.jsonl").read_bytes() == answers


def test_options_that_a_run_lacks_have_their_defaults(short_run: Program) -> None:
    short_run()
    work = short_run.output / WORK
    metas = work / "answers.json", work / CORPUS / "meta.json"
    state, answers = torch.load(work / "state.pt"), (work / "answers.jsonl").read_bytes()
    read = [read_json(path) for path in metas]
    for config in (state["fingerprint"]["config"], *(meta["of"] for meta in read)):
        del config["responses"]["greedy_first"], config["prompts"]["max_prompts"]
    del state["fingerprint"]["config"]["loss"]["kl"], state["fingerprint"]["drafter"]["attention_bias"]
    torch.save(state, work / "state.pt")
    for path, meta in zip(metas, read, strict=True):
        write_json(path, meta)
    (short_run.output / "run.json").unlink()
    short_run()
    assert "max_prompts" not in read_json(metas[1])["of"]["prompts"], "the rows are used as they are"
    shutil.rmtree(work / CORPUS)
    assert "finished" in short_run()[-1]
    assert (work / "answers.jsonl").read_bytes() == answers
    assert "responses.samples: 1, now 2" in short_run.refuses("responses.samples=2")
    assert first_difference({"loss": {}}, {"loss": {"kl": 0.5}}, defaults()["config"]) == "loss.kl: 0.0, now 0.5"
