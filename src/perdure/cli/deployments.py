"""The commands about deployments: deploy, deployments."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, command, root, with_store
from perdure.cli.code import durable_function
from perdure.cli.parameters import share, trust_option, who_option
from perdure.cli.text import ago, plural, readable
from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.ops import Deployment


@command(
    root,
    "Code",
    "perdure deploy travel v43 --canary 5%\nperdure deploy app.py:travel v43 --move\nperdure deploy travel --remove",
)
@click.argument("function")
@click.argument("version", required=False)
@click.option("--canary", metavar="SHARE", type=share, help="Give it only to this share of new runs, such as 5%.")
@click.option("--move", is_flag=True, help="Also move the open runs whose replay passes; needs APP:FUNCTION.")
@click.option("--remove", is_flag=True, help="Remove the choice: runs get the version of the code that starts them.")
@who_option
@trust_option
@click.pass_obj
def deploy(
    cli: Invocation,
    function: str,
    version: str | None,
    canary: float | None,
    move: bool,
    remove: bool,
    who: str,
    trust: tuple[str, ...],
) -> int:
    """Choose the version that new runs of a function get.

    Workers with that version claim these runs. Open runs keep their version. Perdure reverts a canary that fails more
    often than the version before; it reverts at most one in a hundred of those that do not. To revert a canary
    yourself, deploy the version before.

    --move replays the open runs with the code of APP and moves those that fit. It names those that do not, and exits
    with 1 if there are any.
    """
    with cli.open(trust=trust) as store:
        if (version is None) != remove or (canary is not None) + move + remove > 1:
            raise UsageError("give VERSION, with either --canary or --move or neither; or --remove alone")
        code = durable_function(function) if ":" in function else None
        name = function if code is None else code.perdure_durable.name
        if move and (code is None or code.perdure_durable.version != version):
            raise UsageError(f"--move needs the code of {version!r}: write app.py:{name}, which must have it")
        store.ops.deploy(name, version, canary=canary, who=who)
        moved = [] if code is None or not move else store.ops.move_runs(code)
        deployment = {one.function: one for one in store.ops.deployments()}.get(name)
    said = f"new runs of {name} get {version}"
    if deployment is None:
        said = f"new runs of {name} get the version of the code that starts them"
    elif canary is not None:
        said = f"{canary * 100:g}% of {said}, the others {deployment.version}"
    outcomes = [readable(one) | {"ok": one.is_ok} for one in moved]
    cli.result(said, deployment or {"function": name}, moved=outcomes)
    if not remove:
        cli.message("these runs wait until a worker has that version")
    if move and not cli.json:
        for one in moved:
            cli.line("moved" if one.is_ok else "stays", one.run, one.problem or "")
        cli.message(f"{plural(len(moved), 'open run')} of other versions: {sum(one.is_ok for one in moved)} moved")
    return OK if all(one.is_ok for one in moved) else NO


@command(root, "Code", "perdure deployments\nperdure deployments --json | jq .version")
@with_store
def deployments(cli: Invocation, store: Store) -> None:
    """List the versions that `perdure deploy` chose for new runs, and the failures of canaries.

    --json prints a line per function.
    """
    now = datetime.now(UTC)

    def row(one: Deployment) -> list[str]:
        tried = "" if one.canary is None else f"{one.canary}, {one.share * 100:g}%"
        failed = f"{one.canary_failed} of {one.canary}, {one.failed} of {one.version}" if tried else one.reverted or ""
        return [one.function, one.version, tried, ago(one.since, now), failed]

    names = ("function", "version", "canary", "since", "failed")
    cli.listing(store.ops.deployments(), names, row, empty="no deployments: a run gets the version that starts it")
