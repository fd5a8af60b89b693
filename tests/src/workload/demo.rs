//! `demo`: what the README shows, on a real `/dev/ublkb0`.

use anyhow::Result;
use blockd_testkit::folder::Folder;

use super::{Run, sparse};
use crate::vm::Drive;

/// The commands, as a person would type them.
const SCRIPT: &str = r#"
set -eu
say() { echo; echo "\$ $*"; "$@"; }
start() {
    blockd serve --config /etc/blockd.toml >>/tmp/log 2>&1 &
    daemon=$!
    until blockd list >/dev/null 2>&1; do sleep 0.05; done
}
mkdir -p /run/blockd /mnt/demo
printf 'state_dir = "/tmp/state"\n[[pool]]\nname = "default"\npath = "/dev/vda"\n' >/etc/blockd.toml
trap 'cat /tmp/log' EXIT
echo "A real kernel: $(uname -r)."
start
say blockd features
say blockd add --size 10G demo
test -b /dev/ublkb0
say mkfs.ext4 -q /dev/ublkb0
say mount -t ext4 -o discard /dev/ublkb0 /mnt/demo
echo; echo "Copying files, and kill -9 of the daemon meanwhile."
cp -a /usr /mnt/demo/ &
copy=$!
kills=0
for pause in 0.2 0.4 0.3; do
    sleep $pause
    kill -9 $daemon
    wait $daemon || true
    kills=$((kills + 1))
    start
done
wait $copy
echo "copied; the daemon died $kills times, and the file system noticed nothing"
say blockd list
say blockd pool map --width 64
sync
say umount /mnt/demo
say e2fsck -fn /dev/ublkb0
say mount -t ext4 /dev/ublkb0 /mnt/demo
echo 3 >/proc/sys/vm/drop_caches
diff -r /usr /mnt/demo/usr
files=$(find /mnt/demo/usr -type f | wc -l)
if dmesg | grep -iE 'I/O error|ext4-fs error'; then exit 1; fi
say umount /mnt/demo
say blockd del --yes demo
test ! -b /dev/ublkb0
kill $daemon
wait $daemon
trap - EXIT
echo
echo "$files files compared, 0 differ, $kills kills"
"#;

/// The host's half; there is no other.
///
/// # Errors
/// When anything differs.
pub fn run(run: &Run) -> Result<String> {
    let folder = Folder::new("demo")?;
    let disk = sparse(&folder, "disk", 2 << 30)?;
    let vm = run.machine("demo")?.drive(Drive::File(disk));
    let output = vm.run(SCRIPT)?;
    println!("{}", output.text);
    let last = output.text.lines().rfind(|line| line.contains("differ")).unwrap_or_default();
    Ok(last.to_owned())
}
