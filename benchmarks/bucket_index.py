"""Requests to an S3 server for the index of images in a bucket.

The server is moto, in this process. The stage `index` runs twice in one workspace. Opening an image takes two requests,
which are not counted. As a control, the stamps of the same objects are read by a request for each: a query in a URI
keeps mcis from listing.
"""

import collections
import concurrent.futures
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from moto.server import ThreadedMotoServer
from PIL import Image

from mcis.datasets.storage.files import stamps_of_column
from mcis.platform import pipeline
from mcis.platform.config.resolve import resolve
from mcis.platform.engine.runtime import ray_session
from mcis.platform.runs.workspace import Workspace

BUCKET = "photographs"
FOLDERS = 4
TARGET_LISTED = 0.01
TARGET_ONE_BY_ONE = 100


class CountedRequests(logging.Handler):
    """Counts the requests to the server by kind, from its log: LIST, or the HTTP method."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a line of the log."""
        line = record.getMessage()
        methods = [method for method in ("HEAD", "GET", "PUT", "POST") if f"{method} /" in line]
        kind = "LIST" if "list-type=2" in line else methods[0] if methods else "other"
        self.counts[kind] += 1

    def take(self) -> collections.Counter[str]:
        """Returns the counts since the last call."""
        counts = self.counts
        self.counts = collections.Counter()
        return counts


def start_server() -> CountedRequests:
    """Starts an S3 server, and names it in the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": f"http://{host}:{port}"}

    requests = CountedRequests()
    log = logging.getLogger("werkzeug")
    log.setLevel(logging.INFO)
    log.handlers = [requests]
    log.propagate = False
    return requests


def put_images(count: int) -> list[str]:
    """Writes images to a bucket and returns their URIs."""
    client = boto3.session.Session().client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.create_bucket(Bucket=BUCKET)

    def put(image: tuple[str, bytes]) -> str:
        key, content = image
        client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(put, _images(count)))


def _images(count: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        yield f"images/{number % FOLDERS}/{number:06d}.jpg", stream.getvalue()


def index(table: Path, workspace: Path) -> None:
    """Runs the stage `index`."""
    resolved = resolve("tags", "paper", {"data.tags.table": str(table)})
    pipeline.run(resolved, Workspace(workspace), "index", until="index")


def show(label: str, counts: collections.Counter[str]) -> None:
    """Prints the requests of a step."""
    print(f"{label:28}", ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none")


def main() -> None:
    """Counts the requests of the first index, of an index without changes, and of single requests."""
    options = harness.option_parser(__doc__, images=20000).parse_args()
    requests = start_server()
    uris = put_images(options.images)
    requests.take()

    one_by_one = stamps_of_column(pa.chunked_array([[f"{uri}?region=us-east-1" for uri in uris]]))
    single = requests.take()
    show("stamps, one by one", single)
    listed = stamps_of_column(pa.chunked_array([uris]))
    lists = requests.take()
    show("stamps, listed", lists)
    if not listed.equals(one_by_one):
        raise SystemExit("the stamps differ")

    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / "tags.parquet"
        tags = [[f"class {number % 4}"] for number in range(len(uris))]
        pq.write_table(pa.table({"image": uris, "tags": tags}), table)
        with ray_session(resolve("tags", "paper", {"data.tags.table": str(table)}).config.compute):
            index(table, Path(name) / "workspace")
            first = requests.take()
            show("first index", first)
            index(table, Path(name) / "workspace")
            again = requests.take()
            show("index without changes", again)

    finding = first.total() - 2 * options.images
    print(f"{options.images} objects in {FOLDERS} folders")
    ratio = single.total() / lists.total()
    print(
        f"ratio {ratio:.0f} target {TARGET_ONE_BY_ONE}: requests for stamps in a bucket one by one, relative to listing"
    )
    first_share = finding / options.images
    print(
        f"ratio {first_share:.4f} target at most {TARGET_LISTED}: requests per image of a bucket to find and check it"
    )
    second_share = again.total() / options.images
    print(f"ratio {second_share:.4f} target at most {TARGET_LISTED}: requests per image of a bucket if nothing changed")


if __name__ == "__main__":
    main()
