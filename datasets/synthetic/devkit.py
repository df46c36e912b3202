"""The embedded data set: seed -> a small VOC devkit of drawn scenes, with tags, masks for scoring and saliency maps.

`scenes` describes what the pictures show, and why.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mcis.datasets.images.decode import encode_labels
from mcis.datasets.synthetic.scenes import SPLITS, Scene, draw_scene
from mcis.datasets.synthetic.silhouettes import DRAWN_CLASSES


def draw(root: Path, *, train: int = 480, val: int = 120, size: int = 96, classes: int = 8, seed: int = 0) -> None:
    """Draws the data set into `root`, in the layout of a VOC devkit.

        JPEGImages/<id>.jpg             RGB; the long side has `size` pixels, the short one as many or 3/4 of that
        SegmentationClassAug/<id>.png   palette PNG: 0 background, k + 1 for class index k, 255 on a thin border
        SaliencyMaps/<id>.png           gray, of train_aug only: soft, class-agnostic, with errors
        ImageSets/Segmentation/{train_aug,val}.txt       <id> per line
        ImageSets/Segmentation/{train_aug,val}_cls.txt   <id> <class index> ... per line
        classes.txt                     a name per line

    Each image follows from (seed, split, its number in the split, size, classes), so a longer list begins with the
    shorter. A split of at least `classes` images holds every class. The folder appears complete; a present one stays.
    """
    if root.exists() and any(root.iterdir()):
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-") as aside:
        folder = Path(aside) / "drawn"  # the temporary directory itself is closed to other users, and would stay so
        folder.mkdir()
        for split, number in zip(SPLITS, (train, val), strict=True):
            scenes = (draw_scene(seed, split, index, size=size, classes=classes) for index in range(number))
            _write_split(folder, split, scenes)
        (folder / "classes.txt").write_text("".join(f"{drawn.name}\n" for drawn in DRAWN_CLASSES[:classes]))
        try:
            folder.rename(root)
        except OSError:
            if not root.is_dir():  # another process may have been faster
                raise


def _write_split(folder: Path, split: str, scenes: Iterable[Scene]) -> None:
    names = ("JPEGImages", "SegmentationClassAug", "SaliencyMaps", "ImageSets/Segmentation")
    images, masks, saliency, lists = (folder / name for name in names)
    for subfolder in (images, masks, saliency, lists):
        subfolder.mkdir(parents=True, exist_ok=True)
    ids, tagged = [], []
    for index, scene in enumerate(scenes):
        image_id = f"{split.removesuffix('_aug')}_{index:06d}"
        # Without chroma subsampling: at this size it would wash out the checkers.
        Image.fromarray(scene.rgb).save(images / f"{image_id}.jpg", quality=92, subsampling=0)
        (masks / f"{image_id}.png").write_bytes(encode_labels(scene.labels))
        if split == "train_aug":
            Image.fromarray(scene.saliency).save(saliency / f"{image_id}.png")
        ids.append(image_id)
        tagged.append(" ".join([image_id, *map(str, scene.tags)]))
    (lists / f"{split}.txt").write_text("\n".join(ids) + "\n")
    (lists / f"{split}_cls.txt").write_text("\n".join(tagged) + "\n")
