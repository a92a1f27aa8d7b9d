"""Select sites and describe what to keep of them: names, selectors, taps, schedules, plans."""
