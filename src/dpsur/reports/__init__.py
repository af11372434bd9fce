"""The HTML page about a run, and its privacy statement in the forms that reviewers ask for."""
