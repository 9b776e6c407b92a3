"""What the parser has to say, in one readable message that names the key, the value and what was expected."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from jsonargparse import ArgumentParser

_KEY = re.compile(r'^Parser key "(?P<key>[^"]+)":\s*(?P<detail>.*)$', re.DOTALL)
_CLASS = re.compile(r"^Problem with given class_path '(?P<path>[^']+)':\s*(?P<detail>.*)$", re.DOTALL)
_TYPE = re.compile(r"^Expected an? (?P<kind>.+?)(?:\. Got value:\s*(?P<value>.*))?$", re.DOTALL)
_OPTION = re.compile(r"^(?:Group '(?P<group>[^']+)' does not accept o|O)ption '(?P<key>[^']+)'")
_RESTRICTED = re.compile(r"^Not of type (?P<kind>\w+): ")
_REQUIRED = re.compile(r"^the following arguments are required: (?P<keys>.+)$")
_GIVEN = re.compile(r"\nGiven value type:.*?Given value: (?P<value>.*)$", re.DOTALL)
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: (?P<first>\S+)")
_SUBTYPES = re.compile(r"^Subtypes: \[<class '(?P<base>\w+\.[\w.]+)'>", re.MULTILINE)
_NO_PART = re.compile(
    r"^(?:Expected a dot import path string:|Not a valid subclass of |Import path .*does not )"
)
_CLASS_PATH = re.compile(r"^\s*\{.*?'class_path': '([^']*)'")
_UNTYPED = re.compile(
    r"Parameter '(?P<name>\w+)' from '(?P<path>[\w.]+?)(?:\.__init__)?' does not specify a type"
)
_ABSTRACT = re.compile(r"^Expected an instantiatable class, but ")
_OF_CLASS = re.compile(r" is not an argument of | There are: | \(an argument of ")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)|nan")
_WHOLE = re.compile(r"-?\d+(?:\.0|e\+?\d\d?)")
_WORDS = {"None": "null", "True": "true", "False": "false"}
_UNION = "Does not validate against any of the Union subtypes"


def readable(error: Exception, parser: ArgumentParser) -> str:
    """One message from an error of the parser; unknown keys come with the likeliest known ones.

    Args:
        error: raised by jsonargparse while it parsed or instantiated.
        parser: the parser at work; its keys are the choices.
    """
    return _told("", _dedent(str(error)), parser)


def told_by_class(key: str, path: str, problem: str, arguments: Mapping[str, Any]) -> str:
    """What a constructor has to say, under the key of the argument that it is about, where that can be found.

    Args:
        key: of the part, such as "environment".
        path: import path of the part's class; the constructor may be that of one of its arguments.
        problem: what the constructor said. Where it begins with the name of an argument, that is looked for.
        arguments: of the class, nested.

    >>> told_by_class("environment", "a.B", "base_url is 'x', but ...", {"server": {"base_url": "x"}})
    "environment.init_args.server.base_url is 'x', but ... (told by a.B)"
    """
    if problem.startswith(_UNION):  # such as an argument that may be null too
        problem = "; ".join(entry for entry in _entries(problem) if not _TYPE.match(entry)) or problem
    name, _, rest = problem.partition(" ")
    found = [(place, value) for place, value in _leaves(f"{key}.init_args", arguments) if _ends(place, name)]
    found = [one for one in found if repr(one[1]) in rest] or found
    told = f"{found[0][0]} {rest}" if len(found) == 1 else f"{key}.init_args: {problem}"
    return f"{told} (told by {path})"


def says_what_is_missing(error: Exception) -> bool:
    """Whether a parser's error is about options that were not given, and not about those that were."""
    return bool(_REQUIRED.match(str(error)))


def with_choices(problem: str, given: str, choices: Iterable[str]) -> str:
    """A problem with a name, and the names that exist, the most similar one first.

    >>> with_choices("algorithm is 'IterPPO'", "IterPPO", ["ITPO", "IterativePPO"])
    "algorithm is 'IterPPO'. Did you mean IterativePPO? There are: ITPO, IterativePPO."
    """
    known = sorted(choices)
    lowered = {name.lower(): name for name in known}
    close = get_close_matches(given.lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered[close[0]]}?" if close else ""
    return f"{problem}.{hint} There are: {', '.join(known)}."


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Every single value below a key, with its own key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _ends(key: str, name: str) -> bool:
    return key.rpartition(".")[2] == name


