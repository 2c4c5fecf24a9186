"""What the application and the server that runs it both know."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServerState:
    """Of one front process."""

    draining: bool = False  # told to stop: open answers finish, new ones are refused
