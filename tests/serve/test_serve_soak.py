"""The clients of scripts/soak.py and a server of this process; the program itself ends servers and takes minutes."""

import asyncio
import random
import re
import sys

import httpx
from paths import ROOT
from test_serve_api import client, engine, url

sys.path.insert(0, str(ROOT / "scripts"))

import soak

__all__ = ["client", "engine", "url"]  # fixtures


def test_answers_among_all_sorts_of_requests_are_those_given_alone(url: str) -> None:
    dice = random.Random(1)
    asked = soak.decided(dice, 14)

    async def run() -> soak.Soak:
        state = soak.Soak(url, dice, asked, "org/tiny")
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await state.alone(client)
            state.expected[::2] = [[text + "!" for text in texts] for texts in state.expected[::2]]

            async def some() -> None:
                for _ in range(5):
                    await state.one(client)

            await asyncio.gather(*(some() for _ in range(5)))
            assert not any((await soak.settled(client)).values())
        return state

    state = asyncio.run(run())
    assert state.counts["compared"] > 9 and state.counts["different"] > 0
    assert len(state.failures) == state.counts["different"]
    assert all(re.search(r"request \d*[02468], alone", failure) for failure in state.failures)
