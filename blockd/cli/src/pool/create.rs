//! `blockd pool create` and `blockd pool open`.

use std::path::PathBuf;

use blockd_api::v1::{self, CreatePoolRequest, DeviceKind, OpenPoolRequest};
use blockd_media::error::Error;
use serde::Serialize;

use super::super::{Context, amount, answers, size_argument};

/// Make a pool and open it
///
/// The daemon remembers it for its next start. A file is sparse unless it is to be preallocated. A
/// pool that is there already, with these properties, is left as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool create fast --path /srv/fast.pool --size 100G\n  \
                  blockd pool create disk --path /dev/sdb --kind disk\n  \
                  blockd pool create near --path /dev/dax0.0 --kind pmem")]
pub(crate) struct Create {
    /// Its name: 1 to 128 bytes without '/'
    pub pool: String,

    /// Absolute path of the file or device
    #[arg(
        long,
        required_unless_present_any = ["memory", "replace_missing"],
        conflicts_with = "memory"
    )]
    pub path: Option<PathBuf>,

    /// Kind of the path [default: a disk if it is a block device, otherwise a file]
    #[arg(long, value_enum, conflicts_with = "memory")]
    pub kind: Option<Kind>,

    /// Keep it in the daemon's memory: it is gone when the daemon ends
    #[arg(long)]
    pub memory: bool,

    /// How big, like 512M, 10G, 1T (powers of 1024); a disk is taken whole without it
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub size: Option<String>,

    /// Size of an extent, the unit of allocation, 64K to 1M [default: 256K]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub extent_size: Option<String>,

    /// Copy a shared extent at its first write, instead of laying another over it
    ///
    /// By default the first write after a snapshot copies nothing, and the volume may take two
    /// extents at a place until a fold makes one of them (see `blockd pool fold`). That can be
    /// turned on and off later (see `blockd pool feature`).
    #[arg(long)]
    pub no_composite: bool,

    /// Take the file's space from its file system at once
    #[arg(long)]
    pub preallocate: bool,

    /// Go through the host's page cache
    #[arg(long)]
    pub buffered: bool,

    /// Allow a file in memory (tmpfs), which is gone with the host's next boot and made anew then
    #[arg(long, conflicts_with = "memory")]
    pub volatile: bool,

    /// Start anew where the pool was served before and is missing: its volumes are given up
    ///
    /// Options that are left out are as in the configuration, or as when the pool was created.
    /// Another pool in its place is not replaced.
    #[arg(long)]
    pub replace_missing: bool,

    /// The platform keeps persistent memory when power fails, though the kernel does not know that
    #[arg(long)]
    pub power_safe: bool,

    /// Blocks in persistent memory may be torn by a crash, in units of 8 bytes
    #[arg(long)]
    pub torn_blocks: bool,

    /// Leave what is freed in persistent memory as it is, instead of overwriting it
    #[arg(long)]
    pub no_erase: bool,
}

/// Open a pool that could not be opened before, or was closed
///
/// A pool that was served before is never made anew when its file or disk is missing. Once that is
/// there again, this opens the pool and serves the volumes of it that were attached, at the same
/// places. A pool that is open is left as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  blockd pool open default")]
pub(crate) struct Open {
    /// The pool [default: the daemon's default pool]
    #[arg(default_value = "", hide_default_value = true)]
    pub pool: String,
}

/// The kind of device on which a pool is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Kind {
    /// A regular file
    File,
    /// A block device
    Disk,
    /// Persistent memory: /dev/daxX.Y, a file on a file system with DAX, or on tmpfs
    Pmem,
}

/// The output of `pool create --json` and `pool open --json`.
#[derive(Debug, Serialize)]
struct Created {
    changed: bool,
    pub(super) pool: v1::Pool,
}

impl Create {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let size_bytes = self.size.as_deref().map_or(Ok(0), |size| size_argument("size", size))?;
        let request = CreatePoolRequest {
            name: self.pool,
            path: match &self.path {
                Some(path) => path_argument(path)?,
                None => String::new(),
            },
            kind: match self.kind {
                _ if self.memory => DeviceKind::Memory,
                None => DeviceKind::Unspecified,
                Some(Kind::File) => DeviceKind::File,
                Some(Kind::Disk) => DeviceKind::Disk,
                Some(Kind::Pmem) => DeviceKind::Pmem,
            }
            .into(),
            power_safe: self.power_safe,
            atomicity: match self.torn_blocks {
                true => v1::Atomicity::None,
                false => v1::Atomicity::Unspecified,
            }
            .into(),
            erase: self.no_erase.then_some(false),
            preallocate: self.preallocate,
            size_bytes,
            extent_size: extent_size(self.extent_size.as_deref())?,
            buffered: self.buffered,
            volatile: self.volatile,
            replace_missing: self.replace_missing,
            no_composite: self.no_composite,
            ..Default::default()
        };
        let answer = context.client().await?.create_pool(request).await?;
        let created = Created { changed: answer.changed, pool: answers::pool(answer.pool)? };
        context.output.either(&created, || {
            let pool = &created.pool;
            let size = context.output.size(amount(pool.size_bytes));
            if created.changed {
                format!("{}: {size}, open\n", pool.name)
            } else {
                format!("{}: was there already, {size}\n", pool.name)
            }
        })
    }
}

impl Open {
    pub(super) async fn run(self, context: &Context) -> Result<(), Error> {
        let request = OpenPoolRequest { name: self.pool };
        let answer = context.client().await?.open_pool(request).await?;
        let opened = Created { changed: answer.changed, pool: answers::pool(answer.pool)? };
        let name = &opened.pool.name;
        context.output.either(&opened, || match opened.changed {
            true => format!("{name}: open\n"),
            false => format!("{name}: unchanged, it was open\n"),
        })
    }
}

/// A path as the daemon takes it: it has another current directory than we have.
pub(crate) fn path_argument(path: &std::path::Path) -> Result<String, Error> {
    let absolute = std::path::absolute(path).map_err(|source| Error::file("find", path, source))?;
    let text = absolute.into_os_string().into_string();
    text.map_err(|path| Error::invalid("path", path.display(), "UTF-8"))
}

pub(crate) fn extent_size(text: Option<&str>) -> Result<u32, Error> {
    let Some(text) = text else {
        return Ok(0);
    };
    let allowed = "a power of two from 64K to 1M";
    let bytes = u32::try_from(size_argument("extent-size", text)?).ok();
    bytes
        .filter(|bytes| bytes.is_power_of_two() && (64 << 10..=1 << 20).contains(bytes))
        .ok_or_else(|| Error::invalid("extent-size", text, allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extent_sizes_are_checked_before_the_daemon_is_asked() {
        assert_eq!(extent_size(None).unwrap(), 0);
        assert_eq!(extent_size(Some("256K")).unwrap(), 1 << 18);
        for bad in ["32K", "2M", "100K", "x"] {
            assert!(extent_size(Some(bad)).is_err(), "{bad}");
        }
    }
}
