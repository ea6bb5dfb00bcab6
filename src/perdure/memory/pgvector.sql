-- An index of memory's vectors by pgvector: a table with the vectors of the newest versions, which triggers fill in the
-- transaction of each put, and a function that asks it. Run by the store's owner, again after a change of the embedder.
-- Writers of memory wait meanwhile. A tenant whose data is encrypted has no rows in it.
-- {store} and {vector} are the schemas of the store and of the extension. Everything is named with its schema: the
-- extension's is often one in which others may make functions and operators.
BEGIN;
SET LOCAL statement_timeout = 0;
SET LOCAL search_path = pg_catalog, pg_temp;
LOCK TABLE {store}.memory_item, {store}.memory_vector IN SHARE ROW EXCLUSIVE MODE;

CREATE TABLE IF NOT EXISTS {store}.memory_ann (
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    space bigint NOT NULL,
    model text NOT NULL,
    dimension bigint NOT NULL,
    vec {vector}.halfvec NOT NULL,
    PRIMARY KEY (tenant, id)
);
ALTER TABLE {store}.memory_ann ENABLE ROW LEVEL SECURITY;
ALTER TABLE {store}.memory_ann FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS tenants ON {store}.memory_ann;
CREATE POLICY tenants ON {store}.memory_ann
    USING ((SELECT {store}.may_see_every_tenant()) OR tenant = (SELECT {store}.visible_tenant()));
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT a.privilege_type AS what, r.rolname AS name
        FROM pg_class c, aclexplode(c.relacl) a JOIN pg_roles r ON r.oid = a.grantee WHERE c.oid = '{store}.memory_vector'::regclass
    LOOP
        EXECUTE format('GRANT %s ON {store}.memory_ann TO %I', given.what, given.name);
    END LOOP;
END $$;

-- Half-precision numbers, the low byte first, as Perdure stores them.
CREATE OR REPLACE FUNCTION {store}.memory_halfvec(stored bytea) RETURNS {vector}.halfvec
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(
        (CASE WHEN half >> 15 = 1 THEN -1 ELSE 1 END)
        * CASE WHEN (half >> 10) & 31 = 0 THEN (half & 1023) * power(2, -24)
            ELSE (1024 + (half & 1023)) * power(2, ((half >> 10) & 31) - 25) END
        ORDER BY n)::real[]::{vector}.halfvec
    FROM (
        SELECT n, get_byte(stored, 2 * n) | (get_byte(stored, 2 * n + 1) << 8) AS half
        FROM generate_series(0, length(stored) / 2 - 1) n
    ) halves
$$;

CREATE OR REPLACE FUNCTION {store}.memory_ann_add() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM {store}.tenant_key k WHERE k.tenant = NEW.tenant) THEN
        RETURN NULL;
    END IF;
    INSERT INTO {store}.memory_ann (tenant, id, space, model, dimension, vec)
    SELECT NEW.tenant, NEW.id, i.space, NEW.model, length(NEW.vec) / 2, {store}.memory_halfvec(NEW.vec)
    FROM {store}.memory_item i
    WHERE i.tenant = NEW.tenant AND i.id = NEW.id AND i.ended_at IS NULL AND i.gone IS NULL;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION {store}.memory_ann_drop() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {store}.memory_ann WHERE tenant = OLD.tenant AND id = OLD.id;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS memory_ann_add ON {store}.memory_vector;
DROP TRIGGER IF EXISTS memory_ann_drop ON {store}.memory_vector;
DROP TRIGGER IF EXISTS memory_ann_drop ON {store}.memory_item;
REVOKE ALL ON FUNCTION {store}.memory_ann_add(), {store}.memory_ann_drop() FROM PUBLIC;
CREATE TRIGGER memory_ann_add AFTER INSERT ON {store}.memory_vector FOR EACH ROW EXECUTE FUNCTION {store}.memory_ann_add();
CREATE TRIGGER memory_ann_drop AFTER DELETE ON {store}.memory_vector FOR EACH ROW EXECUTE FUNCTION {store}.memory_ann_drop();
CREATE TRIGGER memory_ann_drop AFTER UPDATE OF ended_at ON {store}.memory_item
    FOR EACH ROW WHEN (NEW.ended_at IS NOT NULL) EXECUTE FUNCTION {store}.memory_ann_drop();

INSERT INTO {store}.memory_ann (tenant, id, space, model, dimension, vec)
SELECT v.tenant, v.id, i.space, v.model, length(v.vec) / 2, {store}.memory_halfvec(v.vec)
FROM {store}.memory_vector v JOIN {store}.memory_item i ON i.tenant = v.tenant AND i.id = v.id
WHERE i.ended_at IS NULL AND i.gone IS NULL AND NOT EXISTS (SELECT 1 FROM {store}.tenant_key k WHERE k.tenant = v.tenant)
ON CONFLICT (tenant, id) DO NOTHING;

-- A graph for each model. hnsw takes at most 4,000 numbers: longer vectors are compared one by one.
DO $$
DECLARE
    made record;
BEGIN
    FOR made IN SELECT DISTINCT model, length(vec) / 2 AS dimension FROM {store}.memory_vector WHERE length(vec) <= 8000 LOOP
        EXECUTE format(
            'CREATE INDEX IF NOT EXISTS %I ON {store}.memory_ann USING hnsw ((vec::{vector}.halfvec(%s)) {vector}.halfvec_ip_ops)
            WHERE model = %L AND dimension = %s',
            'memory_ann_' || md5(made.model || ' ' || made.dimension), made.dimension, made.model, made.dimension
        );
    END LOOP;
END $$;
ANALYZE {store}.memory_ann;

-- The nearest by the graph, in their order; `exact`: by comparing all, which no graph can serve.
CREATE OR REPLACE FUNCTION {store}.memory_nearest(
    of_tenant bigint, from_path text, to_path text, of_model text, wanted bytea, how_many bigint, exact boolean
) RETURNS TABLE (id bigint, cosine double precision) LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET hnsw.iterative_scan = 'strict_order' SET hnsw.ef_search = 200 AS $$
DECLARE
    spaces bigint[] := ARRAY(
        SELECT s.space FROM {store}.memory_space s WHERE s.tenant = of_tenant AND s.path >= from_path AND s.path < to_path);
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT a.id, -(a.vec::{vector}.halfvec(%1$s) OPERATOR({vector}.<#>) $1::{vector}.halfvec(%1$s)) FROM {store}.memory_ann a
        WHERE a.tenant = $2 AND a.space = ANY ($3) AND a.model = %2$L AND a.dimension = %1$s
        ORDER BY (a.vec::{vector}.halfvec(%1$s) OPERATOR({vector}.<#>) $1::{vector}.halfvec(%1$s)) %3$s LIMIT $4',
        length(wanted) / 2, of_model, CASE WHEN exact THEN '+ 0' ELSE '' END
    ) USING {store}.memory_halfvec(wanted), of_tenant, spaces, how_many;
END $$;
COMMIT;
