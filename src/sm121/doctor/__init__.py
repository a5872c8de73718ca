"""`doctor`: is this machine able to build, or to run, this? It changes nothing."""
