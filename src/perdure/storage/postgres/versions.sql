-- Versioned tables (storage/versions.py): made by a store's first snapshot, and brought up to date by each migration.
-- Statements end with two semicolons; the setting perdure.tables has what domains declare of the tables, as JSON.
CREATE TABLE IF NOT EXISTS epoch (
    one integer PRIMARY KEY CHECK (one = 1),
    epoch bigint NOT NULL,
    held bigint NOT NULL                -- the newest snapshot that is kept; -1: none
);;
INSERT INTO epoch (one, epoch, held) VALUES (1, 1, -1) ON CONFLICT DO NOTHING;;
DO $install$
DECLARE
    store text := current_schema();
    declared json;
    each text;
    columns text;
    old text;
    keys text;
    added record;
    look json;
BEGIN
    IF to_regclass('snapshot') IS NULL THEN -- an empty one, which was left when a store was dropped
        EXECUTE format('DROP SCHEMA IF EXISTS %I', store || '_at');
    END IF;
    EXECUTE format('CREATE SCHEMA IF NOT EXISTS %I', store || '_at');
    FOR declared IN SELECT json_array_elements(current_setting('perdure.tables')::json) LOOP
        each := declared ->> 'name';
        CONTINUE WHEN to_regclass(each) IS NULL; -- a later migration makes it
        EXECUTE format('ALTER TABLE %I ADD COLUMN IF NOT EXISTS stamp bigint NOT NULL DEFAULT 0', each);
        SELECT string_agg(format('%I', attname), ', ' ORDER BY attnum),
            string_agg(format('OLD.%I', attname), ', ' ORDER BY attnum) INTO columns, old FROM pg_attribute
            WHERE attrelid = each::regclass AND attnum > 0 AND NOT attisdropped AND attname <> 'stamp';
        SELECT string_agg(format('%I', a.attname), ', ' ORDER BY k.place) INTO keys
            FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k(number, place), pg_attribute a
            WHERE i.indrelid = each::regclass AND i.indisprimary AND a.attrelid = i.indrelid AND a.attnum = k.number;
        IF to_regclass(each || '_past') IS NULL THEN
            EXECUTE format('CREATE TABLE %I (LIKE %I)', each || '_past', each);
            EXECUTE format('ALTER TABLE %I ADD COLUMN died bigint NOT NULL', each || '_past');
        END IF;
        FOR added IN SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type,
                coalesce(pg_get_expr(d.adbin, d.adrelid), 'NULL') AS expression
            FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
            WHERE a.attrelid = each::regclass AND a.attnum > 0 AND NOT a.attisdropped AND NOT EXISTS (
                SELECT 1 FROM pg_attribute p WHERE p.attrelid = (each || '_past')::regclass AND p.attname = a.attname)
        LOOP -- rows of the past have the default of a column that is newer than they are
            EXECUTE format('ALTER TABLE %I ADD COLUMN %I %s DEFAULT %s', each || '_past', added.attname, added.type,
                added.expression);
        END LOOP;
        EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %I (%s)', each || '_past_key', each || '_past', keys);
        FOR look IN SELECT json_array_elements(declared -> 'looked_up') LOOP
            EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %I (tenant, %s)', each || '_past_by_' || (look ->> -1),
                each || '_past', (SELECT string_agg(format('%I', name), ', ') FROM json_array_elements_text(look) name));
        END LOOP;
        IF (declared ->> 'finds_changes')::boolean THEN
            EXECUTE format('CREATE INDEX IF NOT EXISTS %I ON %I (tenant, stamp)', each || '_stamp', each);
        END IF;
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', each || '_past');
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', each || '_past');
        EXECUTE format('DROP POLICY IF EXISTS tenants ON %I', each || '_past');
        EXECUTE format('CREATE POLICY tenants ON %I
            USING ((SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()))', each || '_past');
        -- SECURITY DEFINER: writers have no right to write the past. So no role may attach the function to a table of its
        -- own, and nothing in it is looked up in a path that the caller chose.
        -- FOR KEY SHARE takes ROW SHARE on the table until the transaction ends, and touches no row.
        EXECUTE format($f$CREATE OR REPLACE FUNCTION %2$I() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
            SET search_path = pg_catalog, pg_temp AS $body$
            DECLARE
                now_epoch bigint;
                newest_kept bigint;
            BEGIN
                SELECT e.epoch, e.held INTO now_epoch, newest_kept FROM %1$I.epoch e
                    LEFT JOIN (SELECT 1 AS one FROM %1$I.epoch WHERE false FOR KEY SHARE) AS writers ON true;
                IF TG_OP <> 'INSERT' AND OLD.stamp < now_epoch AND OLD.stamp <= newest_kept
                    OR TG_OP = 'DELETE' AND newest_kept >= 0 AND %6$s THEN
                    INSERT INTO %1$I.%3$I (%4$s, stamp, died) VALUES (%5$s, OLD.stamp, now_epoch);
                END IF;
                IF TG_OP = 'DELETE' THEN
                    RETURN OLD;
                END IF;
                NEW.stamp := now_epoch;
                RETURN NEW;
            END $body$$f$, store, 'keep_' || each, each || '_past', columns, old, declared ->> 'remembered');
        EXECUTE format('REVOKE ALL ON FUNCTION %I() FROM PUBLIC', 'keep_' || each);
        EXECUTE format('CREATE OR REPLACE TRIGGER keep_past BEFORE INSERT OR UPDATE OR DELETE ON %I
            FOR EACH ROW EXECUTE FUNCTION %I()', each, 'keep_' || each);
        -- The conditions stand outside of the union: only a union of bare tables can use their indexes in a join.
        EXECUTE format($f$CREATE OR REPLACE VIEW %2$I.%3$I WITH (security_invoker = true) AS SELECT %4$s FROM (
                SELECT %4$s, stamp, 9223372036854775807 AS died FROM %1$I.%3$I
                UNION ALL SELECT %4$s, stamp, died FROM %1$I.%5$I) versions
            WHERE stamp <= (SELECT nullif(current_setting('perdure.at', true), '')::bigint)
                AND died > (SELECT nullif(current_setting('perdure.at', true), '')::bigint)$f$,
            store, store || '_at', each, columns, each || '_past');
    END LOOP;
END $install$;;
CREATE TABLE IF NOT EXISTS snapshot (
    name text PRIMARY KEY,
    epoch bigint NOT NULL UNIQUE,
    token text NOT NULL,                -- the epoch and chance: two stores with one epoch and two tokens have parted
    taken_at bigint NOT NULL,           -- microseconds since 1970
    good integer NOT NULL,
    keep_until bigint,
    manifest text NOT NULL              -- JSON: what took it, and of which store
);;
-- A note may name what belongs to one tenant.
CREATE TABLE IF NOT EXISTS snapshot_note (
    token text PRIMARY KEY,
    note text NOT NULL
);;
-- Snapshots are of all tenants: each may read at them; only those who work for all may take, release or annotate one.
ALTER TABLE snapshot ENABLE ROW LEVEL SECURITY;;
ALTER TABLE snapshot FORCE ROW LEVEL SECURITY;;
DROP POLICY IF EXISTS readers ON snapshot;;
CREATE POLICY readers ON snapshot FOR SELECT USING (true);;
DROP POLICY IF EXISTS operators ON snapshot;;
CREATE POLICY operators ON snapshot USING ((SELECT may_see_every_tenant()));;
ALTER TABLE snapshot_note ENABLE ROW LEVEL SECURITY;;
ALTER TABLE snapshot_note FORCE ROW LEVEL SECURITY;;
DROP POLICY IF EXISTS operators ON snapshot_note;;
CREATE POLICY operators ON snapshot_note USING ((SELECT may_see_every_tenant()));;
-- Roles that may read the store may read it at a snapshot; operators also take and release one. The past is written by
-- the functions above; a role may delete its tenants' part of it, since erasing does.
DO $grants$
DECLARE
    store text := current_schema();
    reader name;
    each text;
BEGIN
    FOR reader IN SELECT DISTINCT r.rolname FROM pg_class c, aclexplode(c.relacl) a, pg_roles r
        WHERE c.oid = 'tenant'::regclass AND a.privilege_type = 'SELECT' AND r.oid = a.grantee AND r.oid <> c.relowner LOOP
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', store || '_at', reader);
        EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO %I', store || '_at', reader);
        EXECUTE format('GRANT %s ON epoch, snapshot, snapshot_note TO %I', CASE WHEN has_type_privilege(reader, 'sees_every_tenant', 'USAGE')
            THEN 'SELECT, INSERT, UPDATE, DELETE' ELSE 'SELECT' END, reader);
        FOR each IN SELECT declared ->> 'name' FROM json_array_elements(current_setting('perdure.tables')::json) declared LOOP
            CONTINUE WHEN to_regclass(each) IS NULL;
            EXECUTE format('GRANT SELECT, DELETE ON %I TO %I', each || '_past', reader);
        END LOOP;
    END LOOP;
END $grants$
