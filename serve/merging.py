"""Several answers of one request as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeAlias

from .answer import Piece

Merged: TypeAlias = AsyncGenerator[tuple[int, Piece | None]]
Queue: TypeAlias = asyncio.Queue[tuple[int, Piece | Exception | None]]


async def merged(answers: Sequence[AsyncGenerator[Piece]]) -> Merged:
    """The pieces of all answers as they come, each with its answer's number; None is the end of one.

    Whatever one of them raises is raised, and ends the others, as closing the stream does.
    """
    queue: Queue = asyncio.Queue()
    tasks = [asyncio.create_task(_fill(queue, index, pieces)) for index, pieces in enumerate(answers)]
    left = len(tasks)
    try:
        while left:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fill(queue: Queue, index: int, pieces: AsyncGenerator[Piece]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                queue.put_nowait((index, piece))
        queue.put_nowait((index, None))
    except Exception as error:  # raised again by the reader
        queue.put_nowait((index, error))
