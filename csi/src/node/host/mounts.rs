//! Mounts, and the folders and files that they are made at.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::Host;
use crate::error::Error;
use crate::node::mountinfo::Table;
use crate::node::world::{Kind, Mount, Mounted, Mounts, Result};

/// Where the kernel shows the mount table.
const TABLE: &str = "/proc/self/mountinfo";

impl Mounts for Host {
    fn mounts(&self) -> Result<Table> {
        let text = fs::read(TABLE).map_err(|error| Error::io(TABLE, error))?;
        Table::parse(&text)
            .map_err(|line| Error::unexpected(TABLE, format!("not understood: {line}")))
    }

    fn mount(&self, it: &Mount<'_>) -> Result<Mounted> {
        let Mount { device, file_system, path, options } = it;
        let (node, place) = (device.path.display(), path.display());
        tracing::debug!(device = %node, path = %place, file_system, "mount");
        let data = (!options.data.is_empty()).then_some(options.data.as_str());
        match mount(Some(&device.path), *path, Some(*file_system), options.flags, data) {
            Ok(()) => Ok(Mounted::Done),
            Err(Errno::EROFS | Errno::EACCES) => Ok(Mounted::NeedsWriting),
            // The error of btrfs in this case.
            Err(Errno::EIO) if options.read_only() => Ok(Mounted::NeedsWriting),
            Err(Errno::EBUSY) => Err(Error::in_use(device.path.display(), "is in use")),
            // The error of ext4; xfs continues without DAX.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) if options.has_dax() => {
                let problem = "can't be mounted with DAX, which usage AppDirect needs: see dmesg";
                Err(Error::in_use(device.path.display(), problem))
            }
            Err(errno) => {
                let what = format!("mounting {} at {}", device.path.display(), path.display());
                Err(Error::io(what, errno.into()))
            }
        }
    }

    fn bind(&self, from: &Path, to: &Path) -> Result<()> {
        tracing::debug!(from = %from.display(), to = %to.display(), "bind");
        mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .map_err(|errno| Error::io(format!("binding {}", to.display()), errno.into()))
    }

    /// Leaves its other flags.
    fn make_read_only(&self, path: &Path) -> Result<()> {
        tracing::debug!(path = %path.display(), "make read-only");
        let failed =
            |errno: Errno| Error::io(format!("making {} read-only", path.display()), errno.into());
        let has = statvfs(path).map_err(failed)?.flags();
        // The call removes attributes that are not listed here.
        let kept = [
            (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
            (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
            (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
            (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
            (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
            (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
        ];
        let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        for (there, flag) in kept {
            if has.contains(there) {
                flags |= flag;
            }
        }
        mount(None::<&str>, path, None::<&str>, flags, None::<&str>).map_err(failed)
    }

    fn unmount(&self, path: &Path, lazily: bool) -> Result<()> {
        tracing::debug!(path = %path.display(), lazily, "unmount");
        let mut result = umount2(path, MntFlags::UMOUNT_NOFOLLOW);
        if lazily && result == Err(Errno::EBUSY) {
            result = umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH);
        }
        match result {
            // It has gone meanwhile.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
            Err(Errno::EBUSY) => Err(Error::in_use(path.display(), "is in use and stays mounted")),
            Err(errno) => Err(Error::io(format!("unmounting {}", path.display()), errno.into())),
        }
    }

    fn kind(&self, path: &Path) -> Result<Option<Kind>> {
        match fs::symlink_metadata(path) {
            Ok(data) if data.is_dir() => Ok(Some(Kind::Folder)),
            Ok(data) if data.is_file() => Ok(Some(Kind::File)),
            Ok(_) => Ok(Some(Kind::Other)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(path.display(), error)),
        }
    }

    fn make_folder(&self, path: &Path) -> Result<()> {
        tracing::debug!(path = %path.display(), "make folder");
        made(path, DirBuilder::new().mode(0o750).create(path))
    }

    fn make_file(&self, path: &Path) -> Result<()> {
        tracing::debug!(path = %path.display(), "make file");
        let mut options = OpenOptions::new();
        made(path, options.write(true).create_new(true).mode(0o660).open(path).map(drop))
    }

    fn remove(&self, path: &Path, kind: Kind) -> Result<()> {
        tracing::debug!(path = %path.display(), "remove");
        let holds = || Error::in_use(path.display(), "holds something, and is left as it is");
        let result = match kind {
            Kind::Folder => fs::remove_dir(path),
            Kind::File if fs::symlink_metadata(path).is_ok_and(|data| data.len() == 0) => {
                fs::remove_file(path)
            }
            Kind::File | Kind::Other => return Err(holds()),
        };
        match result {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Err(holds()),
            Err(error) => Err(Error::io(format!("removing {}", path.display()), error)),
            Ok(()) => Ok(()),
        }
    }
}

fn made(path: &Path, result: io::Result<()>) -> Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::in_use(path.display(), "can't be made: there is no folder above it"))
        }
        Err(error) => Err(Error::io(format!("making {}", path.display()), error)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_empty_folders_are_removed() {
        let folder = std::env::temp_dir().join(format!("csi-remove-{}", std::process::id()));
        Host.make_folder(&folder).unwrap();
        Host.make_folder(&folder).unwrap();
        let file = folder.join("file");
        Host.make_file(&file).unwrap();
        Host.make_file(&file).unwrap();
        assert!(
            Host.remove(&folder, Kind::Folder).unwrap_err().to_string().contains("holds something")
        );
        fs::write(&file, "data").unwrap();
        assert!(
            Host.remove(&file, Kind::File).unwrap_err().to_string().contains("holds something")
        );
        fs::write(&file, "").unwrap();
        assert_eq!(Host.kind(&file).unwrap(), Some(Kind::File));
        Host.remove(&file, Kind::File).unwrap();
        Host.remove(&folder, Kind::Folder).unwrap();
        Host.remove(&folder, Kind::Folder).unwrap();
        assert_eq!(Host.kind(&folder).unwrap(), None);
    }

    #[test]
    fn a_folder_without_one_above_it_is_not_made() {
        let said = Host.make_folder(Path::new("/nowhere/at/all")).unwrap_err().to_string();
        assert!(said.contains("no folder above"), "{said}");
    }
}
