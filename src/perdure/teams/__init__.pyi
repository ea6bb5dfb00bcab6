# The public names: see `perdure/__init__.pyi`.

from perdure.teams.letters import DeadLetter as DeadLetter
from perdure.teams.linked import LinkedSnapshot as LinkedSnapshot
from perdure.teams.linked import LinkedTeam as LinkedTeam
from perdure.teams.linked import alink as alink
from perdure.teams.linked import link as link
from perdure.teams.members import MemberInfo as MemberInfo
from perdure.teams.post import Post as Post
from perdure.teams.recovery import Fall as Fall
from perdure.teams.recovery import RecoveryLine as RecoveryLine
from perdure.teams.recovery import SentMessage as SentMessage
from perdure.teams.recovery import recovery_line as recovery_line
from perdure.teams.register import NatsRegister as NatsRegister
from perdure.teams.snapshots import InFlight as InFlight
from perdure.teams.snapshots import TeamSnapshot as TeamSnapshot
from perdure.teams.team import Team as Team
