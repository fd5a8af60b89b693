//! The exports that NBD clients can open: every attached volume, by `POOL/NAME`, and by `NAME` in
//! the default pool.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use blockd_engine::pool::PoolHandle;
use blockd_mapper::engine::VolumeSummary;
use blockd_mapper::format::catalogue::VolumeKind;
use blockd_media::units::human;
use blockd_nbd::{ALLOCATED, Describes, ExportError, ExportInfo, MetaContext};
use blockd_serve::nbd::{Exports, Opened};
use blockd_serve::worker::Target;
use tokio::sync::watch;

use super::attachments::{Attachment, Coming};
use super::{Control, volumes};

/// Where NBD is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NbdAddress {
    /// The socket or port.
    pub place: NbdPlace,
    /// Clients must use TLS.
    pub tls: bool,
}

/// A socket or port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdPlace {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port.
    Tcp(SocketAddr),
}

impl NbdAddress {
    /// The URI of an export there; without a name, of the server.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        let scheme = if self.tls { "nbds" } else { "nbd" };
        let export = percent_encoded(export.as_bytes());
        match &self.place {
            NbdPlace::Unix(path) => {
                let socket = percent_encoded(path.as_os_str().as_bytes());
                format!("{scheme}+unix:///{export}?socket={socket}")
            }
            NbdPlace::Tcp(address) => {
                // A server that listens everywhere is found here.
                let ip = match address.ip() {
                    IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
                    IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
                    ip => ip,
                };
                format!("{scheme}://{}/{export}", SocketAddr::new(ip, address.port()))
            }
        }
    }
}

/// RFC 3986: unreserved characters stay, and so does the slash.
fn percent_encoded(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(*byte));
            }
            _ => {
                let _ = write!(text, "%{byte:02X}");
            }
        }
    }
    text
}

/// A volume that a client has opened, on its way to a worker.
#[derive(Clone, Debug)]
pub struct Exported {
    control: Control,
    attachment: Arc<Attachment>,
}

/// The fate of a client that comes.
#[derive(Debug)]
pub enum Arrival {
    /// The client is connected, or refused.
    Done,
    /// The volume's pool is not open here. It may come again once this has changed or ended.
    Waits(watch::Receiver<()>),
}

impl Exported {
    /// Connects a client, unless the volume was detached since the client opened it, or its pool is
    /// not open here.
    pub fn if_attached(&self, connect: impl FnOnce(Target)) -> Arrival {
        // Looked up before the lock: it may take a moment.
        let target = self.target();
        let came = self.attachment.if_attached(|| {
            if let Some(target) = target {
                connect(target);
            }
        });
        match came {
            Coming::Waits(changed) => Arrival::Waits(changed),
            Coming::Connected | Coming::Refused => Arrival::Done,
        }
    }

    fn target(&self) -> Option<Target> {
        let (pool, volume) = self.control.attached(&self.attachment)?;
        Some(Target { pool, volume: volume.id, name: volume.name })
    }

    /// A client of the volume waits for the pool.
    pub fn demand(&self) {
        if let Some(pool) = super::standby::pool_id(&self.attachment.record) {
            self.control.data_path().demands().add(pool);
        }
    }
}

impl Control {
    /// The name that a volume is exported by.
    pub(super) fn export_name(&self, pool: &str, volume: &str) -> String {
        if pool == self.0.options.default_pool {
            volume.to_owned()
        } else {
            format!("{pool}/{volume}")
        }
    }

    fn export_info(
        &self,
        pool: &PoolHandle,
        volume: &VolumeSummary,
        attachment: &Attachment,
    ) -> ExportInfo {
        ExportInfo {
            name: self.export_name(pool.name(), &volume.name),
            description: format!("{} in pool {}", human(volume.size), pool.name()),
            size: volume.size,
            block_size: volume.block_size,
            preferred_size: preferred_size(pool.extent_size()),
            read_only: attachment.record.read_only || pool.is_read_only(),
            // Every connection sees the one map, and a flush covers the pool.
            multi_conn: true,
        }
    }

    /// The same for a volume whose pool is not open here.
    fn standby_info(&self, attachment: &Attachment) -> Option<ExportInfo> {
        let record = &attachment.record;
        let standby = record.standby.as_ref().filter(|_| attachment.waits())?;
        Some(ExportInfo {
            name: self.export_name(&record.pool, &record.volume),
            description: format!("{} in cell {}, on standby", human(standby.size), record.pool),
            size: standby.size,
            block_size: standby.block_size,
            preferred_size: preferred_size(standby.extent_size),
            read_only: record.read_only,
            multi_conn: true,
        })
    }

