"""Files by path and URI: what is read, what is refused, and stamps under bad names."""

from pathlib import Path

import pytest

from mcis.datasets.files import holds_credentials, is_remote, read_bytes, stamps, without_credentials


def test_a_path_and_a_file_uri_are_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "with space.bin"
    path.write_bytes(b"abc")
    uri = "file://" + str(path).replace(" ", "%20")
    assert read_bytes(str(path)) == read_bytes(uri) == b"abc"
    assert stamps([str(path), uri]) == [(3, path.stat().st_mtime_ns)] * 2
    assert (is_remote(uri), is_remote(str(path))) == (True, False)


def test_a_file_of_more_bytes_than_allowed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_bytes(str(path), most=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(str(path), most=4)


@pytest.mark.parametrize(
    ("uri", "holds", "without"),
    [
        ("s3://key:word@bucket/a/b.csv?region=x", True, "s3://bucket/a/b.csv"),
        ("s3://bucket/a.csv?secret_key=word", True, "s3://bucket/a.csv"),
        ("s3://bucket/a.csv?AWSAccessKeyId=a&access_key=word", True, "s3://bucket/a.csv"),
        ("hdfs://me@host:8020/a", False, "hdfs://host:8020/a"),
        ("s3://bucket/a:b@c.csv?region=x", False, "s3://bucket/a:b@c.csv"),
        ("s3://[bad:word@bucket", True, "s3://bucket"),
        ("/data/a:b@c?password=x", False, "/data/a:b@c?password=x"),
    ],
)
def test_credentials_in_a_uri_are_found_and_left_out(uri: str, holds: bool, without: str) -> None:
    assert (holds_credentials(uri), without_credentials(uri)) == (holds, without)


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///key.jpg", "s3://b ad/x.jpg", "nosuch://a/b.jpg", "abfs://x/y.jpg", "a\0b", "absent.jpg", "://"],
)
def test_a_bad_name_fails_alone(uri: str, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_bytes(b"x")
    first, second = stamps([uri, str(path)])
    assert first is None
    assert second is not None
    with pytest.raises((OSError, ValueError)):
        read_bytes(uri)
