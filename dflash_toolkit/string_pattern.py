"""Regular expressions of JSON strings as automata: several together, with a length, with look-ahead in front.

The number of states can grow exponentially with the length of an expression, so a process of its own computes them,
within limits of processor time and memory: `python -m dflash_toolkit.string_pattern`.
"""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MOST_STATES = 2000
CPU_SECONDS = 5
MEMORY = 1 << 30  # bytes
# characters that a JSON string writes with an escape; a pattern's text has none of them
ESCAPED = frozenset(map(chr, range(0x20))) | {'"', "\\"}
LOOK_AROUND = re.compile(r"(?<!\\)\(\?(<?[=!])")


class StringPattern:
    """Strings that match all of some patterns, and have a length.

    A pattern matches the whole string, which is narrower than JSON Schema's search in it: a grammar would otherwise
    write any text around it.

    Args:
        patterns: without look-behind, back references and boundaries; look-ahead only at the beginning.
        least, most: characters of the string.

    Attributes:
        empty: no string matches.

    Raises:
        ValueError: a pattern that cannot be followed, or needs too many states.
    """

    def __init__(self, patterns: Sequence[str], least: int = 0, most: int | None = None) -> None:
        request = {"patterns": [_checked(each) for each in patterns], "least": least, "most": most, "cpu": CPU_SECONDS}
        command = [sys.executable, "-m", "dflash_toolkit.string_pattern"]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        try:
            found = json.loads(done.stdout)
        except ValueError as error:  # the process has reached a limit
            raise ValueError(f"{patterns[0][:200]!r} needs too many states") from error
        if "error" in found:
            raise ValueError(found["error"])
        self._initial, self._finals = found["initial"], frozenset(found["finals"])
        self._edges: dict[int, list[Any]] = {int(state): edges for state, edges in found["edges"].items()}
        self.empty = not self._edges

    def rules(self, name: str) -> Iterator[str]:
        """Yields the rules of an EBNF grammar. The rule `name` matches these strings without their quotes."""
        yield f"{name} ::= {name}_{self._initial}"
        for state, edges in self._edges.items():
            parts = ['""'] if state in self._finals else []
            for excluded, letters, to in edges:
                kept = "".join(_escape(each) for each in letters if each not in ESCAPED)
                if excluded:
                    parts.append(f'[^\\0-\\x1f\\"\\\\{kept}] {name}_{to}')
                elif kept:
                    parts.append(f"[{kept}] {name}_{to}")
            yield f"{name}_{state} ::= {' | '.join(f'({part})' for part in parts) or '[]'}"


def has_look_around(pattern: str) -> bool:
    return LOOK_AROUND.search(pattern) is not None


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern[:200]!r} is not a regular expression ({error})") from error
    return pattern


def _escape(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\U{ord(letter):08x}"


# ---- in the process --------------------------------------------------------------------------------------------


def _compute(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the automaton of a request: the states that lead to an end, with their edges."""
    machine = None
    for each in request["patterns"]:
        one = _machine_of(each)
        machine = one if machine is None else machine & one
    assert machine is not None
    if request["least"] or request["most"] is not None:
        limit = "" if request["most"] is None else request["most"]
        machine &= _parsed(f"[\\s\\S]{{{request['least']},{limit}}}")
    if len(machine.states) > MOST_STATES:
        raise ValueError(f"{request['patterns'][0][:200]!r} needs more than {MOST_STATES} states")
    from interegular.fsm import anything_else

    symbols: dict[int, list[Any]] = {}
    for letter, key in machine.alphabet._symbol_mapping.items():
        symbols.setdefault(key, []).append(letter)
    named = {each for each in machine.alphabet._symbol_mapping if each is not anything_else}
    live = {state for state in machine.states if machine.islive(state)}
    edges = {
        state: [
            (True, sorted(named.difference(letters)), to)
            if anything_else in (letters := symbols[key])
            else (False, sorted(letters), to)
            for key, to in machine.map.get(state, {}).items()
            if to in live
        ]
        for state in sorted(live)
    }
    return {"initial": machine.initial, "finals": sorted(machine.finals), "edges": edges}


def _machine_of(pattern: str) -> Any:
    """Returns the automaton of a pattern, which may begin with look-ahead: `^(?!A)(?=B)C$`."""
    rest, conditions = pattern.removeprefix("^"), []
    while rest.startswith(("(?!", "(?=")):
        end = _closing(rest)
        conditions.append((rest[2] == "=", rest[3:end]))
        rest = rest[end + 1 :]
    if conditions and not pattern.startswith("^"):
        raise ValueError(f"{pattern[:200]!r} is not supported (look-ahead without ^ in front)")
    found = _parsed(_without_end(rest))
    for wanted, condition in conditions:
        condition = condition.removeprefix("^")
        ends = _without_end(condition) != condition
        machine = _parsed(f"(?:{_without_end(condition)})" + ("" if ends else r"[\s\S]*"))
        found = (found & machine if wanted else found.difference(machine)).reduce()
    return found


def _parsed(pattern: str) -> Any:
    """Returns the automaton of a pattern without look-ahead and anchors."""
    if found := LOOK_AROUND.search(pattern):
        raise ValueError(f"{pattern[:200]!r} is not supported (look-around {found[0]!r} within it)")
    try:
        import interegular
    except ModuleNotFoundError as error:
        raise ValueError("needs interegular; install it with: pip install 'dflash-toolkit[serve]'") from error
    try:
        return interegular.parse_pattern(pattern).to_fsm().reduce()
    except MemoryError:
        raise
    except Exception as error:  # it has no class of its own for every kind
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{pattern[:200]!r} is not supported ({reason})") from error


def _closing(pattern: str) -> int:
    """Returns the index of the bracket that closes the one at the beginning."""
    depth, in_class, at = 0, False, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return at
        at += 1
    raise ValueError(f"{pattern[:200]!r} has an open bracket")


def _without_end(pattern: str) -> str:
    """Removes `$` from the end, if it is not escaped."""
    slashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and slashes % 2 == 0 else pattern


def _main() -> None:
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu"], request["cpu"]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        found = _compute(request)
    except ValueError as error:
        found = {"error": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main()
