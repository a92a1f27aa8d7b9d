"""The flight recorder: the last steps of a training in memory, and the bad one kept, replayed and explained."""
