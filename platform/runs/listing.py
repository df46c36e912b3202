"""What the configured image sources say they hold, before any image is opened."""

from pathlib import Path

from mcis.datasets.classes import VOC_CLASSES, read_classes
from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing, merge
from mcis.datasets.sources import lid, single_label, tagged, voc, web
from mcis.platform.config.resolve import sources_of
from mcis.platform.config.sections import Config, DataConfig


def _needed(path: Path | str | None, setting: str, what: str, option: str) -> Path:
    if path is None:
        raise UserError(f"setting {setting} without its images", what, f"add {option}")
    return Path(path)


def _list(source: str, data: DataConfig, setting: str, classes: tuple[str, ...]) -> Listing:
    if source == "voc":
        return voc.list_voc(
            _needed(data.voc, setting, "a VOC 2012 devkit", "--voc DIR (the folder VOC2012)"),
            classes=data.classes,
            train_list=data.train_list,
            val_list=data.val_list,
            test_list=data.test_list,
            saliency=data.saliency,
            masks=data.masks,
            sbd=data.sbd,
            tags_from=data.tags_from,
        )
    if source == "lid":
        c = data.lid
        root = _needed(c.root, setting, "the folder of the LID challenge", "--lid DIR")
        return lid.list_lid(
            root,
            train_list=root / c.train_list,
            val_list=root / c.val_list,
            test_list=root / c.test_list if c.test_list else None,
            classes=root / c.classes,
            masks=root / c.masks if c.masks else None,
            first_index=c.first_index,
        )
    if source == "tags":
        t = data.tags
        if t.table is None:
            raise UserError(f"setting {setting} without its table", "a table of images and tags", "add --tags FILE")
        return tagged.list_tagged(
            t.table,
            classes=data.classes,
            image_column=t.image,
            tags_column=t.tags,
            mask_column=t.mask,
            saliency_column=t.saliency,
            split_column=t.split,
            id_column=t.id,
            ignore_others=t.ignore_others,
        )
    if source == "single":
        return single_label.list_single_label(
            _needed(data.single.root, setting, "a folder of single-label images", "--single DIR"),
            classes,
            class_file=data.single.classes,
            list_file=data.single.subset,
            saliency=data.single.saliency,
        )
    root = _needed(data.web.root, setting, "a folder of <class>/<file>", "--web DIR")
    return web.list_web(root, classes, saliency=data.web.saliency)


def listing(config: Config) -> Listing:
    """What the configured sources say they hold.

    Raises:
        UserError: a source is not named, or its lists are in disorder.
    """
    parts: list[Listing] = []
    classes = read_classes(config.data.classes) if config.data.classes else VOC_CLASSES
    for source in sources_of(config.setting):
        parts.append(_list(source, config.data, config.setting, classes))
        classes = parts[0].classes
    return merge(*parts)
