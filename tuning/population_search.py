"""A search by population based training: generations of runs, each of which starts from weights of the one before.

Nothing is kept beside the stages of the members' runs: a repeated command draws the same members, finds their stages
finished, and goes on where there are none.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch

from mcis.datasets.errors import UserError
from mcis.platform.config.keys import Values
from mcis.platform.config.training import ClassifierConfig
from mcis.platform.networks.build import build_classifier
from mcis.platform.networks.checkpoints import WEIGHTS
from mcis.platform.networks.trained import classifier_description
from mcis.platform.runs.listing import listing
from mcis.platform.runs.locks import refuse_if_running
from mcis.platform.runs.progress import console
from mcis.platform.runs.tracking import Tracker
from mcis.platform.runs.workspace import write_json, written_aside
from mcis.tuning.axes import ends
from mcis.tuning.cases import configured
from mcis.tuning.found import Generation, Member, best_of, control_of, line_of
from mcis.tuning.pictures import population_picture
from mcis.tuning.population import first_generation, next_generation
from mcis.tuning.search_space import SearchSpace, check_space, running, write_best
from mcis.tuning.tables import population_table
from mcis.tuning.trials import Outcome, Trial, run_trials

_IN_COMMON = ("seed", "classifier.epochs", "classifier.keep_epoch", "weights.")
"""Keys of what the members of a generation have in common begin so."""


@dataclass(frozen=True, kw_only=True)
class Population(SearchSpace):
    """A population before it trains; its members are the runs NAME-g00-m00, NAME-g00-m01 ...

    Attributes:
        members: of each generation.
        generations: of which each trains for the epochs of the configuration.
    """

    members: int = 8
    generations: int = 4

    def member_name(self, member: Member) -> str:
        """The name of a member's run."""
        return f"{self.name}-g{member.generation:02d}-m{member.number:02d}"

    def values(self, member: Member) -> Values:
        """What a member's configuration changes, by dotted key: where it starts, and a seed of each generation, as its
        epochs would else draw the pairs of the generation before.

        Raises:
            UserError: a file that says where the weights are is damaged.
        """
        if member.parent is None:
            return member.values
        parent = self.member_name(replace(member, generation=member.generation - 1, number=member.parent))
        weights = self.workspace.outputs(parent)["train_classifier"] / WEIGHTS
        seed = self.resolved.config.seed + member.generation
        return {**member.values, "seed": seed, "weights.initial": str(weights)}


def run_population(population: Population) -> list[Generation]:
    """Searches the values, and their changes in mid-training, that maximize a score.

    Writes best.toml, which `mcis run --config` takes, study.json and study.png into the folder of its run.

    Returns:
        The members by generation and number, with what they came to.

    Raises:
        UserError: another process runs under the search's name in the workspace; what cannot be searched
            (`check_population`); or no member of a generation came to its end, after the table.
    """
    refuse_if_running(population.workspace, population.name)
    check_population(population)
    began = time.monotonic()
    identity = population.identity_with("population", population.members)
    generations: list[Generation] = []
    with running(population, kind="population", identity=identity) as tracker:
        while len(generations) < population.generations and (not generations or _done(generations[-1])):
            generations.append(_trained(population, generations, tracker.run_id))
            _keep(population, generations, tracker)
            console.print(_in_words(generations[-1]), markup=False)
        folder = population.folder
        for path in (folder.study, folder.study_picture, *([folder.best] if best_of(generations) else [])):
            tracker.artifact(path)
    _print(population, generations, (time.monotonic() - began) / 60)
    if not _done(generations[-1]):
        raise UserError(
            f"no member of generation {len(generations) - 1} of {population.name} came to its end; the first, "
            f"{population.member_name(generations[-1][0])}: {generations[-1][0].cause}",
            "at least one",
            "see why, and repeat the command: what is finished is kept",
        )
    return generations


def check_population(population: Population) -> None:
    """Finds what cannot be searched, before the first member trains.

    Raises:
        UserError: see `check_space`; no classifier is trained; an axis of what members have in common, or of values
            that change the classifier's networks, whose weights they take over.
    """
    check_space(population)
    config, classes = population.resolved.config, len(listing(population.resolved.config).classes)
    if config.weights.classifier is not None or config.supervision == "full":
        raise UserError(
            "--population without a classifier that is trained",
            "supervision=tags and no weights.classifier",
            "leave out --population",
        )
    if common := sorted(key for key in population.axes if key.startswith(_IN_COMMON)):
        raise UserError(
            f"--axis {' and '.join(common)} with --population",
            "keys of which members of one generation may have different values: they train for equally many epochs, "
            "from weights of each other and a seed of the generation",
            "leave it out, or search without --population",
        )
    networks = _networks(config.classifier, classes)
    for key, axis in population.axes.items():
        for value in ends(axis) if key.startswith("classifier.") else ():
            if _networks(configured(population.resolved, {key: value}).classifier, classes) != networks:
                raise UserError(
                    f"--axis {key} with --population: {value} is of other networks than {population.default[key]}",
                    "axes that leave the networks as they are, since members take over each other's weights",
                    "leave it out, or search without --population",
                )


