-- Tenants that the database keeps apart: row-level security on every table that has a tenant, and whom it lets see what.
-- A table that a later migration adds needs the same three lines; a test looks for one that lacks them.
--
-- Who sees what hangs on two types, which hold nothing: whoever may use the type has the right. Types, because GRANT …
-- ON ALL TABLES does not reach them, so that a broad grant gives nobody more than he should see; and because their
-- owner has the right by itself, as the owner of a store always could see all of it. `perdure roles` makes the grants.
--   sees_every_tenant     all tenants: the owner; workers, backups and upkeep for all tenants
--   chooses_tenant        the tenant named by the setting perdure.tenant, for as long as a transaction
--   neither               the one tenant that tenant_role names for the role, whatever is set; without a row there, nothing
CREATE TYPE sees_every_tenant AS ENUM ();
CREATE TYPE chooses_tenant AS ENUM ();
REVOKE USAGE ON TYPE sees_every_tenant FROM PUBLIC;
REVOKE USAGE ON TYPE chooses_tenant FROM PUBLIC;

-- Roles that are bound to one tenant, by name. Only the owner writes here.
CREATE TABLE tenant_role (
    role name PRIMARY KEY,
    tenant bigint NOT NULL
);

-- Bodies of this form are resolved when they are made: a caller's search_path and temporary tables do not reach into them.
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

-- FORCE: for the owner too, who passes by the right above and can give it away.
DO $$
DECLARE
    each text;
BEGIN
    FOREACH each IN ARRAY ARRAY[
        'thread', 'tag', 'record', 'body', 'sweep', 'space', 'label', 'write', 'run', 'run_value', 'journal', 'ask',
        'answer', 'signal', 'blob', 'run_blob', 'pack', 'pin', 'erased', 'seal', 'copy', 'quarantine'
    ] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', each);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', each);
        EXECUTE format(
            'CREATE POLICY tenants ON %I
            USING ((SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()))', each
        );
    END LOOP;
END $$;

-- Copies of the whole store hold every tenant's data: each may know of them, since erasing must name them.
CREATE POLICY whole_store ON copy FOR SELECT USING (tenant IS NULL);

-- A tenant's number is looked up, and a tenant made, by its name, before the number is known.
ALTER TABLE tenant ENABLE ROW LEVEL SECURITY;
ALTER TABLE tenant FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tenant USING (
    (SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()) OR name = (SELECT chosen_tenant_name())
);

ALTER TABLE tenant_role ENABLE ROW LEVEL SECURITY;
ALTER TABLE tenant_role FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tenant_role USING ((SELECT may_see_every_tenant()) OR role = current_user);

-- What belongs to the store. In meta, a key about one tenant is a word and the tenant's number ("upkeep 3").
ALTER TABLE meta ENABLE ROW LEVEL SECURITY;
ALTER TABLE meta FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON meta USING (
    (SELECT may_see_every_tenant()) OR split_part(key, ' ', 2) = (SELECT visible_tenant())::text
);
CREATE POLICY whole_store ON meta FOR SELECT USING (key = 'store');

-- Limits of queues are for those who work for more than one tenant. How large the store is, everybody can ask the server.
ALTER TABLE queue ENABLE ROW LEVEL SECURITY;
ALTER TABLE queue FORCE ROW LEVEL SECURITY;
CREATE POLICY several ON queue USING ((SELECT serves_several_tenants()));
ALTER TABLE size_sample ENABLE ROW LEVEL SECURITY;
ALTER TABLE size_sample FORCE ROW LEVEL SECURITY;
CREATE POLICY several ON size_sample USING ((SELECT serves_several_tenants()));
CREATE POLICY whole_store ON size_sample FOR SELECT USING (true);
