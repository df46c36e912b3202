"""Writes photographs as JPEGs for other tools."""

import contextlib
import hashlib
from io import BytesIO
from pathlib import Path

from PIL import Image

from mcis.datasets.images.decode import is_upright_jpeg
from mcis.datasets.images.squares import read_rgb
from mcis.datasets.images.value_range import ValueRange
from mcis.datasets.storage.files import read_bytes
from mcis.datasets.storage.folders import atomic_write

_QUALITY = 95
"""Quality of JPEGs that are converted from other formats."""


def write_photograph(uri: str, content_hash: str, path: Path, value_range: ValueRange | None = None) -> None:
    """Writes an image as a JPEG that needs no rotation, because readers of masks ignore the EXIF orientation.

    The file is copied if it is such a JPEG; otherwise it is converted.

    Args:
        uri: Path or URI of the image.
        content_hash: SHA-256 of its content.
        path: File to write.
        value_range: See `read_rgb`.

    Raises:
        UserError: The image cannot be read or was changed.
    """
    content = _upright_content(uri, content_hash)
    if content is None:
        stream = BytesIO()
        image = Image.fromarray(read_rgb(uri, content_hash=content_hash, value_range=value_range))
        image.save(stream, "JPEG", quality=_QUALITY, subsampling=0)
        content = stream.getvalue()
    with atomic_write(path, durable=False) as temporary:
        temporary.write_bytes(content)


def _upright_content(uri: str, content_hash: str) -> bytes | None:
    """Content of an unchanged upright JPEG; None for any other file, whose errors `read_rgb` raises."""
    with contextlib.suppress(OSError, ValueError):
        content = read_bytes(uri)
        if is_upright_jpeg(content) and hashlib.sha256(content).hexdigest() == content_hash:
            return content
    return None