def _networks(config: ClassifierConfig, classes: int) -> Any:
    """What tells the networks of two classifiers apart, so that weights of one do not fit the other."""
    with torch.device("meta"):
        model = build_classifier(config, classes)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return shapes, classifier_description(config, ()), config.trained == "neck"


def _trained(population: Population, before: Sequence[Generation], parent: str) -> Generation:
    """Trains the next generation up to the objective's stage."""
    seed = population.resolved.config.seed
    if before:
        members = next_generation(before[-1], population.axes, seed=seed)
    else:
        members = first_generation(population.axes, population.default, members=population.members, seed=seed)
    trials = [_trial(population, member) for member in members]
    outcome = run_trials(trials, population.common(parent), parallel=population.parallel)
    return [_ended(population, member, outcome) for member in members]


def _ended(population: Population, member: Member, outcome: Outcome) -> Member:
    """A member with what it came to, or why it failed."""
    name = population.member_name(member)
    if name in outcome.failures:
        return replace(member, cause=outcome.failures[name].found)
    val_map = outcome.val_map[name]
    try:
        return replace(member, objective=population.goal.value(val_map, outcome.scores[name]), val_map=val_map)
    except UserError as error:
        return replace(member, cause=error.found)


def _trial(population: Population, member: Member) -> Trial:
    varied = {"generation": member.generation, "member": member.number, "parent": member.parent}
    return population.trial(population.member_name(member), population.values(member), varied)


def _done(generation: Generation) -> Generation:
    return [member for member in generation if member.objective is not None]


def _keep(population: Population, generations: Sequence[Generation], tracker: Tracker) -> None:
    """Writes what was found so far into the folder of the search's run, and hands the newest figures to MLflow."""
    folder, best = population.folder, best_of(generations)
    write_json(
        folder.study,
        {
            "study": "population",
            **population.about(),
            "generations": [
                [{"run": population.member_name(member), **asdict(member)} for member in generation]
                for generation in generations
            ],
            "best": best and population.member_name(best),
        },
    )
    with written_aside(folder.study_picture) as aside:
        population_picture(generations, aside, population.name, population.goal.about)
    if best:
        write_best(population, population.values(best))
        tracker.metrics({"best": best.objective or 0.0})
    figures = {"objective.best": best_of(generations[-1:]), "objective.control": control_of(generations[-1])}
    for name, member in figures.items():
        if member:
            tracker.metrics({name: member.objective or 0.0}, len(generations) - 1)


def _in_words(generation: Generation) -> str:
    """How a generation came out, in a line."""
    done, best, control = _done(generation), best_of([generation]), control_of(generation)
    parts = [f"generation {generation[0].generation}: {len(done)} of {len(generation)} members done"]
    if best:
        average = mean(member.objective or 0.0 for member in done)
        parts.append(f"best {best.objective:.2f} (member {best.number}), mean {average:.2f}")
    if control:
        parts.append(f"default {control.objective:.2f}")
    return ", ".join(parts)


def _print(population: Population, generations: Sequence[Generation], minutes: float) -> None:
    """The table, what failed, and what the best owes to more than its epochs."""
    console.print(population_table(generations, population.goal.about, list(population.axes)))
    members = [member for generation in generations for member in generation]
    length = f"{len(generations)} generations of {population.resolved.config.classifier.trained_epochs} epochs"
    console.print(f"{len(members)} members in {length}; {minutes:.1f} min of this command", markup=False)
    for member in members:
        if member.cause:
            console.print(f"  {population.member_name(member)} failed: {member.cause}", markup=False)
    if best := best_of(generations):
        control = control_of(generations[best.generation])
        gain = (best.objective or 0.0) - (control.objective or 0.0) if control else None
        above = "" if gain is None else f", {gain:+.2f} against the default values after as many epochs"
        line = ", ".join(str(each.number) for each in line_of(generations, best))
        console.print(
            f"best: {population.member_name(best)}, trained by members {line}: {best.objective:.2f}{above}; "
            f"mcis run --config {population.folder.best} --name NAME",
            markup=False,
        )
