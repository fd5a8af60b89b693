//! The receiver of a stream, at the other end of a TCP connection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use blockd_api::v1::Volume;
use blockd_media::error::Error;

use super::{blocking, interruptible};
use crate::transfer::increment::Header;
use crate::transfer::link::{Hello, Link, Reply, Shared, TlsArguments, lock};
use crate::transfer::{Stop, interrupted};

/// How the address of a receiver begins.
pub(super) const SCHEME: &str = "tcp://";

/// A receiver.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    /// HOST:PORT.
    address: String,
    /// The volume there; empty for the name that it has here.
    name: String,
    attach: bool,
    tls: TlsArguments,
    /// The receiver has refused: another attempt is of no use.
    is_refused: Arc<AtomicBool>,
    /// A transfer has begun since the last [`Remote::has_begun`].
    has_begun: Arc<AtomicBool>,
}

impl Remote {
    /// A receiver at `tcp://HOST:PORT[/NAME]`; `None` for another target.
    pub(super) fn parse(
        target: &str,
        attach: bool,
        tls: &TlsArguments,
    ) -> Result<Option<Self>, Error> {
        let Some(rest) = target.strip_prefix(SCHEME) else { return Ok(None) };
        let (address, name) = rest.split_once('/').unwrap_or((rest, ""));
        let port = address.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(_))) {
            return Err(Error::invalid("TARGET", target, "like tcp://HOST:PORT or with /NAME"));
        }
        Ok(Some(Self {
            address: address.to_owned(),
            name: name.to_owned(),
            attach,
            tls: tls.clone(),
            is_refused: Arc::default(),
            has_begun: Arc::default(),
        }))
    }

    /// Whether another attempt may go on where this one ended.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Whether a transfer has begun since the last call.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.swap(false, Ordering::Relaxed)
    }

    /// Connects, and has the stream begin where the receiver says. `None`: it has all of it.
    pub(super) async fn begin(
        &self,
        header: &mut Header,
        volume: &Volume,
    ) -> Result<Option<Shared>, Error> {
        let stop = Arc::new(Stop::default());
        let name = match (self.name.as_str(), volume.origin.as_str()) {
            ("", "") => volume.name.clone(),
            ("", origin) => origin.to_owned(),
            (name, _) => name.to_owned(),
        };
        let whole = Header { from_bytes: 0, ..header.clone() };
        let hello = Hello { attach: self.attach, name, header: whole };
        let work = {
            let (remote, stop) = (self.clone(), Arc::clone(&stop));
            move || {
                let mut link = Link::connect(&remote.address, &remote.tls, &stop)?;
                let reply = link.begin(&hello)?;
                Ok((link, reply))
            }
        };
        let (link, reply) = interruptible(&stop, blocking(work)).await?;
        self.has_begun.store(true, Ordering::Relaxed);
        match reply {
            Reply::Send(offset) if offset <= header.snapshot.size_bytes => {
                header.from_bytes = offset;
                Ok(Some(Arc::new(Mutex::new(link))))
            }
            Reply::Send(offset) => Err(Error::Unexpected {
                what: format!("receiver {}", self.address),
                problem: format!("has {offset} bytes of the snapshot, more than there are"),
            }),
            Reply::Done => Ok(None),
            Reply::Refused(error) => Err(self.refused(error)),
        }
    }

    /// Ends a transfer: sends the end, or finds why it was cut off.
    pub(super) async fn finish<T: Send + 'static>(
        &self,
        link: Shared,
        copied: Result<T, Error>,
    ) -> Result<T, Error> {
        let remote = self.clone();
        blocking(move || {
            let mut link = lock(&link);
            match copied {
                Ok(done) => match link.finish() {
                    Ok(Reply::Refused(error)) => Err(remote.refused(error)),
                    Ok(_) => Ok(done),
                    Err(error) => Err(error),
                },
                // An attempt that was stopped is not made again.
                Err(_) if link.stop().check().is_err() => Err(interrupted()),
                Err(error) => Err(link.refusal().map_or(error, |error| remote.refused(error))),
            }
        })
        .await
    }

    fn refused(&self, error: Error) -> Error {
        self.is_refused.store(true, Ordering::Relaxed);
        error
    }
}
