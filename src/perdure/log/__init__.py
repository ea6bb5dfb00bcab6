"""The log: records chained by hash, stored as differences between keyframes, read back and checked."""
