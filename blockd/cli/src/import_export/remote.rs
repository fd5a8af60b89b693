//! The receiver of a stream, at the other end of a TCP connection.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use blockd_api::v1::Volume;
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use blockd_media::names::check_new_name;

use super::{blocking, interruptible};
use crate::transfer::increment::Header;
use crate::transfer::link::{Hello, Link, Reply, Shared, TlsArguments, lock};
use crate::transfer::{Stop, interrupted};

/// How the address of a receiver begins.
pub(super) const SCHEME: &str = "tcp://";

/// A receiver that has no other sender answers sooner, most often.
const SOON: Duration = Duration::from_secs(10);

/// A receiver.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    /// HOST:PORT.
    address: String,
    /// The volume there; empty for the name that it has here.
    name: String,
    attach: bool,
    tls: TlsArguments,
    /// The connection has failed since the last [`Remote::is_cut`], and nothing else.
    is_cut: Arc<AtomicBool>,
    /// A transfer has begun, or waited for its turn, since the last [`Remote::has_begun`].
    has_begun: Arc<AtomicBool>,
    /// Transfers in a row that began no farther than one before them.
    in_vain: Arc<AtomicU32>,
    /// The farthest offset where one has begun; none before the first.
    begun_at: Arc<Mutex<Option<u64>>>,
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
        if !name.is_empty() {
            check_new_name(name).map_err(|allowed| Error::invalid("TARGET", target, allowed))?;
        }
        Ok(Some(Self {
            address: address.to_owned(),
            name: name.to_owned(),
            attach,
            tls: tls.clone(),
            is_cut: Arc::default(),
            has_begun: Arc::default(),
            in_vain: Arc::default(),
            begun_at: Arc::default(),
        }))
    }

    /// Whether the connection has failed since the last call: another attempt may go on there.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.swap(false, Ordering::Relaxed)
    }

    /// Whether a transfer has begun, or waited for its turn, since the last call.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun.swap(false, Ordering::Relaxed)
    }

    /// How many transfers in a row began no farther than one before them.
    pub(super) fn in_vain(&self) -> u32 {
        self.in_vain.load(Ordering::Relaxed)
    }

    fn begins_at(&self, offset: u64) {
        let mut begun_at = self.begun_at.lock().unwrap_or_else(PoisonError::into_inner);
        if *begun_at < Some(offset) {
            *begun_at = Some(offset);
            self.in_vain.store(0, Ordering::Relaxed);
        } else {
            self.in_vain.fetch_add(1, Ordering::Relaxed);
        }
        self.has_begun.store(true, Ordering::Relaxed);
    }

    /// The same error, which ends an attempt as that of the connection if it broke. A peer of
    /// another kind, or with a certificate that does not fit, is the same at the next attempt.
    fn cut(&self, error: Error) -> Error {
        let lasts = |kind| matches!(kind, io::ErrorKind::Other | io::ErrorKind::InvalidData);
        let is_cut = matches!(&error, Error::Io { source, .. } if !lasts(source.kind()));
        self.is_cut.fetch_or(is_cut, Ordering::Relaxed);
        error
    }

    /// Says once that there is no answer yet.
    async fn awaited<T>(&self, answer: impl Future<Output = T>) -> T {
        let mut answer = std::pin::pin!(answer);
        tokio::select! {
            answer = &mut answer => return answer,
            () = tokio::time::sleep(SOON) => {}
        }
        eprintln!("blockd: {} has not answered yet: other senders may be before", self.address);
        answer.await
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
                link.begin(&hello)?;
                let clock = Clock::start();
                let reply = link.first_reply();
                // Time in the queue of a receiver is no time without one.
                remote.has_begun.fetch_or(clock.elapsed() >= SOON, Ordering::Relaxed);
                Ok((link, reply?))
            }
        };
        let begun = interruptible(&stop, self.awaited(blocking(work))).await;
        let (link, reply) = begun.map_err(|error| self.cut(error))?;
        match reply {
            Reply::Send(offset) if offset <= header.snapshot.size_bytes => {
                self.begins_at(offset);
                header.from_bytes = offset;
                Ok(Some(Arc::new(Mutex::new(link))))
            }
            Reply::Send(offset) => Err(Error::Unexpected {
                what: format!("receiver {}", self.address),
                problem: format!("has {offset} bytes of the snapshot, more than there are"),
            }),
            Reply::Done => Ok(None),
            Reply::Refused(error) => Err(error),
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
                    Ok(Reply::Refused(error)) => Err(error),
                    Ok(_) => Ok(done),
                    Err(error) => Err(remote.cut(error)),
                },
                // An attempt that was stopped is not made again.
                Err(_) if link.stop().check().is_err() => Err(interrupted()),
                Err(error) => Err(match link.refusal() {
                    Some(refused) => refused,
                    None if link.is_cut() => remote.cut(error),
                    // The volume here could not be read.
                    None => error,
                }),
            }
        })
        .await
    }
}
