-- Gives a role exactly the rights of its kind on the tables as they are now, in place of what it had. Run it as the
-- store's owner. Nothing is granted that row-level security does not cover (TRUNCATE, REFERENCES, TRIGGER).
BEGIN;
SET LOCAL search_path = {schema};
SELECT set_config('perdure.new_role', {role_text}, true);
DO $$
DECLARE
    new_role text := current_setting('perdure.new_role');
BEGIN
    IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = new_role) THEN
        EXECUTE format('CREATE ROLE %I LOGIN', new_role);
    END IF;
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), new_role);
END $$;
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role};
REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM {role};
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM {role}; -- PUBLIC may call what policies use
REVOKE ALL ON SCHEMA {schema} FROM {role};
REVOKE USAGE ON TYPE chooses_tenant, sees_every_tenant FROM {role};
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
-- Except what tables declare (storage/domains.py, Table.roles_may).
REVOKE INSERT, UPDATE, DELETE ON {read_only} FROM {role};
REVOKE UPDATE, DELETE ON {add_only} FROM {role};
GRANT USAGE ON SEQUENCE number TO {role};
DELETE FROM tenant_role WHERE role = {role_text};
--app: GRANT USAGE ON TYPE chooses_tenant TO {role};
--tenant: REVOKE INSERT ON tenant FROM {role};
--tenant: INSERT INTO tenant (tenant, name) SELECT nextval('number'), {tenant}
--tenant: WHERE NOT EXISTS (SELECT 1 FROM tenant WHERE name = {tenant}) ON CONFLICT (name) DO NOTHING;
--tenant: INSERT INTO tenant_role (role, tenant) SELECT {role_text}, tenant FROM tenant WHERE name = {tenant};
--operator: GRANT USAGE ON TYPE sees_every_tenant TO {role};
--operator: GRANT SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {role}; -- a backup copies where they are
-- Snapshots (storage/versions.py): every role may read at one, and erase from it what is its tenant's; only an operator
-- takes and releases them.
DO $$
DECLARE
    new_role text := current_setting('perdure.new_role');
    each text;
BEGIN
    IF to_regclass('epoch') IS NOT NULL THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema() || '_at', new_role);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO %I', current_schema() || '_at', new_role);
        IF '{kind}' <> 'operator' THEN
            EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON epoch, snapshot, snapshot_note FROM %I', new_role);
        END IF;
        FOR each IN SELECT relname FROM pg_class
            WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND relname LIKE '%\_past' LOOP
            EXECUTE format('REVOKE INSERT, UPDATE ON %I FROM %I', each, new_role);
        END LOOP;
    END IF;
END $$;
DO $$
DECLARE
    new_role text := current_setting('perdure.new_role');
    sees_all boolean := has_type_privilege(new_role, 'sees_every_tenant', 'USAGE');
    chooses boolean := has_type_privilege(new_role, 'chooses_tenant', 'USAGE');
    other text;
BEGIN
    IF sees_all AND current_setting('server_version_num')::int >= 170000 THEN -- another role than the owner may VACUUM
        EXECUTE format('GRANT MAINTAIN ON ALL TABLES IN SCHEMA %I TO %I', current_schema(), new_role);
    END IF;
    -- Roles that this one could become by SET ROLE count too.
    SELECT x.rolname INTO other FROM pg_roles x WHERE pg_has_role(new_role, x.oid, 'MEMBER') AND (
        x.rolsuper OR x.rolbypassrls OR has_type_privilege(x.oid, 'sees_every_tenant', 'USAGE')
        OR pg_has_role(x.oid, (SELECT relowner FROM pg_class WHERE oid = 'tenant'::regclass), 'USAGE')
        OR (has_type_privilege(x.oid, 'chooses_tenant', 'USAGE') AND NOT chooses)) LIMIT 1;
    IF other IS NOT NULL AND '{kind}' <> 'operator' THEN
        RAISE EXCEPTION 'the role "%" is or can become "%", which sees more than a role of this kind may. '
            'Nothing was changed; use another role', new_role, other
            USING ERRCODE = 'invalid_role_specification';
    END IF;
END $$;
COMMIT;
