//! Volumes as block devices of a real kernel: added, used, refused while in use, and there again
//! after whatever ended the daemon.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::File;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use blockd_tests::vm::{Drive, Vm, Which};

/// The parts that the scripts share: a daemon with a pool on a disk, and assertions.
const COMMON: &str = r#"
set -eu
mkdir -p /run/blockd /var/lib/blockd /etc/blockd /mnt/a
cat >/etc/blockd/blockd.toml <<'END'
[workers]
count = 2
buffer_size = "8M"
[[pool]]
name = "default"
path = "/dev/vda"
END
fail() { echo "FAILED: $*"; cat /tmp/log; exit 1; }
start() {
    blockd serve --config /etc/blockd/blockd.toml >>/tmp/log 2>&1 &
    pid=$!
    for _ in $(seq 400); do
        blockd version --json 2>/dev/null | grep -q '"ready": *true' && return
        sleep 0.05
    done
    fail the daemon does not become ready
}
# Runs what has to be refused with this exit code, and says what it said.
refused() {
    code=$1; shift
    if "$@" >/tmp/said 2>&1; then fail "$* was done"; else found=$?; fi
    [ $found = $code ] || fail "$*: exit code $found: $(cat /tmp/said)"
    echo "refused: $(cat /tmp/said)"
}
same() { cmp /tmp/x "$1" || fail "$1 differs"; }
fresh() { echo 3 >/proc/sys/vm/drop_caches; }
dd if=/dev/urandom of=/tmp/x bs=64k count=64 2>/dev/null
# Before the time is over, print where every task is.
(
    sleep 70
    echo "STUCK:"
    for task in /proc/[0-9]*/task/*; do
        [ -n "$(cat $task/../../cmdline)" ] || [ "$(cut -d ' ' -f 3 $task/stat)" = D ] || continue
        echo "$(cat $task/comm) $(cut -d ' ' -f 3 $task/stat) $(cat $task/wchan)"
    done 2>/dev/null
    tail -n 12 /tmp/log
    mount -t debugfs none /sys/kernel/debug 2>/dev/null || true
    for disk in /sys/kernel/debug/block/ublkb*; do
        echo "$disk $(cat $disk/state) requeued: $(cat $disk/requeue_list | wc -l)"
        for queue in $disk/hctx*; do
            echo "$(cat $queue/state) waiting: $(cat $queue/dispatch | wc -l)"
            cat $queue/busy
        done
    done
) &
"#;

/// A device's life, in order; printed step by step.
const LIFE: &str = r#"
start
[ "$(blockd add --size 1G a)" = /dev/ublkb0 ] || fail add
[ "$(blockd add --size 1G a)" = /dev/ublkb0 ] || fail add again
[ "$(readlink /dev/blockd/default/a)" = /dev/ublkb0 ] || fail name
cd /sys/block/ublkb0/queue
echo limits $(cat logical_block_size physical_block_size minimum_io_size optimal_io_size \
    max_sectors_kb discard_granularity discard_max_bytes write_zeroes_max_bytes write_cache fua)
cd /
blockd show a --json | tr -d '\n ' | grep -o '"device_major":[0-9]*,"device_minor":[0-9]*'
echo numbers $(cat /sys/block/ublkb0/dev)
blockd show a --json | tr -d '\n ' | grep -o '"queue_depth":[0-9]*,"zero_copy":[a-z]*'
dd if=/tmp/x of=/dev/blockd/default/a bs=64k oflag=direct 2>/dev/null
dd if=/dev/ublkb0 of=/tmp/y bs=64k count=64 iflag=direct 2>/dev/null
same /tmp/y

mkfs.ext4 -q /dev/ublkb0
mount -t ext4 /dev/ublkb0 /mnt/a
cp /tmp/x /mnt/a/x
refused 7 blockd del --yes a
[ "$(readlink /proc/$pid/ns/mnt)" != "$(readlink /proc/self/ns/mnt)" ] || fail namespace

# The daemon dies while a file is written; the writer gets no error.
# It goes on until the daemon is back, however quick it is.
(for n in $(seq 60); do
    cp /tmp/x /mnt/a/y$n; sync /mnt/a/y$n
    [ $n -ge 6 ] && [ -e /tmp/enough ] && break
done; touch /tmp/written) &
writer=$!
sleep 0.3
kill -9 $pid
wait $pid || true
blockd version >/dev/null
start
[ ! -e /tmp/written ] && echo was writing
touch /tmp/enough
wait $writer || fail write
fresh
same /mnt/a/x
for n in 1 2 3 4 5 6; do same /mnt/a/y$n; done
grep -q ' /mnt/a ' /proc/$pid/mountinfo && fail mounted in the namespace of the daemon
grep -c 'goes on where it was' /tmp/log

# An orderly end leaves the device as well.
kill $pid
wait $pid || fail end
[ -b /dev/ublkb0 ] || fail the device is gone
start
fresh
same /mnt/a/y6
cp /tmp/x /mnt/a/z
umount /mnt/a
e2fsck -fn /dev/ublkb0 >/tmp/fsck || fail "$(cat /tmp/fsck)"

sleep 1000 </dev/ublkb0 &
reader=$!
refused 7 blockd detach a
kill $reader
wait $reader || true
blockd resize a --size 2G --json | tr -d '\n ' | grep -o '"device_has_old_size":[a-z]*'
echo size $(cat /sys/block/ublkb0/size)
blockd detach a
[ ! -e /dev/ublkb0 ] && [ ! -e /dev/blockd/default ] || fail still there
[ "$(blockd attach a --queues 2 --depth 8)" = /dev/ublkb0 ] || fail attach
echo size $(cat /sys/block/ublkb0/size)
echo queues $(ls /sys/block/ublkb0/mq | wc -l)
mount -t ext4 /dev/ublkb0 /mnt/a
same /mnt/a/z
umount /mnt/a
blockd del --yes a
[ ! -e /dev/ublkb0 ] || fail still there
echo life is over
"#;

/// Faults, and the reports of them.
const TROUBLE: &str = r#"
start
blockd features | grep -q USER_RECOVERY || fail features
[ "$(blockd add --size 64M a)" = /dev/ublkb0 ] || fail add
[ "$(blockd add --size 64M b)" = /dev/ublkb1 ] || fail add

# A writer that waits for space that is not there is failed by force, and nothing hangs.
blockd add --size 8G big >/dev/null
dd if=/dev/zero of=/dev/ublkb2 bs=1M oflag=direct 2>/dev/null &
filler=$!
written() { set -- $(cat /sys/block/ublkb2/stat); echo $7; }
for _ in $(seq 100); do
    before=$(written)
    sleep 0.5
    [ $before != 0 ] && [ $before = $(written) ] && break
done
refused 7 blockd del --yes big
blockd del --yes big --force
wait $filler && fail filled
[ ! -e /dev/ublkb2 ] || fail still there

# The list is lost: devices without an owner are deleted, but not those in use.
mkfs.ext4 -q /dev/ublkb1
mount -t ext4 /dev/ublkb1 /mnt/a
kill $pid
wait $pid || fail end
mv /var/lib/blockd/attachments.json /tmp/list
start
[ ! -e /dev/ublkb0 ] || fail the orphan is there
[ -b /dev/ublkb1 ] || fail a mounted device was deleted
grep 'of no volume' /tmp/log | sed 's/.*INFO *//'
kill $pid
wait $pid || fail end
mv /tmp/list /var/lib/blockd/attachments.json
start
touch /mnt/a/file
umount /mnt/a
[ "$(blockd list --json | tr -d '\n ' | grep -o '"device_path":"[^"]*"' | tr '\n' ' ')" = \
    '"device_path":"/dev/ublkb0" "device_path":"/dev/ublkb1" ' ] || fail "$(blockd list)"
blockd recover | cat
blockd del --yes a
blockd del --yes b

blockd add --ublk --size 64M q >/dev/null
rm -f /var/lib/blockd/closed.json
mkdir -p /var/lib/blockd/closed.json/x
refused 9 blockd pool close --force default
rm -r /var/lib/blockd/closed.json
dd if=/dev/ublkb0 of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null || fail q is not served
blockd del --yes q

rmmod ublk_drv
refused 7 blockd add --ublk --size 64M c
refused 7 blockd features
refused 4 blockd show c
blockd add --size 64M c | grep nbd+unix
echo trouble is over
"#;

/// Orderly restarts, one after the other, while a mounted file system is written without a break.
const RESTARTS: &str = r#"
start
blockd add --size 1G a >/dev/null
mkfs.ext4 -q /dev/ublkb0
mount -t ext4 /dev/ublkb0 /mnt/a
write() { # a number, how
    while [ ! -e /tmp/end ]; do
        dd if=/tmp/x of=/mnt/a/w$1 bs=$2 $3 2>/tmp/wrong$1 || { cp /tmp/wrong$1 /tmp/failed; exit; }
        touch /tmp/wrote$1
    done
}
write 1 64k conv=fsync & one=$!
write 2 16k oflag=direct & two=$!
for cycle in 1 2 3 4 5 6 7 8; do
    sleep 0.5
    kill $pid
    wait $pid || fail end $cycle
    start
    ! grep 'hangs in losing' /tmp/log || fail cycle $cycle
done
touch /tmp/end
wait $one $two
[ ! -e /tmp/failed ] || fail "$(cat /tmp/failed)"
[ -e /tmp/wrote1 ] && [ -e /tmp/wrote2 ] || fail nothing was written
umount /mnt/a
mount -t ext4 /dev/ublkb0 /mnt/a
same /mnt/a/w1
same /mnt/a/w2
umount /mnt/a
e2fsck -fn /dev/ublkb0 >/dev/null 2>&1 || fail e2fsck
echo restarts are over
"#;

/// Held by the one machine that runs: three at once on two processors take as long in all, and each
/// runs into its limit of time.
static ONE: Mutex<()> = Mutex::new(());

fn machine(name: &str, which: Which, disk_mib: u64, script: &str) -> String {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = Folder::new(name).unwrap();
    let disk = folder.path().join("disk");
    File::create(&disk).unwrap().set_len(disk_mib << 20).unwrap();
    let vm = Vm::new(name)
        .kernel(which)
        .limit(Duration::from_secs(120))
        .modules(&["ublk_drv", "ext4"])
        .programs(&["mkfs.ext4", "e2fsck"])
        .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
        .program(&tools::blockd().unwrap())
        .drive(Drive::File(disk));
    let output = vm.run(&format!("{COMMON}{script}")).unwrap();
    println!("{name}: {:.1} s", output.seconds);
    output.text
}

fn says(text: &str, all: &[&str]) {
    for said in all {
        assert!(text.contains(said), "no {said:?} in:\n{text}");
    }
}

/// The output that is the same on every kernel.
const EVERYWHERE: [&str; 9] = [
    "limits 512 4096 4096 262144 128 4096 1073741824 1073741824 write back 1",
    "\"device_major\":259,\"device_minor\":0",
    "numbers 259:0",
    "/dev/ublkb0 is mounted at /mnt/a",
    "was writing",
    "/dev/ublkb0 is open in process",
    "size 4194304",
    "queues 2",
    "life is over",
];

#[test]
fn a_device_outlives_the_daemon_on_the_older_kernel() {
    let text = machine("ublk-older", Which::Older, 512, LIFE);
    says(&text, &EVERYWHERE);
    says(&text, &["\"queue_depth\":32,\"zero_copy\":false"]);
    says(&text, &["\"device_has_old_size\":true\nsize 2097152\n"]);
}

#[test]
fn a_device_outlives_the_daemon_on_the_newer_kernel() {
    let text = machine("ublk-newer", Which::Newer, 512, LIFE);
    says(&text, &EVERYWHERE);
    says(&text, &["\"queue_depth\":128,\"zero_copy\":true"]);
    says(&text, &["\"device_has_old_size\":false\nsize 4194304\n"]);
}

#[test]
fn orderly_restarts_under_writers_lose_no_request_on_the_older_kernel() {
    says(&machine("ublk-restarts", Which::Older, 512, RESTARTS), &["restarts are over"]);
}

#[test]
fn failures_are_reported_and_nothing_hangs() {
    let text = machine("ublk-trouble", Which::Older, 96, TROUBLE);
    says(
        &text,
        &[
            "/dev/ublkb2 is open in process",
            "/dev/ublkb0 was ours, of no volume, and is deleted",
            "/dev/ublkb1 is ours, of no volume, and stays: /dev/ublkb1 is mounted at /mnt/a",
            "/dev/ublk-control is not there: load the kernel's driver with `modprobe ublk_drv`",
            "nbd+unix:///c?",
            "trouble is over",
        ],
    );
}
