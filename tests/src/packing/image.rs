//! The image that is cloned: Debian as it is installed by its own tools, on ext4.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::tools;

use crate::vm::{Drive, Vm};

/// Bytes of the disk, as of Debian's own cloud images before they are grown.
const SIZE: u64 = 2 << 30;
/// Unpacking takes minutes where the processor is emulated.
const LIMIT: Duration = Duration::from_secs(30 * 60);

const RELEASE: &str = "bookworm";
/// The packages that Debian's cloud images have beyond the important ones, boot loaders apart.
const PACKAGES: &str = "linux-image-cloud-amd64,openssh-server,cloud-init,cloud-guest-utils,sudo,\
                        dbus,libpam-systemd,systemd-timesyncd,unattended-upgrades,\
                        bash-completion,locales,man-db,manpages,curl,wget,polkitd";
/// The packages that are installed in the clone, from files: the guest has no network.
pub(super) const INSTALLED: &str = "nginx git vim";

/// Makes the file system on the first disk with the kernel's own allocation, from the archive on
/// the second. Its tables are written now: a clone that wrote them later would write long runs,
/// which take no more space than they have bytes. The mount option is that of Debian's images.
const UNPACK: &str = r"
set -eu
mkfs.ext4 -q -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 /dev/vda
mount -t ext4 /dev/vda /mnt
tar --extract --file=/dev/vdb --directory=/mnt --numeric-owner --xattrs --xattrs-include='*'
echo '/dev/vda / ext4 rw,discard,errors=remount-ro 0 1' >/mnt/etc/fstab
echo golden >/mnt/etc/hostname
rm -f /mnt/etc/machine-id /mnt/etc/ssh/ssh_host_*
touch /mnt/etc/machine-id
mkdir -p /mnt/var/lib/cloud/seed/nocloud
cd /mnt/var/lib/cloud/seed/nocloud
echo 'instance-id: clone' >meta-data
printf '#cloud-config\nhostname: clone\nssh_pwauth: false\n' >user-data
cp /stages.service /mnt/etc/systemd/system/stages.service
mkdir -p /mnt/etc/systemd/system/cloud-init.target.wants
ln -s /etc/systemd/system/stages.service /mnt/etc/systemd/system/cloud-init.target.wants/
cd /
umount /mnt
e2fsck -fn /dev/vda
";

/// Runs the script on the third disk when the guest has booted, `cloud-init` included.
const SERVICE: &str = "[Unit]\n\
    After=cloud-final.service multi-user.target\n\
    [Service]\n\
    Type=oneshot\n\
    TimeoutStartSec=infinity\n\
    ExecStart=/bin/sh /dev/vdc\n";

/// An installed system, and packages for it.
#[derive(Debug)]
pub(super) struct Image {
    /// A raw disk.
    pub(super) disk: PathBuf,
    /// An archive of packages and all that they need.
    pub(super) packages: PathBuf,
}

impl Image {
    /// The image of the cache, below the build folder; made when there is none yet. Delete it there
    /// after a change of anything here.
    pub(super) fn get() -> Result<Self> {
        let cache = tools::build_folder()?.join("vm/debian");
        fs::create_dir_all(&cache)?;
        let image = Self { disk: cache.join("disk"), packages: cache.join("packages.tar") };
        if !image.disk.exists() {
            eprintln!("packing: installing Debian {RELEASE} into an image");
            let root = cache.join("root.tar");
            install(&root, &image.packages)?;
            image.unpack(&root).context("unpacking Debian into an image")?;
            fs::remove_file(root)?;
        }
        Ok(image)
    }

    fn unpack(&self, root: &Path) -> Result<()> {
        let cache = root.parent().context("where the image goes")?;
        let part = cache.join("part");
        File::create(&part)?.set_len(SIZE)?;
        let service = cache.join("stages.service");
        fs::write(&service, SERVICE)?;
        let vm = Vm::new("debian")
            .limit(LIMIT)
            .programs(&["mkfs.ext4", "e2fsck", "tar"])
            .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
            .file(&service, "/stages.service", false)
            .drive(Drive::File(part.clone()))
            .drive(Drive::File(root.to_path_buf()));
        vm.run(UNPACK)?;
        // Renamed when it is complete.
        fs::rename(part, &self.disk)?;
        Ok(())
    }
}

/// Debian's packages in an archive, and those that the clone installs in another.
fn install(root: &Path, packages: &Path) -> Result<()> {
    let download = format!(
        "export APT_CONFIG=\"$MMDEBSTRAP_APT_CONFIG\"; apt-get clean; \
         apt-get --yes --download-only install {INSTALLED}"
    );
    let mut command = Command::new(tools::find("mmdebstrap")?);
    command.args(["--quiet", "--variant=important"]).arg(format!("--include={PACKAGES}"));
    command.arg(format!("--customize-hook={download}"));
    command
        .arg(format!("--customize-hook=tar-out /var/cache/apt/archives '{}'", packages.display()));
    command.arg("--customize-hook=rm -f \"$1\"/var/cache/apt/archives/*.deb");
    tools::output(command.arg(RELEASE).arg(root)).map(|_| ())
}
