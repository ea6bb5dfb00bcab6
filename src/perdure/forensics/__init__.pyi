# The public names: see `perdure/__init__.pyi`.

from perdure.forensics.audit import Audit as Audit
from perdure.forensics.audit import AuditEntry as AuditEntry
from perdure.forensics.audit import audit_run as audit_run
from perdure.forensics.audit import audit_thread as audit_thread
from perdure.forensics.datasets import export_dataset as export_dataset
from perdure.forensics.incidents import Frame as Frame
from perdure.forensics.incidents import Incident as Incident
from perdure.forensics.incidents import incident as incident
from perdure.forensics.queries import SqlResult as SqlResult
from perdure.forensics.queries import export_parquet as export_parquet
from perdure.forensics.queries import sql as sql
from perdure.forensics.queries import sql_tables as sql_tables
from perdure.forensics.sandboxes import Sandbox as Sandbox
from perdure.forensics.sandboxes import sandbox as sandbox
from perdure.runs.calls.evidence import record_failures as record_failures
