"""Localization maps equal those of a slow reference that processes pairs of images one by one."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mcis.datasets.images.squares import read_rgb
from mcis.datasets.sampling.related_images import Relations
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.models.backbones import IMAGENET, to_float_images
from mcis.models.coattention import affinity, coattend, unshared
from mcis.models.grids import Grid, Grids
from mcis.models.localization import embed, scale_maps
from mcis.models.resampling import resample
from mcis.platform.config.sections import Config
from mcis.platform.networks.build import build_classifier, load_trained
from mcis.platform.outputs.read_index import split_rows
from mcis.platform.outputs.relations import draw_relations
from mcis.platform.outputs.tables import image_maps
from mcis.platform.runs.context import RunContext
from mcis.platform.stages import localization
from mcis.platform.stages.localization.workers import Relate, relate_rows, write_rows


def relations_of(config: Config, context: RunContext) -> tuple[Relations, NDArray[np.bool_]]:
    rows = split_rows(context, "train", tagged=True)
    is_source = np.array(rows["domain"].to_pylist()) == "source"
    tags = Tags.from_index(rows["tags"], len(context.classes))
    return draw_relations(config.localize, config.seed, tags, is_source), is_source


def literal_maps(config: Config, context: RunContext) -> list[torch.Tensor]:
    """All maps, (T, H, W), pair by pair: features of both images, whole affinity, attention, class layer."""
    model = load_trained(
        build_classifier(config.classifier, len(context.classes)), context.stage_outputs["train_classifier"]
    )
    uris = split_rows(context, "train", tagged=True)["uri"].to_pylist()
    relations, is_source = relations_of(config, context)
    method = config.localize.method
    layer = model.common_head if model.own_head else model.phi

    @functools.cache
    def features(image: int) -> torch.Tensor:
        pixels = torch.from_numpy(read_rgb(uris[image], config.classifier.input_size))[None]
        images, how = IMAGENET(to_float_images(pixels)), config.localize
        return embed(model.backbone, model.standardize, images, extra_scales=how.extra_scales, hflip=how.hflip)

    def attended(image: int, other: int, values: torch.Tensor) -> torch.Tensor:
        target = features(image)
        other_features = features(other)
        pair_domains = [[0, 2], [2, 1]][int(is_source[image])][int(is_source[other])]
        if method.w_p == "identity":
            w_p = torch.eye(24)
        else:
            w_p = model.w_p if model.w_p.ndim == 2 else model.w_p[pair_domains]
        form, scale = model.form, model.affinity.scale
        # Of two domains, n is the source's.
        is_one_domain = is_source[image] == is_source[other]
        target_is_n = method.target == "n" if is_one_domain else is_source[image]
        if target_is_n:
            return coattend(values, target, affinity(other_features, target, w_p, form=form, scale=scale)).n
        return coattend(target, values, affinity(target, other_features, w_p, form=form, scale=scale)).m

    def activation(image: int, other: int, tag: int, contrastive: bool) -> torch.Tensor:
        common = attended(image, other, features(other))
        if contrastive:
            common = unshared(features(image), model.w_b(common))
        return layer(common)[0, tag]

    out = []
    with torch.inference_mode():
        for number, (image, tag) in enumerate(zip(relations.image.tolist(), relations.tag.tolist(), strict=True)):
            first, last = relations.contrastive_start[number : number + 2]
            parts = [activation(image, other, tag, False) for other in relations.related[number].tolist()]
            parts += [activation(image, other, tag, True) for other in relations.contrastive[first:last].tolist()]
            out.append(torch.stack(parts).mean(dim=0))
        keys = list(zip(relations.image.tolist(), relations.tag.tolist(), strict=True))
        for _ in range(1, config.localize.hops):
            before = dict(zip(keys, out, strict=True))
            out = []
            for (image, tag), related in zip(keys, relations.related.tolist(), strict=True):
                theirs = [before.get((other, tag), layer(features(other))[0, tag]) for other in related]
                passed = [attended(image, n, map[None, None])[0, 0] for n, map in zip(related, theirs, strict=True)]
                out.append(torch.stack(passed).mean(dim=0))
    return out


def literal_released(config: Config, context: RunContext) -> tuple[list[torch.Tensor], int]:
    """The released maps of all tags, unrounded, (T, H, W), and the number of left-out parts (of 5 per map)."""
    model = load_trained(
        build_classifier(config.classifier, len(context.classes)), context.stage_outputs["train_classifier"]
    )
    layer = model.common_head if model.own_head else model.phi
    uris = split_rows(context, "train", tagged=True)["uri"].to_pylist()
    relations, _ = relations_of(config, context)
    out = []
    dropped = 0

    def part(activation: torch.Tensor, *, first: bool = False) -> torch.Tensor:
        nonlocal dropped
        if not first and 1 / (1 + np.exp(-activation.mean().item())) <= 0.1:
            dropped += 1
            return torch.zeros_like(activation)
        return activation.clamp(min=0) / activation.max().clamp(min=1e-6)

    def moved(values: torch.Tensor, first: float, step: float) -> torch.Tensor:
        """Resamples a map from pixels first + n * step to pixels 0, 8, ..., 56."""
        source, target = (Grid((at + 0.5) / 64, by / 64, len(values)) for at, by in ((first, step), (0, 8)))
        onto = target._replace(positions=8)
        return resample(values, Grids(source, source), Grids(onto, onto), "bicubic").clamp(0, 1)

    def unflipped(values: torch.Tensor) -> torch.Tensor:
        """Resamples a map of the flipped image, whose columns are at pixels 7, 15, ..., 63 of the image."""
        rows = Grid(0.5 / 64, 8 / 64, 8)
        columns = Grid(7.5 / 64, 8 / 64, 8)
        return resample(values.flip(1), Grids(rows, columns), Grids(rows, rows), "bicubic").clamp(0, 1)

    def pair(m: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = affinity(m, n, model.w_p, form=model.form, scale=model.affinity.scale)
        common = coattend(m, n, p)
        return layer(common.m)[0], layer(common.n)[0]

    with torch.inference_mode():
        pictures = [IMAGENET(to_float_images(torch.from_numpy(read_rgb(uri, 64))[None])) for uri in uris]
        features = [model.backbone(picture) for picture in pictures]
        scaled = [
            [torch.nn.functional.interpolate(picture, size=side, mode="bilinear") for side in (48, 128)]
            for picture in pictures
        ]
        for number, (image, tag) in enumerate(zip(relations.image.tolist(), relations.tag.tolist(), strict=True)):
            f = features[image]
            of_m, of_flip = pair(f, model.backbone(pictures[image].flip(3)))
            parts = [part(of_m[tag], first=True), unflipped(part(of_flip[tag]))]
            for picture, factor in zip(scaled[image], (0.75, 2), strict=True):
                scaled_part = part(pair(f, model.backbone(picture))[1][tag])
                parts.append(moved(scaled_part, 0.5 / factor - 0.5, 8 / factor))
            related = [pair(f, features[other])[0][tag] for other in relations.related[number].tolist()]
            parts.append(part(torch.stack(related).mean(dim=0)))
            out.append(torch.stack(parts).sum(dim=0) / 5)
    return out, dropped


def maps_of(folder: Path, context: RunContext) -> list[torch.Tensor]:
    """The stage's maps in the order of the index; checks that every tag of every image has one."""
    shards = Shards(folder / "maps")
    out = []
    for row in split_rows(context, "train", tagged=True).to_pylist():
        maps = image_maps(shards, row["image_id"])
        assert maps.classes.tolist() == row["tags"]
        out += list(torch.from_numpy(maps.maps))
    return out


