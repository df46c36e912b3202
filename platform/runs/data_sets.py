"""The images of a run as MLflow's data sets: names, counts, where they are, and a digest; no image is opened."""

import json
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from mcis.datasets.sources import SOURCES
from mcis.datasets.storage.uris import is_remote, without_credentials
from mcis.platform.config.sections import Config
from mcis.platform.config.settings import sources_of
from mcis.platform.runs.listing import value_of

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_CONTEXTS = {"train": "training", "val": "validation", "test": "test"}


class DataSet(NamedTuple):
    """The images of one source and split.

    Attributes:
        name: such as `voc train`.
        digest: of the whole index that the images are part of.
        context: what the run uses them for: training, validation or test.
        source_type, source: where they are, as MLflow reads it: `local` and {"uri": path}, `s3` and {"uri": URI}.
        profile: their number, as JSON.
    """

    name: str
    digest: str
    context: str
    source_type: str
    source: str
    profile: str

    def as_input(self) -> "DatasetInput":
        """As an MLflow run has it."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        data_set = Dataset(self.name, self.digest, self.source_type, self.source, profile=self.profile)
        return DatasetInput(data_set, [InputTag("mlflow.data.context", self.context)])


def data_sets(config: Config, index: pa.Table, digest: str) -> list[DataSet]:
    """The data sets of an index, by source and split.

    Args:
        index: the columns domain and split of INDEX_SCHEMA.
        digest: the identity of the index.
    """
    sets = []
    for source in sources_of(config.setting):
        location = _location(config, source)
        scheme = urlsplit(location).scheme if is_remote(location) else "local"
        of_source = index.filter(pc.equal(index["domain"], SOURCES[source].domain))
        for split, context in _CONTEXTS.items():
            images = pc.sum(pc.equal(of_source["split"], split)).as_py() or 0
            if images:
                sets.append(
                    DataSet(
                        name=f"{source} {split}",
                        digest=digest,
                        context=context,
                        source_type=scheme,
                        source=json.dumps({"uri": without_credentials(location)}),
                        profile=json.dumps({"num_rows": images}),
                    )
                )
    return sets


def _location(config: Config, source: str) -> str:
    """The path or URI that the configuration has for a source."""
    return str(value_of(config, SOURCES[source].keys(source)[SOURCES[source].location]))
