"""Running a user's model and loss for planning, so that they are afterwards what they were."""
