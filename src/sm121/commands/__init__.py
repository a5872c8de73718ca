"""One module per verb: argparse options in, exit code out. `sm121.cli` lists them."""
