"""Stage 3: classifier + index -> localization maps of every training image's tags, float16 (MAPS_SCHEMA).

A map holds class activations at feature resolution, unscaled; `models.localization.scale_maps` makes them comparable.
Two tables: `single` holds the single-round maps, `maps` those with related images (section 3.2). Each image is embedded
once; its features are kept, float16, in memory-mapped files, one for each shard of the images, that all workers read,
so that memory stays bounded by what the operating system caches and a map costs attention alone.

Where the features of all images exceed `localize.features_gb`, maps are made in rounds, of some classes or of a part of
a large one, each with files of the features that its maps need, and an image is embedded once in every round that needs
it. The maps are the same.

Maps of several numbers of related images (`localize.also_related`) are made in one pass, and each number's are the
output of the stage with that number alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mcis.datasets.errors import UserError
from mcis.datasets.index import Listing
from mcis.datasets.sampling.related_images import Relations
from mcis.datasets.storage.copies import copy_folder, is_there, names_in, remove
from mcis.datasets.tables.backbone_outputs import Features
from mcis.datasets.tables.large_tables import digest
from mcis.datasets.tables.shards import Shards
from mcis.datasets.tags import Tags
from mcis.platform.config.sections import Config
from mcis.platform.engine.cache import features_cache
from mcis.platform.engine.mapping import Worker, map_table, shards_of
from mcis.platform.networks.pretrained import classifier_weights
from mcis.platform.runs.context import RunContext
from mcis.platform.runs.read_index import of_source, of_split, split_rows
from mcis.platform.runs.relations import VECTORS, draw_relations, read_vectors
from mcis.platform.runs.results import StageResult
from mcis.platform.runs.workspace import Workspace, read_json, write_json
from mcis.platform.stages.localization.account import Account, account_of
from mcis.platform.stages.localization.features import feature_shape
from mcis.platform.stages.localization.rounds import Plan, Round, embed_rows, plan_rounds, round_folders, rounds_of
from mcis.platform.stages.localization.workers import Embed, Merge, Pool, Relate

_LOWER = "localize.batch"
"""What a worker takes less memory with."""


def check(config: Config, listing: Listing, workspace: Workspace) -> None:
    """Raises UserError where related images are to be of a domain that no tagged training image is of."""
    if any(config.localize.numbers):
        _check_domain(config, of_split(listing.table, "train", tagged=True))


def inputs(config: Config, context: RunContext) -> None:
    """The images are the index's; they depend on nothing else outside."""


def for_each_number(config: Config) -> list[Config]:
    """A configuration for each number of related images whose maps are made in a pass, that of `config` first."""
    own, numbers = config.localize.related, config.localize.numbers
    ordered = [own, *(number for number in numbers if number != own)]
    return [config.model_copy(update={"localize": config.localize.alone(number)}) for number in ordered]


def run(config: Config, context: RunContext) -> StageResult:
    """Writes the localization maps of all tagged training images; after a kill only missing shards are computed.

    Raises:
        UserError: no training image has a tag, or none is of the domain that related images are to be of, or the
            features of a single map's images exceed their bound.
    """
    return run_together([config], [context])[0]


def run_together(configs: Sequence[Config], contexts: Sequence[RunContext]) -> list[StageResult]:
    """As `run`, for configurations that differ in the number of related images alone.

    Each image is embedded once and each pair is mapped once, as the related images of a number are the first of those
    of a larger one. What is in progress lies in the folder of the largest number.
    """
    numbers = [config.localize.related for config in configs]
    largest = int(np.argmax(numbers))
    parts = dict(sorted(zip(numbers, [context.part for context in contexts], strict=True)))
    localize = configs[largest].localize.model_copy(update={"also_related": tuple(parts)})
    config, context = configs[largest].model_copy(update={"localize": localize}), contexts[largest]
    rows, all_images = split_rows(context, "train", tagged=True), len(split_rows(context, "train", columns=["tags"]))
    if not len(rows):
        raise UserError(f"none of {all_images} training images has a tag", "tagged images to localize", "add tags")
    counts = {"images": len(rows), "images without tags": all_images - len(rows)}
    accounts: dict[int, Account] = {0: ({"maps": int(pc.sum(pc.list_value_length(rows["tags"])).as_py())}, [])}
    if any(numbers):
        job = _prepare(config, context, rows, parts)
        busy = _localize(job)
        for number in set(numbers) - {0}:
            relations, own = job.relations.first(number), localize.alone(number)
            accounts[number] = account_of(own, relations, job.tags, job.source, job.plan)
    else:
        busy = _single_round_alone(config, context, rows)
    _hand_out(parts)
    return [
        StageResult(busy=busy, counts=counts | more_counts, notes=tuple(notes))
        for more_counts, notes in (accounts[number] for number in numbers)
    ]


