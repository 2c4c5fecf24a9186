"""The HTTP client of dflash-data and dflash-eval."""

import base64
from http.server import BaseHTTPRequestHandler

import pytest
from servers import stand_in

from dflash_toolkit import UserError
from dflash_toolkit.openai_http import RefusedError, TryAgainError, find_model, request_json, stream_json, without_login


def test_a_login_in_the_url_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    sent: list[str] = []

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        sent.append(request.headers["Authorization"])
        return 422, b'{"error": "no"}', {}

    with stand_in(answer) as url:
        login = url.replace("//", "//user:s%40cret@")
        assert without_login(login) == url
        with pytest.raises(RefusedError, match=r"HTTP 422: no") as caught:
            request_json(login, 60, {})
        assert "cret" not in str(caught.value)
        with pytest.raises(UserError, match="HTTP 422") as caught:
            find_model(login, None, 60)
        assert "cret" not in str(caught.value)
    assert sent == [f"Basic {base64.b64encode(b'user:s@cret').decode()}"] * 2


@pytest.mark.parametrize(
    ("status", "headers", "reply", "events", "error"),
    [
        (200, {}, b'data: {"a": 1}\n\n: ping\n\ndata:{"a": 2}\n\ndata: [DONE]\n\n', 2, None),
        (200, {}, b'data: {"a": 1}\n\ndata: <html>\n\n', 1, UserError),
        (200, {}, b'data: {"a": 1}\n\ndata: \xff\n\n', 1, UserError),
        (200, {}, b"data: [1]\n\n", 0, UserError),
        (503, {"Retry-After": "7"}, b"", 0, TryAgainError),
    ],
)
def test_a_stream_yields_events_until_it_fails(
    status: int, headers: dict[str, str], reply: bytes, events: int, error: type[Exception] | None
) -> None:
    found = []
    with stand_in(lambda request, body: (status, reply, headers)) as url:
        try:
            for event in stream_json(url, 60, {}):
                found.append(event)
        except (UserError, TryAgainError) as caught:
            assert type(caught) is error
            assert getattr(caught, "after_s", 7) == 7
        else:
            assert error is None
    assert found == [{"a": i + 1} for i in range(events)]
