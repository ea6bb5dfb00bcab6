# The public names: see `perdure/__init__.pyi`.

from perdure.regions.promotion import Promoted as Promoted
from perdure.regions.promotion import promote as promote
from perdure.regions.replication import Replicated as Replicated
from perdure.regions.replication import replicate as replicate
