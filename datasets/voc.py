"""PASCAL VOC 2012 devkit -> listing: images and tags from its lists, the paths of masks and saliency maps."""

from pathlib import Path

import pyarrow as pa

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import LISTING_SCHEMA, Listing, shown


def _folder(path: Path, what: str, remedy: str) -> Path:
    if not path.is_dir():
        raise UserError(f"no folder {path}", what, remedy)
    return path


def _read_list(path: Path, remedy: str) -> list[tuple[int, list[str]]]:
    """The lines that are not blank, each with its number from 1 and cut into words."""
    if not path.is_file():
        raise UserError(f"no list {path}", "a text file with one image id a line", remedy)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}", "a UTF-8 text file with one image id a line", remedy
        ) from None
    return [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.split()]


def _ids(path: Path, remedy: str) -> list[str]:
    lines = _read_list(path, remedy)
    for number, words in lines:
        if len(words) > 1:
            raise UserError(
                f"{path}, line {number}: {shown(words)}", "one image id a line", "leave the id alone on its line"
            )
    return [words[0] for _, words in lines]


def _tags(path: Path, classes: tuple[str, ...]) -> dict[str, list[int]]:
    remedy = f"write lines '<id> <class index> ...' with indices 0..{len(classes) - 1} into {path.name}"
    known = {str(index): index for index in range(len(classes))}
    tags: dict[str, list[int]] = {}
    for number, (image_id, *indices) in _read_list(path, remedy):
        unknown = [text for text in indices if text not in known]
        if unknown:
            raise UserError(
                f"{path}, line {number}: class index {shown(unknown)} of image {image_id}",
                f"indices 0..{len(classes) - 1} of the {len(classes)} classes",
                "mend the list, or name the right class file with data.classes",
            )
        if image_id in tags:
            raise UserError(f"{path}, line {number}: {image_id} a second time", "one line an image", "merge the lines")
        tags[image_id] = sorted({known[text] for text in indices})
    return tags


def list_voc(
    root: Path,
    *,
    classes: Path | None = None,
    train_list: str = "train_aug",
    val_list: str = "val",
    saliency: str = "SaliencyMaps",
    masks: str = "SegmentationClassAug",
) -> Listing:
    """Reads the lists of a devkit folder; no image is opened.

    Args:
        root: the folder VOC2012 with JPEGImages and ImageSets/Segmentation.
        classes: file with one class name a line; None = VOC's 20 names.
        train_list, val_list: list names; <name>.txt holds ids, <name>_cls.txt `<id> <class index from 0> ...`.
        saliency, masks: folders with <id>.png, inside root or absolute. Each may be absent as a whole; where the
            saliency folder is there, it has a map for every training image.

    Raises:
        UserError: a folder or list is missing, empty or contradictory, a class index is unknown, a listed image or a
            single saliency map is absent, a class has no training image.
    """
    root = root.expanduser().resolve()
    names = read_classes(classes) if classes else VOC_CLASSES
    images = _folder(root / "JPEGImages", "the images of a VOC 2012 devkit", "point --voc at the folder VOC2012")
    lists = root / "ImageSets" / "Segmentation"
    _folder(lists, "the lists of a VOC 2012 devkit", "point --voc at the folder VOC2012")
    mask_folder, saliency_folder = root / masks, root / saliency
    notes: list[str] = []
    if not mask_folder.is_dir():
        notes.append(f"no folder of ground-truth masks {mask_folder.name}: nothing is scored")
    rows: list[dict[str, object]] = []
    seen: dict[str, str] = {}
    for split, list_name in (("train", train_list), ("val", val_list)):
        path = lists / f"{list_name}.txt"
        ids = _ids(path, f"add it or set data.{split}_list")
        if not ids:
            raise UserError(f"{path} lists no image", "at least one image id", f"set data.{split}_list to another list")
        tags = _tags(lists / f"{list_name}_cls.txt", names)
        untagged = [i for i in ids if i not in tags]
        if untagged:
            raise UserError(
                f"{list_name}_cls.txt has no line for {shown(untagged)}",
                f"a line for each of the {len(ids)} images of {path.name}",
                "add the missing lines; an image without any class gets a line with its id alone",
            )
        present = {p.name for p in images.iterdir()}
        absent = [i for i in ids if f"{i}.jpg" not in present]
        if absent:
            raise UserError(
                f"{path.name} names {len(absent)} image(s) that are not in {images}: {shown(absent)}",
                f"<id>.jpg for each of the {len(ids)} ids",
                "add the images or take their ids off the list",
            )
        for image_id in ids:
            if image_id in seen:
                where = f"twice in {path}" if seen[image_id] == path.name else f"in {path} and in {seen[image_id]}"
                raise UserError(
                    f"image {image_id} is listed {where}", "each image once, in one split", "delete one of the lines"
                )
            seen[image_id] = path.name
        salient = {p.name for p in saliency_folder.iterdir()} if saliency_folder.is_dir() else set()
        if split == "train" and saliency_folder.is_dir():
            without = [i for i in ids if f"{i}.png" not in salient]
            if without:
                raise UserError(
                    f"no saliency map in {saliency_folder} for {len(without)} of {len(ids)} training images: "
                    f"{shown(without)}",
                    "<id>.png for each of them",
                    "add the maps, or point data.saliency at an absent folder and set pseudo_masks.background=crf",
                )
        for image_id in ids:
            rows.append(
                {
                    "image_id": image_id,
                    "uri": str(images / f"{image_id}.jpg"),
                    "domain": "target",
                    "split": split,
                    "tags": tags[image_id],
                    "mask_uri": str(mask_folder / f"{image_id}.png") if mask_folder.is_dir() else None,
                    "saliency_uri": str(saliency_folder / f"{image_id}.png") if f"{image_id}.png" in salient else None,
                }
            )
    table = pa.Table.from_pylist(rows, schema=LISTING_SCHEMA)
    _check_classes(table, names, train_list)
    return Listing(table, names, tuple(notes))


def _check_classes(table: pa.Table, names: tuple[str, ...], train_list: str) -> None:
    tagged = {
        tag
        for tags, split in zip(table["tags"].to_pylist(), table["split"].to_pylist(), strict=True)
        if split == "train"
        for tag in tags
    }
    empty = [name for index, name in enumerate(names) if index not in tagged]
    if empty:
        raise UserError(
            f"no training image of class {shown(empty)} in {train_list}.txt",
            "at least one tagged image for each class",
            "add images, or take the class out of the class file (data.classes)",
        )
