"""Where the images of an index come from: licenses and addresses, as far as a source states them."""

import collections
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.errors import one_line
from mcis.datasets.index import PROVENANCE_SCHEMA
from mcis.datasets.storage.folders import path_exists
from mcis.platform.runs.files import read_table, write_table

NOT_STATED = "not stated"
"""License of an image that has an address alone."""
_FILE = "provenance.parquet"
_MAX_SITES = 3
"""Maximum number of sites that are named for a license."""


class LicenseCount(NamedTuple):
    """The images with a license.

    Attributes:
        license: Name of the license, or NOT_STATED.
        images: Number of images.
        sites: Hosts of most of their addresses, the most frequent first.
    """

    license: str
    images: int
    sites: list[str]


def write_provenance(folder: Path, provenance: pa.Table, ids: pa.ChunkedArray) -> pa.Table:
    """Writes the provenance of the images of an index next to it.

    Args:
        folder: Output of the stage `index`.
        provenance: PROVENANCE_SCHEMA.
        ids: Ids of the images of the index; the others are left out.

    Returns:
        The rows that were written.
    """
    rows = provenance.filter(pc.is_in(provenance["image_id"], ids.combine_chunks()))
    write_table(folder / _FILE, rows)
    return rows


def read_provenance(folder: Path) -> pa.Table:
    """Reads what `write_provenance` wrote; without rows if no source states where its images come from."""
    path = folder / _FILE
    return read_table(path) if path_exists(path) else PROVENANCE_SCHEMA.empty_table()


def license_counts(provenance: pa.Table) -> list[LicenseCount]:
    """Counts images by license, the most frequent first.

    Args:
        provenance: PROVENANCE_SCHEMA.
    """
    sites: dict[str, collections.Counter[str]] = {}
    images: collections.Counter[str] = collections.Counter()
    for row in provenance.to_pylist():
        license = one_line(row["license"] or NOT_STATED)
        images[license] += 1
        site = _host(row["url"]) if row["url"] else ""
        sites.setdefault(license, collections.Counter()).update([site] if site else [])
    counts = []
    for license, count in images.most_common():
        counts.append(LicenseCount(license, count, [site for site, _ in sites[license].most_common(_MAX_SITES)]))
    return counts


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # an invalid address
        return ""
