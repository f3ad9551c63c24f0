"""Chats of several spellings as the messages that chat templates take."""

from collections.abc import Mapping
from typing import Any

# ShareGPT's names of who speaks, which are not those of chat templates.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
# What an assistant's message may have instead of content.
_INSTEAD = ("tool_calls", "function_call")


class UnusableError(Exception):
    """Why a row is of no use."""


def messages_of(value: Any, *, key: str, system: Any) -> list[dict[str, Any]]:
    """The messages of a chat, each with "role" and "content", and what else it has.

    A message is spelled with "role" and "content", or as ShareGPT does with "from" and "value".
    Keys without a value are left out: Parquet gives every message the keys of all. Content in
    parts of text becomes one text, for most templates would print the list.

    Args:
        value: what the row has.
        key: its key, for errors.
        system: what the row has as its system prompt, put before the messages if it is text.

    Raises:
        UnusableError: it is no list of messages, or one has no content that is text.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise UnusableError(f"{key!r} is no list of messages with a role")
    messages = [_message(message, key) for message in value]
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise UnusableError(f"{key!r} is no list of messages with a role")
    content = message.get("content")
    if content is None and any(message.get(name) for name in _INSTEAD):
        content = ""  # templates differ in what they make of none
    return {**message, "content": _text(content)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise UnusableError("a message without content")
    if not isinstance(content, list):
        raise UnusableError(f"a message's content is not text: {type(content).__name__}")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnusableError(f"a part of a message is not text: {kind}")
