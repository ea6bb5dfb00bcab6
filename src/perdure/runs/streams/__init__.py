"""Values on their way from a step that runs to readers in any process: stored beside the journal, never replayed."""
