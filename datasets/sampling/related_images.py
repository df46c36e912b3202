"""Chooses the related images from which each localization map is computed (section 3.2), and registers the rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mcis.datasets.registry import Registry
from mcis.datasets.sampling.keyed_random import DrawPurpose, uniforms
from mcis.datasets.sampling.nearest_images import ClassMaps
from mcis.datasets.tags import ClassMembers, Positions, Tags

_MAPS_AT_ONCE = 2**18
"""Number of maps whose related images are drawn or compared at a time."""
_IMAGES_AT_ONCE = 2**13
"""Number of images whose maps are combined with each other at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Relations:
    """The images from which T maps of N images are computed.

    Maps are numbered by image, then by tag. Images are positions in the table of the N images.
    """

    start: NDArray[np.int64]
    """(N + 1,) number of the first map of each image."""
    image: NDArray[np.int64]
    """(T,) image of each map."""
    tag: NDArray[np.int64]
    """(T,) class of each map."""
    related: Positions
    """(T, R) related images; (T, 1) if each image is related to itself."""
    contrastive: Positions
    """(O,) images for contrastive activations, map by map (see `_contrastive_images`)."""
    contrastive_start: NDArray[np.int64]
    """(T + 1,) where the `contrastive` images of each map begin."""

    def maps_of_related(self) -> NDArray[np.int32]:
        """Returns the number of the map that each related image has for the same class, (T, R); -1 if it has none."""
        classes = int(self.tag.max(initial=0)) + 1
        keys = self.image * classes + self.tag
        order = np.argsort(keys, kind="stable")
        numbers = np.empty(self.related.shape, np.int32)
        for first in range(0, len(numbers), _MAPS_AT_ONCE):
            part = slice(first, first + _MAPS_AT_ONCE)
            wanted = self.related[part].astype(np.int64) * classes + self.tag[part, None]
            found = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
            numbers[part] = np.where(keys[found] == wanted, found, -1)
        return numbers

    def num_repeating(self) -> int:
        """Returns the number of maps whose related images contain an image twice, or the image of the map."""
        count = 0
        for first in range(0, len(self.related), _MAPS_AT_ONCE):
            part = slice(first, first + _MAPS_AT_ONCE)
            ordered = np.sort(self.related[part], axis=1)
            has_duplicate = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
            has_itself = (ordered == self.image[part, None]).any(axis=1)
            count += int((has_duplicate | has_itself).sum())
        return count


class RelatedImagesQuery(NamedTuple):
    """Input of a rule for related images: N images, their T maps, and values of the configuration.

    Attributes:
        tags: Tags of the N images; each image has at least one.
        is_source: Whether each image is of the domain `source`, (N,).
        image, tag: Image and class of each map, (T,).
        related: R.
        seed: Seed of all random numbers.
        may_repeat: Draw with replacement, including the image itself (paper-vs-code, "Localization maps").
        vectors: Vectors of all images, (N, C), see `rounded_unit_vectors`; None for rules that need none.
    """

    tags: Tags
    is_source: NDArray[np.bool_]
    image: NDArray[np.int64]
    tag: NDArray[np.int64]
    related: int
    seed: int
    may_repeat: bool = False
    vectors: NDArray[np.float32] | None = None


def draw_related_images(
    tags: Tags,
    is_source: NDArray[np.bool_],
    *,
    seed: int,
    related: int,
    related_by: str = "class",
    related_may_repeat: bool = False,
    contrastive: bool = False,
    vectors: NDArray[np.float32] | None = None,
    related_images: Positions | None = None,
) -> Relations:
    """Draws the related images of the maps of all tags.

    Args:
        tags, is_source, seed, related, related_may_repeat, vectors: See `RelatedImagesQuery`.
        related_by: A rule in `RELATED_IMAGE_RULES`.
        contrastive: Whether maps are contrasted with the related images of the image's other tags.
        related_images: The related images of all maps, (T, R), if they are known; None: they are drawn.
    """
    start = tags.start.astype(np.int64)
    tag = tags.values.astype(np.int64)
    image = np.repeat(np.arange(len(tags)), np.diff(start))
    if related_images is None:
        query = RelatedImagesQuery(tags, is_source, image, tag, related, seed, related_may_repeat, vectors)
        drawn = RELATED_IMAGE_RULES[related_by].draw(query)
        related_images = drawn.astype(np.uint32, copy=False)

    if contrastive:
        contrastive_images, contrastive_start = _contrastive_images(tags, related_images)
    else:
        contrastive_images = np.zeros(0, np.uint32)
        contrastive_start = np.zeros(len(tag) + 1, np.int64)

    return Relations(
        start=start,
        image=image,
        tag=tag,
        related=related_images,
        contrastive=contrastive_images,
        contrastive_start=contrastive_start,
    )