UNTRAINED = ("localize.method.w_p=identity", "localize.related_by=wrong_class", "classifier.attention=none")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("localize.method.contrastive=true", "localize.related=2"),
        ("localize.method.target=n",),
        UNTRAINED,
        ("localize.related_by=itself",),
        ("localize.hops=3",),
        ("localize.hops=2", *UNTRAINED),
    ],
    ids=str,
)
def test_maps_equal_those_of_single_pairs(localizable: Any, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """With float16 features and trained weights; the maps are scaled to [0, 1] for the comparison."""
    config = localizable.config(*overrides)
    context = localizable.classified(config, tmp_path).into(tmp_path / "part")
    result = localization.run(config, context)
    actual = maps_of(context.output, context)
    expected = literal_maps(config, context)
    assert len(actual) == len(expected) == result.counts["maps"]
    for ours, theirs in zip(actual, expected, strict=True):
        assert theirs.max() - theirs.min() > 0.01
        difference = scale_maps(ours, "range") - scale_maps(theirs, "range")
        assert difference.abs().max() < 5e-3 * config.localize.hops
    relations, _ = relations_of(config, context)
    with_part = int((np.diff(relations.contrastive_start) > 0).sum())
    assert with_part == result.counts.get("maps with a contrastive part", 0)
    assert (0 < with_part < len(actual)) == config.localize.method.contrastive


@pytest.mark.parametrize("head", ["own", "shared"])
def test_released_maps_equal_those_of_single_pairs(localizable: Any, tmp_path: Path, head: str) -> None:
    """Up to one 8-bit level at few positions; with the shared head, the bound on the mean leaves some parts out."""
    released = ("localize.method.name=released", "localize.related_may_repeat=true", "maps.scale=maximum")
    unchanged_images = ("localize.extra_scales=[]", "localize.hflip=false", f"classifier.head={head}")
    config = localizable.config(*released, *unchanged_images)
    changes = {"phi.bias": localizable.state["phi.bias"] - 2} if head == "shared" else {}
    context = localizable.classified(config, tmp_path, **changes).into(tmp_path / "part")
    localization.run(config, context)
    actual = maps_of(context.output, context)
    expected, dropped = literal_released(config, context)
    assert len(actual) == len(expected)
    if head == "shared":
        assert 0.1 < dropped / (4 * len(expected)) < 0.9

    ours = torch.stack(actual).float()
    theirs = torch.stack(expected)
    assert (ours * 255 - (ours * 255).round()).abs().max() < 0.1  # kept as float16
    levels = (ours * 255).round() - (theirs * 255).round()
    assert levels.abs().max() <= 1
    assert levels.abs().mean() < 0.05
    assert (theirs.amax(dim=(1, 2)) > 0.1).float().mean() > 0.1


def test_float32_maps_differ_only_by_rounding(localizable: Any, tmp_path: Path) -> None:
    """The stage attends over activations and shares one query between maps; the reference does not."""
    config = localizable.config("localize.method.contrastive=true")
    context = localizable.into(tmp_path / "part")
    rows = split_rows(context, "train", tagged=True)
    relations, is_source = relations_of(config, context)
    weights = context.stage_outputs["train_classifier"]
    classes = len(context.classes)
    model = load_trained(build_classifier(config.classifier, classes), weights)
    size = config.classifier.input_size
    how = config.localize
    pixels = torch.from_numpy(np.stack([read_rgb(uri, size) for uri in rows["uri"].to_pylist()]))
    with torch.inference_mode():
        images = IMAGENET(to_float_images(pixels))
        features = embed(model.backbone, model.standardize, images, extra_scales=how.extra_scales, hflip=how.hflip)
    write_rows(tmp_path / "features", 0, features.numpy())
    relate = Relate(config, weights, classes, tmp_path, is_source, 1)
    expected = literal_maps(config, context)
    maps: list[torch.Tensor] = []
    for row in relate_rows(rows, relations).to_pylist():
        maps += list(relate.maps(row))
    assert len(maps) == len(expected)
    difference = max((a - b).abs().max().item() for a, b in zip(maps, expected, strict=True))
    assert difference < 1e-5


def test_related_images_of_both_domains_use_the_affinity_of_their_domains(localizable: Any, tmp_path: Path) -> None:
    """Every third image is in the source domain, and the three W_P differ clearly."""
    dataset = localizable.with_index(tmp_path, lambda n: {"domain": "target" if n % 3 else "source"})
    config = dataset.config("classifier.num_domain_affinities=3", "localize.method.contrastive=true")
    noise = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(0)) * 0.3
    context = dataset.classified(config, tmp_path, w_p=dataset.state["w_p"] + noise).into(tmp_path / "part")
    localization.run(config, context)
    relations, is_source = relations_of(config, context)
    assert 0 < is_source[relations.related].mean() < 1
    for ours, theirs in zip(maps_of(context.output, context), literal_maps(config, context), strict=True):
        assert (scale_maps(ours, "range") - scale_maps(theirs, "range")).abs().max() < 5e-3
