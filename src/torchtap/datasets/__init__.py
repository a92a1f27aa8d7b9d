"""Activation datasets: from data to a sharded, shuffled, resumable folder of activations, and back into training.

documents.py   data → numbered documents → units of work
rows.py        a site's value → rows with identities
encoding.py    rows → stored dtype, with statistics and the measured error
worker.py      a unit → a shard;  shard.py: its file
engines.py     this process, several processes, Ray, Dask
harvest.py     `harvest`: settings, resume, progress
reader.py      `open_activations`: rows, batches, documents;  export.py: other layouts
reshuffle.py   `reshuffle`: a second pass over all rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtap.lazy import names_from

if TYPE_CHECKING:
    from torchtap.datasets.encoding import SiteStatistics as SiteStatistics
    from torchtap.datasets.harvest import Progress as Progress
    from torchtap.datasets.harvest import harvest as harvest
    from torchtap.datasets.reader import Activations as Activations
    from torchtap.datasets.reader import Batches as Batches
    from torchtap.datasets.reader import open_activations as open_activations
    from torchtap.datasets.reshuffle import reshuffle as reshuffle

_HOME = {
    "Activations": "reader",
    "Batches": "reader",
    "Progress": "harvest",
    "SiteStatistics": "encoding",
    "harvest": "harvest",
    "open_activations": "reader",
    "reshuffle": "reshuffle",
}
__all__ = list(_HOME)
__getattr__ = names_from(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
