"""Matches files that other programs or people wrote to the images that they are named after."""

import collections
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Generic, NamedTuple, TypeVar

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.sources.lists import map_paths, relative_name, without_image_suffix

IMPORTED_FILE = "imported"
"""Column of index rows: the file of another program's mask or prediction of the image."""
_T = TypeVar("_T")


def match_files(
    image_ids: Sequence[str], files: Mapping[str, _T], all_ids: Iterable[str] | None = None
) -> list[_T | None]:
    """Returns the file of each image, or None.

    A file has the name that `mcis export` gives it: the image's id without the suffix of an image file. It may also be
    named `<id>` or `<id>.jpg`, or after the image's file without its folders, if no other image has that name.

    Args:
        files: Files by their name: the path relative to their folder, without suffix.
        all_ids: Ids of all images that may have such a file, also in other splits. None: `image_ids`.
    """
    # Only names that a file may have are counted, because there may be millions of images.
    names_in_files = set(files)
    names_in_files.update(name.removesuffix(".jpg") for name in files)
    names_in_files.update(PurePosixPath(name).stem for name in files)
    images_by_stem: collections.Counter[str] = collections.Counter()
    images_by_short_path: collections.Counter[str] = collections.Counter()
    for path in map(_path_of, image_ids if all_ids is None else all_ids):
        short_path = without_image_suffix(str(path))
        if path.stem in names_in_files:
            images_by_stem[path.stem] += 1
        if short_path in names_in_files:
            images_by_short_path[short_path] += 1

    matched = []
    for path in map(_path_of, image_ids):
        names = [str(path), f"{path}.jpg"]
        short_path = without_image_suffix(str(path))
        if images_by_short_path[short_path] == 1:
            names += [short_path, f"{short_path}.jpg"]
        if images_by_stem[path.stem] == 1:
            names += [path.name, path.stem]
        matching = (files[name] for name in names if name in files)
        matched.append(next(matching, None))
    return matched


def _path_of(image_id: str) -> PurePosixPath:
    return PurePosixPath(unicodedata.normalize("NFC", relative_name(image_id) or ""))


class ImportedFiles(NamedTuple, Generic[_T]):
    """Files of another program, by the name of their image.

    Attributes:
        files: Files by their name: the path relative to their folder, without suffix.
        kind: What they are, for messages.
        folder: Their folder.
        key: Configuration key of the folder, for messages.
    """

    files: Mapping[str, _T]
    kind: str
    folder: Path
    key: str

    def check_any_matches(self, image_ids: Sequence[str], all_ids: Iterable[str] | None = None) -> None:
        """Raises UserError if no file belongs to any of the images. For `all_ids` see `match_files`."""
        if not any(match_files(image_ids, self.files, all_ids)):
            raise UserError(
                f"none of the {len(self.files)} {self.kind}s in {self.folder} belongs to one of the {len(image_ids)} "
                f"images: {join_shortened(list(self.files))}",
                f"files named after the images, such as {join_shortened(list(image_ids)[:3]) or 'none'}, by the whole "
                "id if another image has the same file name",
                f"rename the files, or correct {self.key}",
            )

    def match_all(self, image_ids: Sequence[str], all_ids: Iterable[str] | None = None) -> list[_T]:
        """Returns the file of each image. For `all_ids` see `match_files`.

        Raises:
            UserError: An image has none. Scores on the other images could not be compared with those of other runs.
        """
        matched = match_files(image_ids, self.files, all_ids)
        missing = [image_id for image_id, file in zip(image_ids, matched, strict=True) if file is None]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(image_ids)} images have no {self.kind} in {self.folder}: "
                f"{join_shortened(missing)}",
                f"a {self.kind} of every image, so that scores can be compared, named by the whole id if another image "
                "has the same file name",
                f"add the files, or correct {self.key}; or leave the images out of all compared runs: "
                "data.leave_out=FILE for training images, predict.split for predictions",
            )
        return [file for file in matched if file is not None]


def imported_masks(folder: Path, kind: str, key: str, suffixes: Sequence[str] = (".png",)) -> ImportedFiles[str]:
    """Finds the masks of another program: paths by the name of their image.

    Args:
        kind: What they are, for messages.
        key: Configuration key of the folder, for messages.
        suffixes: Suffixes of the files.

    Raises:
        UserError: The folder is missing or empty, or something in it would be left out.
    """
    files = map_paths(folder, kind, suffixes)
    if not files:
        names = " or ".join(suffixes)
        raise UserError(f"no {names} in {folder}", f"{kind}s, <image id>{names}", f"set {key} to their folder")
    return ImportedFiles(files, kind, folder, key)


def palette_note(kind: str, num_files: int, num_images: int) -> list[str]:
    """A note on masks whose labels are those of the colors of a palette with other indices, if any.

    Args:
        num_files: Number of these masks.
        num_images: Number of images with a mask.
    """
    if not num_files:
        return []
    return [
        f"{num_files} of {num_images} {kind}s are palette PNGs whose indices differ from the labels of their colors, "
        "which are used; the labels of other palettes are their indices"
    ]


def unused_note(kind: str, folder: Path, num_files: int, num_images: int) -> list[str]:
    """A note on files that belong to no image of the run, if any."""
    if num_files <= num_images:
        return []
    return [f"{num_files - num_images} of {num_files} {kind}s in {folder} belong to no image that needs one; not read"]
