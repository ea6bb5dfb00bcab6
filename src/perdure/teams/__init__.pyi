# The public names: see `perdure/__init__.pyi`.

from perdure.teams.letters import DeadLetter as DeadLetter
from perdure.teams.members import MemberInfo as MemberInfo
from perdure.teams.members import TeamInfo as TeamInfo
from perdure.teams.restoring import PastEffect as PastEffect
from perdure.teams.restoring import TeamRestore as TeamRestore
from perdure.teams.restoring import TeamRewind as TeamRewind
from perdure.teams.snapshots import MessageInFlight as MessageInFlight
from perdure.teams.snapshots import TeamSnapshot as TeamSnapshot
from perdure.teams.team import Team as Team
