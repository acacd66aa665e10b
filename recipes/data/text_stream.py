"""Turns tokens into text as they come, each character once it is whole."""

from collections.abc import Sequence

from recipes.data.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens before the text that may change how its first one is written, such as whether a space goes before it.
_CONTEXT = 8


class TextStream:
    """The text of a growing sequence of tokens, of which a character may take several.

    Args:
        tokenizer: Whose tokens they are.
        context: The tokens before the first one, whose text is not given.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(context[-_CONTEXT:])
        self._num_told = len(self._tokens)

    def add(self, token: int) -> str:
        """The text that a token completes; empty where a character still lacks tokens.

        Args:
            token: The next token.
        """
        self._tokens.append(token)
        return self._untold(is_last=False)

    def rest(self) -> str:
        """What is left at the end; a character that lacks tokens shows as U+FFFD."""
        return self._untold(is_last=True)

    def _untold(self, *, is_last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[: self._num_told])
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(_BROKEN) and not is_last:
            return ""
        # What was told last stays as the context of what comes, so that the work for a token does not grow.
        self._tokens = self._tokens[self._num_told :]
        self._num_told = len(self._tokens)
        return text[len(before) :]
