"""The doctor's look at an object store: whether the store was told where it is, and whether its objects are there."""

from __future__ import annotations

from perdure.errors import KeyMissing
from perdure.ops.doctor.findings import Finding, Patient, many
from perdure.ops.far.missing import Lost, has_any, look_for
from perdure.storage.program import Flow
from perdure.threads.far_loose import objects_of, place_of

_LOOKED_MAX = 2000  # one question to the object store for each
_SHOWN_MAX = 3
_GIVE = "open(url, objects=…), or --objects URL or PERDURE_OBJECTS for the commands"

_BRING = "bring them back from a copy or an older version of the bucket"


def objects(patient: Patient) -> Flow[list[Finding]]:
    """Of this tenant's objects: a role may see no others. Nothing, if it has none."""
    try:
        tenant = yield from patient.ctx.tenant()
    except KeyMissing:
        tenant = None  # the line about encryption says so
    if tenant is None:
        return []
    if objects_of(patient.ctx) is None:
        if not (yield from has_any(tenant)):
            return []
        says = f"data of tenant {patient.ctx.tenant_name!r} is in an object store, and the store was opened without it"
        return [Finding("objects", "problem", says, f"say where it is: {_GIVE}")]
    place = place_of(patient.ctx)
    looked = yield from look_for(patient.ctx, tenant, _LOOKED_MAX)
    more = "" if looked.objects < _LOOKED_MAX else f" (the first {_LOOKED_MAX:,} were looked for)"
    if not looked.lost:
        return [Finding("objects", "ok", f"{many(looked.objects, 'object')} at {place}, all there{more}")]
    return [_missing(looked.objects, looked.lost, place, more)]


def _missing(count: int, lost: list[Lost], place: str, more: str) -> Finding:
    named = "; ".join(one.what for one in lost[:_SHOWN_MAX]) + ("; …" if len(lost) > _SHOWN_MAX else "")
    if len(lost) == count:
        says = f"none of {many(count, 'object')} is at {place}{more}: {named}"
        return Finding("objects", "problem", says, f"is it the right place? {_GIVE}; if it is, {_BRING}")
    says = f"{len(lost):,} of {many(count, 'object')} missing{more}: {named}"
    return Finding("objects", "problem", says, f"{_BRING}; if they are lost, `perdure repair` mends the rest")
