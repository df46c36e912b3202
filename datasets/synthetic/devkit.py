"""Writes a small VOC devkit of synthetic scenes, with tags, masks for scoring and saliency maps.

See `scenes` for the design of the pictures.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mcis.datasets.images.label_masks import encode_labels
from mcis.datasets.synthetic.scenes import SPLITS, Scene, draw_scene
from mcis.datasets.synthetic.silhouettes import DRAWN_CLASSES


def draw(root: Path, *, train: int = 480, val: int = 120, size: int = 96, classes: int = 8, seed: int = 0) -> None:
    """Draws the data set into `root`, in the layout of a VOC devkit.

        JPEGImages/<id>.jpg             RGB; the long side has `size` pixels, the short side `size` or 3/4 of it
        SegmentationClassAug/<id>.png   palette PNG: 0 background, k + 1 for class index k, 255 on a thin border
        SaliencyMaps/<id>.png           gray, only for train_aug: soft, class-agnostic, with errors
        ImageSets/Segmentation/{train_aug,val}.txt       <id> per line
        ImageSets/Segmentation/{train_aug,val}_cls.txt   <id> <class index> ... per line
        classes.txt                     a name per line

    Each image is a function of (seed, split, number in the split, size, classes), so a larger split begins with the
    smaller one. A split of at least `classes` images contains every class. The folder is written atomically. A folder
    with content is left unchanged.

    Args:
        root: Folder to create.
        train: Number of images in the split train_aug.
        val: Number of images in the split val.
        size: Long side of the images, at least 48 pixels.
        classes: Number of classes, 2 to 8.
        seed: Seed of all random numbers.
    """
    if root.exists() and any(root.iterdir()):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as temporary:
        folder = Path(temporary) / "drawn"  # a subfolder, because the temporary folder itself is private to this user
        folder.mkdir()

        for split, number in zip(SPLITS, (train, val), strict=True):
            scenes = (draw_scene(seed, split, index, size=size, classes=classes) for index in range(number))
            _write_split(folder, split, scenes)
        (folder / "classes.txt").write_text("".join(f"{drawn.name}\n" for drawn in DRAWN_CLASSES[:classes]))

        try:
            folder.rename(root)
        except OSError:
            if not root.is_dir():  # another process may have created it
                raise


def _write_split(folder: Path, split: str, scenes: Iterable[Scene]) -> None:
    images = folder / "JPEGImages"
    masks = folder / "SegmentationClassAug"
    saliency = folder / "SaliencyMaps"
    lists = folder / "ImageSets/Segmentation"
    for subfolder in (images, masks, saliency, lists):
        subfolder.mkdir(parents=True, exist_ok=True)

    ids = []
    lines = []
    for index, scene in enumerate(scenes):
        image_id = f"{split.removesuffix('_aug')}_{index:06d}"
        # No chroma subsampling: at this size it would blur the checkers.
        Image.fromarray(scene.rgb).save(images / f"{image_id}.jpg", quality=92, subsampling=0)
        (masks / f"{image_id}.png").write_bytes(encode_labels(scene.labels))
        if split == "train_aug":
            Image.fromarray(scene.saliency).save(saliency / f"{image_id}.png")
        ids.append(image_id)
        lines.append(" ".join([image_id, *map(str, scene.tags)]))

    (lists / f"{split}.txt").write_text("\n".join(ids) + "\n")
    (lists / f"{split}_cls.txt").write_text("\n".join(lines) + "\n")
