"""Stands in front of every call with which a save changes the file system."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from checkpoint import filesystem

COMPOSED = ("make_folders", "remove_tree")
"""Functions that change nothing themselves, but through the others."""

CALLS = tuple(
    name
    for name, each in vars(filesystem).items()
    if callable(each) and getattr(each, "__module__", "") == filesystem.__name__ and name not in COMPOSED
)


@contextmanager
def before_each_call(before: Callable[..., None]) -> Iterator[None]:
    """Calls a function with the name of each call, and its arguments, before it is done."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            before(name, *args)
            return call(*args)

        return wrapper

    with ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(patch.object(filesystem, name, wrapped(name, getattr(filesystem, name))))
        yield


@contextmanager
def killed_at(number: int, *, torn: bool = False) -> Iterator[list[str]]:
    """Kills this process before its n-th call, from 0, or half-way through it if that writes; yields the calls."""
    calls: list[str] = []

    def before(name: str, *args: Any) -> None:
        if len(calls) == number:
            if torn:
                _write_half(name, *args)
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(name)

    with before_each_call(before):
        yield calls


def _write_half(name: str, descriptor: int, content: Any, offset: int | None = None) -> None:
    if name == "write":
        content = b"".join(bytes(each.cast("B")) for each in content)
    half = content[: len(content) // 2]
    os.write(descriptor, half) if offset is None else os.pwrite(descriptor, half, offset)
