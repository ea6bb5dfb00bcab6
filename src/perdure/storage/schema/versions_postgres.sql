-- Versioned tables (storage/versions.py). Statements end with two semicolons; the tables are in the setting perdure.tables.
CREATE TABLE epoch (
    one integer PRIMARY KEY CHECK (one = 1),
    epoch bigint NOT NULL,
    held bigint NOT NULL                -- the newest snapshot that is kept; -1: none
);;
INSERT INTO epoch (one, epoch, held) VALUES (1, 1, -1);;
-- FOR KEY SHARE takes ROW SHARE on the table until the transaction ends, and touches no row. SECURITY DEFINER: a writer
-- needs no right to the table.
CREATE FUNCTION current_epoch() RETURNS bigint LANGUAGE sql VOLATILE SECURITY DEFINER
BEGIN ATOMIC
    SELECT e.epoch FROM epoch e LEFT JOIN (SELECT 1 AS one FROM epoch WHERE false FOR KEY SHARE) AS writers ON true;
END;;
DO $install$
DECLARE
    store text := current_schema();
    each text;
    columns text;
    keys text;
BEGIN
    IF current_setting('server_version_num')::int < 150000 THEN -- a view has the rights of its reader
        RAISE EXCEPTION 'snapshots need PostgreSQL 15 or newer';
    END IF;
    EXECUTE format('DROP SCHEMA IF EXISTS %I', store || '_at'); -- an empty one, which was left when a store was dropped
    EXECUTE format('CREATE SCHEMA %I', store || '_at');
    FOREACH each IN ARRAY string_to_array(current_setting('perdure.tables'), ' ') LOOP
        SELECT string_agg(format('%I', attname), ', ' ORDER BY attnum) INTO columns FROM pg_attribute
            WHERE attrelid = each::regclass AND attnum > 0 AND NOT attisdropped;
        SELECT string_agg(format('%I', a.attname), ', ' ORDER BY k.place) INTO keys
            FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(number, place), pg_attribute a
            WHERE i.indrelid = each::regclass AND i.indisprimary AND a.attrelid = i.indrelid AND a.attnum = k.number;
        EXECUTE format('ALTER TABLE %I ADD COLUMN stamp bigint NOT NULL DEFAULT 0', each);
        EXECUTE format('ALTER TABLE %I ALTER COLUMN stamp SET DEFAULT current_epoch()', each);
        EXECUTE format('CREATE TABLE %I (LIKE %I)', each || '_past', each);
        EXECUTE format('ALTER TABLE %I ADD COLUMN died bigint NOT NULL', each || '_past');
        EXECUTE format('CREATE INDEX ON %I (%s)', each || '_past', keys);
        IF each IN ('thread', 'run', 'memory_item', 'label', 'write') THEN
            EXECUTE format('CREATE INDEX %I ON %I (tenant, stamp)', each || '_stamp', each);
        END IF;
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', each || '_past');
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', each || '_past');
        EXECUTE format('CREATE POLICY tenants ON %I
            USING ((SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()))', each || '_past');
        EXECUTE format($f$CREATE FUNCTION %2$I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $body$
            DECLARE
                now_epoch bigint := %1$I.current_epoch();
            BEGIN
                IF OLD.stamp < now_epoch AND OLD.stamp <= (SELECT held FROM %1$I.epoch) THEN
                    INSERT INTO %1$I.%3$I SELECT OLD.*, now_epoch;
                END IF;
                IF TG_OP = 'DELETE' THEN
                    RETURN OLD;
                END IF;
                NEW.stamp := now_epoch;
                RETURN NEW;
            END $body$$f$, store, 'keep_' || each, each || '_past');
        EXECUTE format('CREATE TRIGGER keep_past BEFORE UPDATE OR DELETE ON %I FOR EACH ROW EXECUTE FUNCTION %I()',
            each, 'keep_' || each);
        -- The conditions stand outside of the union: only a union of bare tables can use their indexes in a join.
        EXECUTE format($f$CREATE VIEW %2$I.%3$I WITH (security_invoker = true) AS SELECT %4$s FROM (
                SELECT %4$s, stamp, 9223372036854775807 AS died FROM %1$I.%3$I
                UNION ALL SELECT %4$s, stamp, died FROM %1$I.%5$I) versions
            WHERE stamp <= (SELECT nullif(current_setting('perdure.at', true), '')::bigint)
                AND died > (SELECT nullif(current_setting('perdure.at', true), '')::bigint)$f$,
            store, store || '_at', each, columns, each || '_past');
    END LOOP;
    CREATE INDEX ON thread_past (tenant, name);
    CREATE INDEX ON run_past (tenant, id);
    CREATE INDEX ON memory_space_past (tenant, path);
    CREATE INDEX ON memory_item_past (tenant, space, key);
END $install$;;
CREATE TABLE snapshot (
    name text PRIMARY KEY,
    epoch bigint NOT NULL UNIQUE,
    token text NOT NULL,                -- random: two stores with one epoch and two tokens have parted
    taken_at bigint NOT NULL,           -- microseconds since 1970
    note text,
    good integer NOT NULL,
    keep_until bigint,
    manifest text NOT NULL              -- JSON: what took it, and of which store
);;
-- Snapshots are of all tenants: each may read at them; only those who work for all may take or release one.
ALTER TABLE snapshot ENABLE ROW LEVEL SECURITY;;
ALTER TABLE snapshot FORCE ROW LEVEL SECURITY;;
CREATE POLICY readers ON snapshot FOR SELECT USING (true);;
CREATE POLICY operators ON snapshot USING ((SELECT may_see_every_tenant()));;
-- Roles that may read the store may read it at a snapshot; operators also take and release one. The past is written by
-- the functions above; a role may delete its tenants' part of it, since erasing does.
DO $grants$
DECLARE
    store text := current_schema();
    reader name;
    each text;
BEGIN
    FOR reader IN SELECT DISTINCT r.rolname FROM pg_class c, aclexplode(c.relacl) a, pg_roles r
        WHERE c.oid = 'thread'::regclass AND a.privilege_type = 'SELECT' AND r.oid = a.grantee AND r.oid <> c.relowner LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', store || '_at', reader);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO %I', store || '_at', reader);
        EXECUTE format('GRANT %s ON epoch, snapshot TO %I', CASE WHEN has_type_privilege(reader, 'sees_every_tenant', 'USAGE')
            THEN 'SELECT, INSERT, UPDATE, DELETE' ELSE 'SELECT' END, reader);
        FOREACH each IN ARRAY string_to_array(current_setting('perdure.tables'), ' ') LOOP
            EXECUTE format('GRANT SELECT, DELETE ON %I TO %I', each || '_past', reader);
        END LOOP;
    END LOOP;
END $grants$
