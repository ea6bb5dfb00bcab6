"""PostgreSQL: the driver, pipelined connections and their pools, opening, tenants and roles, notifications."""
