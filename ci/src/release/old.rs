//! The published files on a Debian that is older than the one they are made on: its packages are
//! installed into a folder, which becomes the root of the programs that are tried.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::package::served;
use crate::steps::Outcome;
use crate::{command, setup};

/// A release of Debian with a C library that is older than that of any system to build on.
const RELEASE: &str = "bullseye";
/// Packages that those of the release depend on, and what the script uses.
const DEPENDENCIES: &str = "kmod,e2fsprogs,mount";

/// Runs inside. `$1` is the archive's name. The name of a host in the configuration is resolved by
/// the C library, which takes its configuration from the system that it runs on.
const SCRIPT: &str = r#"
set -eu
ldd --version | head -n 1
dpkg --install /dist/*.deb >/dev/null
blockd --version
blockd-csi --version
mkdir --parents /unpacked/usr/lib
ln --symbolic usr/lib /unpacked/lib
tar --extract --file="/dist/$1" --directory=/unpacked --strip-components=1 --no-same-owner
test -L /unpacked/lib
test -f /unpacked/usr/lib/systemd/system/blockd.service
cmp /usr/bin/blockd /unpacked/usr/bin/blockd
cmp /usr/bin/blockd-csi /unpacked/usr/bin/blockd-csi
mount --types tmpfs tmpfs /run
mkdir /run/blockd
blockd config check --config /check.toml
blockd serve --config /check.toml >/log 2>&1 &
daemon=$!
tries=0
until blockd --json version 2>/dev/null | grep --quiet '"ready": *true'; do
    tries=$((tries + 1))
    if [ "$tries" -gt 300 ]; then cat /log >&2; exit 1; fi
    sleep 0.1
done
blockd version
blockd add --size 8M old
head -c 8388608 /dev/urandom >/image
blockd import /image old --overwrite >/dev/null
blockd export old /copy >/dev/null
cmp /image /copy
blockd list
kill "$daemon"
wait "$daemon"
dpkg --purge blockd blockd-csi >/dev/null
test ! -e /usr/bin/blockd
"#;

/// Installs, unpacks and uses what is in `dist`.
pub(super) fn run(dist: &Path, archive: &str) -> Result<Outcome> {
    if !setup::is_root()? {
        return Ok(Outcome::NotRun("only root can change the root folder"));
    }
    if !command::installed("mmdebstrap") {
        return Ok(Outcome::NotRun("there is no mmdebstrap here"));
    }
    let folder = dist.with_file_name("release-old");
    let _ = fs::remove_dir_all(&folder);
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap.args(["--quiet", "--variant=essential"]);
    // The folder is deleted in the end, so that nothing has to be flushed.
    mmdebstrap.arg("--dpkgopt=force-unsafe-io");
    mmdebstrap.arg(format!("--include={DEPENDENCIES}")).stdin(Stdio::null());
    command::output(mmdebstrap.arg(RELEASE).arg(&folder)).context("installing Debian")?;
    let tried = in_it(&folder, dist, archive);
    fs::remove_dir_all(&folder)?;
    print!("{}", tried?);
    Ok(Outcome::Passed)
}

fn in_it(folder: &Path, dist: &Path, archive: &str) -> Result<String> {
    let mut copy = Command::new("cp");
    command::output(copy.arg("--archive").arg(dist).arg(folder.join("dist")))?;
    let path = |name| Path::new("/var/lib/blockd").join(name);
    let pool = served::configuration(Path::new("/run/blockd"), &path("state"), &path("pool"));
    let listeners = "[[nbd.listener]]\nunix = \"/run/blockd/nbd.sock\"\n\
                     [[nbd.listener]]\ntcp = \"localhost:0\"\n";
    fs::write(folder.join("check.toml"), format!("{pool}{listeners}"))?;
    fs::create_dir_all(folder.join("var/lib/blockd/state"))?;
    fs::write(folder.join("etc/hosts"), "127.0.0.1 localhost\n")?;
    // The first source is a library of this system's C library, which is an older one.
    fs::write(folder.join("etc/nsswitch.conf"), "hosts: compat files dns\n")?;
    // Processes and mounts of its own: nothing is left when the script has ended.
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    unshare.arg(format!("--root={}", folder.display())).stdin(Stdio::null());
    unshare.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    command::output(unshare.args(["sh", "-c", SCRIPT, "sh", archive]))
}
