"""What agents need beside durability: tools for models, progress for people, keys for HTTP, clients."""
