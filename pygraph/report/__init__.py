"""Reports for users: how calls run, and why."""
