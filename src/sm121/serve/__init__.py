"""Hand-over: what two nodes need to serve a stack. pins/<release>/serve.toml and the nodes' names
and addresses become serve.env and a systemd unit for each."""
