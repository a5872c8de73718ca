# The README's commands on a fresh machine, from a clone to a wheelhouse.
#
#   bash native.sh CHECKOUT FOLDER OPTIONS...
set -eu
checkout=$1 folder=$2
shift 2
stamp() { echo "sm121-native $(date +%s) $*"; }
cd "$folder"
stamp clone
git clone --quiet "$checkout" sm121
cd sm121
git log -1 --format='commit %H'
uname -m
g++ --version | sed -n 1p
python3 --version
stamp venv
python3 -m venv .venv
stamp uv
.venv/bin/pip install --quiet uv
.venv/bin/uv --version
stamp build
.venv/bin/uvx nox -s build -- "$@"
stamp end
