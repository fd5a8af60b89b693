//! A virtual machine whose disks are volumes: file systems made, used and checked there, while the
//! daemon is killed and comes back.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::time::Duration;

use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools::{self, shell};
use blockd_tests::vm::{Drive, Vm};

const MIB: u64 = 1 << 20;

/// Files of drawn content and length, with their checksums on the side; printed one by one.
const SCRIPT: &str = r#"
set -eu
echo making
mkfs.ext4 -q /dev/vda
mkfs.xfs -q /dev/vdb
mkdir /mnt/ext4 /mnt/xfs
mount -t ext4 -o discard /dev/vda /mnt/ext4
mount -t xfs -o discard /dev/vdb /mnt/xfs
fill() {
    for number in $(seq $1 $2); do
        for kind in ext4 xfs; do
            file=/mnt/$kind/file-$number
            dd if=/dev/urandom of=$file bs=16k count=$((number % 11 + 1)) 2>/dev/null
            sha256sum $file >>/tmp/sums
            # Something to give back, and something that a journal has to keep in order.
            if [ $((number % 5)) = 0 ]; then
                sync -f $file 2>/dev/null || sync
                rm /mnt/$kind/file-$((number - 1))
                sed -i "/$kind.file-$((number - 1))\$/d" /tmp/sums
                mv $file $file-moved
                sed -i "s,$file\$,$file-moved," /tmp/sums
            fi
        done
        echo written $number
    done
}
check() {
    echo 3 >/proc/sys/vm/drop_caches
    sha256sum -c /tmp/sums >/tmp/checked || { grep -v OK /tmp/checked; exit 1; }
    echo checked $(wc -l </tmp/checked) $1
}
fill 1 60
check mounted
umount /mnt/ext4 /mnt/xfs
e2fsck -fn /dev/vda
xfs_repair -n /dev/vdb 2>&1
mount -t ext4 /dev/vda /mnt/ext4
mount -t xfs /dev/vdb /mnt/xfs
check again
umount /mnt/ext4 /mnt/xfs
if dmesg | grep -iE 'I/O error|corrupt|ext4-fs error|xfs.*(error|shutdown)'; then exit 1; fi
echo clean
"#;

#[test]
fn a_guest_works_on_while_the_daemon_is_killed_and_comes_back() {
    let mut daemon = Daemon::new("guest", &Settings::default()).unwrap();
    daemon.start().unwrap();
    let drive = |export: &str| Drive::Nbd {
        socket: daemon.nbd_socket(),
        export: export.to_owned(),
        reconnect_delay: 60,
    };
    for name in ["one", "two"] {
        daemon.add(name, 320 * MIB).unwrap();
    }
    let mut machine = Vm::new("guest")
        .modules(&["xfs"])
        .programs(&["mkfs.ext4", "mkfs.xfs", "e2fsck", "xfs_repair"])
        .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
        .drive(drive("one"))
        .drive(drive("two"))
        .start(SCRIPT)
        .unwrap();
    // In the middle of making the file systems, of writing to them, and twice in a row.
    let moments = [
        ("making", 400, 0),
        ("written 5", 30, 300),
        ("written 20", 0, 20),
        ("written 40", 0, 1500),
    ];
    for (said, before, pause) in moments {
        machine.wait_for(said).unwrap();
        std::thread::sleep(Duration::from_millis(before));
        daemon.kill().unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        daemon.start().unwrap();
    }
    std::thread::sleep(Duration::from_millis(30));
    daemon.kill().unwrap();
    daemon.start().unwrap();
    let output = machine.finish().unwrap();
    assert!(output.text.contains("\nclean\n"), "{}", output.text);
    // The same from outside, after an orderly end.
    assert_eq!(daemon.stop().unwrap().code(), Some(0));
    daemon.start().unwrap();
    let path = daemon.folder().display().to_string();
    for (name, check) in [("one", "e2fsck -fn"), ("two", "xfs_repair -n -f")] {
        let uri = daemon.uri(name);
        shell(&format!("nbdcopy '{uri}' {path}/{name} && {check} {path}/{name} 2>&1")).unwrap();
    }
}

/// The daemon in the guest, on a disk of its own, and the kernel's NBD client in front of it.
const KERNEL_CLIENT: &str = r#"
set -eu
cat >/tmp/blockd.toml <<'END'
runtime_dir = "/run/blockd"
state_dir = "/tmp/state"
[[pool]]
name = "default"
path = "/dev/vda"
END
blockd serve --config /tmp/blockd.toml >/tmp/log 2>&1 &
daemon=$!
trap 'cat /tmp/log' EXIT
until blockd list >/dev/null 2>&1; do sleep 0.1; done
blockd add --size 128M data
nbd-client -unix /run/blockd/nbd.sock /dev/nbd0 -N data -C 2 2>&1
queue=/sys/block/nbd0/queue
echo limits $(cat /sys/block/nbd0/size $queue/fua) $(test $(cat $queue/discard_max_bytes) -gt 0 && echo trims)
mkfs.ext4 -q /dev/nbd0
mkdir /mnt/data
mount -t ext4 /dev/nbd0 /mnt/data
for number in 1 2 3 4 5 6 7 8; do
    dd if=/dev/urandom of=/mnt/data/file-$number bs=64k count=20 2>/dev/null
done
rm /mnt/data/file-8
sha256sum /mnt/data/file-* >/tmp/sums
fstrim -v /mnt/data
umount /mnt/data
nbd-client -d /dev/nbd0
# In order, and once more with another number of connections.
kill -TERM $daemon
wait $daemon
blockd serve --config /tmp/blockd.toml >>/tmp/log 2>&1 &
daemon=$!
until blockd list >/dev/null 2>&1; do sleep 0.1; done
nbd-client -unix /run/blockd/nbd.sock /dev/nbd0 -N data 2>&1
e2fsck -fn /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt/data
sha256sum -c /tmp/sums
umount /mnt/data
nbd-client -d /dev/nbd0
kill -TERM $daemon
wait $daemon
trap - EXIT
echo clean
"#;

#[test]
fn the_kernels_own_client_works_beside_the_daemon() {
    let folder = Folder::new("kernel").unwrap();
    let disk = folder.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(512 * MIB).unwrap();
    let output = Vm::new("kernel-client")
        .modules(&["nbd"])
        .programs(&["nbd-client", "mkfs.ext4", "e2fsck", "fstrim"])
        .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
        .program(&tools::blockd().unwrap())
        .drive(Drive::File(disk))
        .run(KERNEL_CLIENT)
        .unwrap();
    for said in ["limits 262144 1 trims", "trimmed", "file-7: OK", "\nclean\n"] {
        assert!(output.text.contains(said), "no {said} in:\n{}", output.text);
    }
}
