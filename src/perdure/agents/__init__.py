"""What agents need beside durable functions: tools for models, and a record of how far they have come."""
