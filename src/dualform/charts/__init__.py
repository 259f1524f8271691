"""Pictures of what a network remembers: one function per kind of picture, each returns a chart.

Charts are Vega-Lite by way of Altair (extra `charts`): they show themselves in notebooks, and
`save` writes them as SVG, PNG, PDF, HTML or JSON without a browser. Functions here take what the
library gives (an `Attention`, a `Spotlight`, a `Contribution`, or a `Table` of theirs), or plain
numbers where those are more natural. They draw and never compute: every number in a picture is one
that a table has too, and a picture holds no more numbers than it shows.

`pictures.py` draws images (`png.py` makes them), `classes.py` attention class by class,
`timeline.py` attention over training, `waterfall.py` what an output adds up from, `accuracy.py` and
`voting.py` measured percentages, `binned.py` one number against another. Below them, `groups.py`
reads attention as groups of patterns, `measured.py` sums up runs and says how they are printed,
`style.py` holds colours, sizes and the import of Altair, `saving.py` writes files.
"""

from dualform.charts.accuracy import accuracies, strengths
from dualform.charts.binned import weights_against_values
from dualform.charts.classes import top_per_class, totals_per_class
from dualform.charts.measured import printed
from dualform.charts.pictures import images, top_images
from dualform.charts.saving import save
from dualform.charts.style import grid
from dualform.charts.timeline import over_time, top_over_time
from dualform.charts.voting import votes
from dualform.charts.waterfall import parts

__all__ = [
    "images",
    "top_images",
    "top_per_class",
    "totals_per_class",
    "over_time",
    "top_over_time",
    "parts",
    "accuracies",
    "strengths",
    "votes",
    "weights_against_values",
    "printed",
    "grid",
    "save",
]
