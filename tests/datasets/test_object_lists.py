"""Listing objects of S3: the same stamps as by a request for each, in fewer requests; faults of the server."""

import collections
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from mcis.datasets.errors import UserError
from mcis.datasets.storage.files import stamp, stamps, stamps_of_column
from mcis.datasets.storage.object_lists import list_objects

if TYPE_CHECKING:
    from tests.conftest import FaultyS3

Put = Callable[..., list[str]]


@pytest.fixture
def put(bucket: pafs.FileSystem) -> Put:
    """Returns a function that writes objects of some keys to the bucket and returns their URIs."""
    import boto3

    name = bucket.base_path.strip("/")
    client = boto3.session.Session().client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def write(*keys: str, content: bytes = b"abc") -> list[str]:
        for key in keys:
            client.put_object(Bucket=name, Key=key, Body=content)
        return [f"s3://{name}/{key}" for key in keys]

    return write


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Callable[[], collections.Counter[str]]:
    """Returns a function that returns the numbers of requests to the bucket's server since its last call, by kind."""
    caplog.set_level(logging.INFO, "werkzeug")

    def count() -> collections.Counter[str]:
        kinds: collections.Counter[str] = collections.Counter()
        for record in caplog.records:
            if record.name == "werkzeug":
                message = record.getMessage()
                kind = "LIST" if "list-type" in message else "HEAD" if "HEAD" in message else "other"
                kinds[kind] += 1
        caplog.clear()
        return kinds

    return count


def numbered(count: int, folder: str = "photos") -> list[str]:
    return [f"{folder}/{number:05d}.jpg" for number in range(count)]


def test_objects_are_listed_with_the_stamps_of_single_requests(put: Put, requests: Callable[[], Any]) -> None:
    keys = ["a b.jpg", "a%20b.jpg", "photos/é.jpg", "photos/日本.jpg", "photos/~.jpg", "photos/0", "x/y/z/../w.jpg"]
    uris = put(*numbered(40), *keys)
    empty = put("photos/empty.jpg", content=b"")
    absent = [uris[0] + suffix for suffix in ("0", "/a.jpg", "/")] + [uris[0].removesuffix("00000.jpg"), "absent"]
    put("photos/folder/a.jpg")
    all_uris = [*reversed(uris), *empty, *absent, uris[0], uris[0].replace("photos", "photos/folder")]
    expected = [stamp(uri) for uri in all_uris]
    assert expected.count(None) == len(absent) + 1
    requests()

    assert stamps(all_uris) == expected
    counted = requests()
    assert counted["LIST"] < 10
    assert counted["HEAD"] < 10


@pytest.mark.slow
def test_pages_hold_a_thousand_objects_and_few_wanted_objects_are_not_listed(
    put: Put, requests: Callable[[], Any]
) -> None:
    uris = put(*numbered(1100))
    requests()
    table = stamps_of_column(pa.chunked_array([uris[500:], uris[:500]]))
    assert set(table["size"].to_pylist()) == {3}
    assert requests() == {"LIST": 2}

    assert None not in stamps([*uris[:30], *uris[-30:]]), "the first page holds 30 of them"
    assert requests() == {"LIST": 2}
    assert None not in stamps(uris[::100]), "too few to list"
    assert requests() == {"HEAD": 11}
    assert None not in stamps([*uris[:10], *uris[-30:]]), "the first page holds too few of them"
    assert requests() == {"LIST": 1, "HEAD": 30}


@pytest.fixture
def files(faulty_s3: "FaultyS3", monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URIs of 40 objects of a server that cannot list objects."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{faulty_s3.port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"files-{faulty_s3.port}"
    paths = [f"/{bucket}/{number:02d}.jpg" for number in range(40)]
    faulty_s3.files |= dict.fromkeys(paths, b"abc")
    return [f"s3:/{path}" for path in paths]


@pytest.mark.parametrize("statuses", [[403], [404], [503] * 3])
def test_objects_whose_listing_fails_are_found_one_by_one(
    faulty_s3: "FaultyS3", files: list[str], statuses: list[int]
) -> None:
    folder = files[0].removeprefix("s3:/").rpartition("/")[0]
    faulty_s3.faults[folder] = statuses
    found = stamps([*files, f"{files[0]}0"])
    assert [file_stamp and file_stamp.size for file_stamp in found] == [3] * 40 + [None]
    assert not faulty_s3.faults[folder], "the listing was tried"
    assert all(faulty_s3.num_requests[uri.removeprefix("s3:/")] == 1 for uri in files)


@pytest.mark.parametrize(("variable", "value"), [("AWS_PROFILE", "absent"), ("AWS_ENDPOINT_URL", "127.0.0.1:9000")])
def test_without_a_client_nothing_is_listed(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert list_objects([f"s3://no-client-{variable}/{number:02d}.jpg" for number in range(40)]) == {}


def test_refused_access_to_an_object_is_reported(faulty_s3: "FaultyS3", files: list[str]) -> None:
    faulty_s3.faults[files[7].removeprefix("s3:/")] = [403]
    with pytest.raises(UserError, match=f"access to {files[7]} is refused"):
        stamps(files)