def _told(key: str, detail: str, parser: ArgumentParser) -> str:
    if match := _KEY.match(detail):
        return _told(_joined(key, match["key"]), _dedent(match["detail"]), parser)
    if match := _CLASS.match(detail):
        return _told_of_class(key, match["path"], _dedent(match["detail"]))
    if detail.startswith(_UNION):
        return _told_of_union(key, detail, parser)
    if match := _OPTION.match(detail):
        return _unknown(_joined(key, _joined(match["group"] or "", match["key"])), parser)
    if match := _UNRECOGNIZED.match(detail):
        return _unknown(match["first"].lstrip("-").partition("=")[0], parser)
    if match := _REQUIRED.match(detail):
        options = " and ".join(f"--{key}" for key in match["keys"].split(", "))
        return f"{options} must be given; --help describes the options."
    if match := _TYPE.match(detail):
        value = "does not fit" if match["value"] is None else f"is {_shown(match['value'])}"
        return f"{key} {value}, but {_expected([match['kind']], match['value'])} was expected."
    said = " ".join(detail.split())
    return f"{key}: {said}" if key else said


def _told_of_class(key: str, path: str, detail: str) -> str:
    # The arguments of a class have a parser of their own, so its name goes with what is wrong.
    if match := _OPTION.match(detail):
        name = _joined(match["group"] or "", match["key"])
        near = _known_near(name, _keys(_parser_of(path)), f"{key}.init_args")
        # Only the keys of a parser have help of their own.
        where = "" if "." in key else f" --{key}.help {path} explains them."
        return f"{key}.init_args.{name} is not an argument of {path}.{near}{where}"
    if match := _REQUIRED.match(detail):
        names = [f"{key}.init_args.{name}" for name in match["keys"].split(", ")]
        return f"{' and '.join(names)} must be given; {path} has no default for it. Pass --{names[0]} VALUE."
    told = _told(f"{key}.init_args", detail, ArgumentParser())
    return told if _OF_CLASS.search(told) else f"{told} (an argument of {path})"


def _parser_of(path: str) -> ArgumentParser:
    """A parser with the arguments of a class that has just been imported."""
    module, _, name = path.rpartition(".")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
    return parser


def _told_of_union(key: str, detail: str, parser: ArgumentParser) -> str:
    given = _GIVEN.search(detail)
    text = given["value"] if given else ""
    value = _shown(text)
    entries, listed = _entries(detail), _listed(detail)
    if match := _UNTYPED.search(listed):
        name = match["name"]
        return (
            f"{key}.init_args.{name} has no type in {match['path']}, so it cannot be read. Write one "
            f"there, such as `{name}: int`."
        )
    base = _SUBTYPES.search(detail)
    if base and (problem := _no_part(key, text, base["base"], entries)):
        return problem
    of_class = [entry for entry in entries if _CLASS.match(entry)]
    if of_class:
        return _told(key, of_class[-1], parser)
    matches = [_TYPE.match(entry) or _RESTRICTED.match(entry) for entry in entries]
    kinds = [match["kind"] for match in matches if match]
    if len(kinds) == len(entries):
        return f"{key} is {value}, but {_expected(kinds, text)} was expected."
    return f"{key} is {value}, which does not fit: {'; '.join(dict.fromkeys(entries))}."


def _listed(detail: str) -> str:
    return _GIVEN.sub("", detail.partition("Errors:\n")[2])


def _entries(detail: str) -> list[str]:
    """What each type of a union has to say."""
    parts = re.split(r"(?:^|\n)\s{0,4}- ", _listed(detail))
    return [_dedent(part) for part in parts if part.strip()]


def _no_part(key: str, given: str, base_path: str, entries: list[str]) -> str | None:
    """What is wrong with the class of a part, and the classes that there are; None if it is its arguments."""
    classes = [match for match in map(_CLASS.match, entries) if match]
    details = [_dedent(match["detail"]) for match in classes]
    if any(kind.match(detail) for detail in details for kind in (_KEY, _OPTION, _REQUIRED)):
        return None
    module, _, base_name = base_path.rpartition(".")
    if classes:
        why = f"which cannot be found ({details[0]})"
    elif any(map(_ABSTRACT.match, entries)):
        why = "which is only a base of others"
    elif any(map(_NO_PART.match, entries)):
        why = f"which is no {base_name}"
    else:
        return None
    inside = _CLASS_PATH.search(given)
    path = classes[0]["path"] if classes else inside[1] if inside else given.strip()
    place = f"{key}.class_path" if inside else key
    known = _subclasses(getattr(importlib.import_module(module), base_name))
    return with_choices(f"{place} is {path!r}, {why}", path.rpartition(".")[2], known)


