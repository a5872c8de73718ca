# Run a program inside a root of another machine, as in a container. For `unshare --user
# --map-root-user --mount`, so it needs no privilege and changes nothing outside.
#
#   sh enter.sh ROOT SCRATCH MACHINE QEMU MAGIC BINDS... -- PROGRAM ARGUMENTS...
#
# The root is not written to: what is written goes into memory, mounted over SCRATCH, and is gone at
# the end. MAGIC is what the kernel knows the machine's programs by (binfmt_misc), empty if they run
# here by themselves. BINDS keep their path.
set -eu
root=$1 scratch=$2 machine=$3 qemu=$4 magic=$5
shift 5
mkdir -p "$scratch"
mount -t tmpfs sm121 "$scratch"
mkdir "$scratch/upper" "$scratch/overlay" "$scratch/root"
if [ -n "$magic" ]; then
    # A user namespace has binfmt_misc of its own since Linux 6.7 (F: the emulator is opened now,
    # outside of the root; P: it is told argv[0]). On an older kernel the machine's must have it.
    if mount -t binfmt_misc none /proc/sys/fs/binfmt_misc 2>/dev/null; then
        printf '%s' ":sm121-$machine:M::$magic:$qemu:FP" >/proc/sys/fs/binfmt_misc/register
    elif ! grep -qs '^flags:.*F' "/proc/sys/fs/binfmt_misc/qemu-$machine"; then
        echo "sm121-enter: this kernel can't register an emulator for $machine in a user namespace" >&2
        exit 97
    fi
fi
if ! mount -t overlay overlay -o "lowerdir=$root,upperdir=$scratch/upper,workdir=$scratch/overlay,userxattr" "$scratch/root"; then
    echo "sm121-enter: overlayfs can't be mounted in a user namespace here" >&2
    exit 97
fi
for place in proc sys dev; do
    mount --rbind "/$place" "$scratch/root/$place"
done
while [ "$1" != -- ]; do
    mkdir -p "$scratch/root$1"
    mount --rbind "$1" "$scratch/root$1"
    shift
done
shift
exec chroot "$scratch/root" "$@"
