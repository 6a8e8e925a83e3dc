"""What leaves the house: the bundle of one deployment, its statement, the check of it, and the budget behind it."""
