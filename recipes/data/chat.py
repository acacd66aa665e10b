"""Templates that turn a chat into one text, of which the model learns only what the assistant says.

`plain`, for any tokenizer: every message is a line with its role, and then its content; the tokenizer's eos ends what
the assistant says.

    <|user|>
    Hello
    <|assistant|>
    Hi!{eos}

`chatml`, as many published models use it; <|im_start|> and <|im_end|> are one token each:

    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    Hi!<|im_end|>

Learned are the contents of the assistant's messages and the {eos} or <|im_end|> after each; the bos before all is left
out where the chat begins with the same token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipes.data.documents import Segment, UnusableError
from recipes.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
ASSISTANT = "assistant"


class Message(NamedTuple):
    """One message of a chat.

    Attributes:
        role: Who speaks, one of `ROLES`.
        content: What is said, in UTF-8.
    """

    role: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """How messages become one text; a line break stands between them.

    Attributes:
        start: Special token before a message; None: none.
        head: Text before the content, with {role} in it.
        end: Special token after a message; None: eos after what the assistant says, nothing after others.
    """

    start: str | None
    head: str
    end: str | None


TEMPLATES: Mapping[str, ChatTemplate] = {
    "plain": ChatTemplate(start=None, head="<|{role}|>\n", end=None),
    "chatml": ChatTemplate(start="<|im_start|>", head="{role}\n", end="<|im_end|>"),
}


def read_messages(value: object) -> list[Message]:
    """The messages of a chat.

    Args:
        value: A list of mappings with `role` and `content`.

    Raises:
        UnusableError: If it is something else, a role is unknown, or the assistant says nothing.
    """
    if not isinstance(value, list):
        raise UnusableError(f"its 'messages' is no list but {type(value).__name__}")
    messages = [_message(each, number) for number, each in enumerate(value, start=1)]
    if not any(message.role == ASSISTANT and message.content.strip() for message in messages):
        raise UnusableError("no message of the assistant, so that there is nothing to learn")
    return messages


def render(messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer) -> list[Segment]:
    """The text of a chat.

    Args:
        messages: What is said.
        template: How it is written.
        tokenizer: Which tokens stand for the template's.

    Raises:
        ValueError: If the tokenizer lacks one of them.
    """
    return _joined(_segments(messages, template, tokenizer), tokenizer.bos)


def chat_prompt_tokens(messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The tokens after which a model says what the assistant would say next.

    Args:
        messages: What was said, in order.
        template: That of the data it was trained on.
        tokenizer: That of the model.

    Raises:
        ValueError: If the tokenizer lacks a token of the template.
    """
    answer = list(_segments([*messages, Message(ASSISTANT, b"")], template, tokenizer))
    # Without the end of the message that the model is to write.
    segments = _joined(iter(answer[:-1]), tokenizer.bos)
    return [
        token
        for segment in segments
        for token in ([segment.content] if isinstance(segment.content, int) else tokenizer.encode(segment.content))
    ]


def _message(value: object, number: int) -> Message:
    if not isinstance(value, Mapping):
        raise UnusableError(f"message {number} is no object but {type(value).__name__}")
    fields: Mapping[Any, Any] = value
    for name in ("role", "content"):
        if not isinstance(fields.get(name), str):
            raise UnusableError(f"message {number} has no text as its {name!r}")
    if fields["role"] not in ROLES:
        raise UnusableError(f"message {number} has the unknown role {fields['role']!r}; legal: {', '.join(ROLES)}")
    try:
        return Message(fields["role"], fields["content"].encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UnusableError(f"message {number} is no Unicode text ({error.reason})") from error


def _segments(messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer) -> Iterator[Segment]:
    for number, message in enumerate(messages):
        learned = message.role == ASSISTANT
        if number:
            yield Segment(b"\n", learned=False)
        if template.start is not None:
            yield Segment(tokenizer.special(template.start), learned=False)
        yield Segment(template.head.format(role=message.role).encode(), learned=False)
        yield Segment(message.content, learned=learned)
        if template.end is not None:
            yield Segment(tokenizer.special(template.end), learned=learned)
        elif learned:
            yield Segment(tokenizer.eos)


def _joined(segments: Iterator[Segment], bos: int | None) -> list[Segment]:
    """With bos before them; texts that follow each other and are not learned become one, as the template reads."""
    joined: list[Segment] = []
    for segment in segments:
        before = joined[-1] if joined else None
        if (
            before is not None
            and isinstance(before.content, bytes)
            and isinstance(segment.content, bytes)
            and not before.learned
            and not segment.learned
        ):
            joined[-1] = Segment(before.content + segment.content, learned=False)
        else:
            joined.append(segment)
    if bos is not None and joined[0].content != bos:
        joined.insert(0, Segment(bos, learned=False))
    return joined