def _subclasses(base: type) -> set[str]:
    """Short names of the classes of a kind that can be made."""
    found: list[type[object]] = [base]
    for kind in found:  # grows meanwhile
        found += [below for below in kind.__subclasses__() if below not in found]
    return {
        kind.__name__ for kind in found if not (inspect.isabstract(kind) or kind.__name__.startswith("_"))
    }


def _unknown(key: str, parser: ArgumentParser) -> str:
    return f"{key} is not a known key.{_known_near(key, _keys(parser))}"


def _known_near(key: str, known: list[str], prefix: str = "") -> str:
    """The likeliest key, and all keys of the deepest part of `key` that exists.

    Args:
        key: an unknown one.
        known: all that there are.
        prefix: stands before each of them in a configuration.
    """
    parts = key.split(".")
    depth = next(n for n in range(len(parts) - 1, -1, -1) if n == 0 or _below(known, parts[:n]))
    choices, given = _below(known, parts[:depth]), parts[depth]
    close = get_close_matches(given, choices, n=1)
    likely = [".".join([*parts[:depth], name, *parts[depth + 1 :]]) for name in close]
    likely = [name for name in likely if name in known or _below(known, name.split("."))]
    likely += [name for name in known if name.endswith(f".{key}")]
    hint = f" Did you mean {_joined(prefix, likely[0])}?" if likely else ""
    section = ".".join(([prefix] if prefix else []) + parts[:depth])
    return f"{hint} {f'{section} has' if section else 'There are'}: {', '.join(choices)}."


def _below(known: list[str], section: list[str]) -> list[str]:
    """Names directly below a section, in order."""
    size = len(section)
    split = (name.split(".") for name in known)
    return sorted({parts[size] for parts in split if len(parts) > size and parts[:size] == section})


def _keys(parser: ArgumentParser) -> list[str]:
    return list(parser.get_defaults(skip_validation=True).keys())


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "a mapping",
    "NoneType": "null",
    "PositiveInt": "a whole number > 0",
    "NonNegativeInt": "a whole number >= 0",
    "NonNegativeFloat": "a number >= 0",
    "Seed": "a whole number from 0 to 4294967295",
}


def _expected(kinds: Iterable[str], value: str | None) -> str:
    """What was expected in place of a value, with a whole number that came in another form written out.

    >>> _expected(["int", "NoneType"], "1e3"), _expected(["int"], "2.0"), _expected(["int"], "2.5")
    ('a whole number or null (written 1000)', 'a whole number (written 2)', 'a whole number')
    """
    expected, text = " or ".join(dict.fromkeys(map(_kind, kinds))), (value or "").strip()
    if expected.startswith("a whole number") and _WHOLE.fullmatch(text):
        return f"{expected} (written {int(Decimal(text))})"
    return expected


def _kind(kind: str) -> str:
    if choices := re.search(r"Literal\[(.+)\]", kind):
        listed = choices[1].split(", ")
        return f"one of {', '.join(listed)}" if len(listed) > 1 else listed[0]
    name = re.sub(r"^<class '(.+)'>$", r"\1", kind.strip())
    return _KINDS.get(name, name)


def _shown(value: str) -> str:
    """A value as a configuration file has it; the parser shows some in Python's words.

    >>> [_shown(text) for text in ("None", "True", "1e+20", "few", "")]
    ['null', 'true', '1e+20', "'few'", "''"]
    """
    text = value.strip()
    return _WORDS.get(text) or (text if _NUMBER.fullmatch(text) else repr(text))


def _joined(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer else inner


def _dedent(text: str) -> str:
    lines = text.strip().splitlines()
    rest = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    cut = min(rest, default=0)
    return "\n".join([lines[0], *(line[cut:] for line in lines[1:])]) if lines else ""
