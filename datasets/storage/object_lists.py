"""Lists objects of S3 buckets: one request returns the sizes and times of a thousand objects.

Listing only saves requests. Objects that it does not return are unknown, and the caller asks for each of them, so
errors and missing objects are found in one place (`storage.files.stamp`).
"""

import bisect
import collections
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mcis.datasets.storage.faults import call_remote
from mcis.datasets.storage.threads import map_in_threads

_OBJECT_URI = re.compile(
    r"s3://(?P<bucket>[^/?@:\s]+)/"
    r"(?P<key>(?!\.{0,2}/)[^/?\t\r\n]+"  # the first name of the key
    r"(/(?!\.{0,2}(/|$))[^/?\t\r\n]+)*)"  # further names
)
"""Matches URIs of objects of S3 without credentials, query, empty folder names, `.` and `..`."""
_PAGE = 1000
"""Maximum number of objects that S3 returns to one request."""
_MIN_WANTED = 20
"""Minimum number of wanted objects per listed page. Below, requests for single objects take less time."""
_PART = 4 * _PAGE
"""Number of wanted objects that a thread lists one page after the other."""
_PARALLEL = 32


class Stamp(NamedTuple):
    """Size in bytes and modification time in nanoseconds, which identify a version of a file."""

    size: int
    changed: int


class _Part(NamedTuple):
    """Wanted objects of one bucket: their keys in ascending order."""

    bucket: str
    keys: Sequence[str]


def list_objects(uris: Iterable[str]) -> dict[str, Stamp]:
    """Returns the stamps of objects of S3 by URI, as far as listing takes fewer requests than one for each.

    Other URIs, objects that do not exist, empty objects and objects whose listing fails are left out. URIs with a query
    are left out too, because they may name another server.
    """
    found = {}
    for part_stamps in map_in_threads(_list_part, _parts(uris), threads=_PARALLEL):
        found.update(part_stamps)
    return found


def _parts(uris: Iterable[str]) -> Iterator[_Part]:
    """Yields the objects that can be listed, in parts of at most `_PART` objects of one bucket."""
    keys_by_bucket: dict[str, set[str]] = collections.defaultdict(set)
    for uri in uris:
        match = _OBJECT_URI.fullmatch(uri) if uri.startswith("s3://") else None
        if match:
            keys_by_bucket[match["bucket"]].add(match["key"])

    for bucket, keys in keys_by_bucket.items():
        ascending = sorted(keys)  # code points sort as S3's UTF-8
        for first in range(0, len(ascending), _PART):
            yield _Part(bucket, ascending[first : first + _PART])


def _list_part(part: _Part) -> dict[str, Stamp]:
    """Lists pages of a bucket that hold wanted objects, and skips the objects between them.

    It stops at the first page with few wanted objects, and at the first error.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    wanted = set(part.keys)
    found = {}
    position = 0
    while len(part.keys) - position >= _MIN_WANTED:
        start = _just_before(part.keys[position])
        try:
            request = functools.partial(_client(part.bucket).list_objects_v2, Bucket=part.bucket, StartAfter=start)
            page = call_remote(request)
        except (BotoCoreError, ClientError, OSError, ValueError):  # ValueError: an endpoint that is no URL
            break

        objects = page.get("Contents", [])
        for item in objects:
            if item["Key"] in wanted and item["Size"]:
                # Requests for single objects return whole seconds; some servers list fractions.
                seconds = int(item["LastModified"].timestamp())
                found[f"s3://{part.bucket}/{item['Key']}"] = Stamp(item["Size"], seconds * 10**9)
        is_last_page = not objects or not page["IsTruncated"]
        if is_last_page:
            break
        next_position = bisect.bisect_right(part.keys, objects[-1]["Key"])
        if next_position - position < _MIN_WANTED:
            break
        position = next_position
    return found


def _just_before(key: str) -> str:
    """Returns a text that sorts before a key, and after almost all texts that sort before it."""
    previous = ord(key[-1]) - 1
    if 0xD800 <= previous <= 0xDFFF:  # surrogates have no UTF-8
        previous = 0xD7FF
    return f"{key[:-1]}{chr(previous)}~"


@functools.lru_cache(maxsize=64)
def _client(bucket: str) -> Any:
    """Returns a client for the server that pyarrow uses: that of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, or AWS.

    It makes few attempts, because single requests follow, which are repeated.
    """
    import boto3
    from botocore.config import Config

    server = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=3,
        read_timeout=10,
        retries={"total_max_attempts": 3, "mode": "standard"},
        max_pool_connections=_PARALLEL,
        ignore_configured_endpoint_urls=True,
        s3={"addressing_style": "path" if server else "auto"},
    )
    return boto3.session.Session().client("s3", endpoint_url=server, config=config)
