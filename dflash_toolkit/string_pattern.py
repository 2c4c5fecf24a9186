"""Regular expressions of JSON strings as automata: several together, with a length, with look-ahead in front."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

MOST_STATES = 2000
# characters that a JSON string writes with an escape; a pattern's text has none of them
ESCAPED = frozenset(map(chr, range(0x20))) | {'"', "\\"}


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
        ValueError: a pattern that cannot be followed.
    """

    def __init__(self, patterns: Sequence[str], least: int = 0, most: float = float("inf")) -> None:
        self._machine = _machine_of(patterns[0])
        for each in patterns[1:]:
            self._machine &= _machine_of(each)
        if least or most < float("inf"):
            self._machine &= _parsed(f"[\\s\\S]{{{least},{'' if most == float('inf') else int(most)}}}")
        if len(self._machine.states) > MOST_STATES:
            raise ValueError(f"{patterns[0]!r} needs more than {MOST_STATES} states")
        self.empty = self._machine.empty()

    def rules(self, name: str) -> Iterator[str]:
        """Yields the rules of an EBNF grammar whose rule `name` matches these strings, without their quotes."""
        from interegular.fsm import anything_else

        machine = self._machine
        letters: dict[int, list[Any]] = {}
        for letter, key in machine.alphabet._symbol_mapping.items():
            letters.setdefault(key, []).append(letter)
        named = [each for each in machine.alphabet._symbol_mapping if each is not anything_else]
        yield f"{name} ::= {name}_{machine.initial}"
        for state in sorted(machine.states):
            if not machine.islive(state):
                continue
            parts = ['""'] if state in machine.finals else []
            for key, to in machine.map.get(state, {}).items():
                if machine.islive(to):
                    given = [each for each in letters[key] if each is not anything_else and each not in ESCAPED]
                    if anything_else in letters[key]:
                        others = "".join(_escape(each) for each in named if each not in letters[key])
                        parts.append(f'[^\\0-\\x1f\\"\\\\{others}] {name}_{to}')
                    elif given:
                        parts.append(f"[{''.join(map(_escape, given))}] {name}_{to}")
            yield f"{name}_{state} ::= {' | '.join(f'({part})' for part in parts) or '[] '}"


def _escape(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\U{ord(letter):08x}"


def _parsed(pattern: str) -> Any:
    """Returns the automaton of a pattern without look-ahead at its beginning and anchors at its ends."""
    if found := re.search(r"(?<!\\)\(\?(<?[=!])", pattern):
        raise ValueError(f"{pattern[:200]!r} is not supported (look-around {found[0]!r} within it)")
    try:
        import interegular
    except ModuleNotFoundError as error:
        raise ValueError("needs interegular; install it with: pip install 'dflash-toolkit[serve]'") from error
    try:
        return interegular.parse_pattern(pattern).to_fsm().reduce()
    except Exception as error:  # it has no class of its own for every kind
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{pattern[:200]!r} is not supported ({said})") from error


def _machine_of(pattern: str) -> Any:
    """Returns the automaton of a pattern, which may begin with look-ahead: `^(?!A)(?=B)C$`."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern[:200]!r} is no regular expression ({error})") from error
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


def _closing(pattern: str) -> int:
    """Returns the index of the bracket that closes the one at the beginning."""
    depth, inside, at = 0, False, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif letter == "]":
            inside = False
        elif inside:
            pass
        elif letter == "[":
            inside = True
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
