//! Passes requests of the control service, and connections of listeners, to the workers.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blockd_control::services::{Answer, Arrival, DataPath, Exported};
use blockd_engine::pool::{PoolHandle, VolumeId};
use blockd_engine::stats::{VolumeStats, WorkerStats};
use blockd_media::error::Error;
use blockd_serve::FrontendError;
use blockd_serve::demands::Demands;
use blockd_serve::nbd::session::{FRONT_BYTES, Next, next_of};
use blockd_serve::nbd::{Peer, Session, Sessions};
use blockd_serve::worker::{ConnectionInfo, Workers};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::Interest;
use tokio::sync::watch;

/// How long what the clients of a cell have in flight may take to be answered before the cell is
/// handed over. Requests that wait for space take longer, and then it is not.
const STANDBY_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks at a client that has sent a part of a request's header.
const HEADER_PAUSE: Duration = Duration::from_millis(50);

/// Between two looks whether a client is gone that waits for its cell.
const GONE_PAUSE: Duration = Duration::from_secs(1);

/// The workers, for the control service and for listeners.
#[derive(Debug)]
pub(super) struct Serving(pub(super) Workers);

/// The error of a worker as a user gets it.
pub(super) fn frontend_error(error: FrontendError) -> Error {
    match error {
        FrontendError::Invalid { field, value, allowed } => Error::invalid(field, value, allowed),
        FrontendError::Io { what, source } => Error::io(what, source),
        FrontendError::Mapper(error) => error.into(),
        error => Error::Unexpected { what: "workers".to_owned(), problem: error.to_string() },
    }
}

impl DataPath for Serving {
    fn add_pool<'a>(&'a self, pool: &'a PoolHandle) -> Answer<'a, Result<(), Error>> {
        Box::pin(async move { self.0.add_pool(pool).await.map_err(frontend_error) })
    }

    fn remove_pool(&self, pool: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(self.0.remove_pool(pool))
    }

    fn close_volume(&self, pool: [u8; 16], volume: VolumeId) -> Answer<'_, usize> {
        Box::pin(self.0.close_volume(pool, volume))
    }

    fn stand_by(&self, pool: [u8; 16]) -> Answer<'_, bool> {
        Box::pin(async move {
            let all = self.0.stand_by(pool, STANDBY_LIMIT).await;
            if !all {
                self.0.serve(pool).await;
            }
            all
        })
    }

    fn answer_flushes(&self, pool: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(self.0.answer_flushes(pool))
    }

    fn serve(&self, pool: [u8; 16]) -> Answer<'_, ()> {
        Box::pin(self.0.serve(pool))
    }

    fn demands(&self) -> Arc<Demands> {
        Arc::clone(self.0.demands())
    }

    fn connections(&self) -> Vec<ConnectionInfo> {
        self.0.connections()
    }

    fn connections_of(&self, pool: [u8; 16], volume: VolumeId) -> usize {
        self.0.connections_of(pool, volume)
    }

    fn each_volume(&self, see: &mut dyn FnMut(&VolumeStats)) {
        self.0.each_volume(see);
    }

    fn volume_stats(&self) -> Vec<Arc<VolumeStats>> {
        self.0.stats()
    }

    fn worker_stats(&self) -> Vec<Arc<WorkerStats>> {
        self.0.worker_stats()
    }
}

impl Sessions<Exported> for Serving {
    fn connect(&self, stream: OwnedFd, session: Session<Exported>) {
        let mut client = Some((stream, session));
        if let Arrival::Waits(changed) = arrive(&self.0, &mut client)
            && let Some((stream, session)) = client
        {
            tokio::spawn(wait(self.0.clone(), stream, session, changed));
        }
    }

    async fn displace_idle(&self, listener: u64, peer: Peer, has: usize, idle: Duration) -> bool {
        self.0.displace_idle(listener, peer, has, idle).await
    }
}

/// A client on its way.
type Client = (OwnedFd, Session<Exported>);

/// Gives a client to a worker, if its volume is served here. It is gone unless it has to wait.
fn arrive(workers: &Workers, client: &mut Option<Client>) -> Arrival {
    let Some(exported) = client.as_ref().map(|(_, session)| session.volume.clone()) else {
        return Arrival::Done;
    };
    let arrival = exported.if_attached(|volume| {
        let Some((stream, session)) = client.take() else { return };
        let Session { export, negotiated, peer, origin, guard, .. } = session;
        workers.connect(stream, Session { volume, export, negotiated, peer, origin, guard });
    });
    if matches!(arrival, Arrival::Done) {
        *client = None;
    }
    arrival
}

/// Keeps a client until its volume is served here. Its first request asks for that.
async fn wait(
    workers: Workers,
    stream: OwnedFd,
    session: Session<Exported>,
    mut changed: watch::Receiver<()>,
) {
    let exported = session.volume.clone();
    let mut client = Some((stream, session));
    let mut has_asked = false;
    loop {
        let Some((stream, session)) = &client else { return };
        tokio::select! {
            // The end of the channel is a change too.
            _ = changed.changed() => match arrive(&workers, &mut client) {
                Arrival::Done => return,
                Arrival::Waits(next) => {
                    // The cell was here, and has left again.
                    (changed, has_asked) = (next, false);
                }
            },
            asks = asks(stream, session.negotiated.extended), if !has_asked => match asks {
                true => {
                    has_asked = true;
                    exported.demand();
                }
                false => return,
            },
            () = is_gone(stream), if has_asked => return,
        }
    }
}

/// Waits until a client has closed its connection, or that is broken. The client has sent a request
/// that stays unread, so that its socket is always readable. One that has only shut down its
/// sending side may read the answer; over TCP one that has closed its socket looks the same.
async fn is_gone(stream: &OwnedFd) {
    loop {
        tokio::time::sleep(GONE_PAUSE).await;
        let mut polled = [PollFd::new(stream.as_fd(), PollFlags::empty())];
        if poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ended| ended > 0) {
            return;
        }
    }
}

/// Waits until a client has sent a request. False when it has left.
async fn asks(stream: &OwnedFd, extended: bool) -> bool {
    // It may be a TCP socket: only its readiness is asked for. A worker has it wait again.
    let watched = stream.try_clone().and_then(|copy| {
        let copy = UnixStream::from(copy);
        copy.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(copy)
    });
    let Ok(watched) = watched else { return false };
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let mut front = [0; FRONT_BYTES];
    loop {
        if watched.readable().await.is_err() {
            return false;
        }
        let mut look = || Ok(recv(watched.as_raw_fd(), &mut front, flags)?);
        let received = watched.try_io(Interest::READABLE, &mut look);
        let next = match received {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(_) | Ok(0) => return false,
            Ok(count) => next_of(&front[..count], extended),
        };
        match next {
            Next::Request => return true,
            Next::Leaves => return false,
            // The rest of a header is on its way, and the socket stays readable.
            Next::Unknown => tokio::time::sleep(HEADER_PAUSE).await,
        }
    }
}