    /// An attached volume, if its pool serves it.
    fn attached(&self, attachment: &Attachment) -> Option<(PoolHandle, VolumeSummary)> {
        let pool = self.pool(&attachment.record.pool).ok()?;
        let volume = volumes::find(&pool, &attachment.record.volume)?;
        attachment.record.is_of(&pool, volume.id).then_some((pool, volume))
    }

    /// The attached volume that an export's name means.
    fn by_export_name(&self, name: &str) -> Option<Arc<Attachment>> {
        if name.is_empty() {
            let mut all = self.exported();
            let only = all.pop();
            return only.filter(|_| all.is_empty());
        }
        let (pool, volume) = name.split_once('/').unwrap_or(("", name));
        let found = self.0.attachments.get(self.pool_name(pool), volume);
        found.filter(|attachment| attachment.record.ublk.is_none())
    }

    /// Attached volumes that are no block devices: writes over NBD would bypass the cache of those.
    fn exported(&self) -> Vec<Arc<Attachment>> {
        let mut list = self.0.attachments.list();
        list.retain(|attachment| attachment.record.ublk.is_none());
        list
    }
}

impl Exports for Control {
    type Volume = Exported;

    async fn list(&self) -> Vec<ExportInfo> {
        let mut list = Vec::new();
        for attachment in self.exported() {
            if let Some((pool, volume)) = self.attached(&attachment) {
                list.push(self.export_info(&pool, &volume, &attachment));
            } else {
                list.extend(self.standby_info(&attachment));
            }
        }
        list
    }

    async fn open(&self, name: &str) -> Result<Opened<Exported>, ExportError> {
        let attachment = self.by_export_name(name).ok_or(ExportError::Unknown)?;
        let Some((pool, volume)) = self.attached(&attachment) else {
            if let Some(info) = self.standby_info(&attachment) {
                let control = self.clone();
                return Ok(Opened { info, volume: Exported { control, attachment } });
            }
            let pool = &attachment.record.pool;
            let problem = match self.pool(pool) {
                Ok(_) => "the volume is being removed".to_owned(),
                Err(error) => error.to_string(),
            };
            return Err(ExportError::Refused(problem));
        };
        let info = self.export_info(&pool, &volume, &attachment);
        Ok(Opened { info, volume: Exported { control: self.clone(), attachment } })
    }

    async fn contexts(&self, exported: &Exported) -> Vec<MetaContext> {
        let allocated = MetaContext { name: ALLOCATED.to_owned(), describes: Describes::Allocated };
        let mut contexts = vec![allocated];
        // On standby snapshots are not known.
        let Some(target) = exported.target() else { return contexts };
        // By id, and so by age.
        let family = target.pool.mapper().family_of(target.volume);
        let related =
            family.iter().filter(|one| one.kind == VolumeKind::Snapshot && one.id != target.volume);
        contexts.extend(related.map(|one| MetaContext::changed_since(&one.name, one.id.0)));
        contexts
    }
}

/// The size of requests that is best, for extents of this size: a sub-block.
fn preferred_size(extent_size: u64) -> u32 {
    u32::try_from(extent_size / 64).unwrap_or(4096).max(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_can_be_pasted() {
        let unix = NbdPlace::Unix(PathBuf::from("/run/blockd/nbd.sock"));
        let tcp = |text: &str| NbdPlace::Tcp(text.parse().unwrap());
        let cases = [
            (unix.clone(), false, "a", "nbd+unix:///a?socket=/run/blockd/nbd.sock"),
            (unix, true, "p/a b", "nbds+unix:///p/a%20b?socket=/run/blockd/nbd.sock"),
            (tcp("127.0.0.1:10809"), false, "", "nbd://127.0.0.1:10809/"),
            (tcp("0.0.0.0:1"), true, "é", "nbds://127.0.0.1:1/%C3%A9"),
            (tcp("[::]:1"), false, "a?b", "nbd://[::1]:1/a%3Fb"),
        ];
        for (place, tls, export, uri) in cases {
            assert_eq!(NbdAddress { place, tls }.uri(export), uri);
        }
    }
}
