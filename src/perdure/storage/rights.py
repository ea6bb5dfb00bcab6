"""The SQL by which PostgreSQL keeps tenants apart, as far as no table declares it: rights, and functions for policies.

Who sees what hangs on two types, which hold nothing: a role that may use the type has the right. GRANT … ON ALL TABLES
does not reach types, so a broad grant gives no role more than it should see. The owner of a type has the right by
itself, as the owner of a store always could see all of it. `perdure store role` makes the grants.

    sees_every_tenant     all tenants: the owner; workers, backups and maintenance for all tenants
    chooses_tenant        the tenant named by the setting perdure.tenant, for as long as a transaction
    neither               the one tenant that tenant_role names for the role, whatever is set; without a row, nothing
"""

from __future__ import annotations

RIGHTS = """
CREATE TYPE sees_every_tenant AS ENUM ();
CREATE TYPE chooses_tenant AS ENUM ();
REVOKE USAGE ON TYPE sees_every_tenant FROM PUBLIC;
REVOKE USAGE ON TYPE chooses_tenant FROM PUBLIC;

-- Bodies of this form are resolved when they are made: a caller's search_path and temporary tables do not reach them.
-- All but bound_tenant are taken apart by the planner, so that they cost a look into a cache. STABLE and without
-- arguments, inside (SELECT …): once for each statement, not for each row.
CREATE FUNCTION may_see_every_tenant() RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN has_type_privilege('sees_every_tenant'::regtype, 'USAGE');
CREATE FUNCTION bound_tenant() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (SELECT r.tenant FROM tenant_role r WHERE r.role = current_user);
CREATE FUNCTION chosen_tenant_name() RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        THEN current_setting('perdure.tenant_name', true) END;
-- A setting that was local to a transaction is the empty text after it.
CREATE FUNCTION visible_tenant() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN CASE WHEN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        THEN nullif(current_setting('perdure.tenant', true), '')::bigint
        ELSE bound_tenant() END;
CREATE FUNCTION serves_several_tenants() RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN has_type_privilege('chooses_tenant'::regtype, 'USAGE')
        OR has_type_privilege('sees_every_tenant'::regtype, 'USAGE');
"""
