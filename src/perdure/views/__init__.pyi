# The public names: see `perdure/__init__.pyi`.

from perdure.values.readable import readable as readable
from perdure.values.readable import to_json as to_json
from perdure.views.graphs import GraphCheckpoint as GraphCheckpoint
from perdure.views.graphs import adescribe as adescribe
from perdure.views.graphs import describe as describe
from perdure.views.graphs import is_checkpoint as is_checkpoint
from perdure.views.graphs import values_of as values_of
from perdure.views.messages import are_messages as are_messages
from perdure.views.messages import as_line as as_line
from perdure.views.messages import role_of as role_of
from perdure.views.messages import text_of as text_of
