"""Which images each localization map is made of (section 3.2), and the table of rules for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.registry import Registry
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.tags import ClassMembers, Tags

_MAPS_AT_ONCE, _COMBINED_AT_ONCE = 2**18, 2**13
"""Maps for which numbers are drawn, and images whose maps are combined with one another, at a time."""
_STEPS = 2**11
"""Steps of the parts of a vector of unit length: the product of two such vectors is exact in float32 whatever the order
of the sum, so equal vectors have equal neighbors on every machine."""
_BLOCK = 2**22  # entries of a block of products, 32 MiB in float64


@dataclass(frozen=True, kw_only=True, eq=False)
class Relations:
    """What T maps of N images are made of.

    Maps are numbered image by image and tag by tag; images are positions in the table of the N images.
    """

    start: NDArray[np.int64]
    """(N + 1,) where each image's maps begin."""
    image: NDArray[np.int64]
    """(T,) the image whose map it is."""
    tag: NDArray[np.int64]
    """(T,) the class of the map."""
    related: NDArray[np.int64]
    """(T, R) related images; (T, 1) where each image is related to itself."""
    contrastive: NDArray[np.int64]
    """(O,) images with which contrastive activations are computed, map by map (`_contrastive_images`)."""
    contrastive_start: NDArray[np.int64]
    """(T + 1,) where the `contrastive` images of each map begin."""

    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the related images' maps of each map's class, (T, R); -1 of an image without that class."""
        classes = int(self.tag.max(initial=0)) + 1
        have, wanted = self.image * classes + self.tag, self.related * classes + self.tag[:, None]
        order = np.argsort(have, kind="stable")
        found = order[np.searchsorted(have, wanted, sorter=order).clip(max=len(have) - 1)]
        return np.where(have[found] == wanted, found, -1)


class RelatedImagesQuery(NamedTuple):
    """What a rule for related images is given: N images, their T maps, and the configuration's values.

    Attributes:
        tags: of N images, each with at least one.
        source: (N,), which images are of the domain source.
        image, tag: of each map, (T,).
        related: R.
        seed: of all draws.
        may_repeat: draws with repetition, and the image itself may be drawn (RELEASED_RECIPE, "Localization maps").
        vectors: of all images, (N, C), see `rounded_unit_vectors`; None for rules that ask for none.
    """

    tags: Tags
    source: NDArray[np.bool_]
    image: NDArray[np.int64]
    tag: NDArray[np.int64]
    related: int
    seed: int
    may_repeat: bool = False
    vectors: NDArray[np.float32] | None = None


def draw_related_images(
    tags: Tags,
    source: NDArray[np.bool_],
    *,
    seed: int,
    related: int,
    related_by: str = "class",
    related_may_repeat: bool = False,
    contrastive: bool = False,
    vectors: NDArray[np.float32] | None = None,
) -> Relations:
    """Draws the images that the maps of all tags are made of.

    Args:
        tags, source, seed, related, related_may_repeat, vectors: as in `RelatedImagesQuery`.
        related_by: a rule of `RELATED_IMAGE_RULES`.
        contrastive: whether maps are contrasted with the related images of their images' other tags.
    """
    start, tag = tags.start.astype(np.int64), tags.values.astype(np.int64)
    image = np.repeat(np.arange(len(tags)), np.diff(start))
    drawn = RELATED_IMAGE_RULES[related_by].draw(
        RelatedImagesQuery(tags, source, image, tag, related, seed, related_may_repeat, vectors)
    )
    others, contrastive_start = np.zeros(0, np.int64), np.zeros(len(tag) + 1, np.int64)
    if contrastive:
        others, contrastive_start = _contrastive_images(tags, drawn)
    return Relations(
        start=start, image=image, tag=tag, related=drawn, contrastive=others, contrastive_start=contrastive_start
    )


@dataclass(frozen=True, kw_only=True)
class RelatedImageRule:
    """A rule for which images a map is related to, an entry of `RELATED_IMAGE_RULES`.

    Attributes:
        draw: Asked -> (T, R) positions of images; the first r of a row are those for R = r.
        description_suffix: what scores add to the name of the method.
        needs_vectors: whether it asks for vectors of the images.
        is_control: whether it draws no images of the class, so that contrastive images mean nothing.
        repetition_note: which classes make rows repeat, in words.
    """

    draw: Callable[[RelatedImagesQuery], NDArray[np.int64]]
    description_suffix: str = ""
    needs_vectors: bool = False
    is_control: bool = False
    repetition_note: str = (
        "of classes with too few images repeat related images; a class's only image is related to itself"
    )


def _of_class(asked: RelatedImagesQuery) -> NDArray[np.int64]:
    """R related images of each map's class (section 3.2), drawn from (seed, image, class).

    The image itself is not among them and none comes twice while the class has enough; then the row repeats. The only
    image of a class is related to itself. The cost does not depend on the sizes of the classes.
    """
    members = ClassMembers.from_tags(asked.tags, asked.source)
    related = np.empty((len(asked.tag), asked.related), np.int64)
    for first in range(0, len(related), _MAPS_AT_ONCE):
        part = slice(first, first + _MAPS_AT_ONCE)
        image, tag = asked.image[part], asked.tag[part]
        low, high = members.ranges(tag)
        draws = uniforms(DrawPurpose.RELATED_IMAGES, asked.seed, tag, image, count=asked.related)
        if asked.may_repeat:
            related[part] = members.images[low[:, None] + (draws * (high - low)[:, None]).astype(np.int64)]
        else:
            drawn = members.images[low[:, None] + _choices(draws, high - low - 1)]
            # As for partners, the last member, which was left out, stands in for the image itself.
            related[part] = np.where(drawn == image[:, None], members.images[high - 1][:, None], drawn)
    return related


def _itself(asked: RelatedImagesQuery) -> NDArray[np.int64]:
    """Each image alone, once, whatever R."""
    return asked.image[:, None][:, : asked.related]


def _of_wrong_class(asked: RelatedImagesQuery) -> NDArray[np.int64]:
    """R images that lack each map's class, drawn from (seed, image, class): a control of related images.

    None comes twice while there are enough; then the row repeats. Where every image has the class, images of the class.
    """
    members, related = ClassMembers.from_tags(asked.tags), _of_class(asked)
    for k in np.unique(asked.tag):
        maps, (begin, end) = np.flatnonzero(asked.tag == k), members.start[k : k + 2]
        lacking = np.delete(np.arange(len(asked.tags)), members.images[begin:end])
        draws = uniforms(DrawPurpose.WRONG_CLASS, asked.seed, asked.tag[maps], asked.image[maps], count=asked.related)
        size = np.full(len(maps), len(lacking))
        choice = (draws * len(lacking)).astype(np.int64) if asked.may_repeat else _choices(draws, size)
        related[maps] = lacking[choice] if len(lacking) else related[maps]
    return related


def _choices(draws: NDArray[np.float64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """R of 0 .. size - 1 for each of B rows, none twice while there are enough; then the row repeats.

    Args:
        draws: in [0, 1), (B, R).
        size: (B,); where it is 0 or less, so is each choice.

    Returns:
        (B, R).
    """
    choice = np.empty(draws.shape, np.int64)
    for r in range(draws.shape[1]):
        # The r-th of those that are left, counted over all by stepping over those taken, the smallest first.
        choice[:, r] = (draws[:, r] * (size - r)).astype(np.int64)
        for taken in np.sort(choice[:, :r], axis=1).T:
            choice[:, r] += choice[:, r] >= taken
        again = np.flatnonzero(r >= np.maximum(size, 1))
        choice[again, r] = choice[again, r % np.maximum(size, 1)[again]]
    return choice


def rounded_unit_vectors(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors (N, C) -> of unit length, rounded to multiples of 2^-11; a vector of zeros stays one."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return (np.trunc(unit * _STEPS) / _STEPS).astype(np.float32)  # towards 0, so that no length exceeds 1


def _nearest(asked: RelatedImagesQuery) -> NDArray[np.int64]:
    """The R images nearest to each map's image among those of its class, (T, R) positions, nearest first.

    The image itself is not among them and none comes twice while the class has enough; then the row repeats. The only
    image of a class is related to itself.
    """
    assert asked.vectors is not None
    members, out = ClassMembers.from_tags(asked.tags, asked.source), np.empty((len(asked.tag), asked.related), np.int64)
    for k in np.unique(asked.tag):
        of_class, (begin, end) = np.flatnonzero(asked.tag == k), members.start[k : k + 2]
        candidates = np.sort(members.images[begin:end].astype(np.int64))
        out[of_class] = _nearest_of(asked.vectors, asked.image[of_class], candidates, asked.related)
    return out


def _nearest_of(
    vectors: NDArray[np.float32], images: NDArray[np.int64], candidates: NDArray[np.int64], related: int
) -> NDArray[np.int64]:
    """Rows of R of the candidates, which ascend, for some images, nearest first: (B, R)."""
    count = len(candidates)
    wanted = min(related + 1, count)  # as an image may be among its own candidates
    of_candidates = vectors[candidates]
    behind = np.arange(count) / (count * _STEPS**2)  # less than the difference of two products: the earlier goes first
    out = np.empty((len(images), related), np.int64)
    rows = max(1, _BLOCK // count)
    for first in range(0, len(images), rows):
        block = images[first : first + rows]
        nearness = vectors[block] @ of_candidates.T - behind
        top = np.argpartition(nearness, count - wanted, axis=1)[:, count - wanted :]
        order = np.argsort(-np.take_along_axis(nearness, top, axis=1), axis=1)
        found = candidates[np.take_along_axis(top, order, axis=1)]
        for row, image, nearest in zip(out[first:], block, found, strict=False):
            others = nearest[nearest != image]
            row[:] = np.resize(others, related) if len(others) else image
    return out


def _contrastive_images(tags: Tags, related: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The related images of the other tags of each map's image, as far as they lack the map's class, map by map, (O,),
    and where those of each map begin, (T + 1,).

    A map's image and such an image share one class but not the map's. `related` is (T, R) positions.
    """
    start = tags.start.astype(np.int64)
    images, kept = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    for first in range(0, len(tags), _COMBINED_AT_ONCE):
        of_images = start[first : first + _COMBINED_AT_ONCE + 1]
        tag, count = tags.values[of_images[0] : of_images[-1]], np.diff(of_images)
        # Each map is combined with all `count` maps of its image: (C,) combinations, map by map. Of a map combined with
        # itself nothing is left, as its related images have its class.
        repeats = np.repeat(count, count)
        of_map = np.repeat(np.arange(len(tag)), repeats)
        within = np.arange(len(of_map)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        candidates = related[np.repeat(np.repeat(of_images[:-1], count), repeats) + within]
        wanted = np.repeat(tag[of_map], candidates.shape[1])
        lacks = ~tags.matrix(candidates.ravel())[np.arange(candidates.size), wanted].reshape(candidates.shape)
        images.append(candidates[lacks])
        kept.append(np.bincount(np.repeat(of_map, lacks.sum(axis=1)), minlength=len(tag)))
    return np.concatenate(images), np.cumsum(np.concatenate(kept))


RELATED_IMAGE_RULES = Registry[RelatedImageRule](
    "related",
    {
        "class": RelatedImageRule(draw=_of_class),
        "nearest": RelatedImageRule(draw=_nearest, description_suffix=", nearest images", needs_vectors=True),
        "itself": RelatedImageRule(draw=_itself, description_suffix=" with itself", is_control=True),
        "wrong_class": RelatedImageRule(
            draw=_of_wrong_class,
            description_suffix=" with wrong-class images",
            is_control=True,
            repetition_note="of classes that too few images lack repeat related images",
        ),
    },
)
"""What relates images to a map, `localize.related_by`; packages add to them by entry points of `mcis.related`."""
