"""The SQL by which PostgreSQL keeps tenants apart, as far as no table declares it: rights, and functions for policies.

A role that may use the type `sees_every_tenant` sees all tenants; with `chooses_tenant` it sees the one that the
setting perdure.tenant names; any other role sees the one that tenant_role names for it. GRANT … ON ALL TABLES does not
reach types, so a broad grant gives no role more than it should see.
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
