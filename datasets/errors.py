"""Errors that a user can act on: what was found, what was expected, what to do."""


class UserError(Exception):
    """A problem with input, configuration or machine that its owner can correct.

    The texts name an argument of the function that raises in backquotes, `classes` or `classes=FILE`. The function's
    caller knows where the argument came from and may put that in its place.

    Args:
        found: what was found, with the name of the file, key or value.
        expected: what would have been right.
        remedy: what to do about it.
    """

    def __init__(self, found: str, expected: str, remedy: str):
        super().__init__(found, expected, remedy)
        self.found, self.expected, self.remedy = found, expected, remedy

    def __str__(self) -> str:
        return f"{self.found}\n  expected: {self.expected}\n  remedy:   {self.remedy}"