def _hand_out(parts: Mapping[int, Path]) -> None:
    """Copies what the outputs of all numbers have in common. Without related images, single-round maps are the maps.

    Args:
        parts: the outputs' folders by their numbers of related images; that of the largest has it all.
    """
    largest = parts[max(parts)]
    for number, part in parts.items():
        if part != largest:
            copy_folder(largest / "single", part / "single")
            if number and is_there(largest / VECTORS):
                copy_folder(largest / VECTORS, part / VECTORS)
        if not number:
            copy_folder(part / "single", part / "maps")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all rounds share.

    Attributes:
        config: its numbers of related images are those that maps are made of.
        weights: folder of the trained classifier.
        parts: where the stage writes, by the number of related images.
        rows: the N tagged training images.
        tags, source: their tags, and whether each is of the source domain, (N,).
        relations: the images that each map is made of.
        plan: the rounds.
        outputs: what the frozen backbone makes of the images; None = it is computed again.
    """

    config: Config
    classes: int
    weights: Path
    parts: dict[int, Path]
    rows: pa.Table
    tags: Tags
    source: NDArray[np.bool_]
    relations: Relations
    plan: Plan
    outputs: Features | None

    @property
    def folder(self) -> Path:
        """Where all that is in progress lies: the folder of the largest number."""
        return self.parts[max(self.parts)]

    @property
    def tables(self) -> dict[Path, int]:
        """The folders of the stage's tables of maps, and the number of related images of each."""
        of_numbers = {part / "maps": number for number, part in self.parts.items() if number}
        return {self.folder / "single": 0, **of_numbers}

    @property
    def folders(self) -> list[Path]:
        """Where each round's tables lie: those of a single one are the stage's, unless they hold several numbers."""
        if len(self.plan.maps) == 1 and len(self.tables) == 2:
            return [self.folder]
        return round_folders(self.plan, self.folder)

    @property
    def gpu(self) -> bool:
        """Whether the workers with a network run on GPUs."""
        return self.config.compute.gpu

    @property
    def selves(self) -> Path | None:
        """The folder of the self pairs' maps; only the released maps have them."""
        return self.folder / "selves" if self.config.localize.method.name == "released" else None

    def missing(self, rows: pa.Table, table: Path) -> bool:
        """Whether a table of `rows` lacks a shard."""
        return not shards_of(len(rows), self.config.compute.shard_rows).keys() <= set(names_in(table))

    def map(
        self, rows: pa.Table, worker: Callable[..., Worker], arguments: tuple[Any, ...], table: Path, label: str
    ) -> float:
        """Maps the rows into a table, on GPUs where the worker has a network; returns the busy seconds."""
        compute, network = self.config.compute, worker is not Merge
        return map_table(
            rows, worker, arguments, table, label=label, compute=compute, network=network, lower=_LOWER
        ).busy

    def start_afresh_unless_it_fits(self) -> None:
        """Removes what an earlier call left if its rounds or numbers were others, or its self pairs' maps are gone.

        The self pairs' maps are float32: their sum is rounded to 8 bits, and rounding it before as well would show.
        """
        plan, selves = self.folder / "plan.json", self.selves
        rounds = [digest([pa.table({"map": maps})]) for maps in self.plan.maps]
        now = {"rounds": rounds, "related": list(self.parts)}
        if not is_there(plan) or read_json(plan) != now or (selves and not is_there(selves)):
            for name in names_in(self.folder):
                if name != VECTORS:
                    remove(self.folder / name)
            write_json(plan, now)

    def remove_leftovers(self) -> None:
        """Removes the rounds' folders and all features, those of a number's own interrupted call among them."""
        for part in self.parts.values():
            for name in names_in(part):
                if name.startswith("round-") or name in ("features", "selves"):
                    remove(part / name)


