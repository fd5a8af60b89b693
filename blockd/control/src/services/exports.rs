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

use super::attachments::Attachment;
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
    target: Target,
    attachment: Arc<Attachment>,
}

impl Exported {
    /// Connects a client, unless the volume was detached since the client opened it.
    pub fn if_attached(self, connect: impl FnOnce(Target)) {
        self.attachment.if_attached(|| connect(self.target));
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
        let sub_block = u32::try_from(pool.extent_size() / 64).unwrap_or(4096).max(4096);
        ExportInfo {
            name: self.export_name(pool.name(), &volume.name),
            description: format!("{} in pool {}", human(volume.size), pool.name()),
            size: volume.size,
            block_size: volume.block_size,
            preferred_size: sub_block,
            read_only: attachment.record.read_only || pool.is_read_only(),
            // Every connection sees the one map, and a flush covers the pool.
            multi_conn: true,
        }
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
            }
        }
        list
    }

    async fn open(&self, name: &str) -> Result<Opened<Exported>, ExportError> {
        let attachment = self.by_export_name(name).ok_or(ExportError::Unknown)?;
        let Some((pool, volume)) = self.attached(&attachment) else {
            let pool = &attachment.record.pool;
            let problem = match self.pool(pool) {
                Ok(_) => "the volume is being removed".to_owned(),
                Err(error) => error.to_string(),
            };
            return Err(ExportError::Refused(problem));
        };
        let info = self.export_info(&pool, &volume, &attachment);
        let target = Target { pool, volume: volume.id, name: volume.name };
        Ok(Opened { info, volume: Exported { target, attachment } })
    }

    async fn contexts(&self, exported: &Exported) -> Vec<MetaContext> {
        let target = &exported.target;
        let allocated = MetaContext { name: ALLOCATED.to_owned(), describes: Describes::Allocated };
        let mut contexts = vec![allocated];
        // By id, and so by age.
        let family = target.pool.mapper().family_of(target.volume);
        let related =
            family.iter().filter(|one| one.kind == VolumeKind::Snapshot && one.id != target.volume);
        contexts.extend(related.map(|one| MetaContext::changed_since(&one.name, one.id.0)));
        contexts
    }
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
