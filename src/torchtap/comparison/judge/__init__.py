"""From measurements to a verdict, and how it is shown."""
