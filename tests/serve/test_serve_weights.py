"""POST /update_weights_from_disk: new weights for a running server, with an admin key."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import make_drafter, make_target
from live_server import MESSAGES, chat, client_of, gated, make_engine, serving, text_of

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate, save_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.serve.keys import ADMIN_VARIABLE, read_admin_keys

PATH = "/update_weights_from_disk"
ADMIN = {"Authorization": "Bearer admin"}


def changed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def update(url: str, folder: Path | str, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model_path": str(folder)} | more
    answer = httpx.post(url + PATH, json=body, headers=ADMIN, timeout=60)
    return answer.status_code, answer.json()


def test_a_new_target_answers_after_the_update(tmp_path: Path, drafter: Drafter) -> None:
    new = make_target()
    changed(new.model).save_pretrained(tmp_path)
    with serving(make_engine(make_target(), drafter), admin_keys=["admin"]) as url:
        before = chat(client_of(url), temperature=0)
        status, reply = update(url, tmp_path)
        assert (status, reply) == (
            200,
            {
                "success": True,
                "message": f"the target has the weights of {tmp_path}",
                "num_paused_requests": 0,
                "target_version": 1,
                "drafter_version": 0,
            },
        )
        after = chat(client_of(url), temperature=0)
    expected = generate(new, None, encode_chat(new.tokenizer, MESSAGES), SamplingParams(max_tokens=20))
    assert after.choices[0].message.content == text_of(new, expected) != before.choices[0].message.content
    assert (before.usage.dflash["target_version"], after.usage.dflash["target_version"]) == (0, 1)
    assert after.usage.prompt_tokens_details.cached_tokens == 0


def test_a_new_drafter_is_used_while_requests_run(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    save_drafter(changed(make_drafter(target)), tmp_path)
    engine = make_engine(target, drafter)
    with serving(engine, admin_keys=["admin"]) as url:
        expected = chat(client_of(url), temperature=0, max_tokens=40)
        answers: list[Any] = []
        with gated(engine, 3) as gate:
            thread = threading.Thread(target=lambda: answers.append(chat(client_of(url), temperature=0, max_tokens=40)))
            thread.start()
            gate.wait()
            replies: list[Any] = []
            asking = threading.Thread(target=lambda: replies.append(update(url, tmp_path, model="drafter")))
            asking.start()
            gate.open()
            asking.join(60)
            thread.join(60)
    assert replies[0][0] == 200 and replies[0][1]["drafter_version"] == 1
    assert answers[0].choices[0].message.content == expected.choices[0].message.content


def test_a_target_is_not_replaced_under_a_request(tmp_path: Path, drafter: Drafter) -> None:
    target = make_target()
    changed(make_target().model).save_pretrained(tmp_path)
    engine = make_engine(target, drafter)
    with serving(engine, admin_keys=["admin"]) as url:
        stream = client_of(url).chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True, max_tokens=300, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        status, reply = update(url, tmp_path)
        stream.close()
    assert status == 400 and not reply["success"] and reply["target_version"] == 0
    assert reply["message"].startswith("requests are unfinished")


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_folder_that_does_not_fit_changes_nothing(
    part: str, tmp_path: Path, target: Target, drafter: Drafter
) -> None:
    other = make_target(layers=5)
    if part == "target":
        other.model.save_pretrained(tmp_path / "other")
        words = "holds another model than the served one"
    else:
        save_drafter(make_drafter(target, layers=1), tmp_path / "other")
        words = "the drafter's num_layers is 1, but the engine's is 2"
    with serving(make_engine(target, drafter), admin_keys=["admin"]) as url:
        expected = chat(client_of(url), temperature=0)
        for folder, message in ((tmp_path / "none", "is not a directory on the server"), (tmp_path / "other", words)):
            status, reply = update(url, folder, model=part)
            assert status == 400 and not reply["success"] and message in reply["message"]
            assert (reply["target_version"], reply["drafter_version"]) == (0, 0)
        assert chat(client_of(url), temperature=0).choices == expected.choices


def test_a_damaged_file_is_reported(tmp_path: Path, target: Target, drafter: Drafter) -> None:
    target.model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with serving(make_engine(target, drafter), admin_keys=["admin"]) as url:
        status, reply = update(url, tmp_path)
    assert status == 400 and "a file is damaged" in reply["message"]


def test_the_route_needs_the_admin_key(target: Target, tmp_path: Path) -> None:
    with serving(make_engine(target, None), api_keys=["user"], admin_keys=["admin"]) as url:
        address = url + PATH
        for headers in ({}, {"Authorization": "Bearer user"}):
            answer = httpx.post(address, json={"model_path": str(tmp_path)}, headers=headers)
            assert answer.status_code == 401 and "admin key" in answer.json()["error"]["message"]
        described = httpx.get(url + "/openapi.json", headers={"x-api-key": "user"}).json()
        assert PATH in described["paths"]
        assert httpx.post(address, json={"model_path": 3}, headers=ADMIN).status_code == 400
    with serving(make_engine(target, None)) as url:
        assert httpx.post(url + PATH, json={}, headers=ADMIN).status_code == 404


def test_admin_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    monkeypatch.setenv(ADMIN_VARIABLE, "two")
    assert read_admin_keys(str(file)) == ("one", "two") and read_admin_keys(None) == ("two",)
    file.write_text("\n")
    with pytest.raises(UserError, match=r"admin_key_file .* holds no key"):
        read_admin_keys(str(file))
