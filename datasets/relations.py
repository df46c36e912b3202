"""Which images each localization map is made of (section 3.2), and in what rounds they are embedded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.draws import Order, permuted
from mcis.datasets.pairs import related_images
from mcis.datasets.tags import Members, Tags


@dataclass(frozen=True, kw_only=True, eq=False)
class Relations:
    """What the T maps are made of. Maps are counted image by image and tag by tag; images are positions in the rows."""

    start: NDArray[np.int64]
    """(N + 1,) where each image's maps begin."""
    image: NDArray[np.int64]
    """(T,) whose map it is."""
    tag: NDArray[np.int64]
    """(T,) its class."""
    related: NDArray[np.int64]
    """(T, R) related images."""
    others: NDArray[np.int64]
    """(O,) images with which contrastive activations are computed, map by map."""
    others_start: NDArray[np.int64]
    """(T + 1,) where each map's others begin."""
    bank: NDArray[np.int64]
    """(B,) images that evidence contrasts related ones with, ascending; none where there is no evidence."""

    def needs(self, classes: int) -> list[NDArray[np.int64]]:
        """The images whose features the maps of each class are made of, K arrays that ascend."""
        of_others = np.repeat(self.tag, np.diff(self.others_start))
        out = []
        for k in range(classes):
            mine = self.tag == k
            parts = self.image[mine], self.related[mine].reshape(-1), self.others[of_others == k]
            out.append(np.unique(np.concatenate((*parts, self.bank) if mine.any() else parts)))
        return out


def draw(
    tags: Tags,
    source: NDArray[np.bool_],
    *,
    seed: int,
    count: int,
    may_repeat: bool = False,
    domain: Literal["target", "source", "both"] = "both",
    contrastive: bool = False,
    bank: int = 0,
) -> Relations:
    """Draws the related images of all maps.

    Args:
        tags: of N images, each with at least one.
        source: (N,), image is of the domain source.
        count, may_repeat, domain: R and the rest, see `pairs.related_images`.
        contrastive: whether maps are contrasted with the related images of their images' other tags.
        bank: images that stand for all.
    """
    start, tag = tags.start.astype(np.int64), tags.values.astype(np.int64)
    image = np.repeat(np.arange(len(tags)), np.diff(start))
    related = related_images(
        Members.of(tags, source),
        image,
        tag,
        count,
        seed=seed,
        may_repeat=may_repeat,
        domain=domain,
        source=source[image],
    )
    others, others_start = np.zeros(0, np.int64), np.zeros(len(tag) + 1, np.int64)
    if contrastive:
        others, others_start = contrastive_images(tags, related)
    return Relations(
        start=start,
        image=image,
        tag=tag,
        related=related,
        others=others,
        others_start=others_start,
        bank=np.sort(permuted(Order.BANK, seed, 0, len(tags), np.arange(min(bank, len(tags))))),
    )


def contrastive_images(tags: Tags, related: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each map the related images of its image's other tags that lack its class: a pair shares one, not the other.

    Args:
        tags: of N images; their T tags are the maps.
        related: (T, R) positions.

    Returns:
        (O,) positions, map by map, and (T + 1,) where each map's begin.
    """
    start, tag = tags.start.astype(np.int64), tags.values.astype(np.int64)
    count = np.diff(start)
    fellows = np.repeat(count, count)  # (T,) tags of the map's image
    map_, first = np.repeat(np.arange(len(tag)), fellows), np.cumsum(fellows) - fellows
    fellow = np.repeat(np.repeat(start[:-1], count) - first, fellows) + np.arange(len(map_))
    found = related[fellow]
    have = np.sort(np.repeat(np.arange(len(tags)), count) * tags.classes + tag)
    asked = found * tags.classes + tag[map_][:, None]
    # Images of the map's own row have its class, so they drop out as well.
    lacks = have[np.minimum(np.searchsorted(have, asked), len(have) - 1)] != asked
    kept = np.bincount(np.repeat(map_, lacks.sum(axis=1)), minlength=len(tag))
    return found[lacks], np.concatenate([[0], np.cumsum(kept)])


def feature_rounds(needs: Sequence[NDArray[np.int64]], images: int) -> list[list[int]]:
    """Groups the classes into rounds, none of which needs the features of more than `images` images at a time.

    Memory as a function of images: a round keeps 2 C H W bytes (float16) of each image that any of its classes needs,
    1 MiB with VGG-16 at 256x256; in one round that is 10.3 GiB for VOC's 10,582 images and 341 GiB for LID's 349,319.
    Images that classes of a round have in common are kept and embedded once, those that rounds have in common once a
    round. So a round begins with the largest class that is left and goes on, while one fits, with the class that shares
    most images with it, among equals with the largest.

    Args:
        needs: of each class the positions of the images, (n_k,), none twice; a class without any is in no round.
        images: the bound.

    Raises:
        ValueError: a class alone needs more.
    """
    left = {k: len(need) for k, need in enumerate(needs) if len(need)}
    if left and max(left.values()) > images:
        raise ValueError(f"a class needs {max(left.values())} images, more than {images}")
    rounds: list[list[int]] = []
    while left:
        inside = np.zeros(1 + max(int(needs[k].max()) for k in left), bool)
        rounds.append([])
        while left:
            shared = {k: int(inside[needs[k]].sum()) for k in left}
            room = images - int(inside.sum())
            fit = [k for k in left if left[k] - shared[k] <= room]
            if not fit:
                break
            k = max(fit, key=lambda k: (shared[k], left[k], -k))
            inside[needs[k]] = True
            rounds[-1].append(k)
            del left[k]
    return [sorted(classes) for classes in rounds]
