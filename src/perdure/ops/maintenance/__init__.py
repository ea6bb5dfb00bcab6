"""What stays in a store and what goes: retention, compaction, erasing."""
