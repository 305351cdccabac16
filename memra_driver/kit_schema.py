"""Whether a value of JSON keeps a schema: the keywords of JSON Schema that the kit's manifest uses, and no others."""

from __future__ import annotations

import math
import re
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
_NOTES = {"$schema", "$id", "$defs", "title", "description"}
_KNOWN = _NOTES | {
    "$ref", "type", "const", "enum", "minimum", "maximum", "pattern", "maxLength", "items", "minItems", "maxItems",
    "properties", "required", "additionalProperties", "allOf", "if", "then",
}  # fmt: skip


def violation(value: Any, schema: dict[str, Any]) -> str:
    """The first rule of the schema that the value breaks, in words, and where; "" where it breaks none."""
    return _violation(value, schema, schema, "the manifest")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) and not (isinstance(value, float) and not math.isfinite(value))


def _violation(value: Any, rule: dict[str, Any], root: dict[str, Any], where: str) -> str:
    assert set(rule) <= _KNOWN, f"{where}: {set(rule) - _KNOWN}"
    if "$ref" in rule:
        return _violation(value, root["$defs"][rule["$ref"].removeprefix("#/$defs/")], root, where)
    kinds = rule.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{where} is {_shown(value)}; it takes {' or '.join(kinds)}"
    if "const" in rule and not (value == rule["const"] and type(value) is type(rule["const"])):
        return f"{where} is {_shown(value)}, not {_shown(rule['const'])}"
    if "enum" in rule and value not in rule["enum"]:
        return f"{where} is {_shown(value)}; it takes one of {', '.join(map(_shown, rule['enum']))}"
    return _of_kind(value, rule, where) or _inside(value, rule, root, where)


def _of_kind(value: Any, rule: dict[str, Any], where: str) -> str:
    """What a number, a string, or the size of an array may be."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not rule.get("minimum", -math.inf) <= value <= rule.get("maximum", math.inf):
            return f"{where} is {_shown(value)}; {rule.get('minimum', 'less')} .. {rule.get('maximum', 'more')} is allowed"
    elif isinstance(value, str):
        if len(value) > rule.get("maxLength", math.inf):
            return f"{where} has {len(value)} characters; at most {rule['maxLength']}"
        if "pattern" in rule and not re.search(rule["pattern"], value):
            return f"{where} is {_shown(value)}, which is not of the form {rule['pattern']}"
    elif isinstance(value, list) and not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", math.inf):
        return f"{where} has {len(value)} entries; {rule.get('minItems', 0)} .. {rule.get('maxItems', 'more')} is allowed"
    return ""


def _inside(value: Any, rule: dict[str, Any], root: dict[str, Any], where: str) -> str:
    """The rules of what the value holds, and those that hold under a condition."""
    problems = []
    if isinstance(value, list) and "items" in rule:
        problems += [(each, rule["items"], f"{where}[{i}]") for i, each in enumerate(value)]
    elif isinstance(value, dict):
        known = rule.get("properties", {})
        missing = [name for name in rule.get("required", ()) if name not in value]
        if missing:
            return f"{where} lacks {', '.join(missing)}"
        others = rule.get("additionalProperties", True)
        for name, each in value.items():
            if name not in known and others is False:
                return f"{where} has {_shown(name)}, which it may not"
            other = others if isinstance(others, dict) else {}
            problems.append((each, known.get(name, other), f"{where}.{name[:40]}"))
    for each in rule.get("allOf", ()):
        if "if" not in each or not _violation(value, each["if"], root, where):
            problems.append((value, each["then"] if "if" in each else each, where))
    return next(filter(None, (_violation(each, part, root, at) for each, part, at in problems)), "")


def _shown(value: Any) -> str:
    """Short enough for a message, whatever it is."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 70 else ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
