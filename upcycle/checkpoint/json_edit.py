"""Set or remove top-level keys of a JSON object and leave every other byte as it is."""

import json
import re

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def set_top_level(text: str, key: str, value: object, *, after: str) -> str:
    """Replace the value of a top-level key, or insert the key behind another one.

    Args:
        text: a JSON object with at least one key.
        key: the key to set.
        value: its new value.
        after: the top-level key behind which an absent `key` goes, in that key's own layout; the
            last key where that one is absent too.
    """
    members = _members(text)
    new = json.dumps(value)
    if key in members:
        _, begin, end = members[key]
        return text[:begin] + new + text[end:]
    key_begin, _, end = members.get(after) or members[next(reversed(members))]
    lead = text[len(text[:key_begin].rstrip()) : key_begin]
    return f"{text[:end]},{lead}{json.dumps(key)}: {new}{text[end:]}"


def remove_top_level(text: str, key: str) -> str:
    """Remove a top-level key and its value, with the comma that parted it from its neighbour.

    Args:
        text: a JSON object.
        key: the key; where the object lacks it nothing changes.
    """
    members = _members(text)
    if key not in members:
        return text
    names = list(members)
    index = names.index(key)
    begin, _, end = members[key]
    if index:
        begin = members[names[index - 1]][2]
    elif len(names) > 1:
        end = members[names[1]][0]
    return text[:begin] + text[end:]


def _members(text: str) -> dict[str, tuple[int, int, int]]:
    """Of each top-level key: where it begins, and where its value begins and ends."""
    members = {}
    position = _skip(text, text.index("{") + 1)
    while text[position] != "}":
        key_begin = position
        key, position = _DECODER.raw_decode(text, position)
        value_begin = _skip(text, _skip(text, position) + 1)
        _, value_end = _DECODER.raw_decode(text, value_begin)
        members[key] = (key_begin, value_begin, value_end)
        position = _skip(text, value_end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return members


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()