@dataclass(frozen=True, kw_only=True)
class RelatedImageRule:
    """A rule that chooses related images, an entry of `RELATED_IMAGE_RULES`.

    Attributes:
        draw: Returns (T, R) positions of images for a query, of any type of integers; the first r columns are the
            result for R = r.
        description_suffix: Text that scores append to the name of the method.
        needs_vectors: Whether the rule needs vectors of the images.
        is_nearest: Whether it chooses the nearest images (`nearest_images`), which are searched in parallel if there
            are many.
        is_control: Whether it chooses images without the class, so that contrastive images have no meaning.
        repetition_note: Ends the note "N map(s) ..." on repeated related images.
    """

    draw: Callable[[RelatedImagesQuery], NDArray[np.integer[Any]]]
    description_suffix: str = ""
    needs_vectors: bool = False
    is_nearest: bool = False
    is_control: bool = False
    repetition_note: str = (
        "repeat related images, as their class has too few images; the only image of a class is related to itself"
    )


def _draw_from_class(query: RelatedImagesQuery) -> Positions:
    """Draws R related images of each map's class (section 3.2), as a function of (seed, image, class).

    They exclude the image itself and contain no image twice, as long as the class has enough; otherwise the row
    repeats. The only image of a class is related to itself. The cost does not depend on the sizes of the classes.
    """
    members = ClassMembers.from_tags(query.tags, query.is_source)
    related = np.empty((len(query.tag), query.related), np.uint32)
    for first in range(0, len(related), _MAPS_AT_ONCE):
        part = slice(first, first + _MAPS_AT_ONCE)
        image = query.image[part]
        tag = query.tag[part]
        low, high = members.ranges(tag)
        draws = uniforms(DrawPurpose.RELATED_IMAGES, query.seed, tag, image, count=query.related)

        if query.may_repeat:
            related[part] = members.images[low[:, None] + (draws * (high - low)[:, None]).astype(np.int64)]
        else:
            drawn = members.images[low[:, None] + _draw_without_replacement(draws, high - low - 1)]
            # As for partners, the last member was excluded from the draw and replaces the image itself.
            related[part] = np.where(drawn == image[:, None], members.images[high - 1][:, None], drawn)
    return related


def _relate_to_itself(query: RelatedImagesQuery) -> NDArray[np.int64]:
    """Returns each image itself once, (T, 1), for any R of at least 1; (T, 0) for R = 0."""
    return query.image[:, None][:, : query.related]


def _draw_without_class(query: RelatedImagesQuery) -> Positions:
    """Draws R images that lack each map's class, as a function of (seed, image, class): a control.

    No image occurs twice as long as there are enough; otherwise the row repeats. If every image has the class, images
    of the class are used.
    """
    members = ClassMembers.from_tags(query.tags)
    related = _draw_from_class(query)
    for k in np.unique(query.tag):
        maps = np.flatnonzero(query.tag == k)
        begin, end = members.start[k : k + 2]
        candidates = np.delete(np.arange(len(query.tags)), members.images[begin:end])
        if not len(candidates):
            continue

        draws = uniforms(DrawPurpose.WRONG_CLASS, query.seed, query.tag[maps], query.image[maps], count=query.related)
        if query.may_repeat:
            choice = (draws * len(candidates)).astype(np.int64)
        else:
            choice = _draw_without_replacement(draws, np.full(len(maps), len(candidates)))
        related[maps] = candidates[choice]
    return related


