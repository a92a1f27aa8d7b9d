"""Values on their way through a model: changed (`edit`), handed out (`features`), or the reason to stop (`catcher`)."""
