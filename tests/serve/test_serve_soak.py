"""The clients of scripts/soak.py with a server in this process; the program itself kills servers and takes minutes."""

import asyncio
import random
import re
import sys

import httpx
from live_server import client, engine, url
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import soak

__all__ = ["client", "engine", "url"]  # fixtures


def test_answers_in_mixed_load_equal_those_alone(url: str) -> None:
    dice = random.Random(1)
    decisions = soak.decided(dice, 14)

    async def run() -> soak.Soak:
        state = soak.Soak(url, dice, decisions, "org/tiny")
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
