-- An index of memory's vectors by pgvector: a table with the vectors of the newest versions, which triggers fill in the
-- transaction of each put, and a function that asks it. Run by the store's owner, again after a change of the embedder.
-- Writers of memory wait meanwhile. A tenant whose data is encrypted has no rows in it.
BEGIN;
SET LOCAL statement_timeout = 0;
CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
SELECT set_config('search_path', format('%I, %I', current_schema(), n.nspname), true)
FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector';
LOCK TABLE memory_item, memory_vector IN SHARE ROW EXCLUSIVE MODE;

CREATE TABLE IF NOT EXISTS memory_ann (
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    space bigint NOT NULL,
    model text NOT NULL,
    dimension bigint NOT NULL,
    vec halfvec NOT NULL,
    PRIMARY KEY (tenant, id)
);
ALTER TABLE memory_ann ENABLE ROW LEVEL SECURITY;
ALTER TABLE memory_ann FORCE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS tenants ON memory_ann;
CREATE POLICY tenants ON memory_ann
    USING ((SELECT may_see_every_tenant()) OR tenant = (SELECT visible_tenant()));
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT a.privilege_type AS what, r.rolname AS name
        FROM pg_class c, aclexplode(c.relacl) a JOIN pg_roles r ON r.oid = a.grantee WHERE c.oid = 'memory_vector'::regclass
    LOOP
        EXECUTE format('GRANT %s ON memory_ann TO %I', given.what, given.name);
    END LOOP;
END $$;

-- Half-precision numbers, the low byte first, as Perdure stores them.
CREATE OR REPLACE FUNCTION memory_halfvec(stored bytea) RETURNS halfvec
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE SET search_path FROM CURRENT AS $$
    SELECT array_agg(
        (CASE WHEN half >> 15 = 1 THEN -1 ELSE 1 END)
        * CASE WHEN (half >> 10) & 31 = 0 THEN (half & 1023) * power(2, -24)
            ELSE (1024 + (half & 1023)) * power(2, ((half >> 10) & 31) - 25) END
        ORDER BY n)::real[]::halfvec
    FROM (
        SELECT n, get_byte(stored, 2 * n) | (get_byte(stored, 2 * n + 1) << 8) AS half
        FROM generate_series(0, length(stored) / 2 - 1) n
    ) halves
$$;

CREATE OR REPLACE FUNCTION memory_ann_add() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM tenant_key k WHERE k.tenant = NEW.tenant) THEN
        RETURN NULL;
    END IF;
    INSERT INTO memory_ann (tenant, id, space, model, dimension, vec)
    SELECT NEW.tenant, NEW.id, i.space, NEW.model, length(NEW.vec) / 2, memory_halfvec(NEW.vec)
    FROM memory_item i
    WHERE i.tenant = NEW.tenant AND i.id = NEW.id AND i.ended_at IS NULL AND i.gone IS NULL;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION memory_ann_drop() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    DELETE FROM memory_ann WHERE tenant = OLD.tenant AND id = OLD.id;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS memory_ann_add ON memory_vector;
DROP TRIGGER IF EXISTS memory_ann_drop ON memory_vector;
DROP TRIGGER IF EXISTS memory_ann_drop ON memory_item;
CREATE TRIGGER memory_ann_add AFTER INSERT ON memory_vector FOR EACH ROW EXECUTE FUNCTION memory_ann_add();
CREATE TRIGGER memory_ann_drop AFTER DELETE ON memory_vector FOR EACH ROW EXECUTE FUNCTION memory_ann_drop();
CREATE TRIGGER memory_ann_drop AFTER UPDATE OF ended_at ON memory_item
    FOR EACH ROW WHEN (NEW.ended_at IS NOT NULL) EXECUTE FUNCTION memory_ann_drop();

INSERT INTO memory_ann (tenant, id, space, model, dimension, vec)
SELECT v.tenant, v.id, i.space, v.model, length(v.vec) / 2, memory_halfvec(v.vec)
FROM memory_vector v JOIN memory_item i ON i.tenant = v.tenant AND i.id = v.id
WHERE i.ended_at IS NULL AND i.gone IS NULL AND NOT EXISTS (SELECT 1 FROM tenant_key k WHERE k.tenant = v.tenant)
ON CONFLICT (tenant, id) DO NOTHING;

-- A graph for each model. hnsw takes at most 4,000 numbers: longer vectors are compared one by one.
DO $$
DECLARE
    made record;
BEGIN
    FOR made IN SELECT DISTINCT model, length(vec) / 2 AS dimension FROM memory_vector WHERE length(vec) <= 8000 LOOP
        EXECUTE format(
            'CREATE INDEX IF NOT EXISTS %I ON memory_ann USING hnsw ((vec::halfvec(%s)) halfvec_ip_ops)
            WHERE model = %L AND dimension = %s',
            'memory_ann_' || md5(made.model || ' ' || made.dimension), made.dimension, made.model, made.dimension
        );
    END LOOP;
END $$;
ANALYZE memory_ann;

-- The nearest by the graph, in their order; `exact`: by comparing all, which no graph can serve.
CREATE OR REPLACE FUNCTION memory_nearest(
    of_tenant bigint, from_path text, to_path text, of_model text, wanted bytea, how_many bigint, exact boolean
) RETURNS TABLE (id bigint, cosine double precision) LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT SET hnsw.iterative_scan = 'strict_order' SET hnsw.ef_search = 200 AS $$
DECLARE
    spaces bigint[] := ARRAY(
        SELECT s.space FROM memory_space s WHERE s.tenant = of_tenant AND s.path >= from_path AND s.path < to_path);
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT a.id, -(a.vec::halfvec(%1$s) <#> $1::halfvec(%1$s)) FROM memory_ann a
        WHERE a.tenant = $2 AND a.space = ANY ($3) AND a.model = %2$L AND a.dimension = %1$s
        ORDER BY (a.vec::halfvec(%1$s) <#> $1::halfvec(%1$s)) %3$s LIMIT $4',
        length(wanted) / 2, of_model, CASE WHEN exact THEN '+ 0' ELSE '' END
    ) USING memory_halfvec(wanted), of_tenant, spaces, how_many;
END $$;
COMMIT;