def _draw_without_replacement(draws: NDArray[np.float64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draws R of 0 .. size - 1 for each of B rows without replacement; if size < R, the row repeats.

    Args:
        draws: Numbers in [0, 1), (B, R).
        size: (B,), at least 0; if it is 0, all choices of the row are 0.

    Returns:
        (B, R).
    """
    choice = np.empty(draws.shape, np.int64)
    for r in range(draws.shape[1]):
        # The drawn number counts the remaining candidates. Skip those already taken, smallest first.
        choice[:, r] = (draws[:, r] * (size - r)).astype(np.int64)
        for taken in np.sort(choice[:, :r], axis=1).T:
            choice[:, r] += choice[:, r] >= taken

        exhausted = np.flatnonzero(r >= np.maximum(size, 1))
        choice[exhausted, r] = choice[exhausted, r % np.maximum(size, 1)[exhausted]]
    return choice


def _nearest_of_class(query: RelatedImagesQuery) -> Positions:
    """Returns the R images of each map's class that are nearest to its image (`nearest_images`)."""
    assert query.vectors is not None
    maps = ClassMaps.from_tags(query.tags, query.seed)
    count = len(maps.maps)
    if maps.has_large_class:
        maps = maps.with_cells(maps.find_cells(query.vectors, 0, count))
    related = np.empty((count, query.related), np.uint32)
    related[maps.maps] = maps.find_nearest(query.vectors, 0, count, query.related)
    return related


def _contrastive_images(tags: Tags, related: Positions) -> tuple[Positions, NDArray[np.int64]]:
    """Collects, for each map, the related images of its image's other tags that lack the class of the map.

    Such an image shares a class with the map's image, but not the class of the map.

    Args:
        related: (T, R) positions.

    Returns:
        The images, map by map, (O,), and where the images of each map begin, (T + 1,).
    """
    start = tags.start.astype(np.int64)
    images = [np.zeros(0, np.uint32)]
    counts = [np.zeros(1, np.int64)]
    for first in range(0, len(tags), _IMAGES_AT_ONCE):
        map_start = start[first : first + _IMAGES_AT_ONCE + 1]
        tag = tags.values[map_start[0] : map_start[-1]]
        count = np.diff(map_start)

        # Combine each map with all `count` maps of its image, giving (C,) combinations, map by map. Combined with
        # itself, a map keeps no image, because its related images have its class.
        repeats = np.repeat(count, count)
        map_number = np.repeat(np.arange(len(tag)), repeats)
        tag_number = np.arange(len(map_number)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        candidates = related[np.repeat(np.repeat(map_start[:-1], count), repeats) + tag_number]

        wanted = np.repeat(tag[map_number], candidates.shape[1])
        has_class = tags.matrix(candidates.ravel())[np.arange(candidates.size), wanted]
        lacks_class = ~has_class.reshape(candidates.shape)
        images.append(candidates[lacks_class])
        counts.append(np.bincount(np.repeat(map_number, lacks_class.sum(axis=1)), minlength=len(tag)))
    return np.concatenate(images), np.cumsum(np.concatenate(counts))


RELATED_IMAGE_RULES = Registry[RelatedImageRule](
    "related",
    {
        "class": RelatedImageRule(draw=_draw_from_class),
        "nearest": RelatedImageRule(
            draw=_nearest_of_class, description_suffix=", nearest images", needs_vectors=True, is_nearest=True
        ),
        "itself": RelatedImageRule(draw=_relate_to_itself, description_suffix=" with itself", is_control=True),
        "wrong_class": RelatedImageRule(
            draw=_draw_without_class,
            description_suffix=" with wrong-class images",
            is_control=True,
            repetition_note="repeat related images, as too few images lack their class",
        ),
    },
)
"""Rules for related images, `localize.related_by`. Packages add rules by entry points of `mcis.related`."""
