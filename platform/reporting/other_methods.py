"""Masks that other methods predicted, shown next to the predictions of compared runs (Fig. 3)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mcis.datasets.errors import UserError, join_shortened
from mcis.datasets.sources.lists import map_paths
from mcis.platform.outputs.imported_files import match_files


class OtherMethod(NamedTuple):
    """A method whose masks are files.

    Attributes:
        name: Name on the page.
        folder: Its label masks, `<id>.png`.
    """

    name: str
    folder: Path


class MethodMasks(NamedTuple):
    """The masks of a method for the images that all compared runs predict.

    Attributes:
        method: The method.
        files: Its masks by image id.
        missing: Ids of the images without a mask.
        unused: Names of its files that belong to no such image, without suffix.
    """

    method: OtherMethod
    files: dict[str, Path]
    missing: list[str]
    unused: list[str]

    def remarks(self) -> list[str]:
        """Which images have no mask, and which masks belong to no image."""
        remarks = []
        if self.missing:
            total = len(self.files) + len(self.missing)
            remarks.append(
                f"{self.method.name} has no mask of {len(self.missing)} of {total} images: "
                f"{join_shortened(self.missing)}"
            )
        if self.unused:
            remarks.append(
                f"{len(self.unused)} masks of {self.method.name} belong to no predicted image: "
                f"{join_shortened(self.unused)}"
            )
        return remarks


def parse_methods(arguments: Sequence[str], run_labels: Sequence[str]) -> list[OtherMethod]:
    """Parses values NAME=FOLDER of the option `--with`.

    Args:
        arguments: The values.
        run_labels: Labels of the compared runs, which differ from the names of methods.

    Raises:
        UserError: A value has no name, its folder does not exist, or two columns would have the same name.
    """
    methods: list[OtherMethod] = []
    for argument in arguments:
        name, _, folder = argument.partition("=")
        path = Path(folder).expanduser()
        if not name.strip() or not folder or not path.is_dir():
            raise UserError(
                f"--with {argument}",
                "NAME=FOLDER, where the folder holds label masks <id>.png",
                "correct the name or the folder, for example --with PSA=results/psa",
            )
        methods.append(OtherMethod(name.strip(), path))

    names = [*run_labels, *(method.name for method in methods)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(
            f"--with: {repeated[0]} is given twice", "a different name for each column", "rename the method"
        )
    return methods


def find_masks(method: OtherMethod, image_ids: Sequence[str], all_ids: Iterable[str] | None = None) -> MethodMasks:
    """Finds the masks of a method. They are named as `match_files` says.

    Args:
        method: The method.
        image_ids: The images that all compared runs predict.
        all_ids: Ids of all images, see `match_files`.

    Raises:
        UserError: The folder has no mask of any of them, or something in it would be left out (`map_paths`).
    """
    masks = map_paths(method.folder, "mask")
    files = {}
    missing = []
    for image_id, file in zip(image_ids, match_files(image_ids, masks, all_ids), strict=True):
        if file is None:
            missing.append(image_id)
        else:
            files[image_id] = Path(file)

    if not files:
        raise UserError(
            f"{method.folder} has no mask of an image that all runs predict; it has "
            f"{join_shortened(list(masks)) or 'no PNG'}",
            f"label masks <id>.png, named after images such as {join_shortened(list(image_ids)[:3])}, by the whole id "
            "if another image has the same file name",
            f"rename the masks, or correct the folder of --with {method.name}=FOLDER",
        )
    used = set(files.values())
    unused = [name for name, file in masks.items() if Path(file) not in used]
    return MethodMasks(method, files, missing, unused)