def _prepare(config: Config, context: RunContext, rows: pa.Table, parts: dict[int, Path]) -> _Job:
    _check_domain(config, rows)
    names, weights = context.classes, context.inputs["train_classifier"]
    tags = Tags.of_index(rows["tags"], len(names))
    source = _is_source(rows)
    outputs = _outputs(config, context, rows)
    vectors = _vectors(config, context, rows, outputs) if config.localize.related_by == "nearest" else None
    relations = draw_relations(config.localize, config.seed, tags, source, vectors)
    shape = feature_shape(config, weights, len(names))
    return _Job(
        config=config,
        classes=len(names),
        weights=weights,
        parts=parts,
        rows=rows,
        tags=tags,
        source=source,
        relations=relations,
        plan=plan_rounds(config.localize, relations, shape, len(names)),
        outputs=outputs,
    )


def _outputs(config: Config, context: RunContext, rows: pa.Table) -> Features | None:
    """What the classifier's backbone makes of the images, where training left it as it was and the cache holds it."""
    pretrained = classifier_weights(config, context.workspace)
    if not (config.classifier.from_features and pretrained):
        return None
    return features_cache(rows, config.classifier, pretrained, context, config.compute, images=len(rows))


def _vectors(config: Config, context: RunContext, rows: pa.Table, outputs: Features | None) -> NDArray[np.float32]:
    """Of all images, by which the nearest ones are found, (N, C'); the table is kept, as the report asks for it."""
    gpu, folder = config.compute.gpu, context.part / VECTORS
    arguments = config, context.inputs["train_classifier"], len(context.classes), gpu, outputs
    numbered = rows.append_column("position", pa.array(np.arange(len(rows))))
    map_table(numbered, Pool, arguments, folder, label="vectors", compute=config.compute, network=True, lower=_LOWER)
    return read_vectors(folder)


def _localize(job: _Job) -> float:
    """Makes the maps that are missing; returns the busy seconds."""
    busy = 0.0
    if any(job.missing(job.rows, table) for table in job.tables):
        job.start_afresh_unless_it_fits()
        for turn in rounds_of(job.plan, job.folders, job.rows, job.relations):
            busy += _embed_and_relate(job, turn)
        busy += _merge(job)
    job.remove_leftovers()
    return busy


def _embed_and_relate(job: _Job, turn: Round) -> float:
    """Embeds the round's images and makes the maps of its classes; returns the busy seconds."""
    single, busy = turn.folder / "single", 0.0
    if job.missing(turn.to_embed, single) or job.missing(turn.to_relate, turn.folder / "maps"):
        if not is_there(turn.features):  # then the finished single-round maps cannot save embedding the images again
            remove(single)
        arguments = job.config, job.weights, job.classes, job.gpu, turn.features, job.selves
        busy += job.map(turn.to_embed, Embed, (*arguments, job.outputs), single, f"embed{turn.label}")
        related = *arguments, job.source[turn.images]
        busy += job.map(turn.to_relate, Relate, related, turn.folder / "maps", f"localize{turn.label}")
    remove(turn.features)
    return busy


def _merge(job: _Job) -> float:
    """Writes the stage's tables where they are not those of its only round; returns the busy seconds."""
    if job.folders == [job.folder]:
        return 0.0
    tables = {name: [Shards(folder / name) for folder in job.folders] for name in ("single", "maps")}
    return sum(
        job.map(job.rows, Merge, (tables[table.name], number), table, f"merge {table.name}")
        for table, number in job.tables.items()
    )


def _single_round_alone(config: Config, context: RunContext, rows: pa.Table) -> float:
    """Makes the single-round maps without keeping features; returns the busy seconds."""
    gpu = config.compute.gpu
    outputs = _outputs(config, context, rows)
    arguments = config, context.inputs["train_classifier"], len(context.classes), gpu, None, None, outputs
    to_embed = embed_rows(rows, np.zeros(len(rows), np.int64), np.arange(len(rows)), np.ones(len(rows), bool))
    single, compute = context.part / "single", config.compute
    return map_table(
        to_embed, Embed, arguments, single, label="embed", compute=compute, network=True, lower=_LOWER
    ).busy


def _is_source(rows: pa.Table) -> NDArray[np.bool_]:
    return of_source(rows)


def _check_domain(config: Config, rows: pa.Table) -> None:
    """Raises UserError where none of the rows is of the domain that related images are to be of."""
    domain = config.localize.related_from
    if domain != "both" and not (_is_source(rows) == (domain == "source")).any():
        raise UserError(
            f"localize.related_from is {domain}, but no tagged training image of setting {config.setting} is of it",
            "single-label images beside a setting's own" if domain == "source" else "images of the setting's own",
            "set localize.related_from=both, or a setting such as voc+single",
        )
