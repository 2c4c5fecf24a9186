"""Recognizes network failures among the errors of the hub's client."""

OFFLINE = {
    "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "ConnectionError",
    "ReadTimeout", "MaxRetryError", "gaierror", "URLError", "ConnectionRefusedError", "NetworkError", "ProxyError",
}  # fmt: skip
SAID = ("couldn't connect to", "couldn't reach", "cannot reach")


def unreachable(error: BaseException) -> bool:
    """Whether an error of huggingface_hub, transformers or datasets comes from a hub that cannot be reached."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & OFFLINE or any(words in str(link).lower() for words in SAID):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
