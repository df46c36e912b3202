"""Tests of errors for users: printable texts that do not quote the content of files."""

import json
import pickle
import tomllib

import pytest

from mcis.datasets.errors import UserError, join_shortened, unquoted


def test_errors_are_printable_and_bounded() -> None:
    error = UserError("image \x1b[31m\u202e\udcff\0", "3.7\u202f%\nb", "x" * 100_000)
    assert str(error).startswith("image ?[31m???\n  expected: 3.7\u202f%\nb\n  remedy:   xxx")
    assert len(str(error)) < 5000
    again = pickle.loads(pickle.dumps(error))
    assert (again.found, again.expected, again.remedy) == (error.found, error.expected, error.remedy)


@pytest.mark.parametrize(
    ("read", "data"),
    [
        (json.loads, '{"hunter2": hunter2}'),
        (tomllib.loads, "hunter2 hunter2"),
        (tomllib.loads, "hunter2 = 1\nhunter2 = 2"),
        (lambda data: data.encode("utf-16").decode(), "hunter2"),
        (lambda data: int(data), "hunter2"),
        (lambda data: {}[data], "hunter2"),
    ],
)
def test_quotes_of_parsers_are_removed(read, data) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        read(data)
    assert "hunter2" not in unquoted(caught.value)
    assert unquoted(caught.value)


def test_joined_names_end_with_the_number_of_the_others() -> None:
    assert join_shortened(["a", "b"]) == "a, b"
    assert join_shortened(list("abcde")) == "a, b, c, d, e"
    assert join_shortened(list("abcdefg")) == "a, b, c, d, e and 2 more"
