"""Maintenance of stored runs: retention, verification, repair, deployments, tenant isolation."""
